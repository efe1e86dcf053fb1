"""What config.json of a head says wrongly, or does not say."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.draft import weights
from labkit.draft.check_layers import layer_problems
from labkit.draft.check_positions import position_problems, rope_problems, window_problems
from labkit.draft.config import FLAGS, rope_of
from labkit.draft.forms import Head
from labkit.draft.problem import ANEW, CONFIG, Problem
from labkit.targets import BrokenTarget, Target


def config_problems(head: Head, target: Target, engine: str, max_model_len: int) -> Iterator[Problem]:
    """All of them."""
    yield from form_problems(head, engine)
    yield from trained_problems(head)
    yield from flag_problems(head, engine)
    if engine == "vllm" and head.form != "other":
        yield from unread_flags(head)
        yield from method_problems(head)
    yield from size_problems(head, target)
    yield from rope_problems(head, target)
    yield from position_problems(head, target, max_model_len)
    yield from window_problems(head, engine)
    yield from layer_problems(head, target, engine)
    yield from norm_problems(head, target)


def form_problems(head: Head, engine: str) -> Iterator[Problem]:
    """A form that the engine does not read, and a tied or unsaid draft vocabulary."""
    if engine == "sglang" and head.form == "speculators":
        yield Problem("form", CONFIG, "SGLang reads no speculators form", 'draft.convert(head, out, "llama")')
    if head.form != "speculators" and head.written.get("tie_word_embeddings"):
        yield Problem(
            "tied",
            f"{CONFIG}: tie_word_embeddings",
            "it is true, so that SGLang takes the embedding for lm_head and the draft's tokens are other ones",
            "set it to false and ship lm_head.weight",
        )
    if engine == "sglang" and "draft_vocab_size" not in head.written:
        yield Problem(
            "draft vocabulary",
            f"{CONFIG}: draft_vocab_size",
            "SGLang asks for it, and it is missing",
            "write it out",
        )


def trained_problems(head: Head) -> Iterator[Problem]:
    """Whatever differs from what training.json says that the head was trained with."""
    layer = head.layer
    for name, trained in (head.record.get("trained_with") or {}).items():
        said = head.config[name] if name in head.config else layer.get(name)
        if name == "rope_parameters":
            said = rope_of(layer)
        if name not in ("eagle_aux_hidden_state_layer_ids", "max_position_embeddings") and said != trained:
            yield Problem(
                "trained with",
                f"{CONFIG}: {name}",
                f"{name} is {said}, the head was trained with {trained}: acceptance falls",
                ANEW,
            )


def flag_problems(head: Head, engine: str) -> Iterator[Problem]:
    """Norm flags that are not said, that contradict the tensors, or that the engine has not (vllm#38111)."""
    for name, default in FLAGS.items():
        if name not in head.config and head.form == "speculators":
            readings = " (vLLM reads True, speculators False)" if name == "norm_before_residual" else ""
            yield Problem(
                "norm flags",
                f"{CONFIG}: {name}",
                f"config.json does not say {name}: vLLM and speculators may assume different values{readings}",
                f"write it out as it was in training (this lab: {str(default).lower()})",
            )
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if tensor in head.places and not head.config.get(flag):
            yield Problem(
                "norm flags",
                f"{CONFIG}: {flag}",
                f"{flag} is {head.config.get(flag)}, but the file has {tensor}: the engine leaves that norm out",
                f"set {flag} to true",
            )
    for flag in ("norm_before_residual", "norm_before_fc"):
        if engine == "sglang" and head.config.get(flag):
            yield Problem(
                "norm flags", f"{CONFIG}: {flag}", f"SGLang's draft model has no {flag}", "serve it with vLLM"
            )


# Where vLLM takes a head's flags from, by the form of the head; the draft model itself reads them all.
READERS = {"speculators": "transformers_utils/configs/speculators/algos.py"}
DRAFT_MODEL = "model_executor/models/llama_eagle3.py"


def unread_flags(head: Head) -> Iterator[Problem]:
    """Flags that the installed vLLM never looks at (vllm#38111, speculators#610), from its source: no import."""
    for file in filter(None, (READERS.get(head.form), DRAFT_MODEL)):
        for flag in unread_in(file, head):
            way = "serve with a newer vLLM, or train with that flag off"
            yield Problem(
                "norm flags",
                f"{CONFIG}: {flag}",
                f"the installed vLLM does not read {flag} ({Path(file).name}) and serves the head without it",
                way if file == DRAFT_MODEL else f"serve its llama form (labkit convert-head), or {way}",
            )


def unread_in(file: str, head: Head) -> list[str]:
    """The head's flags that are on and that a file of the installed vLLM never names; none without the file."""
    place = installed_vllm()
    if not place or not (place / file).is_file():
        return []
    source = (place / file).read_text()
    return [flag for flag in FLAGS if head.config.get(flag) and flag not in source]


def installed_vllm() -> Path | None:
    """The folder of this environment's vLLM, which is not imported for it."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


def size_problems(head: Head, target: Target) -> Iterator[Problem]:
    """Sizes that have to equal the target's; the vocabulary with its padding (speculators#188)."""
    shape = target.geometry
    hidden = head.layer.get("hidden_size")
    inner = head.config.get("target_hidden_size") or hidden
    for name, said in (("hidden_size", hidden), ("target_hidden_size", inner)):
        if said != shape.hidden_size:
            yield Problem(
                "geometry",
                f"{CONFIG}: {name}",
                f"{name} is {said}, the target's is {shape.hidden_size}",
                "give the target that the head was made for",
            )
    vocabulary = head.layer.get("vocab_size")
    if vocabulary != shape.vocab_size:
        yield Problem(
            "vocabulary size",
            f"{CONFIG}: vocab_size",
            f"vocab_size is {vocabulary}, the target's is {shape.vocab_size}{tokens_said(vocabulary, target)}",
            "write the target's vocab_size, padding included; draft_vocab_size is for the draft's smaller one",
        )
    size = head.config.get("draft_vocab_size")
    if not isinstance(size, int) or not 0 < size <= shape.vocab_size:
        yield Problem(
            "draft vocabulary",
            f"{CONFIG}: draft_vocab_size",
            f"draft_vocab_size is {size}, outside 1..{shape.vocab_size}",
            "write the number of rows of lm_head.weight",
        )


def tokens_said(vocabulary: Any, target: Target) -> str:
    """Why a vocabulary size may be wrong: it is the tokenizer's, or the draft's."""
    if not isinstance(vocabulary, int) or vocabulary >= target.geometry.vocab_size:
        return ""
    try:
        tokens = len(target.tokenizer())
    except BrokenTarget:
        return ""
    return ", whose tokenizer has just that many tokens: its embedding is padded" if tokens == vocabulary else ""


def method_problems(head: Head) -> Iterator[Problem]:
    """What vLLM reads of speculators' form before anything else: a method with a number of tokens, a verifier."""
    if head.form != "speculators":
        return
    try:
        told = head.written["speculators_config"]
        tokens, name = told["proposal_methods"][0]["speculative_tokens"], told["verifier"]["name_or_path"]
        sound = isinstance(tokens, int) and tokens > 0 and isinstance(name, str)
    except (KeyError, IndexError, TypeError):
        sound = False
    if not sound:
        yield Problem(
            "proposal",
            f"{CONFIG}: speculators_config",
            "it has no proposal method with speculative_tokens, or no verifier: vLLM refuses the head",
            ANEW,
        )


def norm_problems(head: Head, target: Target) -> Iterator[Problem]:
    """A target whose norms multiply by 1 + weight, which speculators 0.9's eagle3 trains against wrongly."""
    if weights.gain(target) == "1+w" and head.form == "speculators" and "trained_with" not in head.record:
        yield Problem(
            "1+w norm",
            f"{CONFIG}: speculators_config",
            f"{target.geometry.model_type}'s final norm multiplies by 1 + weight; speculators 0.9 builds a plain "
            "norm for EAGLE-3, so that the head learned wrong targets (speculators#1090)",
            "train it with this lab, or with a speculators that builds the right norm",
            fatal=False,
        )
