"""What one drafted token of a head costs, from the head's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit import files, settings
from labkit.costmodel.hardware import Hardware
from labkit.costmodel.ranges import Range
from labkit.costmodel.weights import weights
from labkit.targets import geometry

COLLECTIVES = 3  # after attention, after the feed-forward, and the embedding, as in the target's layers
INPUTS = 3  # hidden states of the target that an EAGLE-3 head fuses


def drafts() -> dict[str, Any]:
    """data/drafts.json: heads, overhead, options."""
    return files.read_json(settings.root() / "data" / "drafts.json")


def head(name: str) -> dict[str, Any]:
    """The public head whose name is, or ends in, `name`; KeyError where there is none."""
    return next(h for h in drafts()["heads"] if h["name"] == name or h["name"].endswith(f"/{name}"))


def head_like(target_hidden_size: int, draft_vocab_size: int, num_attention_heads: int) -> dict[str, Any]:
    """An EAGLE-3 head that one would train: one layer of the target's width, 2.5 times as wide inside."""
    return {
        "method": "eagle3",
        "hidden_size": target_hidden_size,
        "draft_vocab_size": draft_vocab_size,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": int(2.5 * target_hidden_size),
    }


def head_gigabytes(facts: Mapping[str, Any], ranks: int) -> tuple[float, float]:
    """(GB that one rank reads for each drafted token, GB that it reads once a step), bf16.

    One decoder layer whose attention takes the embedding beside the hidden state (two widths), and the output head
    over the draft vocabulary. Once a step: the fusion of the target's states, which vLLM keeps on every rank.
    """
    config = {k: v for k, v in facts.items() if isinstance(v, int) and k != "vocab_size"}
    shape = geometry(config | {"num_hidden_layers": 1, "vocab_size": facts["draft_vocab_size"]})
    table = weights(shape, ranks).set_index("part")["gb_per_rank"]
    width = shape.hidden_size
    if shape.is_mla:
        second = table["attention, low-rank inputs"]
    else:  # queries, keys and values take the second width as well; the output projection does not
        second = table["attention"] / 2 + table["attention, keys and values"]
    fusion = INPUTS * width * width * 2 / 1e9 if facts["method"] == "eagle3" else 0.0
    return float(table.sum() + second), fusion


def draft_ms(facts: Mapping[str, Any], hardware: Hardware, ranks: int, k: int) -> Range:
    """Milliseconds of one drafted token of k: bytes and collectives, times data/drafts.json's overhead.

    The overhead is wide because it is known from one published run alone: measure it.
    """
    each, once = head_gigabytes(facts, ranks)
    gb, found = each + once / k, []
    overhead = Range.of(drafts()["overhead"])
    collectives_ms = (COLLECTIVES * hardware.allreduce_us.mid if ranks > 1 else 0.0) / 1e3
    low, mid, high = (e * b for e, b in zip(hardware.efficiency, hardware.bandwidth_gb_s, strict=True))
    for gb_s, factor in ((high, overhead.low), (mid, overhead.mid), (low, overhead.high)):
        reading = gb / gb_s * 1e3
        found.append(factor * (reading + collectives_ms))
    return Range.of(found)
