"""``recckpt mirror``: an output dir copied to another place, once or as the run goes on."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from time import sleep
from typing import Any

from recckpt.cli import terminal
from recckpt.cli.keep_option import keep_policy
from recckpt.cli.result import CommandResult, ShownResult, UsageError, leave_stdout, usage_checked
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, RecckptError, WriterFencedError
from recckpt.format.moments import time_now
from recckpt.mirroring.hold import MirrorTakenOverError
from recckpt.mirroring.mirror import Mirror, Mirrored
from recckpt.text import escaped, one_line, plural, size

_INTERVAL_SEC = 5.0


def mirror(args: argparse.Namespace) -> CommandResult:
    """Make one pass, or one after another until control-C."""
    if args.interval is not None and not args.follow:
        raise UsageError("--interval goes with --follow")
    with usage_checked():
        keep = None if args.keep is None else keep_policy(args.keep)
        made = Mirror(args.run, args.to, keep=keep, max_upload_rate=args.max_upload_rate, threads=args.threads)
        if args.follow:
            with suppress(KeyboardInterrupt):
                _follow(made, args.interval or _INTERVAL_SEC, as_json=args.json)
            return ShownResult()
        done = made.update()
    return CommandResult(_data(done), [_line(done)], _problems(done))


def _follow(made: Mirror, interval_sec: float, *, as_json: bool) -> None:
    """Print a line for each pass that changed something, and what is wrong when that changes.

    What is wrong with a place from the start does not mend itself, but for a run that has no checkpoint yet.
    """
    before: list[str] = []
    is_first = True
    with suppress(BrokenPipeError):
        while True:
            try:
                done = made.update()
                problems, is_first = _problems(done), False
                if done.copied or done.removed:
                    terminal.print_at_once(json.dumps(_data(done)) if as_json else f"{time_now()} {_line(done)}")
            except (CheckpointNotFoundError, CheckpointRemovedError) as error:
                problems = [str(error)]
            except (RecckptError, OSError) as error:
                if is_first or isinstance(error, BrokenPipeError) or _is_continued(error):
                    raise
                problems = [str(error)]
            for problem in problems if problems != before else ():
                terminal.complain(f"{problem}; looking again every {interval_sec:g} s")
            before = problems
            sleep(interval_sec)
    leave_stdout()


def _is_continued(error: Exception) -> bool:
    """Say whether somebody went on from the mirror, so that it is at its end; another pass over it ends by itself."""
    return isinstance(error, WriterFencedError) and not isinstance(error, MirrorTakenOverError)


def _line(done: Mirrored) -> str:
    url = one_line(done.url)
    if not done.copied and not done.removed:
        return f"{url}: nothing is new; the newest is {_newest(done)}"
    removed = f", removed {', '.join(map(escaped, done.removed))}" if done.removed else ""
    copied = f"copied {plural(len(done.copied), 'checkpoint')}, {size(done.n_bytes)}"
    return f"{url}: {copied}{removed}; the newest is {_newest(done)}"


def _newest(done: Mirrored) -> str:
    return "-" if done.newest is None else escaped(done.newest)


def _problems(done: Mirrored) -> list[str]:
    return [f"in the run, {one_line(problem)}" for problem in done.problems]


def _data(done: Mirrored) -> dict[str, Any]:
    return {
        "output_dir": done.url,
        "copied": list(done.copied),
        "removed": list(done.removed),
        "bytes": done.n_bytes,
        "newest": done.newest,
        "damaged": dict(done.damaged),
        "left_out": dict(done.left_out),
    }
