"""``recckpt show``: the contents of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from recckpt.cli.arguments import A_CHECKPOINT, argument
from recckpt.cli.result import CommandResult, usage_checked
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.codec import plain
from recckpt.format.tables import TableEntry, descriptions_of
from recckpt.text import Line, Table, cell, count, escaped, one_line, pairs, plural, section, size

if TYPE_CHECKING:
    from recckpt.convert.reader import SourceReader
    from recckpt.format.manifest import Manifest
    from recckpt.output_dir.listing import Checkpoint
    from recckpt.storage import Storage
    from recckpt.types import SlotSpec

_UNCHECKED = "It has no checksums that recckpt could check: import it, so that verify can detect later damage."
_OF_TABLES = ("NAME", "ROWS", "SIZE", "SLOTS")
ARGUMENTS = {
    "show": (
        argument("--files", "also list the files, and the files of each table"),
        argument("checkpoint CKPT", A_CHECKPOINT),
    )
}


def run_show(args: argparse.Namespace) -> CommandResult:
    from recckpt.cli.others import source_at
    from recckpt.output_dir.at_path import locate_path
    from recckpt.output_dir.open_files import first_whole

    def find() -> tuple[Storage, Checkpoint]:
        with usage_checked():
            return locate_path(args.checkpoint)

    try:
        storage, checkpoint, tensors, problems = first_whole(find, _with_tensors)
    except CheckpointNotFoundError:
        if (source := source_at(args.checkpoint)) is None:
            raise
        return contents_of(source)
    url, manifest = storage.url_of(checkpoint.directory), checkpoint.manifest
    data, lines = _data(url, checkpoint, tensors), _lines(url, checkpoint, tensors)
    if args.files:
        xxh3 = {file.name: None if file.xxh3 is None else f"{file.xxh3:016x}" for file in manifest.files}
        data["files"] = [{"name": f.name, "bytes": f.n_bytes, "xxh3": xxh3[f.name]} for f in manifest.files]
        rows = [(escaped(f.name), size(f.n_bytes), xxh3[f.name] or "-") for f in manifest.files]
        lines += section("files", [Table(("NAME", "SIZE", "XXH3"), rows, ("SIZE",))])
        try:
            files = _files_of_tables(storage, checkpoint)
        except (CorruptCheckpointError, CheckpointRemovedError, FormatVersionError) as error:
            return CommandResult(data, lines, [*problems, str(error)])
        for table in data["tables"]:
            table["files"] = files[table["name"]]
        # The only file, or a pattern for the files with the same schema.
        places = []
        for name, of_table in files.items():
            patterns = dict.fromkeys(map(layout.pattern_of_parts, of_table)) if len(of_table) > 1 else of_table
            places.append((escaped(name), str(len(of_table)), ", ".join(map(escaped, patterns)) or "-"))
        lines += section("files of tables", [Table(("TABLE", "FILES", "NAMES"), places, ("FILES",))] if places else [])
    return CommandResult(data, lines, problems)


def contents_of(source: SourceReader) -> CommandResult:
    contents = source.contents
    tables = [_described(table.name, table.n_rows, table.row_bytes, table.slots) for table in contents.tables]
    tensors = [
        {"name": one.name, "dtype": one.dtype, "shape": list(one.shape), "bytes": one.nbytes} for one in contents.dense
    ]
    facts = {"url": source.path, "format": contents.format, "step": contents.step}
    left = [{"name": one.name, "reason": one.reason} for one in contents.left_out]
    of_tables = [(escaped(t["name"]), count(t["rows"]), size(t["bytes"]), _slots(t["slots"])) for t in tables]
    lines = list[Line](pairs([(name, "-" if value is None else escaped(str(value))) for name, value in facts.items()]))
    lines += [_UNCHECKED]
    lines += section("tables", [Table(_OF_TABLES, of_tables, ("ROWS", "SIZE"))] if tables else [])
    lines += section("dense tensors", _tensor_lines(tensors))
    lines += section("registered objects", [escaped(name) for name in contents.extra])
    lines += section("an import leaves out", [one_line(f"{one['name']}: {one['reason']}") for one in left])
    registered = [*contents.extra]
    return CommandResult(
        {**facts, "tables": tables, "tensors": tensors, "registered": registered, "left_out": left}, lines
    )


def _with_tensors(found: tuple[Storage, Checkpoint]) -> tuple[Storage, Checkpoint, list[dict[str, Any]], list[str]]:
    """Describe the dense tensors; avoids CheckpointReader, because importing Arrow takes longer than this command."""
    from recckpt.checkpoint.chain import OpenChain

    storage, checkpoint = found
    try:
        chain = OpenChain.of(storage, checkpoint)
        chain.files.keep_open(file.name for file in checkpoint.manifest.files if layout.has_tensors(file.name))
        tensors = [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
            for name, tensor in chain.tensors.model.items()
        ]
    except CorruptCheckpointError as error:
        return storage, checkpoint, [], [str(error)]
    return storage, checkpoint, tensors, []


def _data(url: str, checkpoint: Checkpoint, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    manifest, links = checkpoint.manifest, []
    for link in checkpoint.links:
        own = link.manifest
        entry = {"id": own.ckpt_id, "directory": link.directory, "kind": own.kind, "save_id": own.save_id}
        links.append({**entry, "step": own.step, "bytes": own.n_bytes})
    return {
        "id": manifest.ckpt_id,
        "url": url,
        "step": manifest.step,
        "time": manifest.time,
        "kind": manifest.kind,
        "supersedes": None if manifest.supersedes is None else plain(manifest.supersedes),
        "links": links,
        "save_id": manifest.save_id,
        "epoch": manifest.epoch,
        "seq": manifest.seq,
        "shards": len(manifest.shards),
        "rows": manifest.rows,
        "bytes": manifest.n_bytes,
        "flags": {"ephemeral": manifest.ephemeral},
        "writer": dict(manifest.writer),
        "state": dict(manifest.state),
        "tables": [_data_of_table(table) for table in manifest.tables],
        "tensors": tensors,
        "registered": _registered(manifest),
        "lacks": manifest.training.unsaved.descriptions,
        "positions": list(manifest.names.io_state),
    }


def _described(name: str, rows: int, row_bytes: int, slots: Iterable[SlotSpec]) -> dict[str, Any]:
    of_slots = [{"name": slot.name, "dtype": slot.dtype, "shape": list(slot.shape)} for slot in slots]
    return {"name": name, "rows": rows, "bytes": rows * row_bytes, "slots": of_slots}


def _data_of_table(table: TableEntry) -> dict[str, Any]:
    data = _described(table.name, table.rows, table.row_bytes, table.slots)
    more = {"delta": table.delta, "live": table.live, "reduced": table.reduced}
    return data | {key: plain(value) for key, value in more.items() if value is not None}


def _lines(url: str, checkpoint: Checkpoint, tensors: list[dict[str, Any]]) -> list[Line]:
    manifest, kind, links = checkpoint.manifest, list[tuple[str, str]](), list[Line]()
    if manifest.parent is not None:
        kind = [("kind", f"delta on {escaped(manifest.parent.ckpt_id)}")]
    elif manifest.is_compacted:
        kind = [("kind", "full, made from a delta and its bases")]
    head = [
        ("checkpoint", escaped(manifest.ckpt_id)),
        ("url", escaped(url)),
        *kind,
        ("step", "-" if manifest.step is None else str(manifest.step)),
        ("time", escaped(manifest.time)),
        ("size", f"{size(manifest.n_bytes)} in {plural(len(manifest.files), 'file')}"),
        ("rows", f"{count(manifest.rows)} in {plural(len(manifest.tables), 'table')}"),
        ("shards", count(len(manifest.shards))),
        ("written by", one_line(", ".join(f"{name} {version}" for name, version in manifest.writer.items()))),
        *([("flags", "ephemeral")] if manifest.ephemeral else []),
    ]
    if checkpoint.below:  # the base checkpoints of a delta
        own = ((link.directory, link.manifest) for link in checkpoint.links)
        rows = [(f"{escaped(d)}/", m.kind, count(sum(t.own_rows for t in m.tables)), size(m.n_bytes)) for d, m in own]
        links = [Table(("DIRECTORY", "KIND", "ROWS", "SIZE"), rows, ("ROWS", "SIZE"))]
    state = [(escaped(name), one_line(cell(value))) for name, value in manifest.state.items()]
    reduced = {table.name: table.reduced for table in manifest.tables if table.reduced is not None}
    lines: list[Line] = list(pairs(head))
    lines += section("links", links)
    lines += section("tables", _table_of_tables(manifest) if manifest.tables else [])
    lines += section("reduced tables", [one_line(text) for text in descriptions_of(reduced)])
    lines += section("dense tensors", _tensor_lines(tensors))
    lines += section("registered objects", _table_of_registered(manifest))
    lines += section("lacks", [one_line(text) for text in manifest.training.unsaved.descriptions])
    return lines + section("training state", pairs(state))


def _tensor_lines(tensors: Iterable[Mapping[str, Any]]) -> list[Line]:
    rows = [(escaped(t["name"]), t["dtype"], str(tuple(t["shape"])), size(t["bytes"])) for t in tensors]
    return [Table(("NAME", "DTYPE", "SHAPE", "SIZE"), rows, ("SIZE",))] if rows else []


def _slots(slots: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"{escaped(one['name'])} {one['dtype']}{one['shape'] or ''}" for one in slots)


def _registered(manifest: Manifest) -> list[dict[str, Any]]:
    names, classes = manifest.names, manifest.training.optimizers
    parameters = [name.rpartition("@")[2] for name in names.dense_opt]
    objects = [*((name, False) for name in names.extra), *((name, True) for name in names.extra_of_ranks)]
    return [
        {
            "name": name,
            "per_rank": per_rank,
            "class": classes.get(name, (None,))[0],
            "parameters": parameters.count(name),
        }
        for name, per_rank in objects
    ]


def _table_of_registered(manifest: Manifest) -> list[Line]:
    rows = []
    for entry in _registered(manifest):
        parts = ["one state per rank"] if entry["per_rank"] else []
        parts += [escaped(entry["class"])] if entry["class"] else []
        parts += [f"state of {plural(entry['parameters'], 'parameter')}"] if entry["parameters"] else []
        parts += ["optimizer of the tables"] if entry["name"] == layout.SPARSE_OPTIM else []
        rows.append((escaped(entry["name"]), ", ".join(parts)))
    rows += [(escaped(name), "position in the data") for name in manifest.names.io_state]
    return [Table(("NAME", "WHAT"), rows)] if rows else []


def _table_of_tables(manifest: Manifest) -> list[Line]:
    head, rows = ["NAME", "ROWS", "SIZE"], []
    has_live = any(table.live for table in manifest.tables)
    for table in manifest.tables:
        row, delta = [escaped(table.name), count(table.rows), size(table.rows * table.row_bytes)], table.delta
        if delta is not None:
            changed = f"{plural(delta.upserts, 'row')}, {plural(delta.deletes, 'delete')}"
            row.append("all rows" if delta.replaced else changed)
        if has_live:
            row.append("-" if table.live is None else f"live, {plural(table.live.n_rows, 'row')}")
        rows.append([*row, _slots(_data_of_table(table)["slots"])])
    head += ["IN THIS DELTA"] if manifest.kind == "delta" else []
    head += ["IN MEMORY"] if has_live else []
    return [Table([*head, "SLOTS"], rows, ("ROWS", "SIZE"))]


def _files_of_tables(storage: Storage, checkpoint: Checkpoint) -> dict[str, list[str]]:
    from recckpt.checkpoint.chain import OpenLink

    files: dict[str, list[str]] = {table.name: [] for table in checkpoint.manifest.tables}
    for part in (part for catalog in OpenLink.of(storage, checkpoint).catalogs for part in catalog.parts):
        for name in dict.fromkeys(batch.table for batch in part.batches):
            files[name].append(part.file)
    return files
