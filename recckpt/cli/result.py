"""The result of a command: text for people, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

GOOD, PROBLEM, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """The result of a command, before any of it is printed."""

    data: Any  # for --json: dicts, lists, numbers, strings, bools and None
    lines: Sequence[str]  # for people
    problems: Sequence[str] = field(default=())  # a line each, for stderr; any makes the exit code 1

    @property
    def code(self) -> int:
        """The exit code."""
        return PROBLEM if self.problems else GOOD

    def text(self, *, as_json: bool) -> str:
        """Return what goes to stdout."""
        if as_json:
            return json.dumps(_strict(self.data), allow_nan=False) + "\n"
        return "".join(f"{line.rstrip()}\n" for line in self.lines)


class CommandError(Exception):
    """A command cannot be carried out; the message is one line for stderr, and the exit code is 1."""


class UsageError(Exception):
    """Wrong arguments; the exit code is 2."""


@contextmanager
def usage_checked() -> Iterator[None]:
    """Turn the ValueError for a path that no storage takes into wrong usage."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def leave_stdout() -> None:
    """Let go of stdout, whose reader is gone: the interpreter flushes once more when it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _strict(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by strings as protocol buffers do."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
