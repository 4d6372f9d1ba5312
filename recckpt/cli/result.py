"""What a command has to say, and how it is said: text for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

GOOD, PROBLEM, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Outcome:
    """The answer of a command, before a byte of it is printed.

    Attributes:
        data: for ``--json``; dicts, lists, numbers, strings, bools and None.
        lines: for people.
        problems: one line each, for stderr; any makes the exit code 1.
    """

    data: Any
    lines: Sequence[str]
    problems: Sequence[str] = field(default=())

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
    """What was asked for makes no sense; the exit code is 2."""


@contextmanager
def usage_checked() -> Iterator[None]:
    """Around the opening of a path: one that no storage knows is wrong usage."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _strict(value: Any) -> Any:
    """Replace what JSON has no number for by the strings of the JSON mapping of protocol buffers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
