"""The training loop: bf16 weights as they are served, fp32 masters, as many steps as the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from labkit import files, settings
from labkit.pretrain.balance import Balance
from labkit.pretrain.corpus import Packs
from labkit.targets.quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM

IGNORED = -100
LOG = "training.json"
GRADIENT_ERROR = 0.05  # relative: bf16 differs by about 1%, a wrong kernel by far more


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train. `seconds` and `steps`: whichever ends first; the learning rate follows both."""

    seconds: float
    steps: int = 1_000_000
    rows: int = 32  # packs a step
    learning_rate: float = 2e-3
    warm_up: int = 100  # steps
    floor: float = 0.02  # of the learning rate, at the end
    weight_decay: float = 0.1
    clip: float = 1.0
    balance_speed: float = 0.005  # of the balancing biases at the full learning rate; it falls with that
    frozen_from: float = 0.9  # share of the training after which the balancing biases stay
    check_s: float = 20.0  # held-out loss and checkpoint
    seed: int = 0


def new_model(device: str, seed: int = 0) -> DeepseekV3ForCausalLM:
    """The text model of data/models/mini-kimi.json with fresh weights: bf16, router biases fp32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shipped = files.read_json(settings.root() / "data" / "models" / "mini-kimi.json")["text_config"]
    config = DeepseekV3Config(
        **{key: value for key, value in shipped.items() if key not in ("model_type", "dtype")}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(config)
    return ready(model.to(torch.bfloat16), device)


def open_model(folder: Path, device: str) -> DeepseekV3ForCausalLM:
    """The model of a checkpoint, to go on with."""
    from transformers import DeepseekV3ForCausalLM

    return ready(DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), device)


def ready(model: DeepseekV3ForCausalLM, device: str) -> DeepseekV3ForCausalLM:
    """On its device, sdpa attention, balancing biases in fp32: steps of 0.001 vanish in bf16."""
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    model.set_attn_implementation("sdpa")
    model.to(device)
    model.set_experts_implementation(experts_for(model))
    return model


def experts_for(model: DeepseekV3ForCausalLM) -> str:
    """The implementation of the experts to train with: grouped on a GPU where its gradients are right.

    A grouped product over groups of any size is right on some versions of torch only, so its gradient is held
    against that of one product an expert, which is slower and always right. On the CPU the batched one is fastest.
    """
    if model.device.type == "cpu":
        return "batched_mm"
    exact = expert_gradients(model, "eager")
    difference = (expert_gradients(model, "grouped_mm") - exact).norm() / exact.norm()
    return "grouped_mm" if difference < GRADIENT_ERROR else "eager"


def expert_gradients(model: DeepseekV3ForCausalLM, implementation: str) -> torch.Tensor:
    """The gradients of one layer's experts, flat, for fixed states and choices: groups of uneven size."""
    model.set_experts_implementation(implementation)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    count, width = experts.gate_up_proj.shape[0], experts.gate_up_proj.shape[2]
    drawn = torch.Generator(model.device).manual_seed(0)
    states = torch.randn(501, width, generator=drawn, device=model.device).to(experts.gate_up_proj.dtype)
    scores = torch.rand(501, count, generator=drawn, device=model.device)
    weights, chosen = scores.topk(model.config.num_experts_per_tok)
    experts(states, chosen, weights).float().square().sum().backward()
    found = torch.cat([p.grad.float().flatten() for p in experts.parameters()])
    model.zero_grad(set_to_none=True)
    return found


@dataclass(frozen=True)
class Batch:
    """Rows of a pack as the model takes them: ids, positions and labels [B, S], mask bool [B, 1, S, S]."""

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


def batch_of(packs: dict[str, torch.Tensor], rows: torch.Tensor) -> Batch:
    """The given rows; a place attends to its own document up to itself and predicts that document's next token."""
    ids, segments = packs["tokens"][rows].long(), packs["segments"][rows]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    mask = (segments[:, :, None] == segments[:, None, :]) & causal  # [B, S, S]
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = torch.where(follows, ids[:, 1:], IGNORED)
    return Batch(ids, packs["positions"][rows].long(), mask[:, None], labels)


def on_device(packs: Packs, device: str) -> dict[str, torch.Tensor]:
    """The packs as int16 tensors on a device: token ids are below 4,096."""
    return {
        name: torch.from_numpy(getattr(packs, name).astype(np.int16)).to(device)
        for name in ("tokens", "segments", "positions")
    }


def loss_of(model: DeepseekV3ForCausalLM, batch: Batch, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of the next token in nats, over the labels that count."""
    logits = model(
        input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).logits
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


class Masters:
    """AdamW on fp32 copies of bf16 weights: small steps add up instead of being rounded away."""

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        """Copy every trained weight; vectors (norms) are not decayed."""
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.copies = [p.detach().float().clone() for p in self.weights]
        matrices = [copy for copy in self.copies if copy.ndim > 1]
        vectors = [copy for copy in self.copies if copy.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": plan.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=True)
        self.clip = plan.clip

    @torch.no_grad()
    def step(self, rate: float) -> torch.Tensor:
        """One step at a learning rate; returns the gradient's norm before clipping."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.copies, self.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.copy_(copy)
        return norm


def rate_at(plan: Plan, step: int, progress: float) -> float:
    """Warm-up by steps, then a cosine from the learning rate to its floor over the progress from 0 to 1."""
    cosine = plan.floor + (1 - plan.floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return plan.learning_rate * min(1.0, (step + 1) / plan.warm_up) * cosine


def row_order(count: int, rows: int, seed: int) -> Iterator[np.ndarray]:
    """Row numbers of one batch after another, every row once an epoch, without end."""
    order, rest = np.random.default_rng(seed), np.zeros(0, np.int64)
    while True:
        while len(rest) < rows:
            rest = np.concatenate([rest, order.permutation(count)])
        yield rest[:rows]
        rest = rest[rows:]


@torch.no_grad()
def held_out_loss(model: DeepseekV3ForCausalLM, packs: dict[str, torch.Tensor], rows: int) -> float:
    """Nats a token over all the packs."""
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(packs["tokens"]), rows):
        batch = batch_of(packs, torch.arange(start, min(start + rows, len(packs["tokens"]))))
        total += loss_of(model, batch, "sum").item()
        count += int((batch.labels != IGNORED).sum())
    model.train()
    return total / max(1, count)


def run(
    model: DeepseekV3ForCausalLM,
    train: Packs,
    held_out: Packs,
    plan: Plan,
    out_dir: Path,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Train and keep the checkpoint with the lowest held-out loss in out_dir/model; returns the checks' figures.

    Ends in time for the last check to fit into `plan.seconds`. The checkpoint is replaced whole, never half.
    """
    device = str(model.device)
    packs, checks = on_device(train, device), on_device(held_out, device)
    masters, balance, started = Masters(model, plan), Balance(model), time.monotonic()
    history: list[dict[str, Any]] = []
    last_check, check_took, tokens, uneven = started, 0.0, 0, torch.zeros(1)
    losses: list[torch.Tensor] = []
    model.train()
    for step, rows in enumerate(row_order(len(train.tokens), plan.rows, plan.seed)):
        now = time.monotonic()
        usable = max(1.0, plan.seconds - 2 * check_took)
        progress = max(step / plan.steps, (now - started) / usable)
        if progress >= 1 or (step and now - last_check >= plan.check_s):
            figures = {
                "step": step, "seconds": round(now - started, 1), "tokens": tokens,
                "epochs": round(step * plan.rows / len(train.tokens), 2),
                "loss": torch.stack(losses).mean().item() if losses else math.nan,
                "held_out_loss": held_out_loss(model, checks, plan.rows),
                "tok_s": round(tokens / max(1e-9, now - started)), "load_max_over_mean": uneven.tolist(),
            }  # fmt: skip
            best = all(figures["held_out_loss"] < old["held_out_loss"] for old in history)
            history.append(figures)
            if best:
                save(model, out_dir)
            files.write_json(out_dir / LOG, {"plan": asdict(plan), "checks": history})
            report(line(figures, best))
            losses, last_check = [], time.monotonic()
            check_took = max(check_took, last_check - now)
        if progress >= 1:
            break
        loss = loss_of(model, batch_of(packs, torch.from_numpy(rows)))
        loss.backward()
        rate = rate_at(plan, step, progress)
        masters.step(rate)
        moving = progress < plan.frozen_from
        uneven = balance.step(plan.balance_speed * rate / plan.learning_rate if moving else 0.0)
        losses.append(loss.detach())
        tokens += plan.rows * train.tokens.shape[1]
        if step % 50 == 0 and device != "cpu":
            torch.cuda.synchronize()  # so that the clock sees what was done, not what was queued
    balance.close()
    return history


def line(figures: dict[str, Any], kept: bool) -> str:
    """The figures of a check as one line."""
    load = max(figures["load_max_over_mean"])
    return (
        f"step {figures['step']} ({figures['epochs']} epochs, {figures['seconds']:.0f} s): "
        f"loss {figures['loss']:.3f}, held out {figures['held_out_loss']:.3f}, {figures['tok_s']:,} tok/s, "
        f"load max/mean {load:.2f}{', kept' if kept else ''}"
    )


def save(model: DeepseekV3ForCausalLM, out_dir: Path) -> None:
    """Write out_dir/model whole (bf16, router biases fp32)."""
    with files.atomic(out_dir / "model") as scratch, no_progress_bars():
        model.save_pretrained(scratch)
