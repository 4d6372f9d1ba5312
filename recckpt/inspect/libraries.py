"""Libraries that recckpt can do without, imported where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recckpt.errors import RecckptError


class MissingLibraryError(RecckptError, ImportError):
    """A library that recckpt can do without is not installed."""


def needed(name: str, extra: str) -> Any:
    """Return a library, or a module of it; MissingLibraryError names the extra that brings it."""
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise MissingLibraryError(
            f"this needs {library}, which is not installed: pip install 'recckpt[{extra}]'"
        ) from error
