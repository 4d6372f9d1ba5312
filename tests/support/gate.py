"""Holds work where it calls a method, until it is let through."""

from __future__ import annotations

import threading
from typing import Any

import pytest


class Gate:
    """Holds the calls of a method until it is opened; knows when somebody waits at it.

    Args:
        patch: puts it before the method.
        owner: class with the method.
        method: name of it.
        error: what the calls raise then instead.
    """

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str, error: Exception | None = None) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        real = getattr(owner, method)

        def held(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            if error is not None:
                raise error
            return real(*args, **kwargs)

        patch.setattr(owner, method, held)

    def wait(self) -> None:
        """Wait until somebody waits at it."""
        assert self.reached.wait(60)

    def open(self) -> None:
        """Let all through from now on."""
        self.opened.set()
