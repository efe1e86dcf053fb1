"""The head that is planned: its weights, from the target's geometry; what a token of its states takes on disk."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.targets import Geometry

STATES = 4  # low, middle and high layer that the head reads, and the last one's output that it learns from
INPUTS = 3
ID_BYTES = 8  # a token's id lies beside its states


@dataclass(frozen=True)
class Head:
    """Weights of an EAGLE-3 head: decoder layer, fusion `fc`, lm_head over the draft vocabulary, embedding.

    lm_head and embedding are the target's rows and stay frozen, as speculators has it.
    """

    layer: int
    fusion: int
    lm_head: int
    embedding: int

    @property
    def trainable(self) -> int:
        """Weights that an optimiser changes."""
        return self.layer + self.fusion

    @property
    def served(self) -> int:
        """Weights that a server reads: all but the embedding, which it shares with the target."""
        return self.trainable + self.lm_head

    def flops_per_token(self, ttt_steps: int) -> float:
        """Arithmetic of training on one token.

        Forward and backward of what is trained, 6 a weight and TTT step (fc once); of the frozen lm_head 4 (no
        gradient of its own), and once 2 for the target's logits over the draft vocabulary.
        """
        each = 6 * self.layer + 4 * self.lm_head
        return float(ttt_steps * each + 6 * self.fusion + 2 * self.lm_head)


def head_of(geometry: Geometry, draft_vocab_size: int) -> Head:
    """The head that labkit.draft would build over a target: one Llama layer of the target's own widths.

    Its attention reads embedding and state side by side (two widths); for a target with latent attention (MLA) it
    has full heads of the value width, as the published Kimi heads have. Norms are too small to count.
    """
    g, width = geometry, geometry.hidden_size
    dim = g.v_head_dim if g.is_mla else g.head_dim
    queries, keys = g.num_attention_heads * dim, g.num_key_value_heads * dim
    attention = 2 * width * (queries + 2 * keys) + queries * width
    return Head(
        layer=attention + 3 * width * inner_width(g),
        fusion=INPUTS * width * width,
        lm_head=min(draft_vocab_size, g.vocab_size) * width,
        embedding=g.vocab_size * width,
    )


def inner_width(g: Geometry) -> int:
    """The feed-forward width: the target's dense one; a target of experts alone has what one token uses."""
    return g.intermediate_size or g.num_experts_per_tok * g.moe_intermediate_size


def state_bytes(geometry: Geometry, item_bytes: int = 2) -> int:
    """Bytes of hidden states of one token, its id not counted: 57,344 for Kimi-K2.5 in bf16."""
    return STATES * geometry.hidden_size * item_bytes


def disk_bytes(geometry: Geometry, tokens: int, item_bytes: int = 2) -> int:
    """Bytes on disk of that many tokens' states and ids."""
    return tokens * (state_bytes(geometry, item_bytes) + ID_BYTES)
