"""A small mixture of experts in Kimi-K2.5's architecture with random weights: it routes, it cannot speak."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import files, settings
from labkit.targets.configs import BrokenConfig
from labkit.targets.geometry import geometry
from labkit.targets.quiet import no_progress_bars

if TYPE_CHECKING:
    from transformers import Kimi_K25ForConditionalGeneration

# Embeddings that stand out from what random attention adds, which is nearly the same for a whole context.
EMBEDDING_SPREAD = 1.0
# Router logits get unit spread over random tokens, so that the choice varies with the token; a little
# correction bias makes the choice differ from the order of the bare logits, as in trained models.
LOGIT_SPREAD = 1.0
BIAS_SPREAD = 0.02
SAMPLE_TOKENS = 512
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def config() -> dict[str, Any]:
    """Its configuration as in config.json: data/models/mini-kimi.json without the lab's own remarks."""
    shipped = files.read_json(settings.root() / "data" / "models" / "mini-kimi.json")
    return {key: value for key, value in shipped.items() if not key.startswith("_")}


def build(folder: Path, seed: int, tokenizer_dir: Path | None = None) -> None:
    """Write the model (bf16 safetensors, config) with weights drawn from `seed` into `folder`.

    `tokenizer_dir` is a model directory whose tokenizer is copied; its vocabulary has to fit. Takes seconds.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = random_model()
    with no_progress_bars():
        model.to(torch.bfloat16).save_pretrained(folder)
    name_layers(folder / "model.safetensors")
    if tokenizer_dir is not None:
        copy_tokenizer(tokenizer_dir, folder)


def random_model() -> Kimi_K25ForConditionalGeneration:
    """The model in fp32 with weights from torch's present random state; routers are fitted to vary."""
    import torch
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    model = Kimi_K25ForConditionalGeneration(Kimi_K25Config(**config())).eval()
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_SPREAD)
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_pre_hook(fit_router) for router in routers]
    with torch.no_grad():
        model(input_ids=torch.randint(model.config.text_config.vocab_size, (1, SAMPLE_TOKENS)), use_cache=False)
    for hook in hooks:
        hook.remove()
    return model


def fit_router(router: Any, inputs: tuple[Any, ...]) -> None:
    """Draw a router's weights so that its logits over these states have no mean and LOGIT_SPREAD.

    Random layers give all tokens a common part; a router that sees it sends them all to the same experts.
    Runs before the router does, so that one pass fits every layer to what the layers below it give.
    """
    import torch

    states = inputs[0].reshape(-1, router.weight.shape[1])  # [T, H]
    common = torch.nn.functional.normalize(states.mean(0), dim=0)
    drawn = torch.randn_like(router.weight)  # [N, H]
    drawn -= torch.outer(drawn @ common, common)
    router.weight.copy_(drawn * LOGIT_SPREAD / (states @ drawn.T).std())
    router.e_score_correction_bias.copy_(torch.randn(len(drawn)) * BIAS_SPREAD)


def name_layers(file: Path) -> None:
    """Give the text model's layers the names that Kimi-K2.5's own checkpoint has.

    Transformers 5.19 reverses the vision tower's blocks -> layers renaming in the text model, too, and writes
    language_model.model.blocks.0; it reads either form, other tools only the checkpoint's own.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    wrong, right = "language_model.model.blocks.", "language_model.model.layers."
    save_file({name.replace(wrong, right): t for name, t in tensors.items()}, file, metadata={"format": "pt"})


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of a model directory; raises BrokenConfig when its vocabulary does not fit."""
    vocabulary = geometry(source).vocab_size
    if vocabulary > geometry(config()).vocab_size:
        raise BrokenConfig(
            f"the tokenizer in {source} has {vocabulary} tokens, mini-kimi {geometry(config()).vocab_size}",
            "give a model directory with a vocabulary of at most that size",
        )
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
