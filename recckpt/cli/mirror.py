"""``recckpt mirror``: copies an output dir to another place, once or continuously."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING, Any

from recckpt.cli import terminal
from recckpt.cli.arguments import AN_OUTPUT_DIR, argument, seconds, threads
from recckpt.cli.result import SHOWN, CommandResult, UsageError, leave_stdout, usage_checked
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, RecckptError
from recckpt.format.codec import time_now
from recckpt.text import escaped, one_line, plural, size

if TYPE_CHECKING:
    from recckpt.policies.keep import Keep
    from recckpt.rewrite.mirroring import Mirror, Mirrored

_INTERVAL_SEC, _DAY_SEC = 5.0, 86_400.0

_KEEP = (
    "a number of the newest, all, every=STEPS, best=METRIC, least=METRIC, days=N, one-per-days=N, bytes=SIZE; several "
    "are separated by commas"
)
ARGUMENTS = {
    "mirror": (
        argument("run RUN", AN_OUTPUT_DIR),
        argument("to TO", "an empty place, or a mirror of RUN; a path or URL"),
        argument("--follow", "keep copying while the run saves, until control-C or SIGTERM"),
        argument("--interval SECONDS", "with --follow: seconds between two passes (default: 5)", type=seconds),
        argument("--keep POLICY", f"checkpoints to keep there (default: those of RUN): {_KEEP}"),
        threads("copy", default=4),
    )
}


def run_mirror(args: argparse.Namespace) -> CommandResult:
    from recckpt.rewrite.mirroring import Mirror

    if args.interval is not None and not args.follow:
        raise UsageError("--interval needs --follow")
    with usage_checked():
        keep = None if args.keep is None else keep_policy(args.keep)
        made = Mirror(args.run, args.to, keep=keep, threads=args.threads)
        if args.follow:
            with suppress(KeyboardInterrupt, SystemExit):  # SIGTERM is the normal end
                _follow(made, args.interval or _INTERVAL_SEC, as_json=args.json)
            return SHOWN
        done = made.update()
    return CommandResult(_data(done), [_line(done)], _problems(done))


def keep_policy(text: str) -> Keep:
    """Parse a keep policy of the command line; ValueError if it is invalid."""
    from recckpt.policies import keep

    policies: dict[str, Callable[[str], Keep]] = {
        "every": lambda text: keep.EveryNth(int(text)),
        "best": lambda text: keep.Best(1, text),
        "least": lambda text: keep.Best(1, text, "min"),
        "days": lambda text: keep.YoungerThan(float(text) * _DAY_SEC),
        "one-per-days": lambda text: keep.OnePer(float(text) * _DAY_SEC),
        "bytes": keep.KeepBytes,
    }
    parts: list[Keep] = []
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            if part == "all":
                parts.append(keep.All())
            else:
                parts.append(policies[name](value) if value and name in policies else keep.Newest(int(part)))
        except ValueError as error:
            expected = f"a number of the newest, all, {', '.join(f'{each}=...' for each in policies)}"
            raise ValueError(f"--keep: found {part!r}, expected {expected}") from error
    return keep.KeptByAny(*parts)


def _follow(made: Mirror, interval_sec: float, *, as_json: bool) -> None:
    """Print a line for each pass that changed something, and problems whenever they change.

    Problems in the first pass end it, except if the run has no checkpoint yet.
    """
    from recckpt.rewrite.mirror_hold import NoMirrorError

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
                if is_first or isinstance(error, (BrokenPipeError, NoMirrorError)):
                    raise
                problems = [str(error)]
            for problem in problems if problems != before else ():
                terminal.complain(f"{problem}; trying again every {interval_sec:g} s")
            before = problems
            sleep(interval_sec)
    leave_stdout()


def _line(done: Mirrored) -> str:
    url, newest = one_line(done.url), "-" if done.newest is None else escaped(done.newest)
    if not done.copied and not done.removed:
        return f"{url}: nothing is new; the newest is {newest}"
    removed = f", removed {', '.join(map(escaped, done.removed))}" if done.removed else ""
    copied = f"copied {plural(len(done.copied), 'checkpoint')}, {size(done.n_bytes)}"
    return f"{url}: {copied}{removed}; the newest is {newest}"


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
