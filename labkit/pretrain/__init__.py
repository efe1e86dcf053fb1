"""How mini-kimi is trained: text, tokenizer, training with balanced experts, export, and its card.

`python -m labkit.pretrain` has the commands; data/targets/mini-kimi is what came of them.
"""

from __future__ import annotations

from labkit.pretrain.corpus import BadCorpus, EvaluationLeak

__all__ = ["BadCorpus", "EvaluationLeak"]
