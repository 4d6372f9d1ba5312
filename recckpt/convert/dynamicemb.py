"""Reads and writes a dump of dynamicemb (NVIDIA).

A dump has one directory per collection. For each table and rank, this directory has files of int64 keys, float32
values, int64 scores and float32 optimizer states, with one row per key; for each table, it has one file of optimizer
settings. An export is one collection, written as if by one rank; any number of ranks can load it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recckpt.convert.source import (
    Array,
    ImportOptions,
    ImportSource,
    LeftOut,
    SourceContents,
    SourceRows,
    SourceTable,
    optimizer_state,
)
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import TargetFiles, file_name
from recckpt.convert.view import Export, TableView, numbers
from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.text import Progress
from recckpt.types import EMBEDDING, SlotSpec

ALL_SLOTS, INCREMENTS, DTYPES = True, False, ()  # values of a dump are float32
_ADAM, _ADAGRAD, _ROWWISE = "adam", "exact_adagrad", "exact_row_wise_adagrad"  # names in the dump format
_SLOTS = {  # kind of optimizer -> slots whose values are stored one after another in each row of its states
    _ADAM: ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"),
    _ADAGRAD: ("sparse_adagrad_sum",),
    _ROWWISE: ("sparse_rowwise_adagrad_sum",),
}
_SETTINGS = {  # kind of optimizer -> name of each setting in a dump -> name here
    _ADAM: ("lr", "eps"),
    _ADAGRAD: ("lr", "eps", "initial_accumulator_value"),
    _ROWWISE: ("lr", "eps", "initial_accumulator_value"),
}
_KEYS, _VALUES, _SCORES, _STATES = "emb_keys", "emb_values", "emb_scores", "emb_opt_values"
_OLD_STATES = "opt_values"  # name in versions of 2025
_COUNTERS = ("counter_keys", "counter_frequencies")
_ITEM_BYTES = {_KEYS: 8, _VALUES: 4, _SCORES: 8, _STATES: 4}
_NAME = re.compile(rf"(.+?)_({'|'.join((*_ITEM_BYTES, _OLD_STATES, *_COUNTERS))})\.rank_(\d+)\.world_size_(\d+)")
_SETTINGS_FILE, _MAX_SETTINGS = "_opt_args.json", 1 << 20
_COUNT, _SCORE = "count", "score"
_FLOATS = ("float32", "float16", "bfloat16")
_EMPTY = "has no rows, so the length of a row is unknown"
_NAMED = "is in several collections, so its name here includes the collection; names= (--name) gives other names"


@dataclass(frozen=True)
class DumpedTable:
    name: str  # name, with the collection's directory if several collections have a table of this name
    # kind of content (keys, values, maybe scores and states) -> its file on each rank
    files: Mapping[str, Sequence[str]]
    n_rows: Sequence[int]  # rows of each rank
    widths: Mapping[str, int]  # values per row in each of ``files`` except the keys
    settings: Mapping[str, Any]  # settings of the optimizer; {} if they were not dumped
    counters: Sequence[str]  # files with the counts of keys that are not yet admitted

    @property
    def optimizer(self) -> str:
        """The kind of optimizer whose states become slots; "" if no states become slots."""
        kind, width, dim = self.settings.get("opt_type"), self.widths.get(_STATES), self.widths[_VALUES]
        if kind not in _SLOTS or not width:
            return ""
        fits = width < dim or width == 1 if kind == _ROWWISE else width == dim * len(_SLOTS[kind])
        return str(kind) if fits else ""

    @property
    def score_slot(self) -> str:
        """The slot for the scores; one eviction strategy uses look-up counts as scores."""
        is_count = str(self.settings.get("evict_strategy", "")).endswith("KLfu")
        return _COUNT if is_count and self.widths[_SCORES] == 1 else _SCORE


def recognises(files: SourceFiles) -> bool:
    return not files.is_file and any(_NAME.fullmatch(name.rpartition("/")[2]) for name in files.names)


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    dumped = {table.name: table for table in _dumped_tables(files)}
    if not dumped:
        expected = "files such as <table>_emb_keys.rank_0.world_size_1"
        raise ConversionError(files.url, "", found="no table of dynamicemb", expected=expected)

    def rows(table: SourceTable) -> Iterator[SourceRows]:
        own = dumped[table.name]
        for rank, n_rows in enumerate(own.n_rows):
            for begin, end in table.steps(n_rows):
                columns = dict[str, Array]()
                for item, paths in own.files.items():
                    dtype, width = np.dtype("<i8" if _ITEM_BYTES[item] == 8 else "<f4"), own.widths.get(item, 1)
                    at = begin * width * dtype.itemsize
                    columns[item] = files.array(paths[rank], at, dtype, (end - begin, width))
                values = _by_slot(own, columns)
                yield SourceRows(columns[_KEYS][:, 0], [values[slot.name] for slot in table.slots])

    left: list[LeftOut] = []
    tables = tuple(_listed(table, left) for table in dumped.values() if table.widths[_VALUES])
    left += [LeftOut(f"table {name}", _EMPTY) for name, table in dumped.items() if not table.widths[_VALUES]]
    known = [path for table in dumped.values() for paths in (*table.files.values(), table.counters) for path in paths]
    left += [one for one in files.beside(known, "a dump") if not one.name.endswith(_SETTINGS_FILE)]
    of_adam = (table for table in dumped.values() if table.widths[_VALUES] and table.optimizer == _ADAM)
    steps = {table.name: table.settings.get("iters") for table in of_adam}
    known_steps = {name: step for name, step in steps.items() if type(step) is int and step >= 0}
    extra = optimizer_state(known_steps, _SLOTS[_ADAM])
    return ImportSource(SourceContents("dynamicemb", tables, extra=extra, left_out=tuple(left)), rows)


def _by_slot(table: DumpedTable, columns: Mapping[str, Array]) -> dict[str, Array]:
    kind, dim = table.optimizer, table.widths[_VALUES]
    values = {EMBEDDING: columns[_VALUES]}
    for n, slot in enumerate(_SLOTS.get(kind, ())):
        states = columns[_STATES]  # row-wise sums are the first value, because rows may be padded
        values[slot] = states[:, 0] if kind == _ROWWISE else states[:, n * dim : (n + 1) * dim]
    if _SCORES in columns:
        scores = columns[_SCORES]
        values[table.score_slot] = scores[:, 0] if scores.shape[1] == 1 else scores
    return values


def _listed(table: DumpedTable, left: list[LeftOut]) -> SourceTable:
    dim, name, kind = table.widths[_VALUES], f"table {table.name}", table.optimizer
    slots = [SlotSpec(EMBEDDING, "float32", (dim,))]
    slots += [SlotSpec(slot, "float32", () if kind == _ROWWISE else (dim,)) for slot in _SLOTS.get(kind, ())]
    if _STATES in table.files and not kind:
        unknown = f"an optimizer without a {_SETTINGS_FILE.lstrip('_')} that names its kind"
        reason = f"{table.widths[_STATES]} values a row of {table.settings.get('opt_type', unknown)}"
        left.append(LeftOut(f"{name}, optimizer states", reason))
    if _SCORES in table.files:
        n_words, slot = table.widths[_SCORES], table.score_slot
        slots.append(SlotSpec(slot, "int64", () if n_words == 1 else (n_words,)))
        strategy = table.settings.get("evict_strategy", "their strategy")
        left.append(LeftOut(f"{name}, scores", f"become the slot {slot!r}, which has the meaning of {strategy}"))
    if table.settings:
        shown = ", ".join(f"{key}={value}" for key, value in table.settings.items())
        left.append(LeftOut(f"{name}, settings", f"must be passed when you make the optimizer: {shown}"))
    if table.counters:
        left.append(LeftOut(f"{name}, counters", "of keys that are not yet admitted: counting restarts"))
    if "/" in table.name:
        left.append(LeftOut(name, _NAMED))
    return SourceTable(table.name, sum(table.n_rows), tuple(slots))


def _dumped_tables(files: SourceFiles) -> Iterator[DumpedTable]:
    """Yield the tables of a dump; ConversionError for missing or shortened files, or damaged settings."""
    ranks: dict[tuple[str, str], dict[str, dict[int, str]]] = {}
    sizes: dict[tuple[str, str], set[int]] = {}
    places = [(path.rpartition("/")[0], _NAME.fullmatch(path.rpartition("/")[2])) for path in files.names]
    with_keys = {(directory, match[1]) for directory, match in places if match and match[2] == _KEYS}
    for path, (directory, match) in zip(files.names, places, strict=True):
        if match is None:
            continue
        table, item = match[1], match[2]
        # In old versions, states of table t_emb have the file name that new versions use for states of table t.
        if item == _STATES and (directory, table) not in with_keys and (directory, f"{table}_emb") in with_keys:
            table = f"{table}_emb"
        item = _STATES if item == _OLD_STATES else item
        ranks.setdefault((directory, table), {}).setdefault(item, {})[int(match[3])] = path
        sizes.setdefault((directory, table), set()).add(int(match[4]))
    counts = Counter(table for _, table in ranks)
    for (directory, table), items in sorted(ranks.items()):
        of_ranks = {
            item: _of_all_ranks(files, table, item, each, sizes[directory, table]) for item, each in items.items()
        }
        path, settings = f"{directory}/{table}{_SETTINGS_FILE}".lstrip("/"), dict[str, Any]()
        if path in files.names:
            try:
                settings = json.loads(files.read(path, _MAX_SETTINGS))
            except (ValueError, RecursionError) as error:
                found = f"invalid JSON ({error!s:.80})"
                raise ConversionError(files.path(path), "", found=found, expected="settings") from error
        if not isinstance(settings, dict):
            found = f"a {type(settings).__name__}"
            raise ConversionError(files.path(path), "", found=found, expected="a dict of settings")
        name = table if counts[table] == 1 or not directory else f"{directory}/{table}"
        yield _measured(files, name, of_ranks, settings)


def _of_all_ranks(files: SourceFiles, table: str, item: str, of_ranks: Mapping[int, str], sizes: set[int]) -> list[str]:
    where = f"table {table!r}, its {item}"
    if len(sizes) > 1:
        found = f"files of dumps of {' and of '.join(map(str, sorted(sizes)))} ranks"
        raise ConversionError(files.url, where, found=found, expected="files of one dump")
    n_ranks = next(iter(sizes))
    if len(of_ranks) != n_ranks or max(of_ranks) >= n_ranks:
        found, expected = f"files of ranks {sorted(of_ranks)}", f"one of each of {n_ranks} ranks"
        raise ConversionError(files.url, where, found=found, expected=expected, remedy="copy those of all ranks there")
    return [of_ranks[rank] for rank in range(n_ranks)]


def _measured(
    files: SourceFiles, name: str, paths: Mapping[str, Sequence[str]], settings: Mapping[str, Any]
) -> DumpedTable:
    """Return a table with its rows and widths, derived from the sizes of its files."""
    if _KEYS not in paths or _VALUES not in paths:
        found, expected = f"files of {', '.join(sorted(paths))}", f"{_KEYS} and {_VALUES}"
        raise ConversionError(files.url, f"table {name!r}", found=found, expected=expected)
    n_rows = []
    for path in paths[_KEYS]:
        size = files.size(path)
        if size % 8:
            raise ConversionError(files.path(path), "its size", found=f"{size} bytes", expected="whole int64 keys")
        n_rows.append(size // 8)
    own = {item: each for item, each in paths.items() if item not in _COUNTERS}
    widths = {item: _width(files, each, n_rows, item) for item, each in own.items() if item != _KEYS}
    counters = [path for item in _COUNTERS for path in paths.get(item, ())]
    return DumpedTable(name, own, n_rows, widths, settings, counters)


def _width(files: SourceFiles, paths: Sequence[str], n_rows: Sequence[int], item: str) -> int:
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


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    left = export.no_dense("a dump of dynamicemb has only rows; use dcp")
    needs_state = any(_kind_of(table) for table in export.tables)
    scalars = export.state(layout.EXTRA).get(layout.SPARSE_OPTIM, {}) if needs_state else {}
    for table in export.tables:
        name, settings = file_name(table.name), _settings_of(table, scalars, left)
        kept = _kept(table, bool(settings), left)
        score = _score_slot(kept)
        if score == _COUNT:
            settings |= {"evict_strategy": "EvictStrategy.KLfu"}
        states = _SLOTS.get(settings.get("opt_type", ""), ())
        items = {_VALUES: (EMBEDDING,), _STATES: states, _SCORES: (score,) if score else ()}
        with ExitStack() as stack:
            made = [_KEYS, *(item for item, slots in items.items() if slots)]
            sinks = {item: stack.enter_context(files.create(f"{name}_{item}.rank_0.world_size_1")) for item in made}
            for rows in kept.rows(progress):
                sinks[_KEYS].write(rows.ids.tobytes())
                columns = dict[str, Array]()
                for slot, column in zip(kept.slots, rows.columns, strict=True):
                    values = numbers(column, slot).astype(np.float32 if slot.dtype in _FLOATS else np.int64)
                    columns[slot.name] = values.reshape(len(column), -1)
                for item in made[1:]:
                    sinks[item].write(np.concatenate([columns[slot] for slot in items[item]], axis=1).tobytes())
        if settings:
            files.put_json(settings, f"{name}{_SETTINGS_FILE}")
    return left


def _kind_of(table: TableView) -> str:
    """Return the kind of optimizer whose slots a table has, all in float32; "" if there is none."""
    dtypes = {slot.name: slot.dtype for slot in table.slots}
    kinds = (kind for kind, slots in _SLOTS.items() if all(dtypes.get(slot) == "float32" for slot in slots))
    return next(kinds, "")


def _settings_of(table: TableView, scalars: Mapping[str, Any], left: list[LeftOut]) -> dict[str, Any]:
    """Return the optimizer's settings in the form of a dump; {} if its states cannot be exported."""
    kind = _kind_of(table)
    if not kind:
        return {}
    groups = (group for group in scalars.get("param_groups", ()) if table.name in group["tables"])
    group: Mapping[str, Any] = next(groups, {})
    lacking = [name for name in _SETTINGS[kind] if name not in group]
    if lacking:
        why = f"need {', '.join(lacking)} of the optimizer beside them, which the checkpoint does not have"
        left.append(LeftOut(f"table {table.name}, optimizer states", why))
        return {}
    settings = {"opt_type": kind, **{name: float(group[name]) for name in _SETTINGS[kind]}}
    if kind == _ADAM:
        beta1, beta2 = group["betas"]
        step = scalars.get("state", {}).get(table.name, {}).get("step", 0)
        settings |= {"iters": int(step), "beta1": float(beta1), "beta2": float(beta2), "weight_decay": 0.0}
    return settings


def _kept(table: TableView, has_states: bool, left: list[LeftOut]) -> TableView:
    """Return the table without slots that a dump cannot hold; ConversionError if a dump cannot hold the vectors."""
    vectors = {slot.name: slot for slot in table.slots}.get(EMBEDDING)
    if vectors is None or vectors.dtype not in _FLOATS or len(vectors.shape) != 1:
        found = "no vectors" if vectors is None else f"vectors of {vectors.dtype} {vectors.shape}"
        expected = f"one dimension of {', '.join(_FLOATS)}"
        raise ConversionError(f"table {table.name!r}", f"slot {EMBEDDING!r}", found=found, expected=expected)
    of_optimizer = _SLOTS.get(_kind_of(table), ())
    names = {EMBEDDING, _score_slot(table), *(of_optimizer if has_states else ())}
    others = [slot.name for slot in table.stored if slot.name not in {*names, *of_optimizer}]
    left += [LeftOut(f"table {table.name}, slot {name}", "has no place in a dump of dynamicemb") for name in others]
    return replace(table, stored=tuple(slot for slot in table.stored if slot.name in names))


def _score_slot(table: TableView) -> str:
    """Return the slot whose values become scores: imported scores or look-up counts; "" if there is no such slot."""
    dtypes = {slot.name: slot.dtype for slot in table.slots}
    return next((name for name in (_SCORE, _COUNT) if dtypes.get(name) == "int64"), "")
