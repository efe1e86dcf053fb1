"""What the evaluation takes from earlier steps: held-out conversations, extracted states, a head that fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from labkit import conversations, draft, files, targets, train
from labkit.acceptance import Acceptance
from labkit.settings import Evaluation

HELD_OUT = "held-out"


@dataclass(frozen=True)
class Pipeline:
    """The folder of notebook 04 in the same run, where the held-out conversations are; it may be missing."""

    folder: Path

    @property
    def there(self) -> bool:
        """Whether notebook 04 left a data set."""
        return (self.folder / "data" / "dataset.parquet").exists()

    def held_out(self, count: int) -> pd.DataFrame:
        """Prompts that training never saw, of the training kind: prompt_id, category, messages; may be empty."""
        if not self.there:
            return pd.DataFrame(columns=["prompt_id", "category", "messages"])
        rows = conversations.load(self.folder / "data")
        chosen = rows[rows.split == "held_out"].head(count)
        messages = [[dict(message) for message in messages] for messages in chosen.messages]
        return pd.DataFrame(
            {"prompt_id": chosen.prompt_id, "category": HELD_OUT, "messages": messages}
        ).reset_index(drop=True)

    def simulated(self, head: Path, target: targets.Target, settings: Evaluation) -> Acceptance | None:
        """Acceptance on the same held-out prompts and as many tokens, from the extracted states alone.

        None where notebook 04 left no states, or extracted other layers than the head reads.
        """
        states = self.folder / "hidden_states"
        record = states / "extraction.json"
        if not self.there or not record.exists():
            return None
        if files.read_json(record)["layers"][:-1] != draft.read(head).layer_ids:
            return None
        samples = train.load_samples(self.folder / "data", states, "held_out")[: settings.held_out]
        short = [sample.cut(sample.prompt_tokens + settings.max_tokens) for sample in samples]
        return train.simulate(draft.load(head, target), short, settings.num_speculative_tokens)


def require_fit(head: Path, target: targets.Target) -> pd.DataFrame:
    """The head's pre-flight as a frame of one line; raises BadHead with all problems when it would not serve."""
    problems = draft.preflight(head, target)
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        raise draft.BadHead(f"{head} does not fit {target.name}: {'; '.join(fatal)}", "export the head anew")
    config = draft.read(head).config
    names = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_output")
    return pd.DataFrame(
        [{"head": head.name, "problems": len(problems)} | {name: str(config.get(name)) for name in names}]
    )
