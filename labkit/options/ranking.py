"""The options of BACKGROUND.md for a target, ranked: the cheapest that can still pay comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from labkit.costmodel.drafting import draft_ms, drafts, head_like
from labkit.costmodel.ranges import Range
from labkit.costmodel.step import StepModel
from labkit.costmodel.verdict import NO_GO, UNCLEAR, verdict
from labkit.options.possible import Engine, hard, installed_engine, obstacles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ["rank", "option", "what", "draft", "possible", "why", "num_speculative_tokens"]
COLUMNS += ["hours_low", "hours", "hours_high", "acceptance_low", "acceptance_length", "acceptance_high"]
COLUMNS += ["speedup_low", "speedup", "speedup_high", "verdict", "measure_next", "source"]
COLUMNS += ["draft_ms_low", "draft_ms", "draft_ms_high"]
OWN_DRAFT_VOCABULARY = 32_000  # BACKGROUND step 6
Row = dict[str, Any]


def rank(
    model: StepModel,
    *,
    engine: Engine | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streams: int = 1,
    acceptance: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """A row an option (A to E, M) and draft, in the order in which to try them.

    Possible ones that may pay come first, the cheapest of them first; then possible ones predicted not to pay;
    then those that are impossible, with the reason in `why`. `acceptance` replaces the acceptance length of an
    option, as {"A": (1.1, 1.3, 1.5)}, once it was measured or simulated. Hours are a person's and the server's, to
    a result.
    """
    engine = engine or installed_engine()
    vocabulary = len(tokenizer) if tokenizer is not None else 0
    rows = [
        *ngram(model),
        *own_layers(model),
        *existing(model, engine, vocabulary),
        *trained(model),
        *budgeted(model),
    ]
    finished = [finish(row, model, streams, acceptance or {}) for row in rows]
    frame = pd.DataFrame(finished, columns=[c for c in COLUMNS if c != "rank"])
    pays = frame["possible"] & (frame["verdict"] != NO_GO)
    order = frame.assign(pays=pays, better=-frame["speedup"].fillna(0)).sort_values(
        ["possible", "pays", "hours", "better"], ascending=[False, False, True, True], kind="stable"
    )
    ranked = frame.loc[order.index].reset_index(drop=True)
    return ranked.assign(rank=ranked.index + 1, draft_ms=ranked["draft_ms"].astype(float))[COLUMNS]


def option(letter: str) -> Mapping[str, Any]:
    """The facts of an option in data/drafts.json."""
    return drafts()["options"][letter]


def start(letter: str, **more: Any) -> Row:
    """A row with what the option's facts say."""
    told = option(letter)
    low, mid, high = Range.of(told["hours"])
    row = {"option": letter, "what": told["what"], "draft": "", "why": "", "possible": True, "draft_ms": 0.0}
    row |= {"hours_low": low, "hours": mid, "hours_high": high, "budget": 0.0}
    row |= {
        "num_speculative_tokens": told.get("num_speculative_tokens", 3),
        "length": told.get("acceptance_length"),
    }
    row |= {"source": (told.get("acceptance_length") or told["hours"])["source"]}
    return row | more


def ngram(model: StepModel) -> Iterator[Row]:
    """A: always possible."""
    yield start("A", draft="prompt lookup")


def own_layers(model: StepModel) -> Iterator[Row]:
    """M: only where the checkpoint carries such layers."""
    layers = model.geometry.num_nextn_predict_layers
    told = start("M", draft=f"{layers} layers of the checkpoint")
    if not layers:
        yield told | {"possible": False, "why": "no MTP layers (num_nextn_predict_layers 0)"}
        return
    k = told["num_speculative_tokens"]
    facts = dataclasses.asdict(model.geometry) | {"method": "mtp", "draft_vocab_size": model.geometry.vocab_size}
    facts = {name: value for name, value in facts.items() if "expert" not in name and "moe" not in name}
    yield told | {"draft_ms": draft_ms(facts, model.hardware, model.tensor_parallel_size, k)}


def existing(model: StepModel, engine: Engine, vocabulary: int) -> Iterator[Row]:
    """B and C: public heads in SGLang and in vLLM; heads of another shape are told once, as impossible."""
    engines = {"C": engine if engine.name == "vllm" else Engine("vllm"), "B": Engine("sglang")}
    if engine.name == "sglang":
        engines["B"] = engine
    heads = drafts()["heads"]
    for letter, server in engines.items():
        fitting = [h for h in heads if not shape_obstacles(h, model, vocabulary)]
        for head in [*fitting, *(h for h in heads if h not in fitting and related(h, model))]:
            yield candidate(letter, head, model, server, vocabulary)
        if not fitting and not any(related(h, model) for h in heads):
            why = f"data/drafts.json knows no head of hidden size {model.geometry.hidden_size:,}"
            yield start(
                letter, possible=False, why=f"{why} and vocabulary {model.geometry.vocab_size:,}: look for one"
            )


def shape_obstacles(head: Row, model: StepModel, vocabulary: int) -> list[str]:
    """What stands in a head's way whatever the engine."""
    any_engine = Engine(next(iter(head["engines"])))
    return [why for why in obstacles(head, model.geometry, any_engine, vocabulary) if hard(why)]


def related(head: Row, model: StepModel) -> bool:
    """Whether somebody might take a head that does not fit for one that does: the same hidden size."""
    return head["hidden_size"] == model.geometry.hidden_size


def candidate(letter: str, head: Row, model: StepModel, engine: Engine, vocabulary: int) -> Row:
    """One public head on one engine."""
    reasons = obstacles(head, model.geometry, engine, vocabulary)
    k, length = head["num_speculative_tokens"], head["acceptance_length"]
    row = start(letter, draft=head["name"], num_speculative_tokens=k, source=head["source"])
    row |= {"what": f"{engine} with an existing {head['method']} head"}
    row |= {"possible": not any(map(hard, reasons)), "length": length}
    if head["target"] != model.geometry.name and row["possible"]:
        reasons.append(f"made for {head['target']}: it loads, but expect less of it than its card says")
        # Nothing says how much less; at worst it proposes nothing that is accepted.
        row["length"] = length and {**length, "low": 1.0, "mid": (1 + length["mid"]) / 2}
    if length is None:
        reasons.append("no acceptance length was published")
        row["length"] = {"low": 1.0, "mid": 1 + k / 2, "high": 1.0 + k}
    row |= {"draft_ms": draft_ms(head, model.hardware, model.tensor_parallel_size, k)}
    return row | {"why": "; ".join(reasons)}


def trained(model: StepModel) -> Iterator[Row]:
    """D: an own head, one layer of the target's width over 32,000 tokens."""
    g = model.geometry
    facts = head_like(g.hidden_size, min(OWN_DRAFT_VOCABULARY, g.vocab_size), g.num_attention_heads)
    row = start("D", draft=f"one layer, draft vocabulary {facts['draft_vocab_size']:,}")
    k = row["num_speculative_tokens"]
    yield row | {"draft_ms": draft_ms(facts, model.hardware, model.tensor_parallel_size, k)}


def budgeted(model: StepModel) -> Iterator[Row]:
    """E: only for a mixture of experts, on top of an own head."""
    row = start("E", draft="on top of D")
    if not model.geometry.is_moe:
        yield row | {"possible": False, "why": "the target does not route"}
        return
    head = next(trained(model))
    k = head["num_speculative_tokens"]
    budget = max(model.geometry.num_experts_per_tok, option("E")["budget_share"] * model.experts_loaded(k + 1))
    row |= {"num_speculative_tokens": k, "length": head["length"], "draft_ms": head["draft_ms"], "budget": budget}
    row["why"] = f"{budget:.0f} experts a layer; lossy: replay it offline first (notebook 03)"
    if model.regime(k + 1).loading == "pairwise":
        row["why"] += "; the kernel reads pair by pair, so a budget saves nothing until it sorts tokens"
    yield (
        row
        | {"hours_low": row["hours_low"] + head["hours_low"], "hours": row["hours"] + head["hours"]}
        | {"hours_high": row["hours_high"] + head["hours_high"]}
    )


def finish(row: Row, model: StepModel, streams: int, acceptance: Mapping[str, Any]) -> Row:
    """A row with its prediction; impossible options keep none."""
    if not row["possible"]:
        return row | {"draft_ms": None, "verdict": "impossible"}
    k = row["num_speculative_tokens"]
    length = Range.of(acceptance.get(row["option"], row["length"]))
    cost = Range.of(row["draft_ms"])
    priced = dataclasses.replace(model, draft_ms=cost, expert_budget=row["budget"])
    found = verdict(priced, length, k, streams)
    row |= {"acceptance_low": length.low, "acceptance_length": length.mid, "acceptance_high": length.high}
    row |= {"speedup_low": found.speedup.low, "speedup": found.speedup.mid, "speedup_high": found.speedup.high}
    row |= {"draft_ms_low": cost.low, "draft_ms": cost.mid, "draft_ms_high": cost.high}
    told = found.next_measurement if found.word == UNCLEAR else ""
    return row | {"verdict": found.word, "measure_next": told}
