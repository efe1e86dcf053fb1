"""A process of two that hold a shard of the head each (FSDP2 over gloo); says on stdout what it found."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from train_data import LAYERS, SETTINGS, make, samples_of

from labkit.train import batches, checkpoint, optimizer, start
from labkit.train.unroll import Unrolled

STEPS = 2


def step(model, adamw, batch):
    """One step; returns the loss."""
    loss = model(batch, STEPS)["sums"].sum() / len(batch["trained"])
    adamw.zero_grad()
    loss.backward()
    adamw.step()
    return loss.item()


def whole(model):
    return get_model_state_dict(model, options=StateDictOptions(**checkpoint.WHOLE))


def main(folder, rank):
    made = make(folder / f"data{rank}")
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder / 'meet'}")
    mesh = dist.init_device_mesh("cpu", (2,))
    batch = batches.pack(samples_of(made)[:4], STEPS)

    def fresh(shard):
        model = Unrolled(start.head(SETTINGS, made["target"], made["vocab"], LAYERS))
        model = fully_shard(model, mesh=mesh) if shard else model
        return model, optimizer.adamw(model, 1e-3)

    plain, sharded, again = fresh(False), fresh(True), fresh(True)
    losses = [(step(*plain, batch), step(*sharded, batch)) for _ in range(2)]
    path = folder / "checkpoint.safetensors"
    checkpoint.save(path, *sharded, {"digest": "d"}, [], write=rank == 0)
    dist.barrier()
    checkpoint.load(path, *again)
    losses.append((step(*plain, batch), step(*again, batch)))
    one, two = whole(plain[0]), whole(again[0])
    if rank == 0:
        assert set(one) == set(two)
        numbers = [name for name in one if one[name].is_floating_point()]
        apart = max(float((one[name] - two[name]).abs().max()) for name in numbers)
        print("losses", losses, "apart", apart)
        assert apart < 1e-4
        assert all(abs(a - b) < 1e-3 * abs(a) for a, b in losses)
        assert losses[2][0] < losses[0][0]
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), int(sys.argv[2]))
