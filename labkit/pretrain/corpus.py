"""The corpus: conversations and shipped text, cleaned, split by document, as packs of tokens."""

from __future__ import annotations

import bisect
import hashlib
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit import files
from labkit.errors import LabError
from labkit.pretrain import chat, shipped
from labkit.pretrain.prompts import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 100  # one document of so many
SHIPPED_SHARE = 0.12  # of the corpus's bytes, at most
REPETITIVE = 0.25  # text that zlib makes smaller than this goes round in circles
SHORTEST_REPEATED = 25  # characters of a sentence; shorter ones may well come twice
FOREIGN = 0.05  # share of characters beyond ASCII above which 4,096 tokens do not cover a text
SENTENCE_END = re.compile(r"[.!?\"'`)\]]\s")
FILE = "corpus.parquet"
GENERATED = "generated-*.parquet"


class BadCorpus(LabError):
    """There is no generated text, or too little is left of it."""


class EvaluationLeak(LabError):
    """A document of the corpus holds text of an evaluation prompt."""


def build(folder: Path, out_dir: Path) -> pd.DataFrame:
    """Clean the conversations in `folder` (generate.run) and write out_dir/corpus.parquet.

    Columns category, text (as the chat template renders it), split ("train" or "held-out"). A prompt, or a
    source of shipped text, is on one side of the split with all that comes of it. Raises BadCorpus.
    """
    parts = [files.read_parquet(path) for path in sorted(folder.glob(GENERATED))]
    if not parts:
        raise BadCorpus(f"{folder} holds no {GENERATED}", "run `python -m labkit.pretrain generate` first")
    chats = conversations(pd.concat(parts, ignore_index=True))
    own = shipped.documents()
    own = own.sample(frac=1.0, random_state=0)
    share = SHIPPED_SHARE / (1 - SHIPPED_SHARE) * chats.text.str.len().sum()
    own = own[own.text.str.len().cumsum() <= share]
    own["text"] = chat.BOS + own.text + chat.END
    frame = pd.concat([chats, own], ignore_index=True)
    frame = frame[~frame.text.map(Evaluation().leaks_into)].reset_index(drop=True)
    frame["split"] = ["held-out" if held_out(source) else "train" for source in frame.source]
    if frame.split.nunique() < 2:
        raise BadCorpus(f"{len(frame)} documents are left, too few to hold any out", "generate for longer")
    frame = frame[["category", "text", "split"]]
    with files.atomic(out_dir / FILE) as scratch:
        frame.to_parquet(scratch, index=False, compression="zstd", compression_level=12)  # it has to travel
    return frame


def conversations(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns category, source, text of the answers worth learning from; each text once."""
    found = []
    for kind, prompt, answer, finished in zip(rows.kind, rows.prompt, rows.answer, rows.finished, strict=True):
        kept = until_repeated(answer if finished else whole_sentences(answer))
        if not sound(prompt + kept) or not kept:
            continue
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": kept}]
        found.append((kind, prompt, chat.render(messages, ended=bool(finished) and kept == answer)))
    frame = pd.DataFrame(found, columns=["category", "source", "text"])
    return frame.drop_duplicates("text", ignore_index=True)


def whole_sentences(text: str) -> str:
    """The text up to its last finished sentence; nothing where there is none."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text[: ends[-1]].strip() if ends else ""


def until_repeated(text: str) -> str:
    """The text up to the first sentence of some length that it says a second time: from there on it circles."""
    seen, start = set(), 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(text)), len(text)]:
        sentence = text[start:end].strip().lower()
        if len(sentence) >= SHORTEST_REPEATED and sentence in seen:
            return text[:start].strip()
        seen.add(sentence)
        start = end
    return text


def sound(text: str) -> bool:
    """Whether a text is mostly ASCII, holds no special token and does not go round in circles."""
    raw = text.encode()
    if "<|" in text or len(text.encode("ascii", "ignore")) < (1 - FOREIGN) * len(text):
        return False
    return len(raw) < 400 or len(zlib.compress(raw)) > REPETITIVE * len(raw)


def held_out(source: str) -> bool:
    """Whether a source is held out: by a digest of its name, so the same in every run."""
    return int(hashlib.sha256(source.encode()).hexdigest()[:8], 16) % HELD_OUT == 0


def bare(texts: Iterable[str], between: str = "\n") -> list[str]:
    """The texts with `between` instead of their special tokens, for the tokenizer to learn from."""
    special = re.compile("|".join(map(re.escape, chat.SPECIAL)))
    return [special.sub(between, text) for text in texts]


def check_excluded(texts: Iterable[str]) -> None:
    """Raise EvaluationLeak for the first text that holds a part of an evaluation prompt."""
    evaluation = Evaluation()
    for text in texts:
        if evaluation.leaks_into(text):
            raise EvaluationLeak(
                f"a document holds text of data/prompts: {text[:120]!r}", "build the corpus again with `train`"
            )


@dataclass(frozen=True)
class Packs:
    """Documents side by side in rows of one length.

    tokens [P, S] uint16; segments [P, S] the number of the document within its row from 1, 0 for padding;
    positions [P, S] the place within the document. Neither attention nor loss crosses a document.
    """

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    @property
    def filled(self) -> float:
        """Share of the places that hold text."""
        return float((self.segments > 0).mean())


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered texts, whose special tokens are read as such."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def pack(documents: Iterable[Sequence[int]], length: int) -> Packs:
    """Put documents into rows of `length` tokens, each where it leaves least room; longer ones are cut up."""
    cut = [doc[i : i + length] for doc in documents for i in range(0, len(doc), length)]
    cut = sorted((piece for piece in cut if len(piece) > 1), key=len, reverse=True)
    rows, free, with_room = [], [], {}
    for piece in cut:
        at = bisect.bisect_left(free, len(piece))
        if at == len(free):
            rows.append([])
            row, room = len(rows) - 1, length
        else:
            room = free[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], free[at]
        rows[row].append(piece)
        room -= len(piece)
        if room not in with_room:
            bisect.insort(free, room)
        with_room.setdefault(room, []).append(row)
    shape = (len(rows), length)
    packs = Packs(np.zeros(shape, np.uint16), np.zeros(shape, np.int16), np.zeros(shape, np.int16))
    for row, pieces in enumerate(rows):
        at = 0
        for number, piece in enumerate(pieces, start=1):
            where = (row, slice(at, at + len(piece)))
            packs.tokens[where], packs.segments[where] = piece, number
            packs.positions[where] = np.arange(len(piece))
            at += len(piece)
    return packs
