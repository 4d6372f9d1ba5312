"""``recckpt ls``: the checkpoints of an output dir."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.result import CommandError, Outcome, usage_checked
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.output_dir.at_path import open_checkpoint
from recckpt.output_dir.listing import Checkpoint, Listing, look_around
from recckpt.output_dir.rotation import pinned_ids
from recckpt.storage import Storage, open_storage
from recckpt.text import count, escaped, grid, one_line, plural, size

_HEAD = ("ID", "STEP", "TIME", "ROWS", "SIZE", "TABLES", "MARKS")
_NUMBERS = ("STEP", "ROWS", "SIZE", "TABLES")


def ls(args: argparse.Namespace) -> Outcome:
    """List committed checkpoints, oldest first, then what is damaged or was never finished."""
    with usage_checked():
        storage = open_storage(args.dir)
    listing = look_around(storage)
    leftovers, pinned = _leftovers(storage, listing), pinned_ids(storage)
    if not listing.committed and not listing.damaged and not listing.unreadable:
        _refuse_checkpoint(args.dir)
    current = {checkpoint.directory for checkpoint in listing.current}
    newest = listing.current[-1].directory if listing.current else None
    rows = []
    checkpoints = []
    for checkpoint in listing.committed:
        is_pinned = checkpoint.ckpt_id in pinned
        marks = _marks(checkpoint, checkpoint.directory in current, checkpoint.directory == newest, is_pinned)
        checkpoints.append(_data(checkpoint, marks))
        rows.append(_row(checkpoint, marks))
    others = {directory: f"damaged: {one_line(str(error))}" for directory, error in listing.damaged.items()}
    others |= {directory: f"unreadable: {one_line(str(error))}" for directory, error in listing.unreadable.items()}
    others |= {directory: f"fenced: {one_line(reason)}" for directory, reason in listing.fenced.items()}
    others |= dict.fromkeys(leftovers, f"no {layout.MANIFEST}: a save that died, or still runs")
    rows += [(escaped(directory), *"-----", text) for directory, text in others.items()]
    data = {
        "output_dir": storage.url,
        "checkpoints": checkpoints,
        "damaged": [{"directory": name, "reason": str(reason)} for name, reason in listing.damaged.items()],
        "unreadable": [{"directory": name, "reason": str(reason)} for name, reason in listing.unreadable.items()],
        "fenced": [{"directory": name, "reason": reason} for name, reason in listing.fenced.items()],
        "leftovers": leftovers,
    }
    return Outcome(data, grid(_HEAD, rows, _NUMBERS) if rows else [], _problems(storage, listing))


def _problems(storage: Storage, listing: Listing) -> list[str]:
    n_bad = len(listing.damaged) + len(listing.unreadable)
    if n_bad:
        total = plural(len(listing.committed) + n_bad, "checkpoint")
        what = "damaged or unreadable" if listing.unreadable else "damaged"
        return [f"{storage.url}: {n_bad} of {total} {what}; run `recckpt verify` to see all of it"]
    return [] if listing.committed else [f"{storage.url}: {storage.why_empty() or 'found no committed checkpoint'}"]


def _refuse_checkpoint(path: str) -> None:
    """Raise CommandError where the path is a checkpoint itself."""
    try:
        _, checkpoint = open_checkpoint(path)
    except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError):
        return
    raise CommandError(f"{path} is the checkpoint {checkpoint.ckpt_id!r}, not an output dir; try `recckpt show`")


def _leftovers(storage: Storage, listing: Listing) -> list[str]:
    """Return the directories that a save began and did not finish, or that are half removed."""
    return [name for name in listing.uncommitted if any(map(layout.is_ours, storage.list_files(name)))]


def _marks(checkpoint: Checkpoint, current: bool, newest: bool, pinned: bool) -> list[str]:
    ephemeral = checkpoint.manifest.ephemeral
    flags = {"newest": newest, "superseded": not current, "pinned": pinned, "ephemeral": ephemeral}
    return [mark for mark, holds in flags.items() if holds]


def _data(checkpoint: Checkpoint, marks: list[str]) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "id": manifest.ckpt_id,
        "directory": checkpoint.directory,
        "step": manifest.step,
        "time": manifest.time,
        "rows": manifest.rows,
        "bytes": manifest.n_bytes,
        "tables": len(manifest.tables),
        "marks": marks,
    }


def _row(checkpoint: Checkpoint, marks: list[str]) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    moved = checkpoint.directory != layout.encode_id(manifest.ckpt_id)
    return (
        escaped(manifest.ckpt_id),
        "-" if manifest.step is None else str(manifest.step),
        escaped(manifest.time),
        count(manifest.rows),
        size(manifest.n_bytes),
        count(len(manifest.tables)),
        ", ".join([*marks, *([f"in {checkpoint.directory}/"] if moved else [])]),
    )
