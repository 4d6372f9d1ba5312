"""A file of ids, as commands take it: text with an id a line, ``.npy``, or ``.parquet``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

_KINDS = "a text file with an id a line, an .npy file of integers, or a .parquet file with a column id"


def read_ids(path: str) -> npt.NDArray[np.int64]:
    """Return the ids in a file, in its order.

    Raises:
        ValueError: they are not int64, or there are none; says where.
        OSError: the file cannot be read.
    """
    file = Path(path)
    read = {".npy": _of_npy, ".parquet": _of_parquet}.get(file.suffix.lower(), _of_text)
    ids = read(file)
    if not len(ids):
        raise ValueError(f"{path}: found no ids, expected {_KINDS}")
    return ids


def _of_text(file: Path) -> npt.NDArray[np.int64]:
    try:
        with file.open(encoding="utf-8") as lines:
            return np.fromiter(_numbers(file, lines), np.int64)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: found no text ({error}), expected {_KINDS}") from error


def _numbers(file: Path, lines: Iterator[str]) -> Iterator[int]:
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        id_ = int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None
        if id_ is None or not -(2**63) <= id_ < 2**63:
            raise ValueError(f"{file}, line {number}: found {text[:40]!r}, expected an int64; {_KINDS}")
        yield id_


def _of_npy(file: Path) -> npt.NDArray[np.int64]:
    try:
        values = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file}: found no array of numbers ({error}), expected {_KINDS}") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
        found = f"{values.dtype}{list(values.shape)}" if isinstance(values, np.ndarray) else "several arrays"
        raise ValueError(f"{file}: found {found}, expected integers of one dimension")
    return _as_int64(file, values)


def _of_parquet(file: Path) -> npt.NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as source:
            names = source.schema_arrow.names
            name = "id" if "id" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise ValueError(f"{file}: found the columns {names}, expected one, or one with the name id")
            column = source.read([name]).column(name)
    except pa.ArrowException as error:
        raise ValueError(f"{file}: found no Parquet file ({error}), expected {_KINDS}") from error
    if not pa.types.is_integer(column.type) or column.null_count:
        found = f"{column.null_count} nulls" if column.null_count else str(column.type)
        raise ValueError(f"{file}, column {name!r}: found {found}, expected integers")
    return _as_int64(file, column.to_numpy())


def _as_int64(file: Path, values: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    if values.dtype.kind == "u" and values.size and int(values.max()) >= 2**63:
        raise ValueError(f"{file}: found an id beyond int64")
    return values.astype(np.int64)
