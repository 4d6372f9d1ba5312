"""Compares two checkpoints, of one run or of two, full or delta, of any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from recckpt.checkpoint.chain import OpenChain
from recckpt.dense.tensors import check_file
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.format.tables import descriptions_of
from recckpt.inspect.diff_result import CheckpointDiff, KeyDiff, Side, Status, TableDiff, ValueDiff
from recckpt.inspect.diff_states import State, compare_keys, states_in
from recckpt.inspect.diff_tables import compare_table, slots_of
from recckpt.inspect.diff_tensors import comparable, compare_tensors
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.open_files import first_whole
from recckpt.parallel.threads import run_all
from recckpt.text import Progress

_THREADS = 8
_GROUPS = {  # file, or kind of object in the file of a rank -> group of its values
    layout.EXTRA: "extra",
    layout.MODEL: "plain value",
    "extra": "extra of ranks",
    "io_state": "position",
    "rng": "random state",
}
_GENERATORS = ("torch", "cuda", "numpy", "python")  # part of the format

Advance = Callable[[int], object]
Groups = Mapping[str, tuple[Collection[str], Mapping[str, FileEntry]]]  # group -> its names, and files with them


def diff(
    before: str | os.PathLike[str], after: str | os.PathLike[str], *, tolerance: float = 0.0, top: int = 10
) -> CheckpointDiff:
    """Compare two checkpoints, and return what differs and by how much.

    Every byte that is compared has been checked. Reads both checkpoints once, side by side in bucket order. Memory is
    bounded by 256 MiB plus the largest row of a dense tensor. Two NaN at the same place are equal; NaN against a number
    is a change larger than any other. Imports no torch.

    Args:
        before: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.
        after: the checkpoint to compare with, or its output dir, like ``before``.
        tolerance: values of tables and dense tensors that differ by no more than this count as the same.
        top: number of rows to list per table: those whose embeddings moved most.

    Raises:
        TypeError: ``before`` or ``after`` is not a path.
        ValueError: ``tolerance`` is not a number from 0 on, or ``top`` not an int from 0 on.
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: the writer removed a checkpoint during the read, and storage is not a local file system.
        CorruptCheckpointError: a file is damaged.
        FormatVersionError: a newer recckpt wrote a checkpoint.
    """
    for path in (before, after):
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"expected the path or URL of a checkpoint or output dir, found {path!r}")
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not is_number or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is a finite number from 0 on, found {tolerance!r}")
    if type(top) is not int or top < 0:
        raise ValueError(f"top is an int from 0 on, found {top!r}")
    sides = one, other = (
        first_whole(partial(locate_path, os.fspath(before)), lambda located: OpenChain.open(*located)),
        first_whole(partial(locate_path, os.fspath(after)), lambda located: OpenChain.open(*located)),
    )
    threads = min(side.storage.threads(_THREADS) for side in sides)
    groups = _groups_of(one), _groups_of(other)
    files = [
        (side, file)
        for side, of_side in zip(sides, groups, strict=True)
        for names, in_files in of_side.values()
        for file in (in_files.values() if names else ())
    ]
    n_bytes = sum(table.rows * table.row_bytes for side in sides for table in side.manifest.tables)
    n_bytes += sum(tensor.nbytes for side in sides for tensor in side.tensors.tensors.values())
    n_bytes += sum(file.n_bytes for _, file in files)
    with Progress(f"comparing {one.manifest.ckpt_id} and {other.manifest.ckpt_id}", n_bytes) as progress:
        progress.add_rows(sum(side.manifest.rows for side in sides))
        run_all(lambda pair: _check(*pair, progress.advance), files, threads)
        compare = partial(compare_table, tolerance=tolerance, top=top, threads=threads, advance=progress.advance)
        tables = tuple(_tables(one, other, compare))
        dense = [comparable(side.tensors) for side in sides]
        tensors = tuple(compare_tensors(dense[0], dense[1], tolerance, progress.advance))
    values = tuple(_compare_values(one, other, *groups, tolerance))
    return CheckpointDiff(side_of(one), side_of(other), float(tolerance), tables, tensors, values)


def _check(side: OpenChain, file: FileEntry, advance: Advance) -> None:
    for error in check_file(side.files, side.directory, file, index=None, advance=advance):
        raise error


def _tables(
    before: OpenChain, after: OpenChain, compare: Callable[[OpenChain, OpenChain, str], TableDiff]
) -> Iterator[TableDiff]:
    for name in dict.fromkeys(table.name for side in (before, after) for table in side.manifest.tables):
        one, other = before.manifest.table(name), after.manifest.table(name)
        if one is not None and other is not None:
            yield compare(before, after, name)
        elif one is not None:
            yield TableDiff(name, "gone", one.rows, None, 0, one.rows, 0, 0, slots_of(one.slots, (), None), ())
        elif other is not None:
            slots = slots_of((), other.slots, None)
            yield TableDiff(name, "added", None, other.rows, other.rows, 0, 0, 0, slots, ())


def side_of(opened: OpenChain) -> Side:
    """Describe one of the two checkpoints that are compared."""
    checkpoint, manifest = opened.checkpoint, opened.manifest
    path = opened.storage.url_of(checkpoint.directory)
    reduced = descriptions_of({table.name: table.reduced for table in manifest.tables if table.reduced is not None})
    facts = manifest.ckpt_id, manifest.kind, manifest.step, manifest.rows, len(checkpoint.links)
    return Side(path, *facts, tuple(reduced))


def _groups_of(side: OpenChain) -> Groups:
    """Return the contents of ``.pt`` files, which are compared by checksum, then by key if the checksums differ."""
    names, files = side.manifest.names, dict[str, dict[str, FileEntry]]()
    for file in side.manifest.files:
        if group := _GROUPS.get(layout.content_of_rank(file.name) or file.name):
            files.setdefault(group, {})[file.name] = file
    names_of = {
        "extra": [name for name in names.extra if name not in names.extra_of_ranks],
        "extra of ranks": names.extra_of_ranks,
        "position": names.io_state,
        "plain value": [name for name in names.dense if name not in side.tensors.model],
        "random state": _GENERATORS if "random state" in files else (),
    }
    return {group: (of_group, files.get(group, {})) for group, of_group in names_of.items()}


def _compare_values(
    before: OpenChain, after: OpenChain, groups: Groups, other_groups: Groups, tolerance: float
) -> Iterator[ValueDiff]:
    """Yield the differences of training state and of ``.pt`` files.

    A ``.pt`` file whose checksum differs is compared key by key. A file with several values has a single checksum; if
    another program wrote it, or it is too large, which of its values have changed is unknown.
    """
    state, other_state = ({"step": side.manifest.step, **side.manifest.state} for side in (before, after))
    for name in {**state, **other_state}:
        old, new = state.get(name), other_state.get(name)
        is_nan = all(isinstance(value, float) and math.isnan(value) for value in (old, new))
        is_same = is_nan or (type(old) is type(new) and old == new)
        yield ValueDiff("training state", name, _status(name, state, other_state, is_same), old, new)
    for group, (names, files) in groups.items():
        other_names, other_files = other_groups[group]
        sums, other_sums = ({name: file.xxh3 for name, file in each.items()} for each in (files, other_files))
        every = dict.fromkeys([*names, *other_names])
        changed: Status = "changed" if len(every) == 1 and group != "plain value" else "unclear"
        states = dict[str, State](), dict[str, State]()
        if every and sums != other_sums:
            states = states_in(before, files.values()), states_in(after, other_files.values())
        for name in every:
            status, inside = _status(name, names, other_names, sums == other_sums, changed), tuple[KeyDiff, ...]()
            if status == changed and all(states) and any(name in side for side in states):
                one, other = (side.get(name, State({}, {})) for side in states)
                inside = tuple(compare_keys(one, other, tolerance))
                status, inside = "changed" if inside else "same", () if group == "random state" else inside
            yield ValueDiff(group, name, status, inside=inside)


def _status(
    name: str, before: Collection[str], after: Collection[str], is_same: bool, changed: Status = "changed"
) -> Status:
    if name in before and name in after:
        return "same" if is_same else changed
    return "gone" if name in before else "added"
