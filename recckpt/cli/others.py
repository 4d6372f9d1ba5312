"""Files of other programs, for the commands that show checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from recckpt.cli.result import CommandResult, usage_checked
from recckpt.errors import CheckpointNotFoundError, ConversionError
from recckpt.format.tensor_index import widened
from recckpt.text import Line, Progress, Table, count, escaped, plural, size

if TYPE_CHECKING:
    import duckdb

    from recckpt.convert.reader import SourceReader
    from recckpt.convert.source import SourceTable, SourceTensor
    from recckpt.inspect.diff_result import CheckpointDiff, Side
    from recckpt.inspect.diff_tensors import Comparable
    from recckpt.inspect.reader import CheckpointReader
    from recckpt.sparse.files.dataset import StreamedDataset

_UNSEEN = "changed values go unnoticed; `recckpt import` the files, so that verify can detect later damage"


def source_at(path: str) -> SourceReader | None:
    """Open files of another program at a path; None if no format recognises them.

    ConversionError if a file is damaged or its format is unclear; MissingLibraryError if it needs torch.
    """
    from recckpt.convert.reader import SourceReader
    from recckpt.output_dir.index_file import is_of_recis, of_others
    from recckpt.storage import open_storage

    storage = open_storage(path)
    return None if of_others(storage) is None and not is_of_recis(storage) else SourceReader(path)


def reader_at(path: str) -> CheckpointReader | SourceReader:
    from recckpt.inspect.reader import CheckpointReader

    try:
        with usage_checked():
            return CheckpointReader(path)
    except CheckpointNotFoundError:
        if (source := source_at(path)) is None:
            raise
        return source


def verified(source: SourceReader, *, deep: bool) -> CommandResult:
    """Read everything if ``deep``; report unreadable parts, and state what damage the format cannot detect."""
    contents, problems = source.contents, list[str]()
    items: list[SourceTable | SourceTensor] = [*contents.tables, *contents.dense]
    sizes = [*(table.n_rows * table.row_bytes for table in contents.tables), *(one.nbytes for one in contents.dense)]
    rows = sum(table.n_rows for table in contents.tables)
    with Progress(f"verifying {source.path}", sum(sizes)) as progress:
        for item in items if deep else ():
            try:
                for n_bytes in source.read_through(item):
                    progress.advance(n_bytes)
            except (ConversionError, OSError) as error:
                problems.append(str(error))
    result = plural(len(problems), "problem") if problems else "good"
    row = escaped(source.path), contents.format, count(rows), count(len(contents.dense)), size(sum(sizes)), result
    numbers = "ROWS", "TENSORS", "SIZE"
    lines: list[Line] = [Table(("SOURCE", "FORMAT", *numbers, "RESULT"), [row], numbers)]
    seen = "everything can be read, and shapes and dtypes agree" if deep else "its headers agree with its files"
    lines += ["", f"{contents.format} has no checksums: {'' if problems else seen + ', but '}{_UNSEEN}"]
    facts = {"url": source.path, "format": contents.format, "checksums": False, "deep": deep}
    return CommandResult({**facts, "good": not problems, "problems": problems}, lines, problems)


def views_of(source: SourceReader) -> tuple[duckdb.DuckDBPyConnection, Sequence[StreamedDataset]]:
    from recckpt.errors import needed
    from recckpt.inspect.sql import create_views

    connection: duckdb.DuckDBPyConnection = needed("duckdb", "sql").connect()
    tables = {name: source.dataset(name) for name in source.with_rows}
    create_views(connection, tables, source.path)
    return connection, [*tables.values()]


def diff_of_others(before: str, after: str, tolerance: float) -> tuple[CheckpointDiff, list[str]] | None:
    """Compare dense tensors by name; None if both paths are checkpoints of recckpt.

    Also returns the names of tables, which are not compared. If one side's names have a common prefix such as
    ``model.``, the prefix is ignored.
    """
    from recckpt.inspect.diff_result import CheckpointDiff
    from recckpt.inspect.diff_tensors import compare_tensors

    sources = source_at(before), source_at(after)
    if sources == (None, None):
        return None
    sides = [_side(path, source) for path, source in zip((before, after), sources, strict=True)]
    old, new = _called_alike(*(tensors for _, tensors, _ in sides))
    tables = sorted({name for _, _, names in sides for name in names})
    n_bytes = sum(tensor.nbytes for tensor in (*old, *new))
    with Progress(f"comparing {before} and {after}", n_bytes) as progress:
        compared = tuple(compare_tensors(old, new, tolerance, progress.advance))
    return CheckpointDiff(sides[0][0], sides[1][0], tolerance, (), compared, ()), tables


def _side(path: str, source: SourceReader | None) -> tuple[Side, list[Comparable], list[str]]:
    from recckpt.inspect.diff import side_of
    from recckpt.inspect.diff_result import Side
    from recckpt.inspect.diff_tensors import Comparable, comparable
    from recckpt.inspect.reader import CheckpointReader

    if source is None:
        chain = CheckpointReader(path).chain
        tensors = [each for each in comparable(chain.tensors) if each.of == "model"]
        return side_of(chain), tensors, [table.name for table in chain.manifest.tables]
    contents = source.contents
    n_rows = sum(table.n_rows for table in contents.tables)
    side = Side(path, path.rstrip("/").rpartition("/")[2], contents.format, contents.step, n_rows, 1, ())
    tensors = [Comparable("model", one.name, one.dtype, one.shape, partial(_rows, one)) for one in contents.dense]
    return side, tensors, [table.name for table in contents.tables]


def _rows(tensor: SourceTensor, begin: int, end: int) -> Any:
    values = tensor.read(begin, end)
    return widened(values) if tensor.dtype == "bfloat16" else values


def _called_alike(old: Sequence[Comparable], new: Sequence[Comparable]) -> tuple[list[Comparable], list[Comparable]]:
    """Return both sides; remove the common prefix from the names of one side if more names match without the prefix."""

    def shorter(tensors: Sequence[Comparable]) -> Iterator[list[Comparable]]:
        yield list(tensors)
        for prefix in dict.fromkeys(each.name.partition(".")[0] + "." for each in tensors):
            names = [each.name.removeprefix(prefix) for each in tensors]
            if len(set(names)) == len(names):  # otherwise a tensor would be lost
                yield [each._replace(name=name) for each, name in zip(tensors, names, strict=True)]

    def n_alike(pair: tuple[list[Comparable], list[Comparable]]) -> int:
        return len({each.name for each in pair[0]} & {each.name for each in pair[1]})

    pairs = [(one, list(new)) for one in shorter(old)] + [(list(old), other) for other in shorter(new)]
    return max(pairs, key=n_alike)
