"""``recckpt.convert.import_checkpoint``: what other programs saved, as a checkpoint of an output dir."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recckpt.checkpoint.new_checkpoint import commit_new
from recckpt.convert.formats import open_source
from recckpt.convert.new_checkpoint import NewCheckpoint, write_new
from recckpt.convert.row_checks import check_table, checked
from recckpt.convert.row_runs import RowRuns
from recckpt.convert.source import ImportOptions, ImportSource, LeftOut, SourceContents, SourceTable
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import CheckpointExistsError, ConversionError
from recckpt.format import layout
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse.files.part_plan import row_bytes
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import WorkDir
from recckpt.text import Progress, first_few, nearest
from recckpt.types import positive_int

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class ImportPlan:
    """What an import does, or has done.

    Attributes:
        source: where from.
        ckpt_id: of the checkpoint.
        step: of the checkpoint.
        contents: what goes into it, and what does not.
        directory: of the checkpoint in the output dir, "" as long as it is only planned.
        rows: rows of each table once they are read; before, as the source says, which is at least as many.
        n_bytes: of its files.
    """

    source: str
    ckpt_id: str
    step: int
    contents: SourceContents
    directory: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    n_bytes: int = 0


def import_checkpoint(
    source: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    format: str | None = None,
    tables: Collection[str] | None = None,
    options: ImportOptions | None = None,
    model: nn.Module | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    step: int | None = None,
    dry_run: bool = False,
    work_dir: str | os.PathLike[str] | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> ImportPlan:
    """Read what another program saved, and commit it as a full checkpoint; see docs/convert.md.

    Everything is read and checked before anything is written to the output dir, which is then taken over from whoever
    writes there. Memory is about ``budget_bytes`` and the largest dense tensor; rows wait in a file of the work dir.

    Args:
        source: a file or a directory; a path or any fsspec URL.
        output_dir: an output dir, new or not; any fsspec URL.
        format: a name of ``recckpt.convert.FORMATS``; None to look at the files.
        tables: only these tables, by their names in the checkpoint; None for all. Dense state comes along either way.
        options: what the source does not say itself.
        model: of a file of ``torch.save``: the model whose parameters the optimizers in it have, or one with tables in
            place of embeddings; the moments of both go to their parameters and rows by its names. Not needed where the
            file names them, or where they are in the order of its tensors.
        optimizers: live optimizers, by the names of their states in that file, where an optimizer has some of the
            parameters, or others than all in order; a sparse optimizer gives the names of the slots.
        step: the step of the checkpoint; None for the source's, or 0.
        dry_run: read no rows and write nothing.
        work_dir: where rows wait; None for the output dir where it is local, else the system's directory of temporary
            files.
        budget_bytes: memory for rows.

    Raises:
        CheckpointExistsError: the output dir has a checkpoint of this step.
        ConversionError: the source is damaged, or holds what a checkpoint cannot; nothing was written.
        OSError: a storage failed; nothing is committed.
        RecckptError: ids are yet to be forgotten in the output dir.
    """
    positive_int("budget_bytes", budget_bytes)
    url = os.fspath(output_dir)
    wishes = options or ImportOptions()
    if model is not None or optimizers:
        wishes = replace(wishes, model=model, optimizers=_checked_optimizers(optimizers or {}))
    with _opened(source, format, wishes) as opened:
        plan = _planned(opened.contents, os.fspath(source), tables, step)
        storage = open_storage(url)
        check_none_pending(storage, FORGET_FIRST)
        if list_checkpoints(storage).find(plan.ckpt_id):
            remedy = "give the import another step"
            raise CheckpointExistsError(f"{storage.url}: checkpoint {plan.ckpt_id!r} is committed already; {remedy}")
        if dry_run:
            return plan
        waiting = WorkDir(os.fspath(work_dir) if work_dir is not None else _near(url))
        return _imported(opened, plan, storage, waiting, budget_bytes)


def _checked_optimizers(optimizers: Any) -> Mapping[str, Any]:
    if not isinstance(optimizers, Mapping) or not all(hasattr(one, "param_groups") for one in optimizers.values()):
        raise TypeError(f"optimizers: found {optimizers!r:.100}, expected a dict, name in the file -> optimizer")
    return optimizers


def _planned(contents: SourceContents, source: str, tables: Collection[str] | None, step: int | None) -> ImportPlan:
    contents = _chosen(contents, tables, source)
    step = next(number for number in (step, contents.step, 0) if number is not None)
    if type(step) is not int or step < 0:
        raise ConversionError(source, "step", found=f"{step!r}", expected="an int of 0 or more")
    rows = {table.name: table.n_rows for table in contents.tables}
    return ImportPlan(source, layout.step_id(step), step, contents, rows=rows)


def _imported(
    source: ImportSource, plan: ImportPlan, storage: Storage, waiting: WorkDir, budget_bytes: int
) -> ImportPlan:
    """Read all rows, in order, then write and commit; return the plan with what it has come to."""
    contents = plan.contents
    n_bytes = sum(table.n_rows * (table.row_bytes + row_bytes(table.slots)) for table in contents.tables)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"importing {plan.source}", n_bytes))
        runs = [stack.enter_context(_read(source, t, waiting, budget_bytes, progress)) for t in contents.tables]
        progress.n_rows = sum(each.n_rows for each in runs)
        state = {"imported_from": plan.source, "imported_format": contents.format}
        write = partial(write_new, new=NewCheckpoint(runs, contents, state), advance=progress.advance)
        directory, record = commit_new(storage, plan.ckpt_id, plan.step, write)
    rows = {table.name: table.rows for table in record.tables}
    return replace(plan, directory=directory, rows=rows, n_bytes=record.n_bytes)


@contextmanager
def _opened(source: str | os.PathLike[str], format: str | None, options: ImportOptions) -> Iterator[ImportSource]:
    opened = open_source(SourceFiles(source), format, options)
    try:
        yield opened
    finally:
        opened.close()


def _chosen(contents: SourceContents, tables: Collection[str] | None, source: str) -> SourceContents:
    """Return the contents with only these tables, whose names a checkpoint can have."""
    there = [table.name for table in contents.tables]
    for name in tables or ():
        if name not in there:
            remedy = nearest(name, there).strip("; ")
            raise ConversionError(
                source, "", found=f"no table {name!r}", expected=f"one of {first_few(there, 20)}", remedy=remedy
            )
    chosen = tuple(table for table in contents.tables if tables is None or table.name in tables)
    for table in chosen:
        check_table(table, source)
    if len(set(there)) < len(there):
        raise ConversionError(source, "", found=f"tables {there}", expected="each name once")
    left = tuple(
        LeftOut(f"table {name}", "not asked for") for name in there if tables is not None and name not in tables
    )
    return replace(contents, tables=chosen, left_out=(*contents.left_out, *left))


@contextmanager
def _read(
    source: ImportSource, table: SourceTable, waiting: WorkDir, budget_bytes: int, progress: Progress
) -> Iterator[RowRuns]:
    """Read all rows of a table into files of the work dir, in order."""
    runs = RowRuns(table, max(1, budget_bytes // 4), waiting.new_file)
    try:
        for rows in source.rows(table):
            runs.add(checked(rows, table))
            progress.advance(len(rows.ids) * table.row_bytes)
        runs.finish()
        if table.is_exact and runs.n_rows != table.n_rows:
            found, expected = f"{runs.n_rows} rows", f"{table.n_rows}, as the source says"
            raise ConversionError(f"table {table.name!r}", "", found=found, expected=expected)
        yield runs
    finally:
        runs.close()


def _near(url: str) -> str:
    """Return a directory of this host, on the disk of the output dir where that is local."""
    if "://" in url and not url.startswith(("file://", "local://")):
        return tempfile.gettempdir()
    path = Path(url.split("://", 1)[-1]).expanduser().absolute()
    return str(next(each for each in (path, *path.parents) if each.is_dir()))
