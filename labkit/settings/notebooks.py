"""The parameters of each notebook: one frozen dataclass a notebook, checked where it is made.

A notebook's parameters cell holds flat scalars whose names and defaults equal the fields here. Zero or an
empty string means "the scale decides"; once a settings object exists, every such field has its real value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.settings.base import SCALES, BadParameter, Settings, root


def refuse_one_server_for_both(server: str, variant_server: str) -> None:
    """Raise BadParameter where baseline and variant would be one server: every speedup would be 1."""
    if server and server.rstrip("/").removesuffix("/v1") == variant_server.rstrip("/").removesuffix("/v1"):
        raise BadParameter(
            f"server and variant_server are both {server}",
            "give variant_server the address of the server that speculates, or leave it out for a prediction (a "
            "swapped service, whose baseline was measured before: write one as 127.0.0.1, the other as localhost)",
        )


def takes_all(settings: NgramBaseline | Evaluation) -> bool:
    """Whether prompts_per_category was left at 0 with a file of one's own, all of whose prompts are then sent.

    The scale chooses among the lab's own prompts, and at smoke among all. Asked before the scale fills the 0 in.
    """
    name = str(settings.prompts)
    shipped = root() / "data" / "prompts" / f"{name}.jsonl"
    own = name != "benchmark" and (Path(name).expanduser().exists() or not shipped.exists())
    return own and settings.scale != "smoke" and str(settings.prompts_per_category) == "0"


@dataclass(frozen=True, kw_only=True)
class Profiling(Settings):
    """Notebook 01: where does decode time go?"""

    notebook = "01_profiling"
    by_scale = {"decode_steps": (8, 24, 128), "max_model_len": (512, 1024, 4096)}
    at_least = {"tensor_parallel_size": 1, "decode_steps": 4, "prompt_tokens": 1}

    target: str = "smollm2-tp2"
    tensor_parallel_size: int = 2
    decode_steps: int = 0
    prompt_tokens: int = 32
    max_model_len: int = 0
    trace_dir: str = ""
    server: str = ""
    interconnect: str = ""
    hardware: str = ""
    fixes: str = "auto"

    def __post_init__(self) -> None:
        """Refuse a table that is not there now, not after the profile."""
        super().__post_init__()
        if self.interconnect and not Path(self.interconnect).is_file():
            raise BadParameter(
                f"interconnect={self.interconnect!r} is no file",
                "name an interconnect.parquet that notebook 01 saved, or leave it empty to measure the links here",
            )

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache in the middle of the profiled request."""
        return self.prompt_tokens + self.decode_steps // 2


@dataclass(frozen=True, kw_only=True)
class NgramBaseline(Settings):
    """Notebook 02: what does the engine do today, and does n-gram speculation help?"""

    notebook = "02_ngram_baseline"
    by_scale = {
        "prompts_per_category": (1, 2, 10),
        "max_tokens": (24, 128, 1024),
        "repeats": (1, 2, 3),
        "cooldown_s": (0, 2, 10),
        "max_model_len": (1024, 2048, 8192),
    }
    at_least = {
        "prompts_per_category": 1,
        "max_tokens": 2,
        "repeats": 1,
        "concurrency": 1,
        "cooldown_s": 0,
        "num_speculative_tokens": 1,
        "prompt_lookup_max": 1,
        "prompt_lookup_min": 1,
    }

    server: str = ""
    variant_server: str = ""
    model: str = ""
    prompts: str = "benchmark"
    prompts_per_category: int = 0
    max_tokens: int = 0
    repeats: int = 0
    concurrency: int = 1
    cooldown_s: float = 0.0
    temperature: float = 0.0
    num_speculative_tokens: int = 5
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    max_model_len: int = 0
    plan_for: str = "kimi-k2.5"
    plan_hardware: str = "rtx-pro-6000-pcie-x8"

    def __post_init__(self) -> None:
        """Refuse now what the variant's server would refuse after the baseline was measured."""
        everything = takes_all(self)
        super().__post_init__()
        if everything:
            object.__setattr__(self, "prompts_per_category", 0)
        refuse_one_server_for_both(self.server, self.variant_server)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise BadParameter(
                f"prompt_lookup_min={self.prompt_lookup_min} is above prompt_lookup_max={self.prompt_lookup_max}",
                "give a smaller prompt_lookup_min",
            )

    @property
    def lookup(self) -> dict[str, int]:
        """The n-gram proposer's options."""
        names = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ExpertActivation(Settings):
    """Notebook 03: how many experts does a step that verifies n tokens touch?"""

    notebook = "03_expert_activation"
    by_scale = {"num_tokens": (512, 8192, 65536), "budget_tokens": (256, 2048, 16384)}
    at_least = {"max_window": 4, "num_tokens": 64, "budget_tokens": 64, "num_speculative_tokens": 1}

    target: str = "mini-kimi"
    num_tokens: int = 0
    budget_tokens: int = 0
    max_window: int = 16
    served: str = "kimi-k2.5"
    hardware: str = "rtx-pro-6000-pcie-x8"
    num_speculative_tokens: int = 3


@dataclass(frozen=True, kw_only=True)
class Eagle3Pipeline(Settings):
    """Notebook 04: from prompts to a trained EAGLE-3 head."""

    notebook = "04_eagle3_pipeline"
    by_scale = {
        "num_prompts": (24, 800, 2400),
        "held_out": (4, 24, 100),
        "max_tokens": (48, 128, 512),
        "draft_vocab_size": (1024, 4096, 16384),
        "epochs": (1, 4, 4),
        "max_model_len": (512, 1024, 4096),
    }
    at_least = {
        "num_prompts": 4,
        "held_out": 1,
        "max_tokens": 8,
        "draft_vocab_size": 16,
        "epochs": 1,
        "ttt_steps": 1,
        "batch_tokens": 16,
        "concurrency": 1,
        "learning_rate": 1e-7,
        "ttt_decay": 1e-3,
        "accumulate": 1,
        "draft_layers": 1,
        "tensor_parallel_size": 1,
        "plan_conversations": 1,
        "plan_tokens": 2,
        "plan_disk_gb": 0,
        "rent_after_days": 0,
    }

    prompts: str = "templated"
    answers: str = "target"
    calibrate: bool = True
    train_reasoning: bool = True
    num_prompts: int = 0
    held_out: int = 0
    max_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    concurrency: int = 64
    aux_layers: str = ""
    hidden_states: str = "bf16"
    states_backend: str = "vllm"
    shard: str = ""
    draft_vocab_size: int = 0
    draft_layers: int = 1
    lm_head: str = "frozen"
    epochs: int = 0
    learning_rate: float = 1e-3
    ttt_steps: int = 3
    batch_tokens: int = 192
    max_model_len: int = 0
    loss: str = "kl_div"
    ttt_decay: float = 1.0
    start: str = "warm"
    accumulate: int = 1
    precision: str = "bf16"
    states_from: str = "files"
    compiled: bool = False
    tensor_parallel_size: int = 1
    plan_for: str = "kimi-k2.5"
    plan_hardware: str = "rtx-pro-6000-pcie-x8"
    plan_conversations: int = 100_000
    plan_tokens: int = 2048
    plan_disk_gb: float = 0.0
    rent_after_days: float = 2.0

    def __post_init__(self) -> None:
        """Refuse answers of nobody now, not after the prompts are there."""
        super().__post_init__()
        if self.answers not in ("target", "dataset"):
            raise BadParameter(
                f"answers={self.answers!r} is nobody's",
                "use target (it answers itself: on-policy) or dataset (the data set's own answers)",
            )
        if not 0 < self.top_p <= 1:
            raise BadParameter(f"top_p={self.top_p} is no probability", "give top_p above 0, at most 1")
        choices = {
            "precision": ("bf16", "fp32"),
            "states_from": ("files", "on-the-fly"),
            "lm_head": ("frozen", "trained"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise BadParameter(f"{name}={getattr(self, name)!r} is unknown", f"use {' or '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Settings):
    """Notebook 05: does the head pay?"""

    notebook = "05_evaluation"
    by_scale = {
        "prompts_per_category": (1, 2, 10),
        "held_out": (4, 16, 200),
        "max_tokens": (24, 128, 1024),
        "repeats": (1, 2, 3),
        "sweep_repeats": (1, 1, 3),
        "max_model_len": (1024, 2048, 8192),
    }
    at_least = {
        "prompts_per_category": 1,
        "held_out": 1,
        "max_tokens": 2,
        "repeats": 1,
        "sweep_repeats": 1,
        "concurrency": 1,
        "num_speculative_tokens": 1,
    }
    # What an empty sweep stands for at smoke, demo and full, besides k and concurrency themselves.
    sweeps = {"sweep_k": ("", "1,5", "1,2,3,4,5"), "sweep_streams": ("", "4,16", "1,2,4,8,16,32")}
    temperatures = (0.0, 0.7, 0.7)

    head: str = ""
    server: str = ""
    variant_server: str = ""
    model: str = ""
    prompts: str = "benchmark"
    prompts_per_category: int = 0
    held_out: int = 0
    max_tokens: int = 0
    repeats: int = 0
    concurrency: int = 1
    num_speculative_tokens: int = 3
    sweep_k: str = ""
    sweep_streams: str = ""
    sweep_temperature: float = -1.0
    sweep_repeats: int = 0
    side_by_side: str = "auto"
    max_model_len: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be compared; fill in the sweep, a single point where servers are attached."""
        everything = takes_all(self)
        super().__post_init__()
        if everything:
            object.__setattr__(self, "prompts_per_category", 0)
        refuse_one_server_for_both(self.server, self.variant_server)
        if self.side_by_side not in ("auto", "yes", "no"):
            raise BadParameter(f"side_by_side={self.side_by_side!r} is unknown", "use auto, yes or no")
        attached = bool(self.server or self.variant_server)
        own = {"sweep_k": self.num_speculative_tokens, "sweep_streams": self.concurrency}
        place = 0 if attached else SCALES.index(self.scale)
        for name, values in self.sweeps.items():
            wanted = whole_numbers(name, getattr(self, name) or values[place])
            told = ",".join(map(str, sorted({own[name], *wanted})))
            object.__setattr__(self, name, told)
        if self.sweep_temperature < 0:
            object.__setattr__(self, "sweep_temperature", self.temperatures[place])
        if self.variant_server and self.ks != [self.num_speculative_tokens]:
            raise BadParameter(
                f"sweep_k={self.sweep_k!r} with an attached server",
                "its k is fixed: leave sweep_k empty and say that k in num_speculative_tokens",
            )

    @property
    def ks(self) -> list[int]:
        """The numbers of drafted tokens to measure, that of num_speculative_tokens among them."""
        return whole_numbers("sweep_k", self.sweep_k)

    @property
    def streams(self) -> list[int]:
        """The numbers of requests in flight to measure, `concurrency` among them."""
        return whole_numbers("sweep_streams", self.sweep_streams)

    @property
    def tokens_a_step(self) -> int:
        """The most tokens of one step: k + 1 for each stream.

        All servers are made for as many requests: step times are taken with that many, and on GPUs CUDA graphs
        then cover the longest verification too.
        """
        return max(self.streams) * (max(self.ks) + 1)


def whole_numbers(name: str, told: str) -> list[int]:
    """The numbers of a parameter such as "1,2,4"; raises BadParameter for anything below 1 or no number."""
    parts = [part.strip() for part in told.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadParameter(f"{name}={told!r} is no list of numbers", f'give {name} as "1,2,4", each at least 1')
    return [int(part) for part in parts]


NOTEBOOKS: dict[str, type[Settings]] = {
    cls.notebook: cls for cls in (Profiling, NgramBaseline, ExpertActivation, Eagle3Pipeline, Evaluation)
}
