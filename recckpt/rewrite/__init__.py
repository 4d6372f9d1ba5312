"""Rewrites an output dir: compacts it, removes forgotten ids, or mirrors it to another place."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.rewrite.compaction import compact
    from recckpt.rewrite.forgetting import forget
    from recckpt.rewrite.mirroring import Mirror, mirror

_HOMES = {"compact": "compaction", "forget": "forgetting", "mirror": "mirroring", "Mirror": "mirroring"}

__all__ = ["compact", "forget", "mirror", "Mirror"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
