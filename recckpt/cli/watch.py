"""``recckpt watch``: a run as it saves, look after look."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import sleep
from typing import TYPE_CHECKING, Protocol, TypeVar

from recckpt.cli import terminal
from recckpt.cli.ls import refuse_checkpoint
from recckpt.cli.result import CommandError, CommandResult, ShownResult, leave_stdout, usage_checked
from recckpt.cli.runs import listed, runs_in, shown_runs
from recckpt.format.moments import time_now
from recckpt.inspect.watch.look import Watcher
from recckpt.inspect.watch.runs import RunsStatus, RunsWatcher
from recckpt.inspect.watch.shown import Fact, facts, few, line
from recckpt.inspect.watch.status import Status
from recckpt.near.options import Near
from recckpt.storage import open_storage
from recckpt.text import escaped, one_line, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType

Show = Callable[[Status, str], object]  # what is known, and why the last look failed, "" where it has not

_Look = TypeVar("_Look")
_Look_co = TypeVar("_Look_co", covariant=True)


class _Looks(Protocol[_Look_co]):
    """Looks at a run, or at several."""

    def look(self) -> _Look_co:
        """Return what is known now; OSError where the storage failed."""


_STYLES = {"plain": "", "good": "green", "doubtful": "yellow", "bad": "bold red"}


def watch(args: argparse.Namespace) -> CommandResult:
    """Show what is known of a run until control-C, or once."""
    try:
        return _watch(args)
    except KeyboardInterrupt:
        return ShownResult()


def _watch(args: argparse.Namespace) -> CommandResult:
    with usage_checked():
        storage = open_storage(args.dir)
        near = None if args.near is None else Near(args.near)
    runs = runs_in(storage, args)
    if runs is not None:
        return _watch_runs(*runs, args)
    watcher = Watcher(storage, args.overdue, near)
    status = watcher.look()  # what is wrong with the place from the start does not mend itself
    if status.why_empty == "not a directory":
        raise CommandError(f"{status.url}: {status.why_empty}")
    if status.last is None:
        refuse_checkpoint(args.dir)
    if args.once:
        return CommandResult(
            status.to_dict(), pairs((name, text) for name, text, _ in facts(status)), _problems(status)
        )
    storage.give_up_after(args.interval)  # the next look tries again
    with _shown_by(args) as show:
        return _go_on(watcher, status, show, args.interval)


def _watch_runs(runs: RunsWatcher, status: RunsStatus, args: argparse.Namespace) -> CommandResult:
    if args.once:
        return listed(status, with_overdue=True)
    with shown_runs(args) as show:
        return _go_on(runs, status, show, args.interval)


def _go_on(watcher: _Looks[_Look], status: _Look, show: Callable[[_Look, str], object], interval: float) -> ShownResult:
    """Show look after look, until control-C or until nobody reads on."""
    trouble = ""
    with suppress(BrokenPipeError), _without_warnings():
        while True:
            show(status, trouble)
            sleep(interval)
            try:
                status, trouble = watcher.look(), ""
            except OSError as error:
                trouble = one_line(str(error))
    leave_stdout()
    return ShownResult()


def _problems(status: Status) -> list[str]:
    if status.last is None and not status.problems and not status.failed:
        return [f"{status.url}: {status.why_empty}"]
    failed = [f"{status.url}: the last save failed: {each.error}" for each in status.failed[-1:]]
    overdue = [f"{status.url}: {text}" for name, text, _ in facts(status) if name == "overdue"]
    return [*failed, *overdue, *(f"{status.url}: {problem}" for problem in few(status.problems))]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the log from writing into the table that the network fails; that is shown there."""
    log = logging.getLogger("recckpt")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _shown_by(args: argparse.Namespace) -> Iterator[Show]:
    """Give what shows a look: a table that changes on a terminal, lines elsewhere."""
    if args.json:
        yield _show_json
        return
    console = terminal.console_of(sys.stdout)
    if console is None:
        yield _LineByLine()
        return
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        yield lambda status, trouble: live.update(_table(status, trouble, args.interval), refresh=True)


def _show_json(status: Status, trouble: str) -> None:
    values = status.to_dict()
    if trouble:
        values = {"output_dir": status.url, "time": time_now(), "error": trouble}
    terminal.print_at_once(json.dumps(values, allow_nan=False))


class _LineByLine:
    """Prints a line when something has changed."""

    def __init__(self) -> None:
        self._before: object = None

    def __call__(self, status: Status, trouble: str) -> None:
        key = (status.key, trouble)
        if key != self._before:
            terminal.print_at_once(f"{time_now()} cannot look: {trouble}" if trouble else line(status))
        self._before = key


def _table(status: Status, trouble: str, interval: float) -> RenderableType:
    """Return what a terminal shows; nothing in it is markup."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = list(facts(status))
    if trouble:
        rows.append(Fact("cannot look", trouble, "bad"))
    for name, text, mood in rows:
        table.add_row(name, Text(text, style=_STYLES[mood]))
    subtitle = f"{status.time.strftime('%H:%M:%S')} UTC, every {interval:g} s, control-C ends"
    return Panel(table, title=Text(escaped(status.url)), title_align="left", subtitle=subtitle, subtitle_align="right")
