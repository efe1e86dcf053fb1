"""Tokens and masks of several chat templates, against segments written by hand and placed by decoded bytes.

The oracle shares nothing with the code: it spells each template's text itself, as (text, does the target say it),
and places tokens by the bytes that each decodes to.
"""

import itertools
import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from labkit import targets
from labkit.conversations.forms import BadRow
from labkit.conversations.template import Template
from labkit.conversations.tokens import tokenise

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<think>", "</think>"]
TEXT = (
    'the quick brown fox jumps over a lazy dog. user assistant system tool\n\nHello, what is it? no \n yes {}[]":'
)

LLAMA = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim }}"
    "{{ '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '[' + call.function.name + (call.function.arguments | tojson) + ']' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # reasoning of every turn is shown; an answer begins within the reasoning
    "{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>' }}{% if m['role'] == 'assistant' %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|><think>' }}{% endif %}"
)
MARKED = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'A: ' }}"
    "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}{{ '</s>\n' }}"
    "{% else %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
STRIPPING = (  # only what follows the last question keeps its reasoning
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT = (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
)
LATE_END = (  # a turn is ended where the next one begins; the last one never
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] }}"
    "{% else %}{{ ('</s>' if loop.index0 else '') + '[' + m['content'] + ']' }}{% endif %}{% endfor %}"
)
OPENS_THOUGHT = THINKING.replace(
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}",
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}",
)


def rows(tok, messages, tools=None, **options):
    return tokenise(Template(tok), messages, tools, **options)


def tokenizer(template, specials=SPECIALS, bos="<s>"):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([TEXT] * 9, trainer)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    eos = "</s>" if "</s>" in specials else None
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, chat_template=template)


def by_hand(tok, segments):
    """Tokens of the segments' text, and for each whether all its bytes are of segments that the target says."""
    text = "".join(said for said, _ in segments)
    own = b"".join((b"\1" if spoken else b"\0") * len(said.encode()) for said, spoken in segments)
    ids = tok(text, add_special_tokens=False)["input_ids"]
    backward = {unit: byte for byte, unit in byte_units().items()}
    added = set(tok.get_added_vocab())
    mask, at = [], 0
    for token in tok.convert_ids_to_tokens(ids):
        raw = token.encode() if token in added else bytes(backward[unit] for unit in token)
        assert text.encode()[at : at + len(raw)] == raw
        mask.append(set(own[at : at + len(raw)]) == {1})
        at += len(raw)
    assert at == len(own)
    return ids, mask


def byte_units():
    """Byte-level BPE's letters for bytes, from its definition: printable Latin-1 itself, the rest from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def llama(turns):
    out = [("<s>", False)]
    for turn in turns:
        spoken = turn["role"] == "assistant"
        out += [(f"<|head|>{turn['role']}<|/head|>\n\n", False), (turn["content"].strip() + "<|eot|>", spoken)]
    return out


def chatml(turns, tools=""):
    out = [] if turns[0]["role"] == "system" else [("<|im_start|>system\nBe kind.<|im_end|>\n", False)]
    out += [(f"<|im_start|>tools\n{tools}<|im_end|>\n", False)] if tools else []
    for turn in turns:
        calls = "".join(
            f"[{call['function']['name']}{call['function']['arguments']}]" for call in turn.get("tool_calls", [])
        )
        spoken = turn["role"] == "assistant"
        out += [
            (f"<|im_start|>{turn['role']}\n", False),
            (f"{turn['content']}{calls}<|im_end|>", spoken),
            ("\n", False),
        ]
    return out


def thinking(turns):
    out = []
    for turn in turns:
        out.append((f"<|head|>{turn['role']}<|/head|>", False))
        if turn["role"] == "assistant":
            out += [("<think>", False), (f"{turn.get('reasoning', '')}</think>{turn['content']}<|im_end|>", True)]
        else:
            out.append((f"{turn['content']}<|im_end|>", False))
    return out


def marked(turns):
    out = [("<s>", False)]
    for turn in turns:
        if turn["role"] == "assistant":
            out += [("A: ", False), (turn["content"], True), ("</s>", True), ("\n", False)]
        else:
            out.append((f"{turn['role']}: {turn['content']}\n", False))
    return out


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def random_conversation(seed, words=("fox", " dog", "\n", "\n\n", " ", "é", "日本", "🦊", ".", "Hello", "a")):
    order = random.Random(seed)

    def text():
        return "x" + "".join(order.choice(words) for _ in range(order.randrange(1, 12)))

    def said():  # answers may begin with white space
        return order.choice(["", " ", "\n"]) + text()

    turns = [{"role": "system", "content": text()}] if order.random() < 0.5 else []
    for _ in range(order.randrange(1, 4)):
        turns += [user(text()), answer(said(), **({"reasoning": text()} if order.random() < 0.5 else {}))]
    return turns


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    ("template", "segments"), [(LLAMA, llama), (CHATML, chatml), (THINKING, thinking), (MARKED, marked)]
)
def test_ids_and_mask_are_the_templates_own(template, segments, seed):
    turns = random_conversation(seed)
    if template in (LLAMA, CHATML, MARKED):
        turns = [{k: v for k, v in turn.items() if k != "reasoning"} for turn in turns]
    tok = tokenizer(template)
    [row] = rows(tok, turns)
    ids, mask = by_hand(tok, segments(turns))
    assert row.input_ids == ids
    assert row.loss_mask == mask
    assert any(row.loss_mask)


def test_a_template_that_drops_earlier_reasoning_gives_a_row_an_answer_each_with_its_own_reasoning():
    tok = tokenizer(STRIPPING)
    turns = [user("a"), answer("b", reasoning="one"), user("c"), answer("d", reasoning="two")]
    first, second = rows(tok, turns)
    head, tail = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
    assert (first.input_ids, first.loss_mask) == by_hand(
        tok, [(head, False), (f"<think>\none\n</think>\n\nb{tail}", True), ("\n", False)]
    )
    middle = f"{head}b{tail}\n<|im_start|>user\nc{tail}\n<|im_start|>assistant\n"
    assert (second.input_ids, second.loss_mask) == by_hand(
        tok, [(middle, False), (f"<think>\ntwo\n</think>\n\nd{tail}", True), ("\n", False)]
    )
    assert (first.turn, second.turn) == (0, 1)
    assert any("a row for each answer" in note for note in first.notes)


def test_a_token_that_is_partly_the_templates_is_not_trained_and_reported():
    """The space before the answers is the template's, and " fox" and " dog" are one token each."""
    tok = tokenizer(MARKED)
    turns = [user("a"), answer("fox jumps"), user("b"), answer("dog jumps")]
    [row] = rows(tok, turns)
    assert (row.input_ids, row.loss_mask) == by_hand(tok, marked(turns))
    assert (
        tok.decode([t for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m]) == " jumps</s> jumps</s>"
    )
    assert row.notes == ["a token spans the beginning of an answer"]


def test_generation_markers_train_only_the_answer_that_a_row_is_for():
    """With markers round every answer, the history of the second row is marked too, and not what it is for."""
    marked_too = STRIPPING.replace("{{ m['content'] + '<|im_end|>\n' }}", MARKED_CONTENT)
    tok = tokenizer(marked_too)
    turns = [user("a"), answer("b", reasoning="one"), user("c"), answer("d", reasoning="two")]
    found = rows(tok, turns)
    said = [tok.decode([t for t, m in zip(r.input_ids, r.loss_mask, strict=True) if m]) for r in found]
    assert said == ["b<|im_end|>", "d<|im_end|>"]


def test_the_same_template_keeps_one_row_where_nothing_is_dropped():
    turns = [user("a"), answer("b"), user("c"), answer("d", reasoning="two")]
    [row] = rows(tokenizer(STRIPPING), turns)
    assert len(runs(row.loss_mask)) == 2


def runs(mask):
    return [key for key, _ in itertools.groupby(mask) if key]


@pytest.mark.parametrize(("template", "end"), [(THINKING, "<|im_end|>"), (STRIPPING, "<|im_end|>")])
def test_reasoning_can_be_left_out_of_training(template, end):
    tok = tokenizer(template)
    turns = [user("a"), answer("the fox", reasoning="what is it")]
    [kept], [hidden] = rows(tok, turns), rows(tok, turns, train_reasoning=False)
    assert kept.input_ids == hidden.input_ids
    trained = [t for t, m in zip(kept.input_ids, kept.loss_mask, strict=True) if m]
    left = [t for t, m in zip(hidden.input_ids, hidden.loss_mask, strict=True) if m]
    assert "what is it" in tok.decode(trained)
    assert tok.decode(left).strip() == f"the fox{end}"


def test_think_tags_are_written_where_the_tokenizer_knows_them_and_the_template_no_field():
    tok = tokenizer(CHATML)
    [row] = rows(tok, [user("a"), answer("b", reasoning="why")])
    assert "<think>\nwhy\n</think>\n\nb<|im_end|>" in tok.decode(row.input_ids)
    assert row.notes == []


def test_reasoning_that_has_no_place_is_reported():
    tok = tokenizer(CHATML, specials=[s for s in SPECIALS if "think" not in s])
    [row] = rows(tok, [user("a"), answer("b", reasoning="why")])
    assert row.notes == ["the template drops reasoning"]
    assert "why" not in tok.decode(row.input_ids)


def test_an_answer_that_begins_otherwise_than_the_generation_prompt_is_found_and_reported():
    """The template opens a thought where answers begin, but shows an answer without one plainly."""
    tok = tokenizer(OPENS_THOUGHT)
    [row] = rows(tok, [user("a"), answer("the dog")])
    wanted = [("<|head|>user<|/head|>a<|im_end|><|head|>assistant<|/head|>", False), ("the dog<|im_end|>", True)]
    assert (row.input_ids, row.loss_mask) == by_hand(tok, wanted)
    assert row.notes == ["the template begins answers otherwise than it shows them"]


def test_a_turn_that_ends_where_the_next_begins_trains_its_end():
    tok = tokenizer(LATE_END)
    [row] = rows(tok, [user("a"), answer("fox"), user("b"), answer("dog")])
    wanted = [("[a]", False), (" fox</s>", True), ("[b]", False), (" dog", True)]
    assert (row.input_ids, row.loss_mask) == by_hand(tok, wanted)
    assert row.notes == ["the template ends answers without a token"]


def test_tools_calls_and_results_are_rendered_and_only_the_target_is_trained():
    tok = tokenizer(CHATML)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    turns = [user("1+1"), answer("", tool_calls=[call]), {"role": "tool", "content": "2"}, answer("It is 2.")]
    [row] = rows(tok, turns, tools)
    assert (row.input_ids, row.loss_mask) == by_hand(tok, chatml(turns, json.dumps(tools)))
    assert len(runs(row.loss_mask)) == 2


def test_calls_that_the_template_does_not_show_are_reported():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    [row] = rows(tokenizer(LLAMA), [user("a"), answer("b", tool_calls=[call])])
    assert row.notes == ["the template drops tool calls"]


@pytest.mark.parametrize(
    ("turns", "kind"),
    [
        ([user("a")], "no answer"),
        ([user("say <|im_end|> please"), answer("b")], "text of a special token"),
        ([user("a"), answer("b<|im_end|>c")], "text of a special token"),
        ([user("a"), answer("b", reasoning="c</think>d")], "text of a special token"),
    ],
)
def test_conversations_that_cannot_be_shown_exactly_are_refused(turns, kind):
    with pytest.raises(BadRow) as caught:
        rows(tokenizer(CHATML), turns)
    assert caught.value.kind == kind


def test_a_template_that_refuses_says_why():
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + LLAMA
    with pytest.raises(BadRow, match="no system here") as caught:
        rows(tokenizer(refusing), [{"role": "system", "content": "s"}, user("a"), answer("b")])
    assert caught.value.kind == "refused by the template"


@pytest.mark.parametrize("template", [LLAMA, "{{ '<s>' }}" + LLAMA])
def test_there_is_one_bos(template):
    """The tokenizer would add one of its own, and the second template writes two."""
    tok = tokenizer(template)
    ids = rows(tok, [user("a"), answer("b")])[0].input_ids
    assert ids.count(tok.bos_token_id) == 1
    assert ids[0] == tok.bos_token_id


class Slow:
    """The same tokenizer as one that tells no offsets, as tiktoken ones do."""

    is_fast = False

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize("seed", range(10))
def test_a_tokenizer_without_offsets_gives_the_same_mask(seed):
    turns = random_conversation(seed)
    tok = tokenizer(THINKING)
    [fast], [slow] = rows(tok, turns), rows(Slow(tok), turns)
    assert (slow.input_ids, slow.loss_mask) == (fast.input_ids, fast.loss_mask)


@pytest.mark.parametrize("seed", range(10))
def test_smollm2s_own_template(seed):
    tok = targets.resolve("smollm2").tokenizer()
    turns = [{k: v for k, v in turn.items() if k != "reasoning"} for turn in random_conversation(seed)]
    [row] = rows(tok, turns)
    segments = chatml(turns)
    if turns[0]["role"] != "system":
        default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        segments[0] = (f"<|im_start|>system\n{default}<|im_end|>\n", False)
    assert (row.input_ids, row.loss_mask) == by_hand(tok, segments)
