"""``recckpt show``: what a checkpoint holds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recckpt.checkpoint.chain import OpenChain
from recckpt.cli.result import CommandResult, usage_checked
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.format.reduced import descriptions_of, reduced_json
from recckpt.format.tables import DeltaRows, LiveLayout, TableEntry, live_json
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.first_whole import first_whole
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.catalogs import read_parts
from recckpt.storage import Storage
from recckpt.text import Line, Table, cell, count, escaped, one_line, pairs, plural, section, size
from recckpt.types import SlotSpec


def show(args: argparse.Namespace) -> CommandResult:
    """Show the manifest, and the names, dtypes and shapes of the dense tensors."""

    def find() -> tuple[Storage, Checkpoint]:
        with usage_checked():
            return locate_path(args.checkpoint)

    storage, checkpoint, tensors, problems = first_whole(find, _with_tensors)
    url, manifest = storage.url_of(checkpoint.directory), checkpoint.manifest
    data, lines = _data(url, checkpoint, tensors), _lines(url, checkpoint, tensors)
    if args.files:
        data["files"] = [_file_data(file) for file in manifest.files]
        lines += section("files", _file_lines(manifest))
        try:
            files = _files_of_tables(storage, checkpoint)
        except (CorruptCheckpointError, CheckpointRemovedError, FormatVersionError) as error:
            return CommandResult(data, lines, [*problems, str(error)])
        for table in data["tables"]:
            table["files"] = files[table["name"]]
        lines += section("files of tables", _table_lines(files))
    return CommandResult(data, lines, problems)


def _with_tensors(found: tuple[Storage, Checkpoint]) -> tuple[Storage, Checkpoint, list[dict[str, Any]], list[str]]:
    storage, checkpoint = found
    try:
        return storage, checkpoint, _tensors(storage, checkpoint), []
    except CorruptCheckpointError as error:
        return storage, checkpoint, [], [str(error)]


def _tensors(storage: Storage, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Describe the dense tensors; without CheckpointReader, since importing Arrow takes as long as all of this."""
    chain = OpenChain.of(storage, checkpoint)
    chain.files.keep_open(file.name for file in checkpoint.manifest.files if layout.has_tensors(file.name))
    return [
        {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
        for name, tensor in chain.tensors.model.items()
    ]


def _data(url: str, checkpoint: Checkpoint, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "id": manifest.ckpt_id,
        "url": url,
        "step": manifest.step,
        "time": manifest.time,
        "kind": manifest.kind,
        "form_of": None if manifest.form_of is None else manifest.form_of.save_id,
        "links": [_link_data(link) for link in checkpoint.links],
        "save_id": manifest.save_id,
        "epoch": manifest.epoch,
        "seq": manifest.seq,
        "shards": len(manifest.shards),
        "rows": manifest.rows,
        "bytes": manifest.n_bytes,
        "flags": {"ephemeral": manifest.ephemeral},
        "writer": dict(manifest.writer),
        "state": dict(manifest.state),
        "tables": [_table_data(table) for table in manifest.tables],
        "tensors": tensors,
        "registered": _registered(manifest),
        "lacks": manifest.training.unsaved.descriptions,
        "positions": list(manifest.names.io_state),
    }


def _table_data(table: TableEntry) -> dict[str, Any]:
    slots = [{"name": slot.name, "dtype": slot.dtype, "shape": list(slot.shape)} for slot in table.slots]
    data = {"name": table.name, "rows": table.rows, "bytes": table.rows * table.row_bytes, "slots": slots}
    data |= {} if table.delta is None else {"delta": asdict(table.delta)}
    data |= {} if table.live is None else {"live": live_json(table.live)}
    return data if table.reduced is None else {**data, "reduced": reduced_json(table.reduced)}


def _link_data(link: Checkpoint) -> dict[str, Any]:
    manifest = link.manifest
    kind = {"id": manifest.ckpt_id, "directory": link.directory, "kind": manifest.kind, "save_id": manifest.save_id}
    return {**kind, "step": manifest.step, "bytes": manifest.n_bytes}


def _lines(url: str, checkpoint: Checkpoint, tensors: list[dict[str, Any]]) -> list[Line]:
    manifest = checkpoint.manifest
    flags = ["ephemeral"] if manifest.ephemeral else []
    dense = [(escaped(t["name"]), t["dtype"], str(tuple(t["shape"])), size(t["bytes"])) for t in tensors]
    state = [(escaped(name), one_line(cell(value))) for name, value in manifest.state.items()]
    lines: list[Line] = list(
        pairs(
            [
                ("checkpoint", escaped(manifest.ckpt_id)),
                ("url", url),
                *_kind(manifest),
                ("step", "-" if manifest.step is None else str(manifest.step)),
                ("time", escaped(manifest.time)),
                ("size", f"{size(manifest.n_bytes)} in {plural(len(manifest.files), 'file')}"),
                ("rows", f"{count(manifest.rows)} in {plural(len(manifest.tables), 'table')}"),
                ("shards", count(len(manifest.shards))),
                ("written by", one_line(", ".join(f"{name} {version}" for name, version in manifest.writer.items()))),
                *([("flags", ", ".join(flags))] if flags else []),
            ]
        )
    )
    lines += section("links", _link_lines(checkpoint.links) if checkpoint.below else [])
    lines += section("tables", _lines_of_tables(manifest) if manifest.tables else [])
    reduced = {table.name: table.reduced for table in manifest.tables if table.reduced is not None}
    lines += section("not as they were", [one_line(text) for text in descriptions_of(reduced)])
    lines += section("dense tensors", [Table(("NAME", "DTYPE", "SHAPE", "SIZE"), dense, ("SIZE",))] if dense else [])
    lines += section("registered objects", _lines_of_registered(manifest))
    lines += section("lacks", [one_line(text) for text in manifest.training.unsaved.descriptions])
    return lines + section("training state", pairs(state))


def _registered(manifest: Manifest) -> list[dict[str, Any]]:
    """Describe the registered objects: of which each rank has a state, and the class and parameters of optimizers."""
    names, classes = manifest.names, manifest.training.optimizers
    parameters = [name.rpartition("@")[2] for name in names.dense_opt]
    of_ranks = [(name, True) for name in names.extra_of_ranks]
    return [
        {
            "name": name,
            "per_rank": per_rank,
            "class": classes.get(name, (None,))[0],
            "parameters": parameters.count(name),
        }
        for name, per_rank in [*((name, False) for name in names.extra), *of_ranks]
    ]


def _lines_of_registered(manifest: Manifest) -> list[Line]:
    """Return a table of the registered objects, and of the positions in the data, which are registered too."""
    rows = []
    for entry in _registered(manifest):
        parts = ["one state a rank"] if entry["per_rank"] else []
        parts += [escaped(entry["class"])] if entry["class"] else []
        parts += [f"state of {plural(entry['parameters'], 'parameter')}"] if entry["parameters"] else []
        rows.append((escaped(entry["name"]), ", ".join(parts)))
    rows += [(escaped(name), "position in the data") for name in manifest.names.io_state]
    return [Table(("NAME", "WHAT"), rows)] if rows else []


def _kind(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what is said of a delta or form, nothing of other full checkpoints."""
    if manifest.parent is not None:
        return [("kind", f"delta on {escaped(manifest.parent.ckpt_id)}")]
    return [] if manifest.form_of is None else [("kind", "full, made of a delta and what it stood on")]


def _link_lines(links: Sequence[Checkpoint]) -> list[Line]:
    """Return a table of what a delta is read from."""
    rows = []
    for link in links:
        manifest = link.manifest
        n_rows = sum(table.own_rows for table in manifest.tables)
        rows.append((f"{escaped(link.directory)}/", manifest.kind, count(n_rows), size(manifest.n_bytes)))
    return [Table(("DIRECTORY", "KIND", "ROWS", "SIZE"), rows, ("ROWS", "SIZE"))]


def _lines_of_tables(manifest: Manifest) -> list[Line]:
    """Return a table of the tables; in a delta with what it holds of each."""
    head, rows = ["NAME", "ROWS", "SIZE"], []
    has_live = any(table.live for table in manifest.tables)
    for table in manifest.tables:
        row = [escaped(table.name), count(table.rows), size(table.rows * table.row_bytes)]
        row += [] if table.delta is None else [_of_delta(table.delta)]
        row += [_of_live(table.live)] if has_live else []
        rows.append([*row, ", ".join(map(_slot, table.slots))])
    head += ["IN THIS DELTA"] if manifest.kind == "delta" else []
    head += ["IN MEMORY"] if has_live else []
    return [Table([*head, "SLOTS"], rows, ("ROWS", "SIZE"))]


def _of_delta(delta: DeltaRows) -> str:
    """Say what a delta holds of a table; one that keeps no marks, such as one of the user's own, is whole in each."""
    return "all rows" if delta.replaced else f"{plural(delta.upserts, 'row')}, {plural(delta.deletes, 'delete')}"


def _of_live(live: LiveLayout | None) -> str:
    """Say how a table lay in memory of another library."""
    return "-" if live is None else f"live, {plural(live.n_rows, 'row')}"


def _slot(slot: SlotSpec) -> str:
    return f"{escaped(slot.name)} {slot.dtype}{list(slot.shape) if slot.shape else ''}"


def _files_of_tables(storage: Storage, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return table -> the files that have rows of it, by the catalogs."""
    files: dict[str, list[str]] = {table.name: [] for table in checkpoint.manifest.tables}
    for part in read_parts(checkpoint, storage):
        for name in dict.fromkeys(batch.table for batch in part.batches):
            files[name].append(part.file)
    return files


def _file_data(file: FileEntry) -> dict[str, Any]:
    """Return what JSON says of a file."""
    return {"name": file.name, "bytes": file.n_bytes, "xxh3": None if file.xxh3 is None else f"{file.xxh3:016x}"}


def _file_lines(manifest: Manifest) -> list[Line]:
    """Return a table of the files."""
    rows = [(escaped(f.name), size(f.n_bytes), "-" if f.xxh3 is None else f"{f.xxh3:016x}") for f in manifest.files]
    return [Table(("NAME", "SIZE", "XXH3"), rows, ("SIZE",))]


def _table_lines(files: Mapping[str, Sequence[str]]) -> list[Line]:
    """Return where each table is: the one file, or a pattern for the files of its schema."""
    rows = []
    for name, names in files.items():
        patterns = dict.fromkeys(map(layout.pattern_of_parts, names)) if len(names) > 1 else names
        rows.append((escaped(name), str(len(names)), ", ".join(map(escaped, patterns)) or "-"))
    return [Table(("TABLE", "FILES", "NAMES"), rows, ("FILES",))] if rows else []
