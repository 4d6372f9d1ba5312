"""Aligned columns of text, and the meanings of table rows."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

_GAP = "  "
_INDENT = 2  # spaces before lines under a heading

Tone = Literal["damaged", "unsure", "good", "newest", "pinned", "past"]  # of a row; a terminal may show it in colour


class Heading(str):
    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """Rows of text under a head.

    Attributes:
        head: names of the columns.
        rows: one text per column.
        right: columns aligned on the right, such as numbers, which are never broken.
        tones: row index -> meaning of the row.
        indent: spaces before each line.
        whole: other columns that are never broken, such as times.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str] = ()
    tones: Mapping[int, Tone] = field(default_factory=dict)
    indent: int = 0
    whole: Collection[str] = ()

    def lines(self) -> list[str]:
        return [" " * self.indent + line for line in grid(self.head, self.rows, self.right)]


Line = str | Table


def plain(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        yield from line.lines() if isinstance(line, Table) else (line,)


def section(title: str, lines: Iterable[Line]) -> list[Line]:
    """Return an empty line, a heading and the lines; [] without lines."""
    listed = [replace(line, indent=_INDENT) if isinstance(line, Table) else " " * _INDENT + line for line in lines]
    return ["", Heading(title), *listed] if listed else []


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return lines with aligned columns; ``right`` names the columns aligned on the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(width_of(line[column]) for line in lines) for column in range(len(head))]

    def cell(text: str, name: str, width: int) -> str:
        padding = " " * (width - width_of(text))
        return padding + text if name in right else text + padding

    return [_GAP.join(map(cell, line, head, widths)).rstrip() for line in lines]


def pairs(values: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(values)
    width = max((width_of(name) for name, _ in listed), default=0)
    return [f"{name}{' ' * (width - width_of(name))}{_GAP}{value}".rstrip() for name, value in listed]


def width_of(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)
