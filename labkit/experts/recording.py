"""Routing recorded with forward hooks on a model that Transformers runs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.errors import LabError
from labkit.experts.gates import Gate, ScoreListener
from labkit.experts.routing import BadRouting, Kept, Routing, Writer, narrow
from labkit.experts.texts import Document
from labkit.targets.quiet import no_progress_bars

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from labkit.targets import Target

# Transformers 5: every family's router is a module of such a class and returns (logits, weights, indices).
ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
LAYER = re.compile(r"(?:layers|h|blocks)\.(\d+)\.")


class NoRecording(LabError):
    """Transformers cannot run this target, so its routing cannot be recorded here."""


class NotMoE(LabError):
    """A model without routed experts was asked for its routing."""


def load(target: Target) -> PreTrainedModel:
    """The target's model in Transformers, fp32 on the CPU or as stored on a GPU; raises NotMoE for a dense one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if not target.geometry.is_moe:
        raise NotMoE(
            f"target {target.name!r} is dense ({target.geometry.architecture}): no routed experts in config.json",
            "give a mixture of experts as `target`: mini-kimi, or the directory of one",
        )
    loader = AutoModelForImageTextToText if target.geometry.wrapper else AutoModelForCausalLM
    gpu = torch.cuda.is_available()
    where = {"dtype": "auto", "device_map": "cuda"} if gpu else {"dtype": torch.float32}
    with no_progress_bars():
        try:
            return loader.from_pretrained(target.path, trust_remote_code=False, **where).eval()
        except (ValueError, KeyError, OSError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise NoRecording(
                f"Transformers cannot load {target.name}: {reason}",
                "code that comes with a model is never run here: use a Transformers version that has this "
                "architecture, or routing that an engine recorded",
            ) from error


def routers(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The routers by layer index, ascending, under any wrapper; raises NotMoE when there are none."""
    found = {}
    for name, module in model.named_modules():
        if ROUTER.search(type(module).__name__):
            index = LAYER.findall(name)
            found[int(index[-1]) if index else len(found)] = module
    if not found:
        raise NotMoE(
            f"{type(model).__name__} has no module of a class that ends in TopKRouter",
            "give a mixture of experts that Transformers runs natively (no remote code)",
        )
    return dict(sorted(found.items()))


@contextlib.contextmanager
def listening(modules: dict[int, torch.nn.Module]) -> Iterator[dict[int, Any]]:
    """Hooks that keep the last output of each router by layer, taken off again at the end."""
    heard: dict[int, Any] = {}

    def listener(layer: int) -> Callable[..., None]:
        return lambda _module, _inputs, output: heard.update({layer: output})

    hooks = [module.register_forward_hook(listener(layer)) for layer, module in modules.items()]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def record(
    model: PreTrainedModel,
    documents: Iterable[Document | Sequence[int]],
    *,
    max_length: int = 1024,
    path: Path | None = None,
    listeners: Sequence[ScoreListener] = (),
) -> Routing:
    """Routing of documents (or bare token lists), each run through the model in one pass without a cache.

    A document longer than max_length tokens is cut into contexts of that length, and windows cross no cut.
    With `path` it goes to that file as it comes (safetensors) and only one context is in memory. `listeners` see
    the router scores of each context and layer, which are kept nowhere: experts.Replay is one.
    Raises NotMoE for a dense model, BadRouting for a router that returns something else than it should.
    """
    found = routers(model)
    source = f"hooks on {type(model).__name__}, Transformers"
    count = int(next(iter(found.values())).weight.shape[0])
    layers = tuple(found)
    with Writer(path, count, layers, source) if path else Kept(count, layers, source) as kept:
        for number, (category, experts) in enumerate(contexts(model, found, documents, max_length, listeners)):
            kept.append(experts, np.full(len(experts), number, np.int32))
            kept.categories.append(category)
        if not kept.categories:
            raise BadRouting("there are no tokens to record", "give documents that hold text")
    return Routing.load(path) if path else kept.routing()


def contexts(
    model: PreTrainedModel,
    found: dict[int, torch.nn.Module],
    documents: Iterable[Document | Sequence[int]],
    max_length: int,
    listeners: Sequence[ScoreListener],
) -> Iterator[tuple[str, np.ndarray]]:
    """The category and the experts [t, L, k] of each context, as the model runs over it."""
    import torch

    gates = {layer: Gate.of(router) for layer, router in found.items()} if listeners else {}
    with torch.no_grad(), listening(found) as heard:
        for given in documents:
            document = given if isinstance(given, Document) else Document("", given)
            for piece in pieces(document.tokens, max_length):
                model(input_ids=torch.tensor([piece], device=model.device), use_cache=False, logits_to_keep=1)
                experts = gather(heard, list(found), len(piece))
                for layer, gate in gates.items():
                    scores = gate.scores(heard[layer][0])
                    for listener in listeners:
                        listener(layer, scores, heard[layer][2])
                heard.clear()  # so that a router that falls silent is noticed
                yield document.category, experts


def pieces(document: Sequence[int], max_length: int) -> Iterator[list[int]]:
    """The document in stretches of at most max_length tokens; raises BadRouting unless it is a list of tokens."""
    if max_length < 1:
        raise BadRouting(f"contexts of at most {max_length} tokens", "give max_length from 1")
    if isinstance(document, str) or not hasattr(document, "__len__"):
        raise BadRouting(
            f"{document!r:.40} is no document", "give each document as a list of token ids: [tokens], or encode it"
        )
    for start in range(0, len(document), max_length):
        yield [int(token) for token in document[start : start + max_length]]


def gather(heard: dict[int, Any], layers: list[int], tokens: int) -> np.ndarray:
    """The indices that the routers gave, [tokens, L, k]."""
    silent = [layer for layer in layers if layer not in heard]
    if silent:
        raise BadRouting(
            f"the routers of layers {silent} were not called",
            "a kernel may replace the router: load the model without hub kernels",
        )
    outputs = [heard[layer] for layer in layers]
    chosen = [output[2] for output in outputs]
    count = outputs[0][0].shape[-1]
    for layer, index in zip(layers, chosen, strict=True):
        if index.dtype.is_floating_point or index.shape[0] != tokens:
            raise BadRouting(
                f"the router of layer {layer} returned {tuple(index.shape)} of {index.dtype} for {tokens} tokens",
                "this family's router returns something else; recording knows (logits, weights, indices)",
            )
    stacked = np.stack([index.cpu().numpy() for index in chosen], axis=1)
    return stacked.astype(narrow(count))
