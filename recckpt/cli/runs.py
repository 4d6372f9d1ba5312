"""``recckpt ls`` and ``recckpt watch`` of a directory of runs: a line for each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recckpt.cli import terminal
from recckpt.cli.result import USAGE, CommandError, CommandResult
from recckpt.format.moments import time_now
from recckpt.inspect.watch.runs import RunsStatus, RunStatus, RunsWatcher, is_output_dir
from recckpt.inspect.watch.shown import Mood, line
from recckpt.storage import Storage
from recckpt.text import Table, count, duration, escaped, size
from recckpt.text.columns import Tone

ShowRuns = Callable[[RunsStatus, str], object]

_HEAD = ("RUN", "STEP", "AGE", "OVERDUE BY", "KEPT", "SIZE", "HEALTH")
_NUMBERS = ("STEP", "AGE", "OVERDUE BY", "KEPT", "SIZE")
_TONES: dict[Mood, Tone] = {"bad": "damaged", "doubtful": "unsure", "good": "good"}


def runs_in(storage: Storage, args: argparse.Namespace) -> tuple[RunsWatcher, RunsStatus] | None:
    """Return what looks at the runs in a directory, and its first look.

    None where the directory is an output dir itself, or has no run.

    Raises:
        CommandError: it has runs, and near saves were asked for, which are those of one.
    """
    if storage.why_empty() or is_output_dir(storage):
        return None
    watcher = RunsWatcher(storage, getattr(args, "overdue", None), getattr(args, "interval", None))
    status = watcher.look()
    if status.runs and args.near is not None:
        what = "a directory of runs, and --near goes with the output dir of one"
        raise CommandError(f"{storage.url} is {what}, such as {storage.url_of(status.runs[0].name)}", USAGE)
    return (watcher, status) if status.runs else None


def listed(status: RunsStatus, *, with_overdue: bool) -> CommandResult:
    """Return a line for each run; a problem for each that is not good, of those that are overdue where asked for."""
    moods = {"bad", "doubtful"} if with_overdue else {"bad"}
    wrong = [run for run in status.runs if run.health[1] in moods]
    problems = [f"{status.url}/{escaped(run.name)}: {run.health[0]}" for run in wrong]
    return CommandResult(status.to_dict(), [table_of(status)], problems)


def table_of(status: RunsStatus) -> Table:
    """Return the runs as a table."""
    tones = {number: _TONES[run.health[1]] for number, run in enumerate(status.runs) if run.health[1] in _TONES}
    return Table(_HEAD, [_row(run) for run in status.runs], _NUMBERS, tones)


def _row(run: RunStatus) -> tuple[str, ...]:
    status, health = run.status, run.health[0]
    if status is None:
        return escaped(run.name), *"-----", health
    last = status.last
    step = "-" if last is None or last.step is None else str(last.step)
    age = "-" if last is None or last.age_sec is None else duration(last.age_sec)
    kept = count(status.n_checkpoints), size(status.n_bytes)
    return escaped(run.name), step, age, run.overdue_by, *kept, health


@contextmanager
def shown_runs(args: argparse.Namespace) -> Iterator[ShowRuns]:
    """Give what shows a look: a table that changes on a terminal, lines elsewhere."""
    console = terminal.console_of(sys.stdout)
    if args.json:
        yield _show_json
    elif console is None:
        yield _LinesOfRuns()
    else:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda status, trouble: live.update(terminal.drawn(console, *_lines(status, trouble)), refresh=True)


def _lines(status: RunsStatus, trouble: str) -> tuple[Table | str, ...]:
    at = f"{escaped(status.url)}, {status.time.strftime('%H:%M:%S')} UTC, control-C ends"
    return (table_of(status), at, *([f"cannot look: {trouble}"] if trouble else []))


def _show_json(status: RunsStatus, trouble: str) -> None:
    values = status.to_dict()
    if trouble:
        values = {"runs_dir": status.url, "time": time_now(), "error": trouble}
    terminal.print_at_once(json.dumps(values, allow_nan=False))


class _LinesOfRuns:
    """Prints a line of each run of which something has changed."""

    def __init__(self) -> None:
        self._before: dict[str, object] = {}

    def __call__(self, status: RunsStatus, trouble: str) -> None:
        keys: dict[str, object] = {run.name: (run.trouble, run.status and run.status.key) for run in status.runs}
        for run in status.runs:
            if keys[run.name] != self._before.get(run.name):
                what = f"{time_now()} cannot look: {run.trouble}" if run.status is None else line(run.status)
                terminal.print_at_once(f"{escaped(run.name)}: {what}")
        if trouble and trouble != self._before.get(""):
            terminal.print_at_once(f"{time_now()} cannot look: {trouble}")
        self._before = {**keys, "": trouble}
