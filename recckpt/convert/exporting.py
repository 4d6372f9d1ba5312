"""``recckpt.convert.export_checkpoint``: writes tables and tensors of a checkpoint in another program's format."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recckpt.checkpoint.chain import OpenChain
from recckpt.convert.formats import HOLD_TENSORS, TARGETS, format_module
from recckpt.convert.skip_damaged import Skipped, WholeRows, problem_of, whole_tensors
from recckpt.convert.source import LeftOut, no_such_table
from recckpt.convert.target_files import FORMAT, RECORDS, TargetFiles
from recckpt.convert.view import DTYPES, Batches, Export, TableView
from recckpt.errors import ConversionError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.tables import TableEntry
from recckpt.output_dir.at_path import counted_back, locate_damaged, locate_path
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import first_whole
from recckpt.policies.row_filter import RowFilter, parse_row_filter
from recckpt.storage import Storage, lost_is_damage, open_parent
from recckpt.text import Progress, nearest
from recckpt.types import EMBEDDING


@dataclass(frozen=True)
class Exported:
    """What :func:`export_checkpoint` wrote.

    Attributes:
        ckpt_id: id of the checkpoint.
        target: path or URL of the export.
        format: name of the format.
        metadata: description in the target: rows and slots of each table, and the largest error of narrowed vectors.
        left_out: what the format cannot store.
        n_bytes: size of the written files.
        skipped: with ``skip_damaged``: what is missing because its file, or a newer link, is damaged.
    """

    ckpt_id: str
    target: str
    format: str
    metadata: Mapping[str, Any]
    left_out: tuple[LeftOut, ...]
    n_bytes: int
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class _Choice:
    tables: Collection[str] | None
    slots: Collection[str] | None
    where: RowFilter
    dtype: str | None
    since: str | None
    all_slots: bool  # whether to export all slots, if ``slots`` is None


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
    skip_damaged: bool = False,
) -> Exported:
    """Write tables and tensors of a checkpoint in another format; see docs/convert.md.

    Every byte that is read is checked. After an error no part of the target is left.

    Args:
        checkpoint: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.
        target: path to write, which must not exist; any fsspec URL.
        to: a name of ``recckpt.convert.TARGETS``.
        tables: export only these tables; None for all.
        slots: columns to export beside the ids; None for the format's default: ``embedding`` in formats for
            serving, else all; with ``skip_damaged`` always all.
        where: a filter of rows, as in a load_conf.
        dtype: ``float16`` or ``bfloat16`` for the vectors, and for float dense tensors if the format stores dense
            tensors; ``int8`` for the vectors only. The metadata states the largest error of the vectors.
        since: id or path of this checkpoint or of a link in its chain: write only the rows changed, and the ids
            deleted, since that checkpoint.
        skip_damaged: omit what is damaged and list it in ``skipped`` and in the metadata. The newest checkpoint of
            an output dir is exported even if it is damaged. Each exported row has its value in the checkpoint: if a
            link of a delta lost rows, rows of older links in the same buckets are omitted, too, because they may be
            out of date.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: as for CheckpointReader; with
            ``skip_damaged``, only if the manifest is damaged or too new.
        ConversionError: the target cannot store what was requested, or there is no such table or slot.
        FileExistsError: the target exists.
        OSError: a storage failed.
    """
    module, path, url = format_module("to", to, TARGETS), os.fspath(checkpoint), os.fspath(target)
    rows = RowFilter() if where is None else parse_row_filter(where)
    choice = _Choice(tables, slots, rows, dtype, since, all_slots=skip_damaged or module.ALL_SLOTS)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
    if since is not None and skip_damaged:
        expected = "only one of the two: an increment needs all changes"
        raise ConversionError(url, "since", found="since with skip_damaged", expected=expected)
    if since is not None and (where is not None or not module.INCREMENTS):
        found = f"since with {to if where is None else 'where'}"
        raise ConversionError(url, "since", found=found, expected="an export of all changed rows, to parquet or npy")
    if dtype is not None and dtype not in module.DTYPES:
        found, expected = f"{dtype} for {to}, which does not have it", ", ".join(module.DTYPES) or "none"
        raise ConversionError(url, "dtype", found=found, expected=expected)

    def write(located: tuple[Storage, Checkpoint, list[CorruptCheckpointError]]) -> Exported:
        storage, found, passed_over = located
        skipped = [Skipped(each.path, f"{problem_of(each)}: this checkpoint may be newer") for each in passed_over]
        with TargetFiles(url) as files:
            with_tensors = to in HOLD_TENSORS
            if skip_damaged:
                export = _opened_damaged(storage, found, choice, skipped, with_tensors=with_tensors)
            else:
                export = _opened(storage, found, choice)
            _check_narrowed(export, found.directory, with_tensors=with_tensors)
            n_bytes = sum((t.n_stored or 0) * (8 + sum(s.row_bytes for s in t.stored)) for t in export.tables)
            with Progress(f"exporting {found.ckpt_id}", n_bytes) as progress:
                # No target has rows or slots that the saved tables lack.
                reduced = ((view.name, found.manifest.named_table(view.name).reduced) for view in export.tables)
                left = [LeftOut(f"table {name}", f"was saved {each}") for name, each in reduced if each and str(each)]
                left += module.write(export, files, progress)
                if to in RECORDS:
                    files.put_json(export.metadata(), RECORDS[to])
            left += _states_left(found, export, skipped, with_states=to == "recis")
        return Exported(found.ckpt_id, url, to, export.metadata(), tuple(left), files.n_bytes, tuple(skipped))

    return first_whole(lambda: locate_damaged(path) if skip_damaged else (*locate_path(path), []), write)


def _opened(storage: Storage, checkpoint: Checkpoint, choice: _Choice) -> Export:
    chosen, chain = _chosen(checkpoint, choice), OpenChain.open(storage, checkpoint)
    metadata, n_newer, views = _metadata(storage, checkpoint), None, []
    if choice.since is not None:
        n_newer = _links_since(storage, checkpoint, choice.since)
        base, names = checkpoint.links[n_newer].manifest, {table.name for table in checkpoint.manifest.tables}
        gone = [table.name for table in base.tables if table.name not in names]
        metadata |= {"since": base.ckpt_id, "dropped_tables": gone}
    for table in chosen:
        reader = (chain if n_newer is None else chain.newest(n_newer)).table(table.name, [s.name for s in table.slots])
        if n_newer is None:
            views.append(_view(table, choice, table.rows, reader.all_rows))
        else:
            replaced = any(link.entry.is_whole for link in reader.links)
            view = _view(table, choice, None, reader.upserts)
            views.append(replace(view, replaced=replaced, deletes=reader.deletes))
    return Export(views, chain.tensors, choice.dtype, metadata, len(checkpoint.manifest.shards), chain.state)


def _opened_damaged(
    storage: Storage, checkpoint: Checkpoint, choice: _Choice, skipped: list[Skipped], *, with_tensors: bool
) -> Export:
    """Open the undamaged tables and tensors; add the damaged ones to ``skipped``."""
    chosen, chain, views = _chosen(checkpoint, choice), OpenChain.of(storage, checkpoint), []
    for table in chosen:
        rows = WholeRows(storage, checkpoint, table.name)
        skipped += rows.skipped
        views.append(_view(table, choice, rows.n_rows, rows.batches))
    tensors = whole_tensors(chain.files, checkpoint, skipped, read=with_tensors)
    metadata = _metadata(storage, checkpoint) | {"skipped": [asdict(each) for each in skipped]}

    def load_whole(name: str) -> dict[str, Any]:  # {} if the file is damaged
        try:
            with lost_is_damage(layout.join(checkpoint.directory, name)):
                return chain.state(name, is_mapped=False)
        except CorruptCheckpointError as error:
            skipped.append(Skipped(error.path, error.found))
            return {}

    return Export(views, tensors, choice.dtype, metadata, len(checkpoint.manifest.shards), load_whole)


def _metadata(storage: Storage, checkpoint: Checkpoint) -> dict[str, Any]:
    manifest, url = checkpoint.manifest, storage.url_of(checkpoint.directory)
    return {"format": FORMAT, "checkpoint": manifest.ckpt_id, "step": manifest.step, "source": url}


def _chosen(checkpoint: Checkpoint, choice: _Choice) -> list[TableEntry]:
    """Return the requested tables; ConversionError if one does not exist."""
    names = [table.name for table in checkpoint.manifest.tables]
    for name in choice.tables or ():
        if name not in names:
            raise no_such_table(checkpoint.directory, name, names)
    return [table for table in checkpoint.manifest.tables if choice.tables is None or table.name in choice.tables]


def _view(table: TableEntry, choice: _Choice, n_rows: int | None, batches: Batches) -> TableView:
    slots, path = {slot.name: slot for slot in table.slots}, f"table {table.name!r}"
    for name in choice.slots or ():
        if name not in slots:
            found, expected, remedy = f"no slot {name!r}", f"one of {[*slots]}", nearest(name, [*slots]).strip("; ")
            raise ConversionError(path, "", found=found, expected=expected, remedy=remedy)
    filtered = {name: slots[name] for name in choice.where.slots if name in slots and math.prod(slots[name].shape) == 1}
    if filtered.keys() != choice.where.slots:
        missing = sorted(choice.where.slots - filtered.keys())
        found, expected = f"not one number per row in {missing}", "slots of one number per row"
        raise ConversionError(path, "where", found=found, expected=expected)
    by_default = slots.keys() if choice.all_slots else {EMBEDDING}
    asked = by_default if choice.slots is None else choice.slots
    stored = tuple(slot for name, slot in slots.items() if name in asked)
    return TableView(table.name, stored, n_rows, batches, choice.where, choice.dtype, filtered)


def _check_narrowed(export: Export, path: str, *, with_tensors: bool) -> None:
    """Raise ConversionError if a dtype changes nothing, or would give a table two slots of one name."""
    views, dtype = export.tables, export.dtype
    for view in views:
        names = [slot.name for slot in view.slots]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            found = f"a slot {twice[0]!r}, the name that {dtype} vectors need for a slot of their own"
            remedy = "leave that slot out, or take another dtype"
            raise ConversionError(f"table {view.name!r}", "dtype", found=found, expected="another name", remedy=remedy)
    vectors = {(v.name, slot.dtype) for v in views for slot in v.slots if slot.name == EMBEDDING}
    are_dense = with_tensors and any(each.dtype != export.tensors.model[each.name].dtype for each in export.dense())
    if dtype is not None and not are_dense and all(each != dtype for _, each in vectors):
        there = ", ".join(f"{each} in {name!r}" for name, each in sorted(vectors))
        found, expected = there or f"no slot {EMBEDDING!r}", f"floats in slot {EMBEDDING!r}, which become {dtype}"
        raise ConversionError(path, "dtype", found=found, expected=expected, remedy="export without a dtype")


def _states_left(
    checkpoint: Checkpoint, export: Export, skipped: Sequence[Skipped], *, with_states: bool
) -> list[LeftOut]:
    """List registered objects, positions and plain values, for a format that cannot hold them."""
    names = checkpoint.manifest.names
    lost = [*names.extra_of_ranks]
    if not with_states:
        damaged = {each.tensor for each in skipped if each.tensor}
        plain = (name for name in names.dense if name not in export.tensors.model and name not in damaged)
        lost += [*names.extra, *names.io_state, *plain]
    return [LeftOut(name, "is state, not a tensor or row; it stays in the checkpoint") for name in lost]


def _links_since(storage: Storage, checkpoint: Checkpoint, since: str) -> int:
    """Return the number of links newer than the link with this id or path; ConversionError if the chain lacks it."""
    around, name = open_parent(since) if "/" in since else (storage, since)
    ours, theirs = (each.url if "://" in each.url else os.path.realpath(each.url) for each in (storage, around))
    for number, link in enumerate(checkpoint.links):
        if since in (link.ckpt_id, link.directory) or ("/" in since and ours == theirs and name == link.directory):
            return number
    meant = counted_back(storage, name) if ours == theirs else None  # for latest~N
    for number, link in enumerate(checkpoint.links):
        if meant is not None and link.manifest.name == meant.manifest.name:
            return number
    found = f"{since!r}, which is not in the chain of {checkpoint.ckpt_id!r}"
    below = ", ".join(link.ckpt_id for link in checkpoint.below)
    expected = f"one of {below}" if below else "a checkpoint of its chain, which has no other, because it is full"
    remedy = "export all of it, or save with Saver(deltas=True)"
    raise ConversionError(checkpoint.directory, "since", found=found, expected=expected, remedy=remedy)
