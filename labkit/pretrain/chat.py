"""mini-kimi's chat form and its tokenizer: 4,096 byte-level BPE tokens of its own corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Their ids are their places here; data/models/mini-kimi.json names the same ids.
PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
VISION = ("<|image|>", "<|video|>", "<|vision_start|>", "<|vision_end|>")
SPECIAL = (PAD, BOS, END, *ROLES.values(), *VISION)

# The same text as `render` makes; the generation block marks what the assistant says, its end token included.
TEMPLATE = (
    "{{ '" + BOS + "' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '" + END + "' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '" + END + "' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(messages: Sequence[dict[str, str]], *, ended: bool = True) -> str:
    """A conversation as the chat template writes it; without the last end token where it was cut off."""
    text = BOS + "".join(ROLES[message["role"]] + message["content"] + END for message in messages)
    return text if ended else text.removesuffix(END)


def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on bare texts (no special tokens in them) and save it into `folder`.

    Byte-level, so that any text survives; digits one by one, so that numbers need no entries of their own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[*ROLES.values(), *VISION],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    with files.atomic(folder) as scratch:
        tokenizer.save_pretrained(scratch)
    return tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `train_tokenizer` saved."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
