"""The shape of a model, under config.json's own names, whatever family or wrapper it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import settings
from labkit.errors import LabError
from labkit.targets.configs import BrokenConfig, checkpoint_wrapper, normalise, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

VOCAB_PADDING = 64  # vLLM pads the vocabulary to this before it divides it


class UnknownGeometry(LabError):
    """A name stands for no shipped geometry and no config.json."""


class ImpossibleParallelism(LabError):
    """A tensor-parallel size does not divide the model."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A text model's figures, named as in config.json; a dense model has `n_routed_experts` 0.

    `wrapper` is the path of the text model inside a multimodal checkpoint ("language_model.model"), "" for a
    plain one; `layers_path` is where its decoder layers lie either way.
    """

    name: str
    model_type: str
    architecture: str
    wrapper: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    n_shared_experts: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0  # of all shared experts of a layer together
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 0
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    quantization_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: str = ""

    @property
    def is_moe(self) -> bool:
        """Whether any layer routes."""
        return bool(self.moe_layers)

    @property
    def is_mla(self) -> bool:
        """Whether attention keeps one compressed latent instead of keys and values."""
        return self.kv_lora_rank > 0

    @property
    def layers_path(self) -> str:
        """Dotted path of the decoder layers in the checkpoint."""
        return f"{self.wrapper or 'model'}.layers"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that route."""
        if not self.n_routed_experts:
            return ()
        routed = range(self.first_k_dense_replace, self.num_hidden_layers)
        # Qwen's decoder_sparse_step counts from one, DeepSeek's moe_layer_freq from zero; usually both are 1.
        shift = 0 if self.is_mla else 1
        return tuple(i for i in routed if (i + shift) % self.moe_layer_freq == 0 and i not in self.mlp_only_layers)

    @property
    def num_moe_layers(self) -> int:
        """How many layers route."""
        return len(self.moe_layers)

    def expected_allreduces(self, tp: int) -> int:
        """AllReduces of one step under tensor parallelism: two a layer and one for the embedding, in vLLM."""
        return 0 if tp == 1 else 2 * self.num_hidden_layers + 1

    def tensor_parallel_sizes(self, largest: int = 8) -> list[int]:
        """The sizes up to `largest` that vLLM accepts: heads, KV heads, widths and vocabulary must divide."""
        return [tp for tp in range(1, largest + 1) if not self.tensor_parallel_obstacles(tp)]

    def tensor_parallel_obstacles(self, tp: int) -> list[str]:
        """Why `tp` ranks cannot share this model; empty when they can."""
        kv, padded = self.num_key_value_heads, -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        divided = {
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "vocab_size (padded)": padded,
        }
        obstacles = [f"{name}={value}" for name, value in divided.items() if value % tp]
        # Fewer KV heads than ranks are copied, so either must be a multiple of the other; MLA has one latent.
        if not self.is_mla and kv % tp and tp % kv:
            obstacles.append(f"num_key_value_heads={kv}")
        return obstacles

    def require_tensor_parallel(self, tp: int) -> None:
        """Raise ImpossibleParallelism, naming what stands in the way and what would do, unless `tp` works."""
        obstacles = self.tensor_parallel_obstacles(tp) if tp >= 1 else ["it is below 1"]
        if obstacles:
            raise ImpossibleParallelism(
                f"tensor_parallel_size={tp} is impossible for {self.name}: {', '.join(obstacles)}",
                f"use one of {', '.join(map(str, self.tensor_parallel_sizes(16)))}",
            )


def geometry(source: str | Path | Mapping[str, Any] | PreTrainedConfig) -> Geometry:
    """The geometry of a shipped name ("kimi-k2.5"), a config.json or its directory, or a configuration.

    Raises UnknownGeometry for a name that stands for nothing, BrokenConfig for a file that cannot be used.
    """
    if isinstance(source, Mapping):
        return from_config(source)
    if hasattr(source, "to_dict"):
        return from_config(source.to_dict())
    shipped = settings.root() / "data" / "models" / f"{source}.json"
    if "/" not in str(source) and shipped.is_file():
        return from_config(read_config(shipped), name=str(source), where=str(shipped))
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        config = read_config(file) | checkpoint_wrapper(file.parent)
        return from_config(config, name=file.resolve().parent.name, where=str(file))
    if path.is_dir():
        raise BrokenConfig(f"{path} has no config.json", "point at a complete model directory")
    known = sorted(file.stem for file in shipped.parent.glob("*.json"))
    raise UnknownGeometry(
        f"{str(source)!r} is no shipped geometry, no directory and no file",
        f"use one of {', '.join(known)}, a config.json or a directory that holds one",
    )


def from_config(config: Mapping[str, Any], name: str = "", where: str = "the given configuration") -> Geometry:
    """The geometry of a configuration as in config.json; raises BrokenConfig naming what is wrong."""
    name = name or str(config.get("_name_or_path") or config.get("model_type") or "unnamed")
    return Geometry(name=name, **normalise(config, where))
