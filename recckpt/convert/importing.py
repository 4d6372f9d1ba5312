"""``recckpt.convert.import_checkpoint``: makes a checkpoint from files of other programs."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recckpt.checkpoint.attempt import Attempt, ShardWriter, commit_new, with_shards
from recckpt.convert.formats import open_source
from recckpt.convert.row_runs import RowRuns
from recckpt.convert.source import ImportOptions, ImportSource, LeftOut, SourceContents, no_such_table
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import CheckpointExistsError, ConversionError
from recckpt.format import layout
from recckpt.format.buckets import gen_slice
from recckpt.format.manifest import Content, Names, Training
from recckpt.format.tables import TableEntry
from recckpt.output_dir.commit import WRITER
from recckpt.output_dir.forget_requests import FORGET_FIRST, check_none_pending
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse.files.part_writer import row_bytes
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import WorkDir
from recckpt.text import Progress
from recckpt.types import positive_int

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

BUDGET_BYTES = 256 << 20


@dataclass(frozen=True)
class ImportPlan:
    """What an import would do, or has done.

    Attributes:
        source: path or URL of the source.
        ckpt_id: id of the checkpoint.
        step: step of the checkpoint.
        contents: what is imported, and what is omitted.
        directory: directory of the checkpoint in the output dir; "" if nothing was written.
        rows: table -> number of rows; before rows are read, an upper bound that the source states.
        n_bytes: bytes of the checkpoint's files.
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

    Reads and checks everything before it writes to the output dir. Then it takes over the output dir from any running
    writer. Needs memory for ``budget_bytes`` and the largest dense tensor; sorts rows in a temporary file in the work
    dir.

    Args:
        source: a file or a directory; a path or any fsspec URL.
        output_dir: an output dir, new or not; any fsspec URL.
        format: a name of ``recckpt.convert.SOURCES``; None to recognise the format by the files.
        tables: import only these tables, by their names in the checkpoint; None for all. Always imports dense state.
        options: facts that the source does not state.
        model: for a file of ``torch.save``: the model whose parameters the optimizers in the file train, or the same
            model with tables in place of embeddings. Its names assign the optimizer states to parameters and rows. Not
            needed if the file names the parameters, or if they are in the order of its tensors.
        optimizers: for a file of ``torch.save``: name of a state in the file -> the live optimizer. Needed if an
            optimizer trains only some of the parameters, or trains them in another order; a sparse optimizer determines
            the names of the slots.
        step: step of the checkpoint; None for the source's step, or 0 without one.
        dry_run: read no rows and write nothing.
        work_dir: directory for the temporary file of rows; None for the output dir if it is local, else the
            system's directory for temporary files.
        budget_bytes: memory for rows.

    Raises:
        CheckpointExistsError: the output dir has a checkpoint of this step.
        ConversionError: the source is damaged, or contains what a checkpoint cannot store; nothing was written.
        OSError: a storage failed; nothing was committed.
        RecckptError: a request to forget ids is unfinished in the output dir.
    """
    positive_int("budget_bytes", budget_bytes)
    url, wishes, live = os.fspath(output_dir), options or ImportOptions(), optimizers or {}
    if not isinstance(live, Mapping) or not all(hasattr(one, "param_groups") for one in live.values()):
        raise TypeError(f"optimizers: found {optimizers!r:.100}, expected a dict, name in the file -> optimizer")
    if model is not None or live:
        wishes = replace(wishes, model=model, optimizers=live)
    opened = open_source(SourceFiles(source), format, wishes)
    contents = _chosen(opened.contents, tables, os.fspath(source))
    step = next(number for number in (step, contents.step, 0) if number is not None)
    if type(step) is not int or step < 0:
        raise ConversionError(os.fspath(source), "step", found=f"{step!r}", expected="an int of 0 or more")
    rows = {table.name: table.n_rows for table in contents.tables}
    plan = ImportPlan(os.fspath(source), layout.step_id(step), step, contents, rows=rows)
    storage = open_storage(url)
    check_none_pending(storage, FORGET_FIRST)
    if list_checkpoints(storage).find(plan.ckpt_id):
        remedy = "give the import another step"
        raise CheckpointExistsError(f"{storage.url}: checkpoint {plan.ckpt_id!r} is committed already; {remedy}")
    if dry_run:
        return plan
    waiting = WorkDir(os.fspath(work_dir) if work_dir is not None else _near(url))
    return _imported(opened, plan, storage, waiting, budget_bytes)


def _chosen(contents: SourceContents, tables: Collection[str] | None, source: str) -> SourceContents:
    """Return the contents with only these tables; ConversionError for names that a checkpoint cannot have."""
    there = [table.name for table in contents.tables]
    for name in tables or ():
        if name not in there:
            raise no_such_table(source, name, there)
    chosen = tuple(table for table in contents.tables if tables is None or table.name in tables)
    for table in chosen:
        table.check(source)
    if len(set(there)) < len(there):
        raise ConversionError(source, "", found=f"tables {there}", expected="each name once")
    left = [LeftOut(f"table {name}", "not asked for") for name in there if tables is not None and name not in tables]
    return replace(contents, tables=chosen, left_out=(*contents.left_out, *left))


def _near(url: str) -> str:
    """Return a directory on this host; on the output dir's disk if that is local."""
    if "://" in url and not url.startswith(("file://", "local://")):
        return tempfile.gettempdir()
    path = Path(url.split("://", 1)[-1]).expanduser().absolute()
    return str(next(each for each in (path, *path.parents) if each.is_dir()))


def _imported(
    source: ImportSource, plan: ImportPlan, storage: Storage, waiting: WorkDir, budget_bytes: int
) -> ImportPlan:
    """Read all rows into bucket order, then write and commit; return the plan with its results."""
    tables = plan.contents.tables
    n_bytes = sum(table.n_rows * (table.row_bytes + row_bytes(table.slots)) for table in tables)
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(f"importing {plan.source}", n_bytes))
        all_runs = []
        for table in tables:
            runs = stack.enter_context(closing(RowRuns(table, max(1, budget_bytes // 4), waiting.new_file)))
            for rows in source.rows(table):
                with waiting.named_errors():
                    runs.add(rows.checked(table))
                progress.advance(len(rows.ids) * table.row_bytes)
            with waiting.named_errors():
                runs.finish()
            if runs.n_rows != table.n_rows:
                found, expected = f"{runs.n_rows} rows", f"{table.n_rows}, as the source says"
                raise ConversionError(f"table {table.name!r}", "", found=found, expected=expected)
            all_runs.append(runs)
        progress.n_rows = sum(runs.n_rows for runs in all_runs)
        write = partial(_write, plan=plan, tables=all_runs, advance=progress.advance)
        directory, record = commit_new(storage, plan.ckpt_id, plan.step, write)
    return replace(
        plan, directory=directory, rows={table.name: table.rows for table in record.tables}, n_bytes=record.n_bytes
    )


def _write(to: Attempt, plan: ImportPlan, tables: Sequence[RowRuns], advance: Callable[[int], object]) -> Content:
    """Write all files of a checkpoint and return its content.

    The checkpoint has one shard per position in the data, so that each resuming rank restores its own position.
    """
    records, rows, contents = [], Counter[str](), plan.contents
    n_shards = max(1, len(contents.io_state))
    for number in range(n_shards):
        shard, own = to.shard(number, n_shards), gen_slice(number, n_shards)
        shard.rows(tables, 1, advance, buckets=(own.begin, own.end))
        _write_state(shard, contents, number)
        records.append(shard.record())
        rows.update(shard.catalog.counts("rows"))
    names = Names(
        dense=(*(tensor.name for tensor in contents.dense), *contents.values),
        extra=tuple(contents.extra),
        io_state=tuple(dict.fromkeys(name for each in contents.io_state for name in each)),
        dense_opt=tuple(contents.dense_opt),
    )
    entries = tuple(TableEntry(runs.table.name, rows[runs.table.name], runs.table.slots) for runs in tables)
    state = {"imported_from": plan.source, "imported_format": contents.format}
    content = Content((), entries, (), names=names, state=state, writer=WRITER)
    return with_shards(replace(content, training=Training(contents.lineages)), records)


def _write_state(shard: ShardWriter, contents: SourceContents, number: int) -> None:
    """Write the positions of one shard; for the first shard, also all dense state, one tensor in memory at a time."""
    states = {}
    if number == 0 and contents.extra:
        states[layout.EXTRA] = "extra", contents.extra
    if contents.io_state:
        states[layout.of_rank("io_state", number)] = "io_state", contents.io_state[number]
    has_dense = number == 0 and bool(contents.dense or contents.values)
    if not states and not has_dense:
        return
    from recckpt.dense.saver import Later  # imports torch, which rows do not need
    from recckpt.dense.state_copy import portable

    if has_dense:
        tensors = {t.name: Later(t.dtype, t.shape, t.same, t.whole) for t in contents.dense}
        shard.tensors({**tensors, **portable("the state", dict(contents.values))})
    if states:
        shard.states({name: portable(what, dict(state)) for name, (what, state) in states.items()})
