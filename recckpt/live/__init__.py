"""Tables that are not recckpt's, saved and restored where they lie: ``live_tables`` finds them in a model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.live.library_types import LibraryExport, LibraryTable
    from recckpt.live.tables import LiveTables, live_tables

__all__ = ["LibraryExport", "LibraryTable", "LiveTables", "live_tables"]
_TYPES = ("LibraryExport", "LibraryTable")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'library_types' if name in _TYPES else 'tables'}"), name)
