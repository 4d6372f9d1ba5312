"""``recckpt watch``: polls a run, or all runs in a directory; `recckpt ls` also uses its line per run."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from recckpt.cli import terminal
from recckpt.cli.arguments import OVERDUE, argument, seconds
from recckpt.cli.result import SHOWN, USAGE, CommandError, CommandResult, leave_stdout, usage_checked
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format.codec import time_now
from recckpt.text import Table, count, duration, escaped, one_line, pairs, size
from recckpt.text.columns import Tone

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from recckpt.inspect.status import Status
    from recckpt.inspect.watch import RunsStatus, RunsWatcher
    from recckpt.storage import Storage

_Look = TypeVar("_Look")
_Look_co = TypeVar("_Look_co", covariant=True)
# Subject of a line -> a key that changes when the line must be printed, and its text; "" prints nothing.
_Lines = dict[str, tuple[object, str]]

_STYLES = {"plain": "", "good": "green", "doubtful": "yellow", "bad": "bold red"}
_HEAD = ("RUN", "STEP", "AGE", "OVERDUE BY", "KEPT", "SIZE", "HEALTH")
_NUMBERS = ("STEP", "AGE", "OVERDUE BY", "KEPT", "SIZE")
_TONES: dict[str, Tone] = {"bad": "damaged", "doubtful": "unsure", "good": "good"}


class _Looks(Protocol[_Look_co]):
    def look(self) -> _Look_co: ...


ARGUMENTS = {
    "watch": (
        argument("dir DIR", "output dir, which need not exist yet, or a directory of output dirs"),
        argument("--interval SECONDS", "seconds between two polls (default: %(default)g)", type=seconds, default=5.0),
        argument("--once", "poll once; exit code 1 if the last save failed or the next one is overdue"),
        argument("--near PATH", "for one run, show what near saves of Near(PATH) on this host would restore"),
        OVERDUE,
    )
}


def run_watch(args: argparse.Namespace) -> CommandResult:
    from recckpt.inspect.watch import Watcher
    from recckpt.inspect.watch_text import facts
    from recckpt.policies.options import Near
    from recckpt.storage import open_storage

    with suppress(KeyboardInterrupt):
        with usage_checked():
            storage = open_storage(args.dir)
            near = None if args.near is None else Near(args.near)
        runs = runs_in(storage, args)
        if runs is not None:
            if args.once:
                return listed(runs[1], with_overdue=True)
            return _go_on(*runs, args, lines=_lines_of_runs, drawn=_drawn_runs)
        watcher = Watcher(storage, args.overdue, near)
        status = watcher.look()  # a place that is wrong from the start is an error
        if status.why_empty == "not a directory":
            raise CommandError(f"{status.url}: {status.why_empty}")
        if status.last is None:
            refuse_checkpoint(args.dir)
        if args.once:
            lines = pairs((name, text) for name, text, _ in facts(status))
            return CommandResult(status.to_dict(), lines, _problems(status))
        storage.give_up_after(args.interval)  # the next poll tries again
        return _go_on(watcher, status, args, lines=_lines_of_run, drawn=partial(_drawn_run, args.interval))
    return SHOWN


def refuse_checkpoint(path: str) -> None:
    from recckpt.output_dir.at_path import open_checkpoint

    try:
        _, checkpoint = open_checkpoint(path)
    except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError):
        return
    raise CommandError(f"{path} is the checkpoint {checkpoint.ckpt_id!r}, not an output dir; try `recckpt show`")


def _problems(status: Status) -> list[str]:
    from recckpt.inspect.watch_text import facts, few

    if status.last is None and not status.problems and not status.failed:
        return [f"{status.url}: {status.why_empty}"]
    failed = [f"{status.url}: the last save failed: {each.error}" for each in status.failed[-1:]]
    overdue = [f"{status.url}: {text}" for name, text, _ in facts(status) if name == "overdue"]
    return [*failed, *overdue, *(f"{status.url}: {problem}" for problem in few(status.problems))]


def runs_in(storage: Storage, args: argparse.Namespace) -> tuple[RunsWatcher, RunsStatus] | None:
    """Return a watcher of the runs in a directory, and its first status; None if the directory is a run or has none."""
    from recckpt.inspect.watch import RunsWatcher, is_output_dir

    if storage.why_empty() or is_output_dir(storage):
        return None
    watcher = RunsWatcher(storage, getattr(args, "overdue", None), getattr(args, "interval", None))
    status = watcher.look()
    if status.runs and args.near is not None:
        what = "a directory of runs, and --near needs the output dir of one run"
        raise CommandError(f"{storage.url} is {what}, such as {storage.url_of(status.runs[0].name)}", USAGE)
    return (watcher, status) if status.runs else None


def listed(status: RunsStatus, *, with_overdue: bool) -> CommandResult:
    """Return one line per run, and a problem for each bad run; overdue runs count only if requested."""
    moods = {"bad", "doubtful"} if with_overdue else {"bad"}
    wrong = [run for run in status.runs if run.health[1] in moods]
    problems = [f"{status.url}/{escaped(run.name)}: {run.health[0]}" for run in wrong]
    return CommandResult(status.to_dict(), [_table_of_runs(status)], problems)


def _table_of_runs(status: RunsStatus) -> Table:
    rows, tones = list[tuple[str, ...]](), dict[int, Tone]()
    for number, run in enumerate(status.runs):
        text, mood = run.health
        tones |= {number: _TONES[mood]} if mood in _TONES else {}
        if run.status is None:
            rows.append((escaped(run.name), *"-----", text))
            continue
        last = run.status.last
        step = "-" if last is None or last.step is None else str(last.step)
        age = "-" if last is None or last.age_sec is None else duration(last.age_sec)
        kept = count(run.status.n_checkpoints), size(run.status.n_bytes)
        rows.append((escaped(run.name), step, age, run.overdue_by, *kept, text))
    return Table(_HEAD, rows, _NUMBERS, tones)


def _go_on(
    watcher: _Looks[_Look],
    status: _Look,
    args: argparse.Namespace,
    *,
    lines: Callable[[_Look, str], _Lines],
    drawn: Callable[[Console, _Look, str], RenderableType],
) -> CommandResult:
    """Show the status repeatedly, until SIGINT, SIGTERM, or a closed output."""
    log, trouble = logging.getLogger("recckpt"), ""
    before = log.level
    log.setLevel(logging.ERROR)  # network errors are shown instead of logged into the table
    try:
        with suppress(BrokenPipeError, SystemExit), _shown_by(args, lines, drawn) as show:  # SIGTERM is the normal end
            while True:
                show(status, trouble)
                sleep(args.interval)
                try:
                    status, trouble = watcher.look(), ""
                except OSError as error:
                    trouble = one_line(str(error))
    finally:
        log.setLevel(before)
    leave_stdout()
    return SHOWN


@contextmanager
def _shown_by(
    args: argparse.Namespace,
    lines: Callable[[_Look, str], _Lines],
    drawn: Callable[[Console, _Look, str], RenderableType],
) -> Iterator[Callable[[_Look, str], object]]:
    """Yield a function that shows one status: as a live table on a terminal, else as JSON or as changed lines."""
    console = terminal.console_of(sys.stdout)
    if args.json:
        yield _show_json
    elif console is not None:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            yield lambda status, trouble: live.update(drawn(console, status, trouble), refresh=True)
    else:
        before: dict[str, object] = {}

        def show(status: _Look, trouble: str) -> None:
            nonlocal before
            now = lines(status, trouble)
            for name, (key, text) in now.items():
                if text and key != before.get(name):
                    terminal.print_at_once(text)
            before = {name: key for name, (key, _) in now.items()}

        yield show


def _show_json(status: Any, trouble: str) -> None:
    values = status.to_dict()
    if trouble:
        place = "runs_dir" if "runs_dir" in values else "output_dir"
        values = {place: status.url, "time": time_now(), "error": trouble}
    terminal.print_at_once(json.dumps(values, allow_nan=False))


def _lines_of_run(status: Status, trouble: str) -> _Lines:
    from recckpt.inspect.watch_text import line

    return {"": ((status.key, trouble), f"{time_now()} cannot look: {trouble}" if trouble else line(status))}


def _lines_of_runs(status: RunsStatus, trouble: str) -> _Lines:
    from recckpt.inspect.watch_text import line

    lines: _Lines = {}
    for run in status.runs:
        what = f"{time_now()} cannot look: {run.trouble}" if run.status is None else line(run.status)
        lines[run.name] = (run.trouble, run.status and run.status.key), f"{escaped(run.name)}: {what}"
    return lines | {"": (trouble, f"{time_now()} cannot look: {trouble}" if trouble else "")}


def _drawn_run(interval: float, console: Console, status: Status, trouble: str) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from recckpt.inspect.watch_text import Fact, facts

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text, mood in (*facts(status), *([Fact("cannot look", trouble, "bad")] if trouble else [])):
        table.add_row(name, Text(text, style=_STYLES[mood]))
    subtitle = f"{status.time.strftime('%H:%M:%S')} UTC, every {interval:g} s, control-C ends"
    return Panel(table, title=Text(escaped(status.url)), title_align="left", subtitle=subtitle, subtitle_align="right")


def _drawn_runs(console: Console, status: RunsStatus, trouble: str) -> RenderableType:
    at = f"{escaped(status.url)}, {status.time.strftime('%H:%M:%S')} UTC, control-C ends"
    return terminal.drawn(console, _table_of_runs(status), at, *([f"cannot look: {trouble}"] if trouble else []))
