"""Which target layers a head reads, in whose counting."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.draft.forms import Head
from labkit.draft.problem import CONFIG, Problem
from labkit.targets import Target


def layer_problems(head: Head, target: Target, engine: str) -> Iterator[Problem]:
    """Layer ids that the target has not, other ones than trained on, or counted as the other project counts."""
    count = target.geometry.num_hidden_layers
    trained = (head.record.get("trained_with") or {}).get("eagle_aux_hidden_state_layer_ids")
    trained = head.record.get("layers", trained)
    ids = head.layer_ids
    where = f"{CONFIG}: eagle_aux_hidden_state_layer_ids"
    if not ids:
        if head.form == "speculators":
            yield Problem(
                "layer ids",
                where,
                "config.json names no eagle_aux_hidden_state_layer_ids: the engine would guess them",
                f"write the layers that it was trained on (vLLM's default: {[2, count // 2, count - 3]})",
            )
        return
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > count:
        yield Problem(
            "layer ids",
            where,
            f"layer ids {ids} do not ascend within 0..{count}: vLLM sorts them, fc's columns stay as they are",
            "write them ascending and permute fc.weight's columns with them",
        )
    elif trained is not None and list(trained) != ids:
        yield Problem(
            "layer ids",
            where,
            f"layer ids are {ids}, but the head was trained on {list(trained)}: acceptance would collapse",
            f"write {list(trained)}",
        )
    elif engine == "sglang":
        yield from sglang_problems(head, ids)
    elif trained is None:
        yield from counting_problems(head, ids, count, where)


def counting_problems(head: Head, ids: list[int], count: int, where: str) -> Iterator[Problem]:
    """Ids that look like layers left rather than entered: the same state has a number one less there."""
    after = [1, count // 2 - 1, count - 4]
    right = [number + 1 for number in ids]
    if ids == after:
        yield Problem(
            "layer counting",
            where,
            f"layer ids {ids} are the usual ones as SpecForge, TorchSpec and ModelOpt count, after a layer; "
            "vLLM counts the layer that a state enters and would feed states one layer too low",
            f"write {right} for vLLM (in eagle_config, for SGLang, they stay)",
        )
    elif "eagle_aux_hidden_state_layer_ids" not in head.written and head.form != "speculators":
        yield Problem(
            "layer counting",
            f"{CONFIG}: eagle_config",
            f"layer ids {ids} stand in eagle_config alone: SGLang adds one to them, vLLM does not, so that they "
            "fit only the engine that the head was made for",
            f"made with SGLang's count: write eagle_aux_hidden_state_layer_ids {right} outside eagle_config",
            fatal=False,
        )


def sglang_problems(head: Head, ids: list[int]) -> Iterator[Problem]:
    """Ids in eagle_config that lead SGLang to other layers than vLLM."""
    theirs, outer = head.sglang_ids, head.written.get("eagle_aux_hidden_state_layer_ids")
    if outer and theirs != [number - 1 for number in ids]:
        yield Problem(
            "layer counting",
            f"{CONFIG}: eagle_config",
            f"eagle_config's layer ids are {theirs}; SGLang adds one to them, which does not give vLLM's {ids}",
            f"write {[number - 1 for number in ids]} there",
        )
