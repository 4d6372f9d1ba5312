"""Checkpoints of other programs, as the commands that look into one read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from recckpt.format.tensor_index import widened

if TYPE_CHECKING:
    from recckpt.convert.source import SourceContents, SourceTensor
    from recckpt.inspect.diff_result import CheckpointDiff, Side
    from recckpt.inspect.diff_tensors import Comparable


def contents_at(path: str) -> SourceContents | None:
    """Return what another program saved at a path, by what an import would read; None where it is nothing known.

    Raises:
        ConversionError: a file is damaged, or its format is not clear.
    """
    from recckpt.convert.formats import open_source
    from recckpt.convert.source import ImportOptions
    from recckpt.convert.source_files import SourceFiles
    from recckpt.output_dir.index_file import is_of_recis, of_others
    from recckpt.storage import open_storage

    storage = open_storage(path)
    if of_others(storage) is None and not is_of_recis(storage):
        return None
    return open_source(SourceFiles(path), None, ImportOptions()).contents


def diff_of_others(before: str, after: str, tolerance: float) -> CheckpointDiff | None:
    """Compare the dense tensors of two checkpoints by name, and nothing else; None where both are ours.

    Where one side has them below a name, such as ``model.``, that is left out.
    """
    from recckpt.inspect.diff_result import CheckpointDiff
    from recckpt.inspect.diff_tensors import compare_tensors
    from recckpt.text import Progress

    of_others = contents_at(before), contents_at(after)
    if of_others == (None, None):
        return None
    sides = [_side(path, contents) for path, contents in zip((before, after), of_others, strict=True)]
    old, new = _called_alike(*(tensors for _, tensors in sides))
    n_bytes = sum(tensor.nbytes for tensor in (*old, *new))
    with Progress(f"comparing {before} and {after}", n_bytes) as progress:
        compared = tuple(compare_tensors(old, new, tolerance, progress.advance))
    return CheckpointDiff(sides[0][0], sides[1][0], tolerance, (), compared, ())


def _side(path: str, contents: SourceContents | None) -> tuple[Side, list[Comparable]]:
    from recckpt.inspect.diff import side_of
    from recckpt.inspect.diff_result import Side
    from recckpt.inspect.diff_tensors import Comparable, comparable
    from recckpt.inspect.reader import CheckpointReader

    if contents is None:
        chain = CheckpointReader(path).chain
        return side_of(chain), [each for each in comparable(chain.tensors) if each.of == "model"]
    n_rows = sum(table.n_rows for table in contents.tables)
    side = Side(path, path.rstrip("/").rpartition("/")[2], contents.format, contents.step, n_rows, 1, ())
    return side, [Comparable("model", one.name, one.dtype, one.shape, partial(_rows, one)) for one in contents.dense]


def _rows(tensor: SourceTensor, begin: int, end: int) -> Any:
    values = tensor.read(begin, end)
    return widened(values) if tensor.dtype == "bfloat16" else values


def _called_alike(old: Sequence[Comparable], new: Sequence[Comparable]) -> tuple[list[Comparable], list[Comparable]]:
    """Return both sides, one of them without a name before its own where more are called alike so."""

    def shorter(tensors: Sequence[Comparable]) -> Iterator[list[Comparable]]:
        yield list(tensors)
        for prefix in dict.fromkeys(each.name.partition(".")[0] + "." for each in tensors):
            names = [each.name.removeprefix(prefix) for each in tensors]
            if len(set(names)) == len(names):  # else one of them would be lost
                yield [each._replace(name=name) for each, name in zip(tensors, names, strict=True)]

    def n_alike(pair: tuple[list[Comparable], list[Comparable]]) -> int:
        return len({each.name for each in pair[0]} & {each.name for each in pair[1]})

    pairs = [(one, list(new)) for one in shorter(old)] + [(list(old), other) for other in shorter(new)]
    return max(pairs, key=n_alike)
