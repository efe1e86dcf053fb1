"""A tiny target, a head over it, and ways to damage the head's files."""

import json

import torch
from safetensors.torch import load_file, save_file

from labkit import files, targets

H, VOCAB, DRAFT, N = 32, 64, 16, 10
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": H,
    "num_hidden_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def tiny_target(folder, **changes):
    """A Llama in two tensors and what the warm start reads, random."""
    folder.mkdir(parents=True)
    files.write_json(folder / "config.json", CONFIG | changes)
    generator = torch.Generator().manual_seed(1)
    last = f"model.layers.{N - 1}."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, H),
        "model.norm.weight": (H,),
        f"{last}input_layernorm.weight": (H,),
        f"{last}post_attention_layernorm.weight": (H,),
        f"{last}self_attn.q_proj.weight": (32, H),
        f"{last}self_attn.k_proj.weight": (16, H),
        f"{last}self_attn.v_proj.weight": (16, H),
        f"{last}self_attn.o_proj.weight": (H, 32),
        f"{last}mlp.gate_proj.weight": (48, H),
        f"{last}mlp.up_proj.weight": (48, H),
        f"{last}mlp.down_proj.weight": (H, 48),
    }
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights |= {name: weights[name].abs() + 0.5 for name in weights if "norm" in name}
    weights |= {name: weights[name] * 0.1 for name in weights if "proj" in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return targets.Target("tiny", folder, "made for a test")


def change_config(head, **changes):
    """Set fields of config.json, in the decoder layer's part where they stand there; None takes one out."""
    config = json.loads((head / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    for name, value in changes.items():
        where = layer if name in layer else config
        if value is None:
            where.pop(name, None)
        else:
            where[name] = value
    (head / "config.json").write_text(json.dumps(config))


def layer_config(head, **changes):
    """Set fields of the decoder layer's part, there or not."""
    config = json.loads((head / "config.json").read_text())
    config.get("transformer_layer_config", config).update(changes)
    (head / "config.json").write_text(json.dumps(config))


def record(head, **changes):
    """Set fields of training.json."""
    path = head / "training.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(head, change):
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")


def spoil(name):
    """A change of tensors: one number of `name` is no number."""

    def change(tensors):
        tensors[name].view(-1)[0] = float("nan")

    return change


def foreign(head):
    """Take away what only the lab writes, so that the head is as another project's: no record, no verifier."""
    (head / "training.json").unlink()
    change_config(head, labkit=None)
    return head
