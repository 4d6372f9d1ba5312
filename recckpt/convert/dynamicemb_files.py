"""The files of a dump of dynamicemb: their names, and how many rows and values a row they have.

A dump has a directory a collection, and in it for each table and rank files of plain numbers: int64 keys, float32
values, int64 scores and float32 optimizer states, row by row the same; and once a table its optimizer's settings.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

ADAM, ADAGRAD, ROWWISE = "adam", "exact_adagrad", "exact_row_wise_adagrad"  # part of their format, as the names are
SLOTS = {  # kind of an optimizer -> the slots whose values lie one after another in a row of its states
    ADAM: ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"),
    ADAGRAD: ("sparse_adagrad_sum",),
    ROWWISE: ("sparse_rowwise_adagrad_sum",),
}
KEYS, VALUES, SCORES, STATES = "emb_keys", "emb_values", "emb_scores", "emb_opt_values"
_OLD_STATES = "opt_values"  # of versions of 2025
_EMB = "_emb"
_COUNTERS = ("counter_keys", "counter_frequencies")
SETTINGS = "_opt_args.json"
_ITEMS = (KEYS, VALUES, SCORES, STATES, _OLD_STATES, *_COUNTERS)
_NAME = re.compile(rf"(.+?)_({'|'.join(_ITEMS)})\.rank_(\d+)\.world_size_(\d+)")
_ITEM_BYTES = {KEYS: 8, VALUES: 4, SCORES: 8, STATES: 4}
_MAX_SETTINGS = 1 << 20


def file_of(table: str, item: str) -> str:
    """Return the name of a file of the only rank."""
    return f"{table}_{item}.rank_0.world_size_1"


@dataclass(frozen=True)
class DumpedTable:
    """The files of a table.

    Attributes:
        name: of the table; with the directory of its collection where another one has its name too.
        files: of keys, values, scores and states, one a rank; without scores or states where there are none.
        n_rows: of each rank.
        widths: values a row of each of ``files`` but the keys.
        settings: of the optimizer; empty where it has not been dumped.
        counters: files with the counts of keys that are not admitted yet.
    """

    name: str
    files: Mapping[str, Sequence[str]]
    n_rows: Sequence[int]
    widths: Mapping[str, int]
    settings: Mapping[str, Any]
    counters: Sequence[str]


def is_of_dump(name: str) -> bool:
    """Say whether a file is one of a dump."""
    return _NAME.fullmatch(name.rpartition("/")[2]) is not None


def dumped_tables(files: SourceFiles) -> list[DumpedTable]:
    """Return the tables of a dump.

    Raises:
        ConversionError: a file of a rank is missing, of another size than it must have, or the settings are damaged.
    """
    ranks: dict[tuple[str, str], dict[str, dict[int, str]]] = {}
    sizes: dict[tuple[str, str], set[int]] = {}
    known = {key for path in files.names if (key := _with_keys(path))}
    for path in files.names:
        directory, _, name = path.rpartition("/")
        if match := _NAME.fullmatch(name):
            table, item = _parsed(directory, match, known)
            ranks.setdefault((directory, table), {}).setdefault(item, {})[int(match[3])] = path
            sizes.setdefault((directory, table), set()).add(int(match[4]))
    counts = Counter(table for _, table in ranks)
    return [
        _measured(
            files,
            table if counts[table] == 1 or not directory else f"{directory}/{table}",
            {item: _of_all_ranks(files, table, item, each, sizes[directory, table]) for item, each in items.items()},
            _settings(files, f"{directory}/{table}{SETTINGS}".lstrip("/")),
        )
        for (directory, table), items in sorted(ranks.items())
    ]


def _with_keys(path: str) -> tuple[str, str] | None:
    """Return the directory and the table of a file of keys, None of another one."""
    directory, _, name = path.rpartition("/")
    match = _NAME.fullmatch(name)
    return (directory, match[1]) if match and match[2] == KEYS else None


def _parsed(directory: str, match: re.Match[str], known: Collection[tuple[str, str]]) -> tuple[str, str]:
    """Return the table and item of a file: old names for states of ``t_emb`` are the new ones for those of ``t``."""
    table, item = match[1], match[2]
    if item == STATES and (directory, table) not in known and (directory, f"{table}{_EMB}") in known:
        return f"{table}{_EMB}", STATES
    return table, STATES if item == _OLD_STATES else item


def _of_all_ranks(files: SourceFiles, table: str, item: str, of_ranks: Mapping[int, str], sizes: set[int]) -> list[str]:
    """Return the file of each rank; ConversionError where there is none, or files of two dumps."""
    where = f"table {table!r}, its {item}"
    if len(sizes) > 1:
        found = f"files of dumps of {' and of '.join(map(str, sorted(sizes)))} ranks"
        raise ConversionError(files.url, where, found=found, expected="those of one dump")
    missing = sorted({*range(next(iter(sizes)))} - of_ranks.keys())
    if missing or len(of_ranks) != next(iter(sizes)):
        found, expected = f"files of ranks {sorted(of_ranks)}", f"one of each of {next(iter(sizes))} ranks"
        raise ConversionError(files.url, where, found=found, expected=expected, remedy="copy all of them there")
    return [of_ranks[rank] for rank in sorted(of_ranks)]


def _settings(files: SourceFiles, path: str) -> Mapping[str, Any]:
    if path not in files.names:
        return {}
    try:
        settings = json.loads(files.read(path, _MAX_SETTINGS))
    except (ValueError, RecursionError) as error:
        raise ConversionError(files.path(path), "", found=f"no JSON ({error!s:.80})", expected="settings") from error
    if not isinstance(settings, dict):
        raise ConversionError(files.path(path), "", found=f"a {type(settings).__name__}", expected="a dict of settings")
    return settings


def _measured(
    files: SourceFiles, name: str, paths: Mapping[str, Sequence[str]], settings: Mapping[str, Any]
) -> DumpedTable:
    """Return a table with its rows and widths, which the sizes of files say."""
    if KEYS not in paths or VALUES not in paths:
        found, expected = f"files of {', '.join(sorted(paths))}", f"{KEYS} and {VALUES}"
        raise ConversionError(files.url, f"table {name!r}", found=found, expected=expected)
    n_rows = []
    for path in paths[KEYS]:
        size = files.size(path)
        if size % 8:
            raise ConversionError(files.path(path), "its size", found=f"{size} bytes", expected="whole int64 keys")
        n_rows.append(size // 8)
    own = {item: each for item, each in paths.items() if item not in _COUNTERS}
    widths = {item: _width(files, each, n_rows, item) for item, each in own.items() if item != KEYS}
    counters = [path for item in _COUNTERS for path in paths.get(item, ())]
    return DumpedTable(name, own, n_rows, widths, settings, counters)


def _width(files: SourceFiles, paths: Sequence[str], n_rows: Sequence[int], item: str) -> int:
    """Return how many values a row has; 0 where there are no rows."""
    widths = set()
    for path, n in zip(paths, n_rows, strict=True):
        size = files.size(path)
        row_bytes, rest = divmod(size, n) if n else (0, size)
        if rest or row_bytes % _ITEM_BYTES[item]:
            found, expected = f"{size} bytes", f"{n} rows, one for each key"
            raise ConversionError(files.path(path), "its size", found=found, expected=expected, remedy="it is cut")
        if n:
            widths.add(row_bytes // _ITEM_BYTES[item])
    if len(widths) > 1:
        found = f"rows of {' and of '.join(map(str, sorted(widths)))} values"
        raise ConversionError(files.path(paths[0]), f"{item} of all ranks", found=found, expected="rows of one length")
    return widths.pop() if widths else 0


def values_between(
    files: SourceFiles, path: str, item: str, begin: int, end: int, *, width: int
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return rows [begin, end) of a file, shape (rows, width)."""
    dtype = np.dtype("<i8" if _ITEM_BYTES[item] == 8 else "<f4")
    return files.array(path, begin * width * dtype.itemsize, dtype, (end - begin, width))
