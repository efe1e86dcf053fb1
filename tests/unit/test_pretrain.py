"""mini-kimi's making: text, packs, balanced experts, the loop, export and card."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, DeepseekV3ForCausalLM

from labkit import experts, files, targets
from labkit.pretrain import balance, card, chat, corpus, export, loop, prompts, shipped
from labkit.targets import mini_kimi

TALK = [{"role": "user", "content": "Why do cats purr?"}, {"role": "assistant", "content": "They are glad."}]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def frame():
    """A corpus of simple arithmetic in words, so regular that a few steps learn something."""
    names = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]
    texts = [
        chat.render([{"role": "user", "content": f"Does the {a} know the {b}?"}, *TALK[1:]])
        for a, b in itertools.permutations(names, 2)
    ]
    split = ["held-out" if i % 10 == 0 else "train" for i in range(len(texts))]
    return pd.DataFrame({"category": "plain", "text": texts, "split": split})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, frame):
    return chat.train_tokenizer(corpus.bare(frame.text), tmp_path_factory.mktemp("tokenizer") / "it", 400)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, frame, tokenizer):
    """A training run of a few steps, as the command `train` leaves it."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer.save_pretrained(folder / "tokenizer")
    files.write_parquet(folder / corpus.FILE, frame)
    packs = {split: corpus.pack(corpus.encode(tokenizer, part.text), 64) for split, part in frame.groupby("split")}
    plan = loop.Plan(seconds=1e6, steps=12, rows=2, warm_up=2, check_s=1e6)
    loop.run(loop.new_model("cpu"), packs["train"], packs["held-out"], plan, folder, lambda _line: None)
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    """Text models taken out of these targets are not kept among the real ones."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory, run_dir):
    return targets.resolve(export.run(run_dir, tmp_path_factory.mktemp("target") / "mini"))


def test_the_template_renders_what_training_saw_and_marks_the_answer(tokenizer):
    text = chat.render(TALK)
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == text
    assert text == "<|bos|><|user|>Why do cats purr?<|end|><|assistant|>They are glad.<|end|>"
    opening = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opening)
    marked = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, said in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if said]
    assert tokenizer.decode(answer) == "They are glad.<|end|>"
    assert chat.render(TALK, ended=False) == text.removesuffix("<|end|>")


@pytest.mark.parametrize(
    "text", ["naïve café, 1 + 1 = 2\n\tdef f(x): return x", "日本語 🙂 \x00", "  two  spaces"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_have_the_ids_of_the_configuration(tokenizer):
    config, text = mini_kimi.config(), mini_kimi.config()["text_config"]
    expected = {
        chat.PAD: text["pad_token_id"],
        chat.BOS: text["bos_token_id"],
        chat.END: text["eos_token_id"],
        "<|image|>": config["image_token_id"],
        "<|video|>": config["video_token_id"],
        "<|vision_start|>": config["vision_start_token_id"],
        "<|vision_end|>": config["vision_end_token_id"],
    }
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in expected} == expected
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]  # no hidden BOS


def test_evaluation_prompts_are_found_wherever_they_are():
    evaluation = prompts.Evaluation()
    said = [text for text in prompts.user_messages() if len(prompts.normalised(text)) >= prompts.SHORTEST_RUN]
    assert len(said) >= 80
    for text in said:
        changed = "He asked: " + text.upper().replace(",", " -") + " Well?"
        assert evaluation.leaks_into(changed), text
    with pytest.raises(corpus.EvaluationLeak):
        corpus.check_excluded(["harmless", said[0]])


def test_nothing_that_is_asked_for_is_an_evaluation_prompt():
    evaluation = prompts.Evaluation()
    assert not [text for text in prompts.templated() if evaluation.leaks_into(text)]
    asked = itertools.islice(prompts.stream(["What is a prompt of my own?"], 0), 500)
    assert not [text for _kind, text in asked if evaluation.leaks_into(text) or "{" in text]


def test_a_run_of_thirteen_words_leaks_and_twelve_do_not():
    words = [f"w{i}" for i in range(20)]
    evaluation = prompts.Evaluation([" ".join(words), "And why?"])
    assert evaluation.leaks_into("x " + " ".join(words[4:17]) + " y")
    assert not evaluation.leaks_into(" ".join(words[4:16]) + " y")
    assert not evaluation.leaks_into("And why?")  # says nothing


def test_the_corpus_drops_leaks_and_keeps_a_prompt_on_one_side(tmp_path, monkeypatch):
    evaluation_prompt = next(t for t in prompts.user_messages() if len(prompts.normalised(t)) > 20)
    rows = [("tale", f"Tell me of number {i % 400}.", f"It is the {i}th of them.", True, 9) for i in range(1200)]
    rows += [("own", evaluation_prompt, "An answer.", True, 3), ("own", "Say ab.", "ab " * 400, True, 400)]
    rows += [("own", "Count.", "One is one. Two is", False, 4)]
    columns = ["kind", "prompt", "answer", "finished", "tokens"]
    pd.DataFrame(rows, columns=columns).to_parquet(tmp_path / "generated-0-00.parquet")
    own = pd.DataFrame([("licences", "licences: x", "Free text. " * 30)], columns=["category", "source", "text"])
    monkeypatch.setattr(shipped, "documents", lambda: own)
    frame = corpus.build(tmp_path, tmp_path)
    assert not frame.text.str.contains(evaluation_prompt, regex=False).any()
    assert not frame.text.str.contains("ab ab").any()
    assert frame.text[frame.text.str.contains("Count.", regex=False)].item().endswith("One is one.")
    sides = frame.assign(prompt=frame.text.str.extract(r"<\|user\|>(.*?)<\|end\|>")[0]).groupby("prompt").split
    assert sides.nunique().max() == 1
    assert set(frame.split) == {"train", "held-out"}
    assert frame.equals(files.read_parquet(tmp_path / corpus.FILE))


def test_text_that_circles_is_cut_where_it_begins_to():
    once = "I am here to help you today. Yes. Yes. The sun is warm and the day is long. "
    assert corpus.until_repeated(once.strip()) == once.strip()
    assert corpus.until_repeated(once + "I am here to help you today. And so on.") == once.strip()
    assert corpus.whole_sentences('He said "Go." Then he') == 'He said "Go."'
    assert corpus.whole_sentences("no end") == ""


def test_without_text_there_is_no_corpus(tmp_path):
    with pytest.raises(corpus.BadCorpus, match="generate"):
        corpus.build(tmp_path, tmp_path)


def test_shipped_text_is_real_and_in_pieces():
    found = shipped.documents()
    assert set(found.category) == {"Python source", "Python docstrings", "Python manual", "licences"}
    assert found.text.str.len().between(shipped.SHORTEST, 20_000).all()
    assert found.text.str.contains("json.dumps", regex=False).any()
    pieces = list(shipped.pieces("a line\n" * 1500))
    assert "\n".join(pieces) == "a line\n" * 1499 + "a line"
    assert max(map(len, pieces)) <= shipped.LONGEST


def test_packs_hold_every_document_once_in_few_rows():
    drawn = np.random.default_rng(0)
    documents = [drawn.integers(1, 4096, size=drawn.integers(2, 90)).tolist() for _ in range(300)]
    packs = corpus.pack(documents, 64)
    found = []
    for tokens, segments, positions in zip(packs.tokens, packs.segments, packs.positions, strict=True):
        for number in range(1, segments.max() + 1):
            inside = segments == number
            assert positions[inside].tolist() == list(range(inside.sum()))
            found.append(tuple(tokens[inside].tolist()))
    pieces = [tuple(doc[i : i + 64]) for doc in documents for i in range(0, len(doc), 64)]
    assert sorted(found) == sorted(piece for piece in pieces if len(piece) > 1)
    assert packs.filled > 0.95
    assert (packs.tokens[packs.segments == 0] == 0).all()


def test_neither_loss_nor_attention_crosses_a_document():
    """The packed loss equals that of each document run alone."""
    model = loop.new_model("cpu").float().eval()
    documents = [list(range(20, 40)), list(range(100, 117)), list(range(50, 60))]
    packs = loop.on_device(corpus.pack(documents, 50), "cpu")
    batch = loop.batch_of(packs, torch.tensor([0]))
    alone, count = 0.0, 0
    with torch.no_grad():
        packed = loop.loss_of(model, batch, "sum").item()
        for document in documents:
            ids = torch.tensor([document])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            alone += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(document) - 1
    assert int((batch.labels != loop.IGNORED).sum()) == count
    assert packed == pytest.approx(alone, rel=1e-5)


def test_grouped_and_batched_experts_agree_with_one_product_an_expert():
    model = loop.new_model("cpu").float()
    exact = loop.expert_gradients(model, "eager")
    for name in ("grouped_mm", "batched_mm"):
        assert torch.allclose(loop.expert_gradients(model, name), exact, rtol=1e-3, atol=1e-3 * exact.abs().max())


class Router(torch.nn.Module):
    """Chooses 2 of 8 experts by fixed scores of which some are far ahead."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0, 0.5, 8))
        self.e_score_correction_bias = torch.nn.Buffer(torch.zeros(8))

    def forward(self, scores):
        chosen = (scores + self.weight.detach() + self.e_score_correction_bias).topk(2).indices
        return scores, scores, chosen


def test_balancing_evens_a_skewed_router_and_then_stays():
    router, drawn = Router(), torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(router)
    balancing = balance.Balance(model)
    uneven = []
    for _ in range(400):
        router(torch.rand(256, 8, generator=drawn) * 0.2)
        uneven.append(balancing.step(0.003).item())
    assert uneven[0] > 3  # of at most 4: two experts serve nearly all
    assert np.mean(uneven[-20:]) < 1.4
    router(torch.rand(256, 8, generator=drawn) * 0.2)
    before = router.e_score_correction_bias.clone()
    balancing.step(0.0)
    assert torch.equal(before, router.e_score_correction_bias)
    assert torch.equal(balancing.load, torch.zeros(1, 8))
    # The order that evens the load is the reverse of the head start.
    assert (before.diff() < 0).all()
    balancing.close()
    router(torch.rand(4, 8))
    assert balancing.load.sum() == 0


def test_loads_are_counted_by_hand():
    router = Router()
    balancing = balance.Balance(torch.nn.Sequential(router))
    router(torch.zeros(3, 8))
    assert balancing.load[0].tolist() == [0, 0, 0, 0, 0, 0, 3, 3]
    assert balancing.step(0.1).item() == pytest.approx(4.0)  # 3 over a mean of 6/8
    assert router.e_score_correction_bias.tolist() == pytest.approx([0.1] * 6 + [-0.1] * 2)


def test_training_learns_balances_and_leaves_a_whole_checkpoint(run_dir):
    record = files.read_json(run_dir / loop.LOG)
    first, last = record["checks"][0], record["checks"][-1]
    assert last["step"] == 12
    assert last["held_out_loss"] < math.log(4096) - 1
    assert first["tokens"] == 12 * 2 * 64
    tensors = load_file(run_dir / "model" / "model.safetensors")
    biases = {name: t for name, t in tensors.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 5
    assert all(bias.dtype == torch.float32 and bias.abs().max() > 0 for bias in biases.values())
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_learning_rate_warms_up_and_falls_to_its_floor():
    plan = loop.Plan(seconds=1, learning_rate=1.0, warm_up=10, floor=0.1)
    assert loop.rate_at(plan, 0, 0.0) == pytest.approx(0.1)
    assert loop.rate_at(plan, 99, 0.5) == pytest.approx(0.55)
    assert loop.rate_at(plan, 99, 1.0) == pytest.approx(0.1)


def test_every_row_comes_once_an_epoch():
    batches = list(itertools.islice(loop.row_order(10, 4, 0), 5))
    rows = np.concatenate(batches)
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))


def test_time_ends_training_with_a_checkpoint(tmp_path, frame, tokenizer):
    packs = corpus.pack(corpus.encode(tokenizer, frame.text[:8]), 64)
    plan = loop.Plan(seconds=0.0, rows=1, check_s=1e6)
    history = loop.run(loop.new_model("cpu"), packs, packs, plan, tmp_path, lambda _line: None)
    assert history[-1]["step"] < 50
    DeepseekV3ForCausalLM.from_pretrained(tmp_path / "model")


def test_the_wrapper_says_what_the_trained_model_says(run_dir, target):
    """Logits of the exported wrapper, of the text model taken out of it, and of the checkpoint are the same."""
    checkpoint = DeepseekV3ForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    wrapper, info = AutoModelForImageTextToText.from_pretrained(
        target.path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    text = DeepseekV3ForCausalLM.from_pretrained(targets.text_model(target).path, dtype=torch.float32)
    ids = torch.arange(30, 90)[None]
    with torch.no_grad():
        wanted = checkpoint(input_ids=ids).logits
        assert torch.equal(text(input_ids=ids).logits, wanted)
        assert torch.equal(wrapper(input_ids=ids).logits, wanted)


def test_tensors_have_the_names_of_kimis_checkpoint(target):
    with safe_open(target.path / "model.safetensors", framework="pt") as tensors:
        kinds = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    text = [name for name in kinds if name.startswith("language_model.model.layers.")]
    assert any(name.startswith("vision_tower.") for name in kinds)
    assert "language_model.model.layers.1.mlp.experts.47.down_proj.weight" in text
    assert "language_model.model.layers.0.mlp.gate_proj.weight" in text
    assert not [name for name in kinds if name.startswith("language_model") and "blocks" in name]
    assert {kind for name, kind in kinds.items() if "e_score_correction_bias" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "e_score_correction_bias" not in name} == {"BF16"}


def test_the_text_model_alone_is_what_engines_read(run_dir, target):
    alone = targets.text_model(target)
    config = files.read_json(alone.path / "config.json")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert not alone.geometry.wrapper
    made, trained = (load_file(path / "model.safetensors") for path in (alone.path, run_dir / "model"))
    # vLLM's DeepSeek class knows no tied head: it has to be there.
    assert torch.equal(made.pop("lm_head.weight"), made["model.embed_tokens.weight"])
    assert config["tie_word_embeddings"] is False
    assert made.keys() == trained.keys()
    assert all(torch.equal(made[name], trained[name]) and made[name].dtype == trained[name].dtype for name in made)
    assert targets.text_model(alone) is alone
    assert alone.tokenizer().chat_template == chat.TEMPLATE


def test_card_figures_by_hand(target):
    model, tokenizer = experts.load(target), target.tokenizer()
    text = chat.render(TALK)
    ids = corpus.encode(tokenizer, [text])[0]
    rows = card.perplexity(model, [experts.Document("plain", ids)], [text])
    with torch.no_grad():
        likely = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    nats = -sum(likely[i, ids[i + 1]].item() for i in range(len(ids) - 1))
    assert rows[-1]["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-4)
    size = len("Why do cats purr?They are glad.")
    assert rows[-1]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
    chosen = np.array([[[0, 1]], [[0, 2]], [[0, 3]], [[0, 1]]])
    found = card.load_table(experts.Routing(chosen, 8, np.zeros(4, int)))
    assert found.max_over_mean.item() == pytest.approx(4.0)  # expert 0: 4 of 8 choices, 1 of 8 would be even
    shares = [4 / 8, 2 / 8, 1 / 8, 1 / 8]
    assert found.entropy.item() == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(8), abs=1e-4)
    assert found.top_eighth.item() == pytest.approx(0.5)


def test_the_card_is_computed_from_the_target_alone(target, monkeypatch):
    monkeypatch.setattr(card, "QUESTIONS", card.QUESTIONS[:1])
    monkeypatch.setattr(card, "ANSWER", 8)
    made = card.make(target, lambda _line: None)
    assert made == json.loads((target.path / card.CARD).read_text(), object_hook=whole_keys)
    page = (target.path / card.PAGE).read_text()
    assert f"{made['weights']['text']:,}" in page
    assert all(question in page for question in card.QUESTIONS)
    assert made["overlap"]["uniform"] == round(4 / 48, 4)
    assert made["unique_experts"][0]["unique_mean"] == 4
    text = DeepseekV3ForCausalLM.from_pretrained(targets.text_model(target).path)
    assert made["weights"]["text"] == sum(p.numel() for p in text.model.parameters())


def whole_keys(found):
    """JSON turns layer numbers into text; back."""
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def test_what_is_too_large_for_the_repository_is_refused(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "LIMIT", 1_000_000)
    with pytest.raises(export.TooLarge, match="MB"):
        export.run(run_dir, tmp_path / "mini")
    assert not (tmp_path / "mini").exists()
