"""Imports from and exports to the formats of other programs (docs/convert.md)."""

from __future__ import annotations

from recckpt.convert.exporting import Exported, export_checkpoint
from recckpt.convert.formats import SOURCES, TARGETS
from recckpt.convert.importing import ImportPlan, import_checkpoint
from recckpt.convert.reader import SourceReader
from recckpt.convert.source import ImportOptions

__all__ = [
    "import_checkpoint",
    "export_checkpoint",
    "SourceReader",
    "ImportPlan",
    "Exported",
    "ImportOptions",
    "SOURCES",
    "TARGETS",
]
