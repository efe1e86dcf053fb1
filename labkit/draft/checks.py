"""What would go wrong if this head were served with this target: found before an engine starts.

Each check is a generator of problems over a head, whatever its form, and the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from labkit.draft.check_config import config_problems
from labkit.draft.check_tensors import tensor_problems
from labkit.draft.forms import BadHead, Head, read
from labkit.draft.problem import Problem
from labkit.errors import LabError
from labkit.targets import Target
from labkit.vocab import VocabMap


class UnknownEngine(LabError):
    """The pre-flight knows nothing of an engine."""


def preflight(
    head_dir: Path, target: Target, *, engine: str = "vllm", vocab: VocabMap | None = None, max_model_len: int = 0
) -> list[Problem]:
    """The problems of serving `head_dir` over `target` on `engine` (vllm, sglang); empty when all is well.

    Each is a sentence (`Problem`, a str) that says where, what and what to do. `vocab`: the map that the head
    should have, where known. `max_model_len`: the longest context to be served (0: the target's own).
    Raises UnknownEngine.
    """
    if engine not in ("vllm", "sglang"):
        raise UnknownEngine(f"the pre-flight does not know {engine!r}", "use vllm or sglang")
    try:
        head = read(Path(head_dir))
    except BadHead as error:
        return [Problem("files", str(head_dir), error.what, error.remedy)]
    found = list(config_problems(head, target, engine, max_model_len or target.geometry.max_position_embeddings))
    if {problem.check for problem in found} & {"geometry", "vocabulary size", "draft vocabulary"}:
        return found  # tensors of other sizes than the target's say nothing more
    return [*found, *tensor_problems(head, target), *map_problems(head, vocab)]


def map_problems(head: Head, vocab: VocabMap | None) -> Iterator[Problem]:
    """A map that is not the one that the head was trained with (speculators#1081), or not the one wanted."""
    from labkit.files import digest

    d2t = head.tensor("d2t")
    if d2t is None:
        return
    mine, trained = digest(d2t.tolist()), head.record.get("vocabulary")
    remedy = "take d2t, t2d and lm_head from one and the same training"
    if trained is not None and mine != trained:
        yield Problem(
            "stale map",
            "model.safetensors: d2t",
            f"it is not the map that the head was trained with ({mine}, training.json says {trained})",
            remedy,
        )
    if vocab is not None and mine != vocab.digest:
        yield Problem(
            "stale map",
            "model.safetensors: d2t",
            f"it is not the map of this run's data ({mine}, the data's is {vocab.digest})",
            "train the head with this map, or serve it with the data that it was trained on",
        )
