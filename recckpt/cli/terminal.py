"""Output for people: coloured tables on a terminal if `rich` (extra `cli`) is installed, otherwise plain text.

Red is damaged, yellow uncertain, bold newest or pinned, faint superseded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from recckpt.text import Heading, Line, Table, one_line, plain
from recckpt.text.bars import aside, is_terminal
from recckpt.text.columns import width_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_STYLES = {"damaged": "red", "unsure": "yellow", "good": "green", "newest": "bold", "pinned": "bold", "past": "dim"}
_MOST_ROWS = 2_000  # most rows of a coloured table, whose layout takes time
_LEAST_WIDTH = 8  # least width of a column of names; narrower terminals get long lines
_LEAST_LAST_WIDTH = 24  # least width of the last column, which has sentences
_GAP = 2


def print_lines(lines: Sequence[Line]) -> None:
    console = console_of(sys.stdout)
    if console is None:
        print_text("".join(f"{line.rstrip()}\n" for line in plain(lines)))
        return
    for line in lines:
        widths = _widths(line, console.width) if isinstance(line, Table) and len(line.rows) <= _MOST_ROWS else None
        if not isinstance(line, Table):
            _print(console, [(line.rstrip(), "bold" if isinstance(line, Heading) else "")])
        elif widths is not None:
            console.print(_grid(line, widths))
        else:
            for number, text in enumerate(line.lines(), -1):
                _print(console, [(text, "bold" if number < 0 else _STYLES.get(line.tones.get(number, ""), ""))])


def print_text(text: str) -> None:
    _take_all(sys.stdout)
    sys.stdout.write(text)


def print_at_once(line: str) -> None:
    print_text(f"{line}\n")
    sys.stdout.flush()


def complain(message: str, style: str = "bold red") -> None:
    """Write a message to stderr as one line; do nothing if stderr is closed."""
    line = one_line(message)
    try:
        console = console_of(sys.stderr)
        if console is None:
            print(f"recckpt: {line}", file=sys.stderr, flush=True)
        else:
            _print(console, [("recckpt: ", style), (line, "")])
    except (OSError, ValueError):
        return


class LogLines(logging.Handler):
    """Writes log records as messages that do not garble the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with aside():
            complain(record.getMessage(), "bold red" if record.levelno >= logging.ERROR else "bold yellow")


def console_of(stream: Any) -> Console | None:
    """Return a console that writes in colour; None if colour is disabled or not possible."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb" or not is_terminal(stream):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    _take_all(stream)
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _take_all(stream: Any) -> None:
    """Make a stream write characters that its encoding lacks as escapes."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")


def _print(console: Console, pieces: Iterable[tuple[str, str]]) -> None:
    from rich.text import Text

    console.print(Text.assemble(*pieces), soft_wrap=True)


def drawn(console: Console, *lines: Line) -> RenderableType:
    """Return lines as one renderable, without markup."""
    from rich.console import Group
    from rich.text import Text

    pieces: list[RenderableType] = []
    for each in lines:
        if isinstance(each, Table) and (widths := _widths(each, console.width)) is not None:
            pieces.append(_grid(each, widths))
        else:
            pieces.append(Text("\n".join(plain([each]))))
    return Group(*pieces)


def _grid(table: Table, widths: Sequence[int]) -> RenderableType:
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name, width in zip(table.head, widths, strict=True):
        justify: Any = "right" if name in table.right else "left"
        grid.add_column(Text(name), justify=justify, overflow="fold", width=width)
    for number, row in enumerate(table.rows):
        grid.add_row(*map(Text, row), style=_STYLES.get(table.tones.get(number, ""), ""))
    return Padding(grid, (0, 0, 0, table.indent))


def _widths(table: Table, room: int) -> list[int] | None:
    """Return the width of each column, None if there is no room; numbers and times are never broken.

    rich alone would cut a column that must be narrower than its minimum.
    """
    widths = [max(map(width_of, column)) for column in zip(table.head, *table.rows, strict=True)]
    least = [_LEAST_WIDTH] * (len(widths) - 1) + [_LEAST_LAST_WIDTH]
    columns = zip(table.head, widths, least, strict=True)
    unbroken = {*table.right, *table.whole}
    spare = [0 if name in unbroken else width - low for name, width, low in columns]
    missing = table.indent + sum(widths) + _GAP * (len(widths) - 1) - room
    for _ in range(missing):  # narrow the widest column that has spare width
        widest = max(range(len(widths)), key=lambda at: (spare[at] > 0, widths[at]))
        if spare[widest] <= 0:
            return None
        widths[widest] -= 1
        spare[widest] -= 1
    return widths
