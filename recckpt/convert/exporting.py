"""``recckpt.convert.export_checkpoint``: tables and tensors of a checkpoint in the format of another program."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from recckpt.checkpoint.chain import OpenChain
from recckpt.convert.changed import deletes, links_since, upserts
from recckpt.convert.formats import target_module
from recckpt.convert.narrowed import DTYPES
from recckpt.convert.source import LeftOut
from recckpt.convert.target_files import TargetFiles
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format.tables import TableEntry
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.first_whole import first_whole
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.row_filter import RowFilter, parse_row_filter
from recckpt.storage import Storage
from recckpt.text import Progress, first_few, nearest
from recckpt.types import EMBEDDING


@dataclass(frozen=True)
class Exported:
    """What :func:`export_checkpoint` wrote.

    Attributes:
        ckpt_id: of the checkpoint.
        target: where to.
        format: which.
        metadata: what the target says of itself: rows and slots of each table, the largest error of narrowed vectors.
        left_out: what the target has no place for.
        n_bytes: of its files.
    """

    ckpt_id: str
    target: str
    format: str
    metadata: Mapping[str, Any]
    left_out: tuple[LeftOut, ...]
    n_bytes: int


@dataclass(frozen=True)
class _Choice:
    """What is asked for."""

    tables: Collection[str] | None
    slots: Collection[str] | None
    where: RowFilter = field(default_factory=RowFilter)
    dtype: str | None = None
    since: str | None = None


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    tables: Collection[str] | None = None,
    slots: Collection[str] | None = None,
    where: Any = None,
    dtype: str | None = None,
    since: str | None = None,
) -> Exported:
    """Write tables and tensors of a checkpoint, or of a chain, in another format; see docs/convert.md.

    Every byte that is read is checked. After an error nothing of the target is left.

    Args:
        checkpoint: a checkpoint, or an output dir, whose newest is meant; any fsspec URL.
        target: what to write, which must not exist; any fsspec URL.
        to: a name of ``recckpt.convert.TARGETS``.
        tables: only these; None for all.
        slots: beside the ids; None for what the format takes by itself, which is ``embedding`` where it is for serving.
        where: which rows, as in a load_conf.
        dtype: ``float16``, ``bfloat16`` or ``int8`` for the vectors; the largest error is in the metadata.
        since: a checkpoint that this one is or stands on, its id or path: only what has changed since, and what was
            deleted.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: as of CheckpointReader.
        ConversionError: the target cannot hold what is asked for, or there is no such table or slot.
        FileExistsError: the target exists.
        OSError: a storage failed.
    """
    module, path, url = target_module(to), os.fspath(checkpoint), os.fspath(target)
    choice = _Choice(tables, slots, RowFilter() if where is None else parse_row_filter(where), dtype, since)
    _check_target(module, to, url, choice, is_filtered=where is not None)

    def write(located: tuple[Storage, Checkpoint]) -> Exported:
        with TargetFiles(url) as files:
            export = _opened(*located, choice, module.ALL_SLOTS)
            n_bytes = sum((t.n_stored or 0) * (8 + sum(s.row_bytes for s in t.stored)) for t in export.tables)
            with Progress(f"exporting {located[1].ckpt_id}", n_bytes) as progress:
                left = [*_not_saved(located[1], export), *module.write(export, files, progress)]
            left += _states_left(located[1], export, with_states=to == "recis")
        return Exported(located[1].ckpt_id, url, to, export.metadata(), tuple(left), files.n_bytes)

    return first_whole(lambda: locate_path(path), write)


def _check_target(module: ModuleType, to: str, url: str, choice: _Choice, *, is_filtered: bool) -> None:
    """Raise ConversionError where a target cannot be written so, ValueError where the dtype is unknown."""
    if choice.dtype is not None and choice.dtype not in DTYPES:
        raise ValueError(f"dtype: found {choice.dtype!r}, expected one of {', '.join(DTYPES)}")
    if choice.since is not None and (is_filtered or not module.INCREMENTS):
        found = f"it beside {'where' if is_filtered else to}"
        raise ConversionError(url, "since", found=found, expected="all changed rows, to parquet or npy")
    if choice.dtype is not None and choice.dtype not in module.DTYPES:
        found, expected = f"{choice.dtype} for {to}, which does not have it", ", ".join(module.DTYPES) or "none"
        raise ConversionError(url, "dtype", found=found, expected=expected)


def _opened(storage: Storage, checkpoint: Checkpoint, choice: _Choice, all_slots: bool) -> Export:
    chain, manifest = OpenChain.open(storage, checkpoint), checkpoint.manifest
    names = [table.name for table in manifest.tables]
    for name in choice.tables or ():
        if name not in names:
            remedy = nearest(name, names).strip("; ")
            path, found = checkpoint.directory, f"no table {name!r}"
            raise ConversionError(path, "", found=found, expected=f"one of {first_few(names, 20)}", remedy=remedy)
    count = None if choice.since is None else links_since(storage, checkpoint, choice.since)
    chosen = [table for table in manifest.tables if choice.tables is None or table.name in choice.tables]
    newer = None if count is None else chain.newest(count)
    views = [_view(table, chain, newer, choice, all_slots) for table in chosen]
    _check_narrowed(views, choice.dtype, checkpoint.directory)
    metadata: dict[str, Any] = {"format": "recckpt-export", "checkpoint": manifest.ckpt_id, "step": manifest.step}
    metadata["source"] = storage.url_of(checkpoint.directory)
    if count is not None:
        base = checkpoint.links[count].manifest
        gone = [table.name for table in base.tables if table.name not in names]
        metadata |= {"since": base.ckpt_id, "dropped_tables": gone}
    return Export(views, chain.tensors, metadata, len(manifest.shards), chain.state)


def _check_narrowed(views: Sequence[TableView], dtype: str | None, path: str) -> None:
    """Raise ConversionError where a dtype changes nothing, or gives a table two slots of one name."""
    for view in views:
        names = [slot.name for slot in view.slots]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            found = f"a slot {twice[0]!r} already, which {dtype} vectors have beside them"
            remedy = "leave that slot out, or take another dtype"
            raise ConversionError(f"table {view.name!r}", "dtype", found=found, expected="another name", remedy=remedy)
    vectors = {(v.name, slot.dtype) for v in views for slot in v.slots if slot.name == EMBEDDING}
    if dtype is not None and all(each != dtype for _, each in vectors):
        there = ", ".join(f"{each} in {name!r}" for name, each in sorted(vectors))
        found, expected = there or f"no slot {EMBEDDING!r}", f"floats in slot {EMBEDDING!r}, which become {dtype}"
        raise ConversionError(path, "dtype", found=found, expected=expected, remedy="export without a dtype")


def _view(table: TableEntry, chain: OpenChain, newer: OpenChain | None, choice: _Choice, all_slots: bool) -> TableView:
    slots = {slot.name: slot for slot in table.slots}
    stored = [slots[name] for name in _asked(table, choice, all_slots)]
    filtered = {name: slots[name] for name in choice.where.slots if name in slots and math.prod(slots[name].shape) == 1}
    if filtered.keys() != choice.where.slots:
        missing = sorted(choice.where.slots - filtered.keys())
        found, expected = f"no number a row in {missing}", "slots of one number a row"
        raise ConversionError(f"table {table.name!r}", "where", found=found, expected=expected)
    if newer is None:
        read = chain.table(table.name, list(slots))
        return TableView(
            table.name,
            tuple(stored),
            table.rows,
            lambda names: read.with_slots(names).all_rows(),
            choice.where,
            choice.dtype,
            filtered,
        )
    changes = newer.table(table.name, list(slots))
    replaced = any(link.entry.is_whole for link in changes.links)
    return TableView(
        table.name,
        tuple(stored),
        None,
        lambda names: upserts(changes.with_slots(names).links),
        choice.where,
        choice.dtype,
        filtered,
        replaced,
        lambda: iter(()) if replaced else deletes(changes.with_slots(()).links),
    )


def _asked(table: TableEntry, choice: _Choice, all_slots: bool) -> list[str]:
    slots: list[str] = [slot.name for slot in table.slots]
    if choice.slots is None:
        return slots if all_slots else [EMBEDDING]
    for name in choice.slots:
        if name not in slots:
            where, remedy = f"table {table.name!r}", nearest(name, slots).strip("; ")
            raise ConversionError(where, "", found=f"no slot {name!r}", expected=f"one of {slots}", remedy=remedy)
    return [name for name in slots if name in choice.slots]


def _not_saved(checkpoint: Checkpoint, export: Export) -> list[LeftOut]:
    """List the tables that were not saved as they were: no target has what the checkpoint lacks."""
    reduced = {view.name: checkpoint.manifest.named_table(view.name).reduced for view in export.tables}
    return [
        LeftOut(f"table {name}", f"was saved {text}") for name, each in reduced.items() if each and (text := str(each))
    ]


def _states_left(checkpoint: Checkpoint, export: Export, *, with_states: bool) -> list[LeftOut]:
    """List registered objects, positions and plain values, for a target that has no place for them."""
    names = checkpoint.manifest.names
    lost = [*names.extra_of_ranks]
    if not with_states:
        plain = (name for name in names.dense if name not in export.tensors.model)
        lost += [*names.extra, *names.io_state, *plain]
    return [LeftOut(name, "is state that is no tensor and no row; it stays in the checkpoint") for name in lost]
