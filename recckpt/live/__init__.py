"""Tables that are not recckpt's, saved and restored where they lie: ``live_tables`` finds them in a model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.live.tables import LiveTables, live_tables

__all__ = ["LiveTables", "live_tables"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"{__name__}.tables"), name)
