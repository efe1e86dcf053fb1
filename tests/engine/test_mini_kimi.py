"""mini-kimi's text model (MLA, MoE) in a real vLLM: it says what the wrapper says, and gives its states."""

from __future__ import annotations

import httpx
import pytest
import torch
from safetensors.torch import load_file

from labkit import conversations, engine, experts, extract, targets

LAYERS = (1, 3, 5)
NEAR_TIE = 0.1  # nats: bf16 in the engine against fp32
QUESTIONS = ("Tell me about the sun.", "Why do we sleep?", "Write a story about a cat.", "What is two plus two?")


@pytest.fixture(scope="module")
def mini_kimi() -> targets.Target:
    return targets.resolve("mini-kimi")


@pytest.fixture(scope="module")
def text(mini_kimi) -> targets.Target:
    return targets.text_model(mini_kimi)


@pytest.fixture(scope="module")
def wrapper(mini_kimi):
    return experts.load(mini_kimi)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mini-kimi")


@pytest.fixture(scope="module")
def rows(text, wrapper, folder, log_dir):
    """Conversations that the text model answered in a plain server, which also said what the wrapper says."""
    prompts = conversations.split(conversations.templated(), 8, 2, seed=0)
    with engine.serve(text, "baseline", log_dir=log_dir, max_model_len=512, max_num_seqs=8) as plain:
        compare(plain, wrapper, text)
        return conversations.collect(prompts, plain, folder / "data", max_length=256, max_tokens=32)


def compare(server, wrapper, text) -> None:
    """Greedy tokens and their log-probabilities by the server against the wrapper in Transformers."""
    tokenizer, exact, count = text.tokenizer(), 0, 0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        body = {"model": server.model, "prompt": ids, "max_tokens": 24, "temperature": 0, "logprobs": 1}
        reply = httpx.post(f"{server.base_url}/completions", json=body | {"return_token_ids": True}, timeout=300)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        said = choice["token_ids"]
        with torch.no_grad():
            likely = wrapper(input_ids=torch.tensor([ids + said])).logits[0].log_softmax(-1)
        for at, (token, logprob) in enumerate(zip(said, choice["logprobs"]["token_logprobs"], strict=True)):
            row = likely[len(ids) - 1 + at]
            assert row[token].item() == pytest.approx(logprob, abs=NEAR_TIE)
            assert row[token] >= row.max() - NEAR_TIE
            exact, count = exact + int(row.argmax() == token), count + 1
    assert count > 40
    assert exact >= 0.9 * count


def test_the_engine_says_what_the_wrapper_says_and_gives_its_states(rows, wrapper, text, folder, log_dir):
    layers = [*LAYERS, text.geometry.num_hidden_layers]
    options = {"layers": layers, "storage": folder / "raw", "max_model_len": 512, "max_num_seqs": 8}
    with engine.serve(text, "extract", log_dir=log_dir, **options) as extracting:
        out = extract.run(folder / "data", extracting, folder / "states", target=text, layers=LAYERS)
    assert extract.verify(out).empty
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _i, output, at=at: seen.update({at + 1: output}))
        for at, layer in enumerate(wrapper.model.language_model.layers)
    ]
    for row, ids in enumerate(rows.input_ids):
        from_engine = load_file(extract.states_path(out, row))["hidden_states"].float()  # [T, layers + 1, H]
        with torch.no_grad():
            wrapper(input_ids=torch.tensor([list(ids)]), use_cache=False)
        for place, layer in enumerate([*LAYERS, text.geometry.num_hidden_layers]):
            wanted = seen[layer][0]  # what leaves layer - 1 enters `layer`
            error = (from_engine[:, place] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert error.median() < 0.03, (row, layer)
    for hook in hooks:
        hook.remove()
