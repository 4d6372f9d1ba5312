"""The result of a command: text for people, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from recckpt.text import Line

GOOD, PROBLEM, USAGE = 0, 1, 2


@dataclass(frozen=True)
class CommandResult:
    data: Any  # for --json: dicts, lists, numbers, strings, bools and None
    lines: Sequence[Line]  # for people
    problems: Sequence[str] = field(default=())  # one line each, for stderr; if there are any, the exit code is 1

    @property
    def code(self) -> int:
        return PROBLEM if self.problems else GOOD

    def as_json(self) -> str:
        return "" if self.data is None else json.dumps(_strict(self.data), allow_nan=False) + "\n"


SHOWN = CommandResult(None, [])  # for commands that printed their output already


class CommandError(Exception):
    """A command failed; the message is one line for stderr."""

    def __init__(self, message: str, code: int = PROBLEM) -> None:
        super().__init__(message)
        self.code = code


class UsageError(Exception):
    """Wrong arguments; the command's usage is printed before the message, and the exit code is 2."""


@contextmanager
def usage_checked() -> Iterator[None]:
    """Turn a ValueError, such as for a path that no storage supports, into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def leave_stdout() -> None:
    """Redirect stdout to the null device after its reader has exited, so that the last flush cannot fail."""
    with suppress(OSError, ValueError):  # if it is not a file, nothing is flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _strict(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by strings, as protocol buffers do."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
