"""``recckpt ls`` and ``recckpt near``: the checkpoints of an output dir, and the near saves on this host."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from recckpt.cli.arguments import argument
from recckpt.cli.result import CommandResult, usage_checked
from recckpt.cli.watch import listed, refuse_checkpoint, runs_in
from recckpt.format import layout
from recckpt.policies.evict import EVENT_TIME
from recckpt.text import Line, Table, cell, count, escaped, one_line, plural, size
from recckpt.text.columns import Tone

if TYPE_CHECKING:
    from recckpt.near.views import NearHere
    from recckpt.output_dir.listing import Checkpoint, Listing
    from recckpt.storage import Storage

_HEAD = ("ID", "STEP", "KIND", "TIME", "ROWS", "SIZE", "TABLES")
_NUMBERS = ("STEP", "ROWS", "SIZE", "TABLES")
_TONES: dict[str, Tone] = {"overwritten": "past", "superseded": "past", "pinned": "pinned", "newest": "newest"}
_MOST_METRICS = 4  # most columns of metrics; --json has all
_LABEL = 40  # most characters of a text to show
_NEAR_HEAD = ("OUTPUT DIR", "NEAR SAVE", "STEP", "TIME", "ROWS", "SIZE", "HERE", "STANDS ON")

ARGUMENTS = {
    "ls": (
        argument("dir DIR", "output dir, or a directory of output dirs; a path or URL"),
        argument("--near PATH", "also list the near saves that a restore with Near(PATH) may use"),
    ),
    "near": (
        argument("what", "list the near saves of all output dirs, or remove all", choices=("ls", "clear")),
        argument("path PATH", "the path of Near(PATH)"),
    ),
}


def run_ls(args: argparse.Namespace) -> CommandResult:
    from recckpt.cli.others import source_at
    from recckpt.cli.show import contents_of
    from recckpt.output_dir.listing import look_around
    from recckpt.storage import open_storage

    with usage_checked():
        storage = open_storage(args.dir)
    listing = look_around(storage)
    if not listing.committed and not listing.damaged and not listing.unreadable:
        refuse_checkpoint(args.dir)
        runs = runs_in(storage, args)
        if runs is not None:
            return listed(runs[1], with_overdue=False)
        if args.near is None and (source := source_at(args.dir)) is not None:
            return contents_of(source)
    data, lines = _committed(storage, listing)
    if args.near is not None:
        from recckpt.near.views import counting_here
        from recckpt.policies.options import Near

        with usage_checked():
            at = Near(args.near)
        near_saves = counting_here(storage, listing, at)
        data["near"] = [_near_data(save) for save in near_saves]
        named, nothing = [(storage.url, save) for save in near_saves], "no valid near saves of this output dir"
        lines.append(_near_table(named) if named else f"{args.near}: {nothing}{_why_empty(args.near)}")
    return CommandResult(data, lines, _problems(storage, listing))


def _committed(storage: Storage, listing: Listing) -> tuple[dict[str, Any], list[Line]]:
    from recckpt.inspect.find import SECOND_CHAIN, needed_by, second_chain
    from recckpt.output_dir.checkpoint_dir import state_of
    from recckpt.output_dir.rotation import pinned_ids

    unfinished, pinned, metrics = _unfinished(storage, listing), pinned_ids(storage), _metrics(listing)
    needed, second = needed_by(listing), second_chain(listing)
    rows, tones, checkpoints = list[tuple[str, ...]](), dict[int, Tone](), list[dict[str, Any]]()
    for checkpoint in listing.committed:
        marks = _marks(checkpoint, listing, pinned) + ([SECOND_CHAIN] if checkpoint is second else [])
        kept_for = [each.ckpt_id for each in needed.get(checkpoint.directory, [])]
        checkpoints.append(_data(checkpoint, marks, kept_for))
        tones |= {len(rows): tone for mark, tone in _TONES.items() if mark in marks}
        rows.append(_row(checkpoint, marks, kept_for, metrics))
    others: list[tuple[str, str, Tone]] = []
    others += [
        (name, f"{state_of(error)}: {one_line(str(error))}", "damaged") for name, error in listing.damaged.items()
    ]
    others += [(name, f"unreadable: {one_line(str(error))}", "damaged") for name, error in listing.unreadable.items()]
    others += [(name, f"fenced: {one_line(reason)}", "unsure") for name, reason in listing.fenced.items()]
    others += [(name, f"no {layout.MANIFEST}: {what}", "unsure") for name, what in unfinished.items()]
    for directory, text, tone in others:
        tones[len(rows)] = tone
        rows.append((escaped(directory), *"------", *("-" for _ in metrics), text))
    data = {
        "output_dir": storage.url,
        "checkpoints": checkpoints,
        "damaged": [
            {"directory": name, "reason": str(reason), "state": state_of(reason)}
            for name, reason in listing.damaged.items()
        ],
        "unreadable": [{"directory": name, "reason": str(reason)} for name, reason in listing.unreadable.items()],
        "fenced": [{"directory": name, "reason": reason} for name, reason in listing.fenced.items()],
        "leftovers": list(unfinished),
    }
    columns = tuple(escaped(name).upper() for name in metrics)
    table = Table((*_HEAD, *columns, "MARKS"), rows, (*_NUMBERS, *columns), tones, whole=("TIME",))
    return data, [table] if rows else []


def _problems(storage: Storage, listing: Listing) -> list[str]:
    from recckpt.output_dir.checkpoint_dir import state_of
    from recckpt.output_dir.index_file import why_nothing

    n_bad = len(listing.damaged) + len(listing.unreadable)
    if n_bad:
        total = plural(len(listing.committed) + n_bad, "checkpoint")
        states = list(dict.fromkeys(map(state_of, listing.damaged.values()))) or ["damaged"]
        what = " or ".join([*states, *(["unreadable"] if listing.unreadable else [])])
        return [f"{storage.url}: {n_bad} of {total} {what}; run `recckpt verify` to see all of it"]
    return [] if listing.committed else [f"{storage.url}: {why_nothing(storage)}"]


def _unfinished(storage: Storage, listing: Listing) -> dict[str, str]:
    """Describe directories of unfinished saves and of half-removed checkpoints, and directories that resemble them."""
    unfinished: dict[str, str] = {}
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if not any(map(layout.is_ours, names)):
            continue
        if layout.is_offer_dir(directory):
            unfinished[directory] = "an offer that is not adopted"
        elif layout.INTENT in names or any(layout.is_draft(name, layout.INTENT) for name in names):
            unfinished[directory] = "a save that died, or still runs"
        else:
            unfinished[directory] = f"files with names of recckpt, without {layout.INTENT}: their writer is unknown"
    return unfinished


def _marks(checkpoint: Checkpoint, listing: Listing, pinned: set[str]) -> list[str]:
    best = listing.find(checkpoint.ckpt_id)
    is_past = best is not checkpoint
    is_superseded = is_past and best is not None and best.manifest.place == checkpoint.manifest.place
    flags = {
        "newest": checkpoint is listing.current[-1],
        "overwritten": is_past and not is_superseded,
        "superseded": is_superseded,
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
        "supersedes": None if manifest.supersedes is None else manifest.supersedes.save_id,
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
    """Return the names of metrics: floats in the checkpoints' states that recckpt itself did not store."""
    states = (checkpoint.manifest.state for checkpoint in listing.committed)
    names = dict.fromkeys(name for state in states for name, value in state.items() if isinstance(value, float))
    return [name for name in names if name != EVENT_TIME and not name.startswith(layout.SPARSE_LR)][:_MOST_METRICS]


def _row(checkpoint: Checkpoint, marks: list[str], kept_for: list[str], metrics: list[str]) -> tuple[str, ...]:
    manifest = checkpoint.manifest
    state, parent = manifest.state, manifest.parent
    notes = [*marks, *(f"{escaped(k)}={escaped(v[:_LABEL])}" for k, v in state.items() if isinstance(v, str))]
    if kept_for and parent is None:
        notes.append(f"base of {plural(len(kept_for), 'delta')}")
    elif kept_for:
        more = f" and {len(kept_for) - 1} more" if len(kept_for) > 1 else ""
        notes.append(f"link of {escaped(kept_for[-1])}{more}")
    if checkpoint.directory != layout.encode_id(manifest.ckpt_id):
        notes.append(f"in {checkpoint.directory}/")
    values = (state.get(name) for name in metrics)
    return (
        escaped(manifest.ckpt_id),
        "-" if manifest.step is None else str(manifest.step),
        "full" if parent is None else f"delta on {escaped(parent.ckpt_id)}",
        escaped(manifest.time),
        count(manifest.rows),
        size(manifest.n_bytes),
        count(len(manifest.tables)),
        *(cell(value) if isinstance(value, int | float) else "-" for value in values),
        ", ".join(notes),
    )


def run_near(args: argparse.Namespace) -> CommandResult:
    from recckpt.near.near_dir import places
    from recckpt.near.views import near_saves_here
    from recckpt.policies.options import Near

    with usage_checked():
        at = Near(args.path)
    dirs = places(at)
    if args.what == "clear":
        removed = [f"{each.place}/{name}" for each in dirs for name in each.clear()]
        line = f"{args.path}: {plural(len(removed), 'near save')} removed{_why_empty(args.path)}"
        return CommandResult({"removed": removed}, [line])
    named: list[tuple[str, NearHere]] = []
    data, left = list[dict[str, Any]](), list[dict[str, str]]()
    for each in dirs:
        saves, url = list(near_saves_here(each)), each.url()
        named += [(url or each.place, save) for save in saves]
        data += [{"place": each.place, "output_dir": url, **_near_data(save)} for save in saves]
        sealed = {save.save.directory for save in saves}
        left += [{"place": each.place, "directory": name} for name in each.directories() if name not in sealed]
    nothing = f"{args.path}: no near saves{_why_empty(args.path)}"
    lines: list[Line] = [_near_table(named)] if named else []
    unsealed = "not sealed: its save died, or is still writing"
    lines += [f"{each['place']}/{each['directory']}: {unsealed}" for each in left]
    return CommandResult({"near_saves": data, "unsealed": left}, lines or [nothing])


def _near_table(saves: list[tuple[str, NearHere]]) -> Table:
    rows = []
    for output_dir, near in saves:
        record, n_here = near.save.manifest, f"{near.n_here} of {plural(near.n_shards, 'shard')}"
        rows.append(
            (
                escaped(output_dir),
                record.save_id,
                "-" if record.step is None else str(record.step),
                escaped(record.time),
                count(sum(table.own_rows for table in record.tables)),
                size(record.n_bytes),
                "all" if near.n_here == near.n_shards else n_here,
                "-" if record.parent is None else escaped(record.parent.ckpt_id),
            )
        )
    return Table(_NEAR_HEAD, rows, ("STEP", "ROWS", "SIZE"), {}, whole=("TIME",))


def _near_data(near: NearHere) -> dict[str, Any]:
    record = near.save.manifest
    return {
        "name": record.save_id,
        "directory": near.save.directory,
        "step": record.step,
        "time": record.time,
        "rows": sum(table.own_rows for table in record.tables),
        "bytes": record.n_bytes,
        "shards": near.n_shards,
        "shards_here": near.n_here,
        "parent": None if record.parent is None else record.parent.ckpt_id,
    }


def _why_empty(path: str) -> str:
    from recckpt.storage.local import LocalStorage

    reason = LocalStorage(path).why_empty()
    return f": {reason}" if reason else ""
