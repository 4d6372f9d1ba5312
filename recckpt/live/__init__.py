"""Tables of other libraries, saved and restored in their own memory: ``live_tables`` finds them in a model.

The function ``live_tables`` is in ``manager/attach.py``, because it imports the adapters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.live.tables import LiveTables
    from recckpt.manager.attach import live_tables

_HOMES = {"LiveTables": "live.tables", "live_tables": "manager.attach"}

__all__ = ["LiveTables", "live_tables"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"recckpt.{_HOMES[name]}"), name)
