"""The root of every failure that the lab explains: what happened, with the value seen, and what to do."""


class LabError(Exception):
    """A failure with a remedy. Each module derives one class a kind of failure.

    `what` states the failure with the value seen and where; `remedy` says what to do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  what to do: {self.remedy}" if self.remedy else self.what
