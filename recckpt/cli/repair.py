"""``recckpt repair``: rewrites the index file, and removes what crashes left."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.result import CommandResult, usage_checked
from recckpt.inspect.repair import Leftover, Repaired
from recckpt.inspect.repair import repair as repair_dir
from recckpt.text import Line, Table, escaped, one_line, plural

_HEAD = ("LEFTOVER", "STATE", "WHAT")


def repair(args: argparse.Namespace) -> CommandResult:
    """Repair an output dir, or say what that would do."""
    with usage_checked():
        done = repair_dir(args.dir, clean=args.clean, dry_run=args.dry_run)
    lines: list[Line] = [_index_line(done, dry_run=args.dry_run)]
    rows = [(escaped(left.path), _state(left, done, args), one_line(left.what)) for left in done.leftovers]
    lines += ["", Table(_HEAD, rows, tones=dict.fromkeys(range(len(rows)), "unsure"))] if rows else []
    for directory, reason in done.damaged.items():
        lines += ["", f"{escaped(directory)} is damaged, and stays: {one_line(reason)}"]
    return CommandResult(_data(done, args), lines, _problems(done, args))


def _index_line(done: Repaired, *, dry_run: bool) -> str:
    total = plural(len(done.checkpoints), "checkpoint")
    if not done.index_problem:
        return f"{done.url}: the index file is right, {total}"
    made = "would be made anew" if dry_run else "made anew"
    return f"{done.url}: the index file was {done.index_problem}; {made}, {total}"


def _state(left: Leftover, done: Repaired, args: argparse.Namespace) -> str:
    if not left.is_dead:
        return "left alone"
    if not args.clean:
        return "--clean removes it"
    if left.path not in done.removed:
        return "still there"
    return "would be removed" if args.dry_run else "removed"


def _problems(done: Repaired, args: argparse.Namespace) -> list[str]:
    problems = []
    if args.clean and done.failed:
        problems.append(f"{done.url}: could not remove {', '.join(map(escaped, done.failed))}")
    if done.damaged:
        problems.append(f"{done.url}: {plural(len(done.damaged), 'damaged checkpoint')} left alone; `recckpt verify`")
    return problems


def _data(done: Repaired, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": done.url,
        "dry_run": args.dry_run,
        "index": {"problem": done.index_problem or None, "checkpoints": list(done.checkpoints)},
        "leftovers": [{"path": left.path, "what": left.what, "dead": left.is_dead} for left in done.leftovers],
        "removed": list(done.removed),
        "damaged": done.damaged,
    }
