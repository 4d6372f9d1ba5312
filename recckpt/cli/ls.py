"""``recckpt ls``: the checkpoints of an output dir."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from recckpt.cli.near import near_data, near_saves_of, near_table, no_near_saves
from recckpt.cli.result import CommandError, CommandResult, usage_checked
from recckpt.cli.runs import listed, runs_in
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import drafts, layout
from recckpt.format.manifest import Manifest, StateValue
from recckpt.inspect.why_kept import SECOND_CHAIN, needed_by, second_chain
from recckpt.output_dir.at_path import open_checkpoint
from recckpt.output_dir.listing import Checkpoint, Listing, look_around
from recckpt.output_dir.rotation import pinned_ids
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.policies.evict import EVENT_TIME
from recckpt.storage import Storage, open_storage
from recckpt.text import Line, Table, cell, count, escaped, one_line, plural, size
from recckpt.text.columns import Tone

_HEAD = ("ID", "STEP", "KIND", "TIME", "ROWS", "SIZE", "TABLES", "MARKS")
_NUMBERS = ("STEP", "ROWS", "SIZE", "TABLES")
_TONES: dict[str, Tone] = {"superseded": "past", "replaced by a form": "past", "pinned": "pinned", "newest": "newest"}
_MOST_METRICS = 4  # columns of them; --json has all
_LABEL = 40  # characters of a text that are shown


def ls(args: argparse.Namespace) -> CommandResult:
    """List committed checkpoints, oldest first, then what is damaged or was never finished; or a directory's runs."""
    with usage_checked():
        storage = open_storage(args.dir)
    listing = look_around(storage)
    leftovers, pinned = _leftovers(storage, listing), pinned_ids(storage)
    if not listing.committed and not listing.damaged and not listing.unreadable:
        refuse_checkpoint(args.dir)
        runs = runs_in(storage, args)
        if runs is not None:
            return listed(runs[1], with_overdue=False)
    metrics = _metrics(listing)
    needed, second = needed_by(listing), second_chain(listing)
    rows, tones, checkpoints = list[tuple[str, ...]](), dict[int, Tone](), list[dict[str, Any]]()
    for checkpoint in listing.committed:
        marks = _marks(checkpoint, listing, pinned) + ([SECOND_CHAIN] if checkpoint is second else [])
        kept_for = [each.ckpt_id for each in needed.get(checkpoint.directory, [])]
        checkpoints.append(_data(checkpoint, marks, kept_for))
        tones |= {len(rows): tone for mark, tone in _TONES.items() if mark in marks}
        rows.append(_row(checkpoint, marks, kept_for, metrics))
    others = {directory: f"damaged: {one_line(str(error))}" for directory, error in listing.damaged.items()}
    others |= {directory: f"unreadable: {one_line(str(error))}" for directory, error in listing.unreadable.items()}
    tones |= {len(rows) + number: "damaged" for number in range(len(others))}
    others |= {directory: f"fenced: {one_line(reason)}" for directory, reason in listing.fenced.items()}
    others |= {directory: f"no {layout.MANIFEST}: {what}" for directory, what in leftovers.items()}
    tones |= {len(rows) + number: tones.get(len(rows) + number, "unsure") for number in range(len(others))}
    rows += [(escaped(directory), *"------", *("-" for _ in metrics), text) for directory, text in others.items()]
    near_saves = [] if args.near is None else near_saves_of(storage, listing, args.near)
    data = {
        "output_dir": storage.url,
        "checkpoints": checkpoints,
        "damaged": [{"directory": name, "reason": str(reason)} for name, reason in listing.damaged.items()],
        "unreadable": [{"directory": name, "reason": str(reason)} for name, reason in listing.unreadable.items()],
        "fenced": [{"directory": name, "reason": reason} for name, reason in listing.fenced.items()],
        "leftovers": list(leftovers),
    }
    data |= {} if args.near is None else {"near": [near_data(save) for save in near_saves]}
    columns = tuple(escaped(name).upper() for name in metrics)
    head, numbers = (*_HEAD[:-1], *columns, _HEAD[-1]), (*_NUMBERS, *columns)
    tables = [Table(head, rows, numbers, tones, whole=("TIME",))] if rows else []
    lines: list[Line] = [*tables]
    if near_saves:
        lines.append(near_table([(storage.url, save) for save in near_saves]))
    elif args.near is not None:
        lines.append(no_near_saves(args.near, " of this output dir that count"))
    return CommandResult(data, lines, _problems(storage, listing))


def _problems(storage: Storage, listing: Listing) -> list[str]:
    n_bad = len(listing.damaged) + len(listing.unreadable)
    if n_bad:
        total = plural(len(listing.committed) + n_bad, "checkpoint")
        what = "damaged or unreadable" if listing.unreadable else "damaged"
        return [f"{storage.url}: {n_bad} of {total} {what}; run `recckpt verify` to see all of it"]
    return [] if listing.committed else [f"{storage.url}: {why_nothing(storage)}"]


def refuse_checkpoint(path: str) -> None:
    """Raise CommandError where the path is a checkpoint itself."""
    try:
        _, checkpoint = open_checkpoint(path)
    except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError):
        return
    raise CommandError(f"{path} is the checkpoint {checkpoint.ckpt_id!r}, not an output dir; try `recckpt show`")


def _leftovers(storage: Storage, listing: Listing) -> dict[str, str]:
    """Return what directories are that a save began and did not finish, that are half removed, or that look so."""
    files = {name: storage.list_files(name) for name in listing.uncommitted}
    return {name: _unfinished(name, names) for name, names in files.items() if any(map(layout.is_ours, names))}


def _unfinished(directory: str, names: Collection[str]) -> str:
    if layout.is_offer_dir(directory):
        return "an offer that is not adopted"
    if layout.INTENT in names or any(drafts.is_draft(name, layout.INTENT) for name in names):
        return "a save that died, or still runs"
    return f"files that are named like ours, without {layout.INTENT}: their writer is unknown"


def _marks(checkpoint: Checkpoint, listing: Listing, pinned: set[str]) -> list[str]:
    best = listing.find(checkpoint.ckpt_id)
    form_of = best.manifest.form_of if best is not None and best is not checkpoint else None
    is_replaced = form_of is not None and form_of.save_id == checkpoint.manifest.origin
    flags = {
        "newest": checkpoint is listing.current[-1],
        "superseded": best is not checkpoint and not is_replaced,
        "replaced by a form": is_replaced,
        "pinned": checkpoint.ckpt_id in pinned,
        "ephemeral": checkpoint.manifest.ephemeral,
        "reduced": any(table.reduced is not None for table in checkpoint.manifest.tables),
    }
    return [mark for mark, holds in flags.items() if holds]


def _data(checkpoint: Checkpoint, marks: list[str], kept_for: list[str]) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "id": manifest.ckpt_id,
        "directory": checkpoint.directory,
        "step": manifest.step,
        "kind": manifest.kind,
        "form_of": None if manifest.form_of is None else manifest.form_of.save_id,
        "parent": None if manifest.parent is None else manifest.parent.ckpt_id,
        "links": [link.directory for link in checkpoint.links],
        "kept_for": kept_for,
        "time": manifest.time,
        "rows": manifest.rows,
        "bytes": manifest.n_bytes,
        "tables": len(manifest.tables),
        "marks": marks,
        "state": dict(manifest.state),
    }


def _metrics(listing: Listing) -> list[str]:
    """Return the names of metrics of checkpoints: the floats of their states that no part of recckpt put there."""
    states = (checkpoint.manifest.state for checkpoint in listing.committed)
    names = dict.fromkeys(name for state in states for name, value in state.items() if isinstance(value, float))
    return [name for name in names if name != EVENT_TIME and not name.startswith(layout.SPARSE_LR)][:_MOST_METRICS]


def _row(checkpoint: Checkpoint, marks: list[str], kept_for: list[str], metrics: list[str]) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    moved = checkpoint.directory != layout.encode_id(manifest.ckpt_id)
    notes = [
        *marks,
        *_labels(manifest.state),
        *_link_of(manifest, kept_for),
        *([f"in {checkpoint.directory}/"] if moved else []),
    ]
    return (
        escaped(manifest.ckpt_id),
        "-" if manifest.step is None else str(manifest.step),
        _kind(checkpoint),
        escaped(manifest.time),
        count(manifest.rows),
        size(manifest.n_bytes),
        count(len(manifest.tables)),
        *(_number(manifest.state.get(name)) for name in metrics),
        ", ".join(notes),
    )


def _number(value: StateValue | None) -> str:
    return cell(value) if isinstance(value, int | float) else "-"


def _kind(checkpoint: Checkpoint) -> str:
    parent = checkpoint.manifest.parent
    return "full" if parent is None else f"delta on {escaped(parent.ckpt_id)}"


def _labels(state: Mapping[str, StateValue]) -> list[str]:
    """Return what a checkpoint was labelled with: the texts of its state, each cut where it is long."""
    return [f"{escaped(name)}={escaped(value[:_LABEL])}" for name, value in state.items() if isinstance(value, str)]


def _link_of(manifest: Manifest, ids: list[str]) -> list[str]:
    """Say for which others a checkpoint is kept, as its marks do."""
    if not ids:
        return []
    if manifest.parent is None:
        return [f"base of {plural(len(ids), 'delta')}"]
    more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
    return [f"link of {escaped(ids[-1])}{more}"]
