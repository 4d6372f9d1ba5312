"""``recckpt compact``: a full checkpoint made of a chain of deltas."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.passed_by import passed_by
from recckpt.cli.result import CommandResult, UsageError, usage_checked
from recckpt.compaction.adopting import Adopted, adopt
from recckpt.compaction.compact import Compacted
from recckpt.compaction.compact import compact as compact_chain
from recckpt.text import escaped, one_line, plural, size


def compact(args: argparse.Namespace) -> CommandResult:
    """Make an offer, or a checkpoint elsewhere, and adopt it where that is asked for."""
    if args.out is not None and args.adopt:
        raise UsageError("--adopt is for an offer in DIR; with --out the checkpoint is committed already")
    with usage_checked():
        done = compact_chain(args.dir, args.ckpt, out=args.out, budget_bytes=args.budget, threads=args.workers)
    adopted = adopt(done.url) if args.adopt else Adopted((), ())
    notes = [] if args.out is None else passed_by(args.out, done.ckpt_id, None)
    lines = [_line(done, is_out=args.out is not None, is_adopted=done.directory in adopted.forms), *notes]
    if args.adopt:
        removed = f", and removed {plural(len(adopted.removed), 'delta')} that it replaces" if adopted.removed else ""
        lines.append(f"{one_line(done.url)}: adopted {plural(len(adopted.forms), 'offer')}{removed}")
    return CommandResult({**_data(done, adopted), "notes": notes}, lines)


def _line(done: Compacted, *, is_out: bool, is_adopted: bool) -> str:
    name = escaped(done.ckpt_id)
    if done.directory is None:
        return f"{name}: {done.reason}; nothing to do"
    what = f"{plural(done.n_rows, 'row')} of {plural(done.n_links, 'link')}, {size(done.n_bytes)}"
    where = one_line(f"{done.url}/{done.directory}")
    if is_out or is_adopted:
        return f"{name}: wrote {what}, to {where}"
    return f"{name}: offered {what}, in {where}; the trainer adopts it at its next save, or --adopt without one"


def _data(done: Compacted, adopted: Adopted) -> dict[str, Any]:
    return {
        "id": done.ckpt_id,
        "output_dir": done.url,
        "directory": done.directory,
        "reason": done.reason or None,
        "links": done.n_links,
        "rows": done.n_rows,
        "bytes": done.n_bytes,
        "adopted": list(adopted.forms),
        "removed": list(adopted.removed),
    }
