"""What differs between two checkpoints, of one run or of two, full or not, of any number of ranks (no torch)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

from recckpt.checkpoint.chain import OpenChain
from recckpt.dense.file_check import check_file
from recckpt.format.manifest import FileEntry
from recckpt.format.reduced import descriptions_of
from recckpt.inspect.diff.bucket_diff import slots_of
from recckpt.inspect.diff.checkpoint_diff import CheckpointDiff
from recckpt.inspect.diff.generators import generators_of
from recckpt.inspect.diff.result import Side, TableDiff
from recckpt.inspect.diff.tables import DiffOptions, compare_table
from recckpt.inspect.diff.tensors import compare_tensors
from recckpt.inspect.diff.values import compare_values, files_of_values
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.first_whole import first_whole
from recckpt.parallel.threads import run_all
from recckpt.text import Progress

_THREADS = 8
_BUDGET_BYTES = 256 << 20


def diff(
    before: str | os.PathLike[str], after: str | os.PathLike[str], *, tolerance: float = 0.0, top: int = 10
) -> CheckpointDiff:
    """Compare two checkpoints, and return what differs and by how much.

    Every byte that is compared has been checked. Both are read once, side by side in bucket order, in bounded memory:
    256 MiB and the largest row of a dense tensor, whatever the tables hold. Two NaN at one place are equal; a NaN
    against a number is a change, larger than all others. Imports no torch.

    Args:
        before: a checkpoint, or an output dir, whose newest is meant; any fsspec URL.
        after: the same.
        tolerance: values of tables and dense tensors that differ by no more than this count as the same.
        top: how many rows of each table to name, of those that moved most.

    Raises:
        TypeError: a path is not a path.
        ValueError: ``tolerance`` is not a number from 0 on, or ``top`` not an int from 0 on.
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: its writer removed one while it was read, and the storage is not a local file system.
        CorruptCheckpointError: a file is damaged.
        FormatVersionError: written by a newer format.
    """
    for path in (before, after):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"expected the path or URL of a checkpoint or output dir, found {path!r}")
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not is_number or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is a finite number from 0 on, found {tolerance!r}")
    if type(top) is not int or top < 0:
        raise ValueError(f"top is an int from 0 on, found {top!r}")
    return _compared(_opened(os.fspath(before)), _opened(os.fspath(after)), float(tolerance), top)


def _opened(path: str) -> OpenChain:
    return first_whole(lambda: locate_path(path), lambda located: OpenChain.open(*located))


def _compared(before: OpenChain, after: OpenChain, tolerance: float, top: int) -> CheckpointDiff:
    sides = before, after
    options = DiffOptions(tolerance, top, _BUDGET_BYTES, min(side.storage.threads(_THREADS) for side in sides))
    n_bytes = sum(table.rows * table.row_bytes for side in sides for table in side.manifest.tables)
    n_bytes += sum(tensor.nbytes for side in sides for tensor in side.tensors.tensors.values())
    plain = [[name for name in side.manifest.names.dense if name not in side.tensors.model] for side in sides]
    files = [
        (side, each) for side, names in zip(sides, plain, strict=True) for each in files_of_values(side.manifest, names)
    ]
    n_bytes += sum(file.n_bytes for _, file in files)
    what = f"comparing {before.manifest.ckpt_id} and {after.manifest.ckpt_id}"
    with Progress(what, n_bytes) as progress:
        progress.add_rows(sum(side.manifest.rows for side in sides))
        run_all(lambda pair: _check(*pair, progress.advance), files, options.threads)
        tables = tuple(_tables(before, after, options, progress.advance))
        tensors = tuple(compare_tensors(before.tensors, after.tensors, tolerance, progress.advance))
    generators = generators_of(before), generators_of(after)
    values = tuple(compare_values(before.manifest, after.manifest, (plain[0], plain[1]), generators))
    return CheckpointDiff(_side(before), _side(after), tolerance, tables, tensors, values)


def _check(side: OpenChain, file: FileEntry, advance: Callable[[int], object]) -> None:
    for error in check_file(side.files, side.directory, file, index=None, advance=advance):
        raise error


def _tables(
    before: OpenChain, after: OpenChain, options: DiffOptions, advance: Callable[[int], object]
) -> Iterator[TableDiff]:
    for name in dict.fromkeys(table.name for side in (before, after) for table in side.manifest.tables):
        one, other = before.manifest.table(name), after.manifest.table(name)
        if one is not None and other is not None:
            yield compare_table(before, after, name, options, advance)
        elif one is not None:
            yield TableDiff(name, "gone", one.rows, None, 0, one.rows, 0, 0, slots_of(one.slots, (), None), ())
        elif other is not None:
            slots = slots_of((), other.slots, None)
            yield TableDiff(name, "added", None, other.rows, other.rows, 0, 0, 0, slots, ())


def _side(opened: OpenChain) -> Side:
    checkpoint, manifest = opened.checkpoint, opened.manifest
    path = opened.storage.url_of(checkpoint.directory)
    reduced = descriptions_of({table.name: table.reduced for table in manifest.tables if table.reduced is not None})
    facts = manifest.ckpt_id, manifest.kind, manifest.step, manifest.rows, len(checkpoint.links)
    return Side(path, *facts, tuple(reduced))
