"""Tokens a second of a training step beside speculators' own: python -m benchmarks.train_step [--target smollm2]

The same head, conversations (random tokens, states of the size that the target has) and TTT steps on one device,
whatever it is. The peer is speculators' own training step: its collation to rows of a fixed length, its model's
forward pass (compiled, FlexAttention and fused losses on a GPU, as its trainer has them), gradient clipping and
AdamW, as in Trainer.train_epoch; its trainer as a whole refuses to run without a GPU. Both get batches that are
ready in memory. Then the lab's whole loop, states computed on the fly by the target, against the goal of 100,000
tokens a second on one H200.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import spread
from labkit import draft, targets, vocab
from labkit.settings import Eagle3Pipeline
from labkit.targets import Target
from labkit.train import batches, loop, optimizer, order, running
from labkit.train.batches import Sample
from labkit.train.onthefly import OnTheFly
from labkit.train.stopping import Stopping
from labkit.train.unroll import Unrolled

GOAL = 100_000
WARM = 3


def conversations(count: int, longest: int, vocabulary: int) -> list[Sample]:
    """Conversations of random tokens, a third to all of `longest` long, the last two thirds of each an answer."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(count):
        length = int(rng.integers(longest // 3, longest + 1))
        mask = np.arange(length) >= length // 3
        samples.append(Sample(Path(f"hs_{number}"), rng.integers(0, vocabulary, length), mask, length // 3))
    return samples


def synthetic(target: Target, layers: int) -> Callable[[Sample], torch.Tensor]:
    """Random states of the size that the target has."""
    hidden = target.geometry.hidden_size
    return lambda sample: torch.randn(sample.tokens, layers, hidden).bfloat16()


def built(target: Target, draft_vocab_size: int, device: torch.device, *, flex: bool = False) -> Any:
    """A head over the target's usual layers; with `flex` it attends as speculators' trainer lets it on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    chosen = vocab.build(np.arange(target.geometry.vocab_size)[::-1].copy(), draft_vocab_size)
    count = target.geometry.num_hidden_layers
    model = draft.build(target, chosen, (2, count // 2, count - 3))
    if flex:
        name = "simple_flex_attention"
        model.config.transformer_layer_config._attn_implementation = model._attn_impl = name
        model._create_mask_fn = create_block_mask
    return model.to(device)


def own_step(model: Any, settings: Eagle3Pipeline, device: torch.device) -> Callable[[Any], None]:
    """The lab's step on a ready batch, all but its bookkeeping."""
    unrolled = Unrolled(model, settings.loss, compiled=settings.compiled)
    adamw = optimizer.adamw(unrolled, 1e-4)

    def step(batch: batches.Batch) -> None:
        batch = batches.to_device(batch, device)
        adamw.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            answer = unrolled(batch, settings.ttt_steps)
        (answer["sums"].sum() / len(batch["trained"])).backward()
        torch.nn.utils.clip_grad_norm_(unrolled.parameters(), optimizer.CLIP_NORM)
        optimizer.drop_broken(unrolled)
        adamw.step()

    return step


def peer_step(model: Any, settings: Eagle3Pipeline, device: torch.device, kernels: str) -> Callable[[Any], None]:
    """speculators' step: the statements of its Trainer.train_epoch that work on the device."""
    from speculators.losses import resolve_loss_config

    how = {"ttt_steps": settings.ttt_steps, "loss_config": resolve_loss_config(settings.loss, kernels)}
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-4, weight_decay=0.01)

    def step(batch: Any) -> None:
        moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16):
            _tokens, loss, metrics = model(**moved, **how)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        _ = {name: value.item() for name, value in metrics.items()}  # log_freq is 1 by default

    return step


def peers_batch(samples: Sequence[Sample], read: Callable[[Sample], torch.Tensor], length: int) -> Any:
    """A batch as speculators' collation makes it, padded to `length`."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    items = []
    for sample in samples:
        states = read(sample)
        item = {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": torch.from_numpy(sample.input_ids),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.from_numpy(sample.loss_mask),
            "lengths": torch.tensor([sample.tokens]),
            "position_ids": torch.arange(sample.tokens),
        }
        items.append(item)
    hidden = items[0]["verifier_last_hidden_states"].shape[-1]
    batch = CollateFn(length, hidden, preprocess=shift_batch)(items)
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def seconds(step: Callable[[Any], None], made: Sequence[Any], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each of `repeats` passes over the batches, after a few to warm up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for batch in itertools.islice(itertools.cycle(made), WARM):
        step(batch)
    laps = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        for batch in made:
            step(batch)
        wait()
        laps.append(time.perf_counter() - started)
    return laps


def whole_loop(target: Target, settings: Eagle3Pipeline, samples: list[Sample], draft_vocab_size: int) -> float:
    """Tokens a second of the lab's own loop, states computed on the fly, after its first steps."""
    accelerator = running.processes()
    model = built(target, draft_vocab_size, accelerator.device)
    count = target.geometry.num_hidden_layers
    source = OnTheFly(target, (2, count // 2, count - 3), accelerator.device)
    unrolled = Unrolled(model, settings.loss, compiled=settings.compiled)
    adamw = optimizer.adamw(unrolled, 1e-4)
    prepared = accelerator.prepare(unrolled, adamw)
    with tempfile.TemporaryDirectory() as folder, Stopping() as stopping:
        path = Path(folder) / "checkpoint.safetensors"
        training = loop.Loop(settings, accelerator, *prepared, samples, samples[:2], path, "", source=source)
        rows = training.run(stopping).frame
    rest = rows.iloc[WARM:-1]  # the last one holds the evaluation
    return rest.tokens.sum() / (rest.seconds.iloc[-1] - rows.seconds.iloc[WARM - 1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--batch-tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--longest", type=int, default=512 if cuda else 200)
    parser.add_argument("--draft-vocab-size", type=int, default=16384 if cuda else 4096)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20 if cuda else 4)
    parser.add_argument("--repeats", type=int, default=5 if cuda else 3)
    parser.add_argument("--compiled", action="store_true", help="torch.compile for the lab's step, too")
    # Its own choice on a GPU is fused, which torch 2.11 does not compile: "eager" ones are compiled with the rest.
    parser.add_argument("--peer-losses", choices=["fused", "eager"], default="")
    given = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    target = targets.resolve(given.target)
    settings = Eagle3Pipeline(
        batch_tokens=given.batch_tokens, ttt_steps=given.ttt_steps, epochs=1, compiled=given.compiled
    )
    count = given.batches * given.batch_tokens // (given.longest * 2 // 3)
    samples = conversations(count, given.longest, target.geometry.vocab_size)
    groups = order.plan(samples, given.batch_tokens, seed=0)[: given.batches]
    tokens = sum(sample.tokens for group in groups for sample in group)
    read = synthetic(target, 4)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{given.target} on {name}: {len(groups)} steps of up to {given.batch_tokens} tokens")
    print(
        f"{given.ttt_steps} TTT steps, draft vocabulary {given.draft_vocab_size}, {given.longest} tokens at most"
    )
    own = own_step(built(target, given.draft_vocab_size, device), settings, device)
    kernels = given.peer_losses or ("fused" if cuda else "eager")
    peer = peer_step(built(target, given.draft_vocab_size, device, flex=cuda), settings, device, kernels)
    own_batches = [batches.pack(group, given.ttt_steps, read) for group in groups]
    peer_batches = [peers_batch(group, read, given.batch_tokens) for group in groups]
    own_laps, peer_laps = [], []
    for _ in range(given.repeats):  # in turn, so that a machine's moods hit both
        own_laps += seconds(own, own_batches, 1, device)
        peer_laps += seconds(peer, peer_batches, 1, device)
    ratios = [b / a for a, b in zip(own_laps, peer_laps, strict=True)]
    print(f"  labkit       {tokens / statistics.median(own_laps):10,.0f} tokens/s")
    print(f"  speculators  {tokens / statistics.median(peer_laps):10,.0f} tokens/s")
    print(f"  labkit / speculators {spread(ratios)}")
    rate = whole_loop(target, settings, samples, given.draft_vocab_size)
    print(f"  labkit's whole loop, states on the fly: {rate:,.0f} tokens/s (goal {GOAL:,} on one H200)")


if __name__ == "__main__":
    main()
