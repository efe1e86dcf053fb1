"""A tiny Llama with random weights whose greedy answers and states are known: what verification is tried on."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit import files, targets

LAYERS, WIDTH, VOCAB = 5, 32, 96
AUX = (1, 2, 3)
PROMPT, ANSWER = 6, 24


def build(folder: Path, seed: int = 0, **more: object) -> targets.Target:
    """Write one; its norm's gain is far from 1, so that a norm left out or read wrongly shows."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        initializer_range=0.4,
        tie_word_embeddings=False,
        dtype="float32",
        **more,
    )
    model = LlamaForCausalLM(config).float()
    model.model.norm.weight.data = 0.2 + 3 * torch.rand(WIDTH)
    model.save_pretrained(folder)
    return targets.Target("tiny", folder, "made for a test")


@torch.inference_mode()
def answers(target: targets.Target, folder: Path, rows: int = 6) -> pd.DataFrame:
    """A data set of prompts at random, of several lengths, and the target's greedy answers to them."""
    model = LlamaForCausalLM.from_pretrained(target.path).eval()
    random = torch.Generator().manual_seed(1)
    found = []
    for number in range(rows):
        prompt = torch.randint(3, VOCAB, (1, PROMPT + 3 * number), generator=random)
        ids = prompt
        for _ in range(ANSWER):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append({"input_ids": ids[0].tolist(), "seq_len": ids.shape[1], "prompt_tokens": prompt.shape[1]})
    frame = pd.DataFrame(found).assign(split="train", temperature=0.0)
    frame["loss_mask"] = [[at >= row.prompt_tokens for at in range(row.seq_len)] for row in frame.itertuples()]
    files.write_parquet(folder / "dataset.parquet", frame)
    return frame
