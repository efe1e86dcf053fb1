"""A head in both of its forms through a real vLLM: the same drafts, accepted alike. Two servers: soak only."""

from __future__ import annotations

import os

import numpy as np
import pytest

from labkit import acceptance, bench, draft, engine, settings, vocab

SOAK = os.environ.get("LABKIT_SOAK") == "1"
LAYERS = (3, 14, 28)  # not vLLM's default, so that ids which an engine does not read would show


def served(target, head, log_dir):
    """Token ids of each answer, and the engine's counts."""
    with engine.serve(target, "eagle3", head=head, log_dir=log_dir, max_model_len=1024) as server:
        before = acceptance.snapshot(server)
        rows = bench.run(server, bench.prompts(per_category=1), max_tokens=32, repeats=1, warmup=0)
        counted = acceptance.between(before, acceptance.snapshot(server))
    assert rows["error"].isna().all()
    return [list(map(int, ids)) for ids in rows["output_token_ids"]], counted


def some_head(target, folder):
    """The demo's trained head where there is one, else one begun from the target's last layer: rarely right."""
    trained = settings.outputs() / "demo" / "04_eagle3_pipeline" / "head"
    if (trained / "config.json").exists():
        return draft.convert(trained, folder, "speculators")
    counts = np.arange(target.geometry.vocab_size)[::-1]  # a BPE numbers frequent tokens first
    model = draft.build(target, vocab.build(counts, 8192, vocab.required_ids(target.tokenizer())), LAYERS)
    draft.warm_start(model, target)
    return draft.export(model, folder, verifier_name=target.name)


@pytest.mark.skipif(not SOAK, reason="two servers, three minutes: make soak")
def test_both_forms_draft_alike(target, log_dir, tmp_path):
    first = some_head(target, tmp_path / "speculators")
    second = draft.convert(first, tmp_path / "llama", "llama")
    assert draft.preflight(first, target) == draft.preflight(second, target) == []
    texts, counted = served(target, first, log_dir)
    texts_again, counted_again = served(target, second, log_dir)
    assert counted.drafts > 0
    assert counted.accepted > 0
    assert (counted.drafts, counted.accepted_at) == (counted_again.drafts, counted_again.accepted_at)
    assert texts == texts_again
