"""Text for people: words, aligned columns, and progress bars (no torch here)."""

from recckpt.text.bars import Progress
from recckpt.text.columns import Heading, Line, Table, grid, pairs, plain, section
from recckpt.text.words import (
    cell,
    count,
    duration,
    escaped,
    first_few,
    instead_of,
    nearest,
    one_line,
    plural,
    quoted,
    shown,
    size,
    sparkline,
)

__all__ = [
    "Heading",
    "Line",
    "Progress",
    "Table",
    "cell",
    "count",
    "duration",
    "escaped",
    "first_few",
    "grid",
    "instead_of",
    "nearest",
    "one_line",
    "pairs",
    "plain",
    "plural",
    "quoted",
    "section",
    "shown",
    "size",
    "sparkline",
]
