"""One thing that would go wrong: what, where, what to do."""

from __future__ import annotations

CONFIG, TENSORS = "config.json", "model.safetensors"
ANEW = "export the head anew from its training"


class Problem(str):
    """A finding of the pre-flight as a sentence, with its parts.

    `check` is its kind in one or two words, `where` the file and field, `what` the value seen and its effect,
    `remedy` what to do. `fatal` is False where only the head's maker can say whether it harms.
    """

    __slots__ = ("check", "fatal", "remedy", "what", "where")

    def __new__(cls, check: str, where: str, what: str, remedy: str, *, fatal: bool = True) -> Problem:
        """The sentence."""
        self = super().__new__(cls, f"{where}: {what}; {remedy}")
        self.check, self.where, self.what, self.remedy, self.fatal = check, where, what, remedy, fatal
        return self
