"""A dump of dynamicemb (NVIDIA): keys, embeddings, scores and optimizer states of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recckpt.convert.beside import beside
from recckpt.convert.dynamicemb_files import (
    ADAM,
    KEYS,
    ROWWISE,
    SCORES,
    SETTINGS,
    SLOTS,
    STATES,
    VALUES,
    DumpedTable,
    dumped_tables,
    is_of_dump,
    values_between,
)
from recckpt.convert.source import Array, ImportOptions, LeftOut, SourceContents, SourceRows, SourceTable
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import STEP_BYTES
from recckpt.errors import ConversionError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.types import EMBEDDING, SlotSpec

_COUNT, _SCORE = "count", "score"
_LFU = "Lfu"  # in the name of the strategy whose scores are counts
_EMPTY = "has no rows, which would say how long one is"
_NAMED = "is in several collections, and has its name with that of the collection; names= (--name) gives others"


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return not files.is_file and any(map(is_of_dump, files.names))


def open_source(files: SourceFiles, options: ImportOptions) -> DynamicembSource:
    """Open a dump, or the directory of one of its collections.

    Raises:
        ConversionError: a file is missing or cut, or there is no table.
    """
    if options.as_table:
        raise ConversionError(files.url, "", found="tensors that are to be tables", expected="its own tables alone")
    dumped = dumped_tables(files)
    if not dumped:
        expected = "files such as <table>_emb_keys.rank_0.world_size_1"
        raise ConversionError(files.url, "", found="no table of dynamicemb", expected=expected)
    return DynamicembSource(files, dumped)


class DynamicembSource:
    """An open dump."""

    def __init__(self, files: SourceFiles, dumped: list[DumpedTable]) -> None:
        self._files = files
        self._dumped = {table.name: table for table in dumped}
        left: list[LeftOut] = []
        tables = tuple(_listed(table, left) for table in dumped if table.widths[VALUES])
        left += [LeftOut(f"table {t.name}", _EMPTY) for t in dumped if not t.widths[VALUES]]

        known = [path for table in dumped for paths in (*table.files.values(), table.counters) for path in paths]
        others = [one for one in beside(files, known, "a dump") if not one.name.endswith(SETTINGS)]
        self.contents = SourceContents("dynamicemb", tables, extra=_scalars(dumped), left_out=(*left, *others))

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows, rank by rank."""
        dumped, names = self._dumped[table.name], [slot.name for slot in table.slots]
        step = max(1, STEP_BYTES // table.row_bytes)
        for rank, n_rows in enumerate(dumped.n_rows):
            for begin in range(0, n_rows, step):
                end = min(begin + step, n_rows)
                columns = {item: self._read(dumped, item, rank, begin, end) for item in dumped.widths}
                ids = self._read(dumped, KEYS, rank, begin, end)[:, 0]
                values = {EMBEDDING: columns[VALUES], **_states_of(dumped, columns)}
                if SCORES in columns:
                    scores = columns[SCORES]
                    values[_score_slot(dumped)] = scores[:, 0] if scores.shape[1] == 1 else scores
                yield SourceRows(ids, [values[name] for name in names])

    def close(self) -> None:
        """Do nothing: each file is closed once it is read."""

    def _read(self, table: DumpedTable, item: str, rank: int, begin: int, end: int) -> Array:
        width = 1 if item == KEYS else table.widths[item]
        return values_between(self._files, table.files[item][rank], item, begin, end, width=width)


def _listed(table: DumpedTable, left: list[LeftOut]) -> SourceTable:
    """Return a table with its slots; what does not become one is listed."""
    dim, name = table.widths[VALUES], f"table {table.name}"
    slots = [SlotSpec(EMBEDDING, "float32", (dim,))]
    kind = _optimizer_of(table)
    slots += [SlotSpec(slot, "float32", () if kind == ROWWISE else (dim,)) for slot in SLOTS.get(kind, ())]
    if STATES in table.files and not kind:
        kind_there = table.settings.get("opt_type", f"an optimizer of which no {SETTINGS.lstrip('_')} says what it is")
        left.append(LeftOut(f"{name}, optimizer states", f"{table.widths[STATES]} values a row of {kind_there}"))
    if SCORES in table.files:
        n_words, slot = table.widths[SCORES], _score_slot(table)
        slots.append(SlotSpec(slot, "int64", () if n_words == 1 else (n_words,)))
        strategy = table.settings.get("evict_strategy", "their strategy")
        left.append(LeftOut(f"{name}, scores", f"are the slot {slot!r}, as {strategy} means them"))
    if table.settings:
        left.append(LeftOut(f"{name}, settings", f"are those an optimizer is made with: {_shown(table.settings)}"))
    if table.counters:
        left.append(LeftOut(f"{name}, counters", "of keys that are not admitted yet: counting begins anew"))
    if "/" in table.name:
        left.append(LeftOut(name, _NAMED))
    return SourceTable(table.name, sum(table.n_rows), tuple(slots))


def _optimizer_of(table: DumpedTable) -> str:
    """Return the kind of the optimizer whose states become slots; empty where there are none that could."""
    kind, width, dim = table.settings.get("opt_type"), table.widths.get(STATES), table.widths[VALUES]
    if kind not in SLOTS or not width:
        return ""
    fits = width < dim or width == 1 if kind == ROWWISE else width == dim * len(SLOTS[kind])
    return str(kind) if fits else ""


def _states_of(table: DumpedTable, columns: dict[str, Array]) -> dict[str, Array]:
    """Return the states of an optimizer by slot; of row-wise sums the first value, where rows were padded."""
    kind, dim = _optimizer_of(table), table.widths[VALUES]
    if kind == ROWWISE:
        return {SLOTS[kind][0]: columns[STATES][:, 0]}
    return {slot: columns[STATES][:, n * dim : (n + 1) * dim] for n, slot in enumerate(SLOTS.get(kind, ()))}


def _score_slot(table: DumpedTable) -> str:
    is_count = str(table.settings.get("evict_strategy", "")).endswith(f"K{_LFU}")
    return _COUNT if is_count and table.widths[SCORES] == 1 else _SCORE


def _scalars(dumped: list[DumpedTable]) -> dict[str, Any]:
    """Return the state of the sparse optimizer, which has a step for each table."""
    steps = {t.name: t.settings.get("iters") for t in dumped if t.widths[VALUES] and _optimizer_of(t) == ADAM}
    state = {table: {"step": step} for table, step in steps.items() if type(step) is int and step >= 0}
    if not state:
        return {}
    return {SPARSE_OPTIM: {"slots": list(SLOTS[ADAM]), "state": state, "param_groups": [{"tables": list(state)}]}}


def _shown(settings: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
