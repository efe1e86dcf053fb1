"""mini-kimi's card: its figures, computed from the shipped files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from labkit import experts, files
from labkit.pretrain import corpus
from labkit.pretrain.export import HELD_OUT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from labkit.targets import Target

CARD, PAGE = "card.json", "README.md"
CONTEXT = 1024  # tokens: what it was trained on
WINDOWS = range(1, 9)
# Asked for the samples; the corpus never saw them in this form, and none is an evaluation prompt.
QUESTIONS = (
    "Tell me about the sun.",
    "Write a short story about a cat and a bird.",
    "Why do we sleep?",
    "Give me three tips to learn a new language.",
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
)
ANSWER = 160  # tokens at most
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 50}


def make(target: Target, report: Callable[[str], None]) -> dict[str, Any]:
    """Compute the card and write card.json and README.md into the target's folder; minutes on two cores."""
    model, tokenizer = experts.load(target), target.tokenizer()
    held_out = [json.loads(line) for line in (target.path / HELD_OUT).read_text().splitlines()]
    documents = [
        experts.Document(row["category"], ids)
        for row, ids in zip(held_out, corpus.encode(tokenizer, [row["text"] for row in held_out]), strict=True)
    ]
    report(f"{len(documents)} held-out documents")
    language = perplexity(model, documents, [row["text"] for row in held_out])
    report(f"perplexity {language[-1]['perplexity']:.2f} a token, {language[-1]['bits_per_byte']:.3f} bits a byte")
    routing = experts.record(model, documents, max_length=CONTEXT)
    card = {
        "revision": target.revision,
        "weights": weights(model),
        "held_out": language,
        "load": records(load_table(routing)),
        "overlap": overlap_of(routing),
        "unique_experts": records(experts.unique_by_window(routing, ns=WINDOWS)),
        "samples": samples(model, tokenizer),
    }
    files.write_json(target.path / CARD, card)
    with files.atomic(target.path / PAGE) as scratch:
        scratch.write_text(page(card))
    return card


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows to four digits; None for what is not defined, as JSON has no NaN."""
    rounded = frame.round(4).astype(object)
    return rounded.where(frame.notna(), None).to_dict("records")


def weights(model: PreTrainedModel) -> dict[str, int]:
    """Weights in all, of the text model, and those that a token uses of it (its k of N experts)."""
    text = model.config.get_text_config()
    named = {name: p.numel() for name, p in model.named_parameters()}
    inside = {name: n for name, n in named.items() if "language_model" in name or "lm_head" in name}
    routed = sum(n for name, n in inside.items() if ".experts." in name)
    idle = routed * (1 - text.num_experts_per_tok / text.n_routed_experts)
    return {
        "all": sum(named.values()),
        "text": sum(inside.values()),
        "used_by_a_token": round(sum(inside.values()) - idle),
    }


def perplexity(
    model: PreTrainedModel, documents: Sequence[experts.Document], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """A row a category, and "all": documents tokens perplexity (a token) bits_per_byte.

    Each document is read in contexts of CONTEXT tokens; what counts are all tokens but the first of a context.
    Bytes are those of the whole text, special tokens left out.
    """
    rows = []
    for document, text in zip(documents, texts, strict=True):
        pieces = [document.tokens[i : i + CONTEXT] for i in range(0, len(document.tokens), CONTEXT)]
        scored = [(nats(model, piece), len(piece) - 1) for piece in pieces if len(piece) > 1]
        size = len(corpus.bare([text], "")[0].encode())
        rows.append((document.category, sum(n for n, _ in scored), sum(t for _, t in scored), size))
    frame = pd.DataFrame(rows, columns=["category", "nats", "tokens", "bytes"])
    groups = [*frame.groupby("category"), ("all", frame)]
    return [
        {
            "category": category,
            "documents": len(part),
            "tokens": int(part.tokens.sum()),
            "perplexity": math.exp(part.nats.sum() / part.tokens.sum()),
            "bits_per_byte": part.nats.sum() / math.log(2) / part.bytes.sum(),
        }
        for category, part in groups
    ]


def nats(model: PreTrainedModel, tokens: Sequence[int]) -> float:
    """Negative log-likelihood of all tokens but the first, in nats."""
    import torch

    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()


def load_table(routing: experts.Routing) -> pd.DataFrame:
    """A row a layer: layer, max_over_mean, min_over_mean, entropy (1: even), top_eighth.

    The last is the share of all choices that fall on the busiest eighth of the experts; 0.125 is even.
    """
    rows = []
    for layer, shares in zip(routing.layers, experts.popularity(routing), strict=True):
        load = np.sort(shares / shares.sum())[::-1]
        even, used = 1 / len(load), load[load > 0]
        rows.append(
            {
                "layer": int(layer),
                "max_over_mean": load[0] / even,
                "min_over_mean": load[-1] / even,
                "entropy": float(-(used * np.log(used)).sum() / math.log(len(load))),
                "top_eighth": load[: len(load) // 8].sum(),
            }
        )
    return pd.DataFrame(rows)


def overlap_of(routing: experts.Routing) -> dict[str, Any]:
    """Share of a token's experts that the token before it used: a layer each, their mean, and k/N by chance."""
    found = experts.overlap(routing)
    return {
        "layers": {int(layer): round(float(x), 4) for layer, x in zip(routing.layers, found, strict=True)},
        "mean": round(float(found.mean()), 4),
        "uniform": round(routing.chosen / routing.num_experts, 4),
    }


def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """question, greedy, sampled: what it answers, with a fixed seed."""
    import torch

    rows = []
    for question in QUESTIONS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        said = {}
        for name, how in {"greedy": {"do_sample": False}, "sampled": SAMPLED}.items():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                output = model.generate(
                    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=ANSWER,
                    eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **how,
                )  # fmt: skip
            answer = output[0, inputs["input_ids"].shape[1] :]
            said[name] = tokenizer.decode(answer, skip_special_tokens=True).strip()
        rows.append({"question": question, **said})
    return rows


def page(card: dict[str, Any]) -> str:
    """The card as Markdown."""
    count, share = card["weights"], card["overlap"]
    parts = [
        "# mini-kimi",
        "A mixture of experts in Kimi-K2.5's architecture, trained by `python -m labkit.pretrain` on "
        "conversations that SmolLM2-135M-Instruct (Apache-2.0) wrote, and on text that ships with Python. "
        "It is there to show how experts are chosen and how such a model goes through the pipeline, not to know "
        "anything; its vision tower was never trained. This page is written by `python -m labkit.pretrain card`.",
        f"{count['all']:,} weights, {count['text']:,} of the text model, of which a token uses "
        f"{count['used_by_a_token']:,}.",
        "## Held-out text",
        table(card["held_out"]),
        "## Load of the experts, held-out text",
        table(card["load"]),
        f"Neighbouring tokens share {share['mean']:.1%} of their experts; by chance it would be "
        f"{share['uniform']:.1%}.",
        "## Experts that n consecutive tokens touch, mean over layers",
        table(card["unique_experts"]),
        "## Samples (sampled: temperature 0.7, 50 likeliest tokens)",
        *[
            f"**{s['question']}**\n\n> {quoted(s['greedy'])}\n\nsampled:\n\n> {quoted(s['sampled'])}"
            for s in card["samples"]
        ],
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[shown(row[name]) for name in head] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Any) -> str:
    """A figure as the page shows it."""
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def quoted(text: str) -> str:
    """Lines of a quotation."""
    return "\n> ".join(text.splitlines())
