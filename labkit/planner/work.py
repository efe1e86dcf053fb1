"""What is wanted: conversations, lengths, how they are trained on."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.errors import LabError


class BadPlan(LabError):
    """The amounts of a plan contradict each other or are no amounts."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Amounts of a training: conversations of prompt and answer tokens, epochs over them, the head's settings.

    streams: requests side by side in each server. item_bytes: 2 for bf16 states, 1 for FP8. stored: whether states
    lie on disk, or are made anew in every epoch by a server that runs beside the training.
    """

    conversations: int = 100_000
    prompt_tokens: int = 200
    answer_tokens: int = 1848
    epochs: int = 1
    ttt_steps: int = 3
    draft_vocab_size: int = 32_000
    batch_tokens: int = 8192  # of one GPU's step
    streams: int = 128
    item_bytes: int = 2
    stored: bool = True

    def __post_init__(self) -> None:
        """Raise BadPlan for an amount below one."""
        amounts = ("conversations", "prompt_tokens", "answer_tokens", "epochs", "ttt_steps", "streams")
        for name in (*amounts, "draft_vocab_size", "batch_tokens"):
            if getattr(self, name) < 1:
                raise BadPlan(f"{name}={getattr(self, name)} is no amount", f"give {name} as 1 or more")
        if self.item_bytes not in (1, 2):
            raise BadPlan(f"states of {self.item_bytes} bytes a number", "use 2 (bf16) or 1 (FP8)")

    @property
    def length(self) -> int:
        """Tokens of a conversation."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all conversations."""
        return self.conversations * self.length

    @property
    def trained_tokens(self) -> int:
        """Tokens trained on over all epochs."""
        return self.tokens * self.epochs


def conversations_for(tokens: int, length: int) -> int:
    """How many conversations of that length make `tokens`; raises BadPlan."""
    if length < 1 or tokens < length:
        raise BadPlan(f"{tokens:,} tokens in conversations of {length:,}", "ask for at least one conversation")
    return -(-tokens // length)
