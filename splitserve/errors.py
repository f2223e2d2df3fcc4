"""What goes wrong for the user's sake: one message, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: names the field, the value, what is allowed and what to do."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{field}={value!r} is not usable; allowed: {allowed}; {remedy}")
        self.field, self.value, self.allowed, self.remedy = field, value, allowed, remedy


class WorkerError(RuntimeError):
    """A worker cannot go on, for a reason that the user is to read as it is."""


class RunFailed(RuntimeError):  # noqa: N818 - a finished sentence about the run
    """A run that had to end; the message says why, where the log is and how to go on."""


def suggest(name: str, choices: Iterable[str]) -> str:
    """`did you mean X?` for the nearest choice, or the list of all of them."""
    known = sorted(choices)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(known)}"
