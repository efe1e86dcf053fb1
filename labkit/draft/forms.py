"""The directories that heads come in: speculators' form, and the LlamaForCausalLMEagle3 of everybody else.

Both hold the same tensors under nearly the same names. The llama form is flat; its first layer is called midlayer;
layer ids stand in it twice, since vLLM and SGLang count them differently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from labkit import files
from labkit.draft import weights
from labkit.draft.config import FLAGS, UnknownArchitecture, rope_of
from labkit.errors import LabError
from labkit.vocab import semantics

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

FORMS = ("speculators", "llama")
LLAMA = "LlamaForCausalLMEagle3"
LLAMA_NAMES = (LLAMA, "Eagle3LlamaForCausalLM", "LlamaEagle3ForCausalLM")
OLD_NAMES = {"midlayer.": "layers.0.", "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1."}
OLD_NAMES |= {"aux_norm_high.": "fc_norm.2."}


class BadHead(LabError):
    """A directory is no head that the lab or an engine can read."""


@dataclass(frozen=True)
class Head:
    """A head's directory of either `form`.

    `config` is in speculators' form whichever it has, flags absent where it does not say them; `written` is
    config.json as it is; `places`: tensor by its name in speculators' form: its file, and its name there;
    `record` is training.json.
    """

    path: Path
    form: str
    config: dict[str, Any]
    written: dict[str, Any]
    places: dict[str, tuple[Path, str]]
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> dict[str, Any]:
        """The decoder layer's configuration."""
        return self.config["transformer_layer_config"]

    @property
    def layer_ids(self) -> list[int] | None:
        """The target layers as vLLM reads them, None where config.json leaves them to the engine."""
        return self.config.get("eagle_aux_hidden_state_layer_ids") or None

    @property
    def sglang_ids(self) -> list[int] | None:
        """The same as SGLang reads them: it adds one to what stands in eagle_config."""
        return (self.written.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or None

    def shapes(self) -> dict[str, list[int]]:
        """Name in speculators' form and shape of each tensor."""
        found = {}
        for name, (path, inside) in self.places.items():
            with weights.opened(path) as file:
                found[name] = file.get_slice(inside).get_shape()
        return found

    def tensor(self, name: str) -> torch.Tensor | None:
        """One tensor, as stored; None where there is none."""
        if name not in self.places:
            return None
        path, inside = self.places[name]
        with weights.opened(path) as file:
            return file.get_tensor(inside)

    def target_ids(self) -> torch.Tensor:
        """The target id of each row of lm_head: int64 [draft vocabulary], in the file's order."""
        d2t = self.tensor("d2t")
        return torch.arange(self.config["draft_vocab_size"]) if d2t is None else semantics.targets_of(d2t)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors in speculators' form: target ids ascending, lm_head with them, t2d made where absent."""
        found = {name: self.tensor(name) for name in self.places}
        full, d2t = self.layer.get("vocab_size", 0), found.get("d2t")
        if d2t is None:
            return {name: tensor for name, tensor in found.items() if name != "t2d"}
        ids = semantics.targets_of(d2t)
        if (ids.diff() < 0).any():
            order = ids.argsort()
            found["d2t"] = ids[order] - torch.arange(len(ids))
            found["lm_head.weight"] = found["lm_head.weight"][order]
        if "t2d" not in found and len(ids) and int(ids.min()) >= 0 and int(ids.max()) < full:
            found["t2d"] = torch.zeros(full, dtype=torch.bool).index_fill(0, ids, True)
        return found

    def speculator_config(self) -> Eagle3SpeculatorConfig:
        """The configuration as speculators' class; raises BadHead where that refuses it."""
        from speculators.models.eagle3 import Eagle3SpeculatorConfig

        if self.form == "other":
            raise UnknownArchitecture(
                f"{self.path} is a {self.written.get('architectures')}",
                f"only {LLAMA} and speculators' form are read",
            )
        try:
            return Eagle3SpeculatorConfig.from_dict(self.config)
        except (ValueError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BadHead(
                f"{self.path}/config.json is no EAGLE-3 head's: {reason}", "run draft.preflight on it"
            ) from error


def read(head_dir: Path) -> Head:
    """Look at a head's directory; tensors are read when asked for. Raises BadHead."""
    try:
        written = files.read_json(head_dir / "config.json")
        places = weights.places(head_dir)
    except (OSError, files.BrokenFile) as error:
        raise BadHead(
            f"{head_dir} cannot be read, so it is no EAGLE-3 head: {error}", "give a whole head directory"
        ) from error
    if not places:
        pickled = [path.name for path in (*head_dir.glob("*.bin"), *head_dir.glob("*.pt"))]
        remedy = "convert them to safetensors where you trust them" if pickled else "give a whole head directory"
        raise BadHead(
            f"{head_dir} has no safetensors, so it is no EAGLE-3 head that can be read: {pickled}", remedy
        )
    refuse_values("config.json", {"it": written})
    form = form_of(written)
    layer = written["transformer_layer_config"] if form == "speculators" else written
    refuse_values("config.json", {name: layer.get(name) or {} for name in ("rope_parameters", "rope_scaling")})
    record = record_of(head_dir)
    config = written if form == "speculators" else to_speculators(written)
    return Head(head_dir, form, config, written, {renamed(name): (p, name) for name, p in places.items()}, record)


def record_of(head_dir: Path) -> dict[str, Any]:
    """What the lab wrote of the head's training, {} where there is nothing; raises BadHead."""
    path = head_dir / "training.json"
    try:
        record = files.read_json(path) if path.exists() else {}
    except (OSError, files.BrokenFile) as error:
        raise BadHead(f"{path} cannot be read: {error}", "fetch it anew, or delete it") from error
    refuse_values(path.name, {"it": record})
    refuse_values(path.name, {"trained_with": record.get("trained_with") or {}})
    return record


def refuse_values(where: str, values: dict[str, Any]) -> None:
    """Raise BadHead for what should be a JSON object and is not."""
    for name, value in values.items():
        if not isinstance(value, dict):
            raise BadHead(f"{where}: {name} is {str(value)[:60]!r}, no JSON object", f"restore {where}")


def form_of(config: dict[str, Any]) -> str:
    """speculators, llama, or other (an EAGLE-3 head that is no Llama); raises BadHead for what is none."""
    architecture = (config.get("architectures") or [""])[0]
    kind = config.get("speculators_model_type")
    if kind == "eagle3" and isinstance(config.get("transformer_layer_config"), dict):
        return "speculators"
    if kind is None and architecture in LLAMA_NAMES:
        return "llama"
    if kind is None and "eagle3" in architecture.lower():
        return "other"
    raise BadHead(
        f"config.json is no EAGLE-3 head's: speculators_model_type is {kind!r}, architectures {architecture!r}",
        f"give a head in speculators' eagle3 form or a {LLAMA}",
    )


def renamed(name: str) -> str:
    """A tensor's name in speculators' form."""
    for old, ours in OLD_NAMES.items():
        if name.startswith(old):
            return name.replace(old, ours, 1)
    return name


HEAD_KEYS = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *FLAGS)
ONLY_LLAMA = ("eagle_config", "num_aux_hidden_states", "labkit", "architectures", "dtype", "torch_dtype")


def to_speculators(written: dict[str, Any]) -> dict[str, Any]:
    """A flat config.json in speculators' form; a flag that it does not say stays unsaid."""
    eagle = written.get("eagle_config") or {}
    layer = {name: value for name, value in written.items() if name not in (*HEAD_KEYS, *ONLY_LLAMA)}
    layer |= {"rope_parameters": rope_of(written), "tie_word_embeddings": False}
    if written.get("model_type") not in ("llama", "qwen3"):
        layer["model_type"] = "llama"  # engines read these as a Llama whatever they call themselves
    ids = written.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": written.get("draft_vocab_size") or written.get("vocab_size"),
        "target_hidden_size": written.get("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": ids,
        "dtype": written.get("dtype") or written.get("torch_dtype"),
        "tie_word_embeddings": bool(written.get("tie_word_embeddings")),
        "speculators_config": (written.get("labkit") or {}).get("speculators_config") or unnamed_verifier(),
    }
    said = {name: eagle.get(name, written.get(name)) for name in FLAGS}
    return config | {name: value for name, value in said.items() if value is not None}


def unnamed_verifier() -> dict[str, Any]:
    """The part of a speculators configuration that a llama form does not have."""
    return {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "", "architectures": []},
    }


def to_llama(config: dict[str, Any]) -> dict[str, Any]:
    """A speculators config.json as a flat one that vLLM and SGLang read.

    The ids stand in it twice: vLLM takes the outer ones as they are, SGLang adds one to those in eagle_config.
    Raises UnknownArchitecture for a draft layer that is no Llama.
    """
    layer, ids = config["transformer_layer_config"], config.get("eagle_aux_hidden_state_layer_ids")
    if layer.get("model_type") != "llama":
        raise UnknownArchitecture(
            f"the draft layer is a {layer.get('model_type')}, which {LLAMA} cannot hold",
            "keep speculators' form, which vLLM serves",
        )
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    flat = layer | {name: config[name] for name in HEAD_KEYS if config.get(name) is not None}
    if ids:
        eagle["eagle_aux_hidden_state_layer_ids"] = [number - 1 for number in ids]
        flat["num_aux_hidden_states"] = len(ids)
    return flat | {
        "architectures": [LLAMA],
        "eagle_config": eagle,
        "tie_word_embeddings": False,
        "dtype": config.get("dtype"),
        "torch_dtype": config.get("dtype"),
        "labkit": {"speculators_config": config.get("speculators_config")},
    }
