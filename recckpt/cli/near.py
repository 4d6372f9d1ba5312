"""``recckpt near``: the near saves on this host, and their removal."""

from __future__ import annotations

import argparse
from typing import Any

from recckpt.cli.result import CommandResult, usage_checked
from recckpt.format import near_names
from recckpt.near.clearing import clear
from recckpt.near.here import NearHere, counting_here, near_saves_here
from recckpt.near.near_dir import NearDir, places
from recckpt.near.options import Near
from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.output_dir.near_hosts import NearHost
from recckpt.storage import Storage
from recckpt.storage.local import LocalStorage
from recckpt.text import Line, Table, count, escaped, one_line, plural, size

_HEAD = ("OUTPUT DIR", "NEAR SAVE", "STEP", "TIME", "ROWS", "SIZE", "HERE", "STANDS ON")
_NUMBERS = ("STEP", "ROWS", "SIZE")


def near(args: argparse.Namespace) -> CommandResult:
    """List what is there, or remove it."""
    with usage_checked():
        at = Near(args.path)
    return _cleared(places(at), args.path) if args.what == "clear" else _listed(places(at), args.path)


def near_saves_of(storage: Storage, listing: Listing, path: str) -> list[NearHere]:
    """Return the near saves of an output dir that count, newest first."""
    with usage_checked():
        at = Near(path)
    return counting_here(storage, listing, at)


def near_table(saves: list[tuple[str, NearHere]]) -> Table:
    """Return the table of near saves, each with its output dir."""
    return Table(
        _HEAD, [(escaped(output_dir), *_row(save)) for output_dir, save in saves], _NUMBERS, {}, whole=("TIME",)
    )


def near_data(near: NearHere) -> dict[str, Any]:
    """Return what programs read of a near save."""
    save, record = near.save, near.save.manifest
    return {
        "name": record.save_id,
        "directory": save.directory,
        "step": record.step,
        "time": record.time,
        "rows": _n_changed(save),
        "bytes": record.n_bytes,
        "shards": near.n_shards,
        "shards_here": near.n_here,
        "parent": None if record.parent is None else record.parent.ckpt_id,
    }


def _listed(dirs: list[NearDir], path: str) -> CommandResult:
    saves = [(each.place, save) for each in dirs for save in near_saves_here(each)]
    unsealed = [(each, name) for each in dirs for name in each.directories() if name not in _directories(saves, each)]
    output_dirs = {each.place: each.url() for each in dirs}
    named = [(output_dirs[place] or place, save) for place, save in saves]
    lines: list[Line] = [near_table(named)] if saves else []
    lines += [f"{each.place}/{name}: not sealed: of a save that died, or is being written" for each, name in unsealed]
    data = [{"place": place, "output_dir": output_dirs[place], **near_data(save)} for place, save in saves]
    left = [{"place": each.place, "directory": name} for each, name in unsealed]
    return CommandResult({"near_saves": data, "unsealed": left}, lines or [no_near_saves(path)])


def no_near_saves(path: str, which: str = "") -> str:
    """Say that there are none, and why where the path is no directory."""
    return f"{path}: no near saves{which}{_why(path)}"


def _why(path: str) -> str:
    reason = LocalStorage(path).why_empty()
    return f": {reason}" if reason else ""


def _directories(saves: list[tuple[str, NearHere]], of: NearDir) -> set[str]:
    return {near.save.directory for place, near in saves if place == of.place}


def may_have_forgotten(host: NearHost) -> str:
    """Say of a host that near saves there may have ids that were forgotten, and what to do."""
    if host.damage:
        return f"near saves of a host may have what was forgotten, and its note is damaged: {one_line(host.damage)}"
    path = escaped(host.path)
    where = f"near saves on {escaped(host.name)} in {path} may have what was forgotten"
    note = near_names.host_note(host.host)
    return f"{where}: run `recckpt near clear {path}` there; if that host is gone with them, remove {note}"


def _cleared(dirs: list[NearDir], path: str) -> CommandResult:
    cleared = [(each.place, clear(each)) for each in dirs]
    removed = [f"{place}/{name}" for place, each in cleared for name in each.removed]
    noted = [each.url for _, each in cleared if each.is_noted]
    failed = {each.url: one_line(str(each.problem)) for _, each in cleared if each.problem is not None}
    lines: list[Line] = [f"{path}: {plural(len(removed), 'near save')} removed{_why(path)}"]
    lines += [f"{one_line(url)}: noted that nothing which was forgotten is on this host" for url in noted if url]
    lines += [f"{one_line(url)}: not noted there: {why}" for url, why in failed.items() if url]
    return CommandResult({"removed": removed, "noted": noted, "not_noted": failed}, lines)


def _row(near: NearHere) -> tuple[str, ...]:
    save, record = near.save, near.save.manifest
    return (
        record.save_id,
        "-" if record.step is None else str(record.step),
        escaped(record.time),
        count(_n_changed(save)),
        size(record.n_bytes),
        "all" if near.n_here == near.n_shards else f"{near.n_here} of {plural(near.n_shards, 'shard')}",
        "-" if record.parent is None else escaped(record.parent.ckpt_id),
    )


def _n_changed(save: Checkpoint) -> int:
    return sum(table.own_rows for table in save.manifest.tables)
