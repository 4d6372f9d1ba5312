"""Dense tensors of a model from a checkpoint in which they are tables, with what optimizers kept of their rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recckpt.errors import StateMismatchError
from recckpt.format.names import Name
from recckpt.format.tables import TableEntry
from recckpt.live.optimizer_slots import key_of
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.load.row_optimizer_states import scalars_in
from recckpt.load.tensor_rows import TensorRows
from recckpt.parallel.meetings import Meetings
from recckpt.sparse.files.ages import Ages
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.load_target import TableLoad
from recckpt.sparse.files.loader import load_tables
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.sparse.files.table_target import LoadTarget
from recckpt.storage.transfers import WorkDir
from recckpt.types import EMBEDDING, SlotSpec

_INT_STEP = "SparseAdam"  # counts in an int, the others in a tensor
_WITHOUT_STEP = "SGD"


@dataclass
class _Gathered:
    """A table whose rows are gathered in tensors, by their numbers; it never says that it has rows to lose."""

    name: str
    columns: Mapping[str, Tensor]

    def ids(self) -> Tensor:
        """Return the row numbers."""
        return torch.arange(len(self.columns[EMBEDDING]), device="cpu")

    def embeddings(self) -> Tensor:
        """Return the values."""
        return self.columns[EMBEDDING]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The other slots."""
        return {slot: values for slot, values in self.columns.items() if slot != EMBEDDING}

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set rows; an id that is the number of none is refused."""
        outside = ids[(ids < 0) | (ids >= len(self.columns[EMBEDDING]))]
        if len(outside):
            expected = f"the numbers of {len(self.columns[EMBEDDING])} rows"
            raise StateMismatchError(
                f"table {self.name!r}, as a dense tensor",
                mismatched={f"{self.name}@id": (int(outside[0]), expected)},
                remedy="leave the tensor out with 'exclude'",
            )
        for slot, values in {EMBEDDING: embeddings, **(slots or {})}.items():
            self.columns[slot][ids] = values

    def clear(self) -> None:
        """Do nothing: every row is written."""

    def __len__(self) -> int:
        return 0


class TableTensors:
    """The tables of one checkpoint that fill dense tensors, all of their rows in memory.

    Every rank reads all of them, as it does dense state.

    Args:
        live: what is filled.
        items: what is planned.
        source: the checkpoint.
        number: of it among the sources.
        download_dir: where files that cannot be mapped are copied before they are read; None: nowhere.
        concurrency: number of threads that read.

    Raises:
        CorruptCheckpointError: a file is damaged.
        StateMismatchError: the ids of a table are not row numbers.
    """

    def __init__(
        self,
        live: LiveState,
        items: Sequence[Planned],
        source: OpenSource,
        number: int,
        *,
        download_dir: WorkDir | None,
        concurrency: int,
    ) -> None:
        self._live, self._source = live, source
        own = [item for item in items if item.offer == number and item.thing.table]
        slots: dict[str, set[str]] = {}
        for item in own:
            if not item.name.is_settings:
                slots.setdefault(item.thing.table, {EMBEDDING}).update(self._keys(item).values())
        entries = {entry.name: entry for entry in source.at.checkpoint.manifest.tables if entry.name in slots}
        self._tables = {name: _gathered(entry, slots[name]) for name, entry in entries.items()}
        loads = [_load_of(table, entries[name]) for name, table in self._tables.items()]
        if loads:
            links, alone = source.rows(number, loads, download_dir, concurrency), Meetings()
            loaded = load_tables(
                links, concurrency=concurrency, advance=lambda n: n, when_checked=lambda: None, meetings=alone
            )
            for name in self._tables:
                if loaded.rows_taken[name] != entries[name].rows:
                    directory = source.at.checkpoint.directory
                    raise count_error(directory, name, entries[name].rows, loaded.rows_taken[name])

    def tensor(self, item: Planned) -> Tensor:
        """Return the values of a dense tensor."""
        return self._tables[item.thing.table].embeddings()

    def state(self, item: Planned) -> Mapping[str, Any]:
        """Return the state of a parameter for a dense optimizer."""
        table, kind = self._tables[item.thing.table], self._kind(item.name)
        values: dict[str, Any] = {key: table.columns[slot] for key, slot in self._keys(item).items()}
        step = int(self._scalars.get("state", {}).get(item.thing.table, {}).get("step", 0))
        if kind == _INT_STEP:
            values["step"] = step
        elif kind != _WITHOUT_STEP:
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            values["step"] = torch.tensor(float(step), dtype=dtype, device="cpu")
        return values

    def settings(self, item: Planned) -> Mapping[str, Any]:
        """Return the settings that a parameter had with the rows of its table, {} where there are none."""
        groups = (group for group in self._scalars.get("param_groups", []) if item.thing.table in group["tables"])
        return {key: value for key, value in next(groups, {}).items() if key != "tables"}

    @cached_property
    def _scalars(self) -> Mapping[str, Any]:
        return scalars_in(self._source)

    def _kind(self, state: Name) -> str:
        return self._live.inventory[Name("dense_opt", state.optimizer)].lineage[0]

    def _keys(self, item: Planned) -> Mapping[str, str]:
        """Return key -> slot of the state of a parameter; nothing of a tensor."""
        if not item.name.parameter:
            return {}
        entry, kind = self._source.at.checkpoint.manifest.named_table(item.thing.table), self._kind(item.name)
        return {key: slot.name for slot in entry.slots if (key := key_of(kind, slot.name))}


def _load_of(table: _Gathered, entry: TableEntry) -> TableLoad:
    return TableLoad(
        target=LoadTarget(table),
        entry=entry,
        slots={slot: slot for slot in table.columns},
        with_rows=True,
        clear=True,
        where=RowFilter(),
        is_update=False,
        ages=Ages(),
    )


def _gathered(entry: TableEntry, slots: Collection[str]) -> _Gathered:
    return _Gathered(entry.name, {spec.name: _empty(entry, spec) for spec in entry.slots if spec.name in slots})


def _empty(entry: TableEntry, spec: SlotSpec) -> Tensor:
    dtype = spec.dtype if entry.reduced is None else entry.reduced.dtypes.get(spec.name, spec.dtype)
    return torch.empty((entry.rows, *spec.shape), dtype=getattr(torch, dtype), device="cpu")


@dataclass(frozen=True)
class Converted:
    """What each source gives in another form than the model has it.

    Attributes:
        tensors: dense tensors that are rows here.
        tables: tables that are dense tensors here.
    """

    tensors: Sequence[TensorRows]
    tables: Sequence[TableTensors]
