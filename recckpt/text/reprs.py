"""What a prompt and a debugger show of an object, at whatever moment they look at it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_MOST = 60  # characters of a name


def shown(describe: Callable[[_T], str]) -> Callable[[_T], str]:
    """Make a ``__repr__`` of what describes an object in a few words.

    It never raises: debuggers show objects whose ``__init__`` has not ended, and those that it left half made.
    """

    @functools.wraps(describe)
    def shown_as(of: _T) -> str:
        name = type(of).__name__
        try:
            return f"<{name} {describe(of)}>"
        except Exception as error:
            return f"<{name}, half made ({type(error).__name__})>"

    return shown_as


def quoted(name: str) -> str:
    """Return a name as Python writes it, cut where it is long."""
    return repr(name if len(name) <= _MOST else f"{name[:_MOST]}...")
