"""Fills live tables from dense tensors of a checkpoint, and dense tensors from its tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.dense.loader import StoredValue, box_of, stands_in
from recckpt.dense.optimizers import NAMES, SHAPES, is_named, states_by_name
from recckpt.dense.sharded import STAND_IN
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import StateMismatchError
from recckpt.format import layout
from recckpt.format.names import ID, Name, slot_name
from recckpt.format.tables import TableEntry
from recckpt.live.optimizer_slots import OPTIONAL, akin_slot, are_own, common_slot, key_of
from recckpt.load.inventory import Thing
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.parallel.ranks import Meetings
from recckpt.policies.row_filter import RowFilter
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.filler import BatchRows, Filler
from recckpt.sparse.files.loader import load_tables
from recckpt.sparse.files.table_target import Ages, LoadTarget
from recckpt.storage.transfers import WorkDir
from recckpt.types import EMBEDDING, SlotSpec, is_optimizer_slot

_STEP_BYTES = 16 << 20  # bytes of rows read at a time
_STATE_REMEDY = "leave it out with 'exclude', and it starts fresh"
_INT_STEP = "SparseAdam"  # has its step as an int, other optimizers as a tensor
_WITHOUT_STEP = "SGD"


class TensorRows:
    """The dense tensors of one checkpoint that fill live tables here.

    Raises:
        StateMismatchError: optimizer states do not have one value for each of these rows; the message names all.
        CorruptCheckpointError: a registered state differs from the manifest.
    """

    def __init__(self, live: LiveState, items: Sequence[Planned], source: OpenSource, number: int) -> None:
        self._live, self.source = live, source
        own = [item for item in items if item.offer == number]
        self._planned = [item for item in own if item.name.is_slot and item.thing.tensor]
        self._states: dict[tuple[str, str], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
        self._columns: dict[str, dict[str, StoredValue]] = {}
        are_settings_taken = any(item.name.is_settings and item.name.group == "sparse_opt" for item in own)
        if are_settings_taken and not source.at.entry.keeps_settings:
            self._planned += self._of_settings()
        mismatched: dict[str, tuple[object, object]] = {}
        for item in self._planned:
            columns = self._columns.setdefault(item.thing.tensor, {})
            value = self._value(item)
            if value is not None:
                columns[_slot_there(item)] = value
                if misfit := _misfit(item, value, live):
                    mismatched[item.name.text] = misfit
        if mismatched:
            raise StateMismatchError(source.at.label, mismatched=mismatched, remedy=_STATE_REMEDY)

    def settled(self, items: Sequence[Planned]) -> list[Planned]:
        """Return the plan without slots that the optimizer has no state for, as before its first step.

        Slots that the table has only with the checkpoint's settings are inserted behind its ids.
        """
        planned: dict[Name, list[Planned]] = {}
        for item in self._planned:
            settled = item
            if item.name.slot != ID and _slot_there(item) not in self._columns[item.thing.tensor]:
                reason = f"{item.thing.optimizer!r} in the checkpoint has no such state of {item.thing.tensor!r}"
                settled = Planned(item.name, reason=reason)
            planned[item.name] = [settled]
        names = {item.name for item in items}
        for item in self._planned:
            if item.name not in names:
                planned[slot_name(item.name.table, ID)] += planned.pop(item.name)
        return [each for item in items for each in planned.get(item.name, [item])]

    def _of_settings(self) -> list[Planned]:
        """Return the slots that a table has only with the checkpoint's settings, if their state exists."""
        names = {item.name for item in self._planned}
        others = [
            replace(item, name=slot_name(item.name.table, slot.name), source=f"{item.thing.tensor}@{slot.name}")
            for item in self._planned
            if item.name.slot == ID and item.thing.optimizer
            for slot in self._live.other_slots(item.name.table)
        ]
        return [item for item in others if item.name not in names and self._value(item) is not None]

    @property
    def entries(self) -> dict[str, TableEntry]:
        n_rows = {item.thing.tensor: item.thing.rows for item in self._planned}
        entries = {}
        for tensor, columns in self._columns.items():
            dtypes = {slot: str(value.dtype).removeprefix("torch.") for slot, value in columns.items()}
            specs = (SlotSpec(slot, dtypes[slot], tuple(value.shape[1:])) for slot, value in columns.items())
            entries[tensor] = TableEntry(tensor, n_rows[tensor], tuple(specs))
        return entries

    def has_slots(self, table: str, slots: Iterable[str], *, is_live: bool = False) -> bool:
        """Return whether the optimizer of a table kept exactly these slots, as far as is known.

        The optimizer of a live table may have a similar class, or other settings with other optional slots.
        """
        entry = self.source.at.checkpoint.manifest.table(table)
        if entry is None:
            return True
        left_out = entry.reduced.slots if entry.reduced is not None else ()
        there = {slot for slot in (*(spec.name for spec in entry.slots), *left_out) if is_optimizer_slot(slot)}
        if not is_live:
            return there == set(slots)
        return {*map(common_slot, there)} - OPTIONAL == {*map(common_slot, slots)} - OPTIONAL

    def has_other_decay(self, table: str, slots: Sequence[str]) -> bool:
        """Return whether a table was trained by an optimizer in which weight decay has another meaning."""
        entry = self.source.at.checkpoint.manifest.table(table)
        if entry is None:
            things = (item.thing for item in self._planned if item.thing.tensor == table and item.thing.lineage)
            kind = next((thing.lineage[0] for thing in things), "")
            return bool(kind) and not are_own(kind, slots)
        there = {spec.name for spec in entry.slots}
        return any(slot not in there and akin_slot(slot) in there for slot in slots)

    @cached_property
    def scalars(self) -> dict[str, Any]:
        """The steps of tables and tensors, and the settings of their optimizers, in the format of sparse optimizers."""
        trained = {item.thing.tensor: item.thing.optimizer for item in self._planned if item.thing.optimizer}
        saved = self.source.row_scalars()
        steps, groups = {**saved.get("state", {})}, [*saved.get("param_groups", [])]
        for tensor, optimizer in trained.items():
            values, settings = self._state(tensor, optimizer)
            step = values.get("step", 0)
            if not isinstance(step, int | float) and not (isinstance(step, Tensor) and step.numel() == 1):
                found = f"a step of {type(step).__name__}"
                raise self.source.corrupt(layout.EXTRA, repr(optimizer), found=found, expected="a number")
            if "step" in values:
                steps[tensor] = {"step": int(step)}
            groups.append({**settings, "tables": [tensor]})
        return {**saved, "state": steps, "param_groups": groups}

    def read(self, filler: Filler) -> Iterator[BatchRows]:
        """Yield, in batches, the rows of a tensor that this rank has in its table, then the rows beyond the table."""
        tensor, n_rows = filler.entry.name, filler.entry.rows
        table = self._live.live_tables[filler.target.table.name]
        (first, end), size = table.rows.box.rows, table.live.n_rows
        columns = {slot: value for slot, value in self._columns[tensor].items() if slot in filler.columns}
        path = layout.join(self.source.at.checkpoint.directory, layout.MODEL)
        n_step = max(1, _STEP_BYTES // filler.row_bytes)
        for begin in chain(range(first, min(end, n_rows), n_step), range(size, n_rows, n_step)):
            stop = min(begin + n_step, n_rows, end if begin < size else n_rows)
            values: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
            for slot, value in columns.items():
                rest = value.shape[1:]
                box = box_of(value, (begin, *(0 for _ in rest)), (stop - begin, *rest), self.source.tensors)
                values[slot] = box.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield BatchRows(tensor, 0, path, np.arange(begin, stop, dtype=np.int64), values)

    def _value(self, item: Planned) -> StoredValue | None:
        tensor, slot = item.thing.tensor, _slot_there(item)
        if slot == ID:
            return None
        if slot == EMBEDDING:
            return self._tensors[tensor]
        if item.thing.state:
            return self.source.tensors.of_extra(item.thing.state)
        kind = self.source.at.checkpoint.manifest.training.optimizers[item.thing.optimizer][0]
        value: Any = self._state(tensor, item.thing.optimizer)[0].get(key_of(kind, slot) or "")
        return self.source.tensors.of_extra(value[STAND_IN]) if stands_in(value) else value

    @cached_property
    def _tensors(self) -> Mapping[str, StoredTensor]:
        return self.source.under_names_of(self._live.tensor_names, self.source.tensors.model)

    def _state(self, tensor: str, optimizer: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        if (tensor, optimizer) in self._states:
            return self._states[tensor, optimizer]
        source, shard = self.source, self._live.shard
        place = self._tensors[tensor].place
        tied = [name for name, stored in self._tensors.items() if stored.place == place]
        found: tuple[Mapping[str, Any], Mapping[str, Any]] = {}, {}
        for state in source.registered_on_all(optimizer, shard):
            if not is_named(state):
                expected = "the state of an optimizer with the names of its parameters, as the manifest says"
                raise source.corrupt(layout.EXTRA, repr(optimizer), found=type(state).__name__, expected=expected)
            states = source.under_names_of(self._live.tensor_names, states_by_name(state))
            values = next((states[name][1] for name in tied if name in states and states[name][1]), {})
            if not isinstance(values, Mapping):
                found_kind = type(values).__name__
                raise source.corrupt(layout.EXTRA, repr(optimizer), found=found_kind, expected="a state by names")
            if values or not found[1]:
                settings: Mapping[str, Any] = {}
                for group in state["param_groups"]:
                    called = source.under_names_of(self._live.tensor_names, dict.fromkeys(group[NAMES]))
                    if not called.keys().isdisjoint(tied):
                        settings = {key: value for key, value in group.items() if key not in ("params", NAMES, SHAPES)}
                        break
                found = values, settings
            if values:
                break
        self._states[tensor, optimizer] = found
        return found


def _slot_there(item: Planned) -> str:
    return item.source.rpartition("@")[2]


def _misfit(item: Planned, value: Any, live: LiveState) -> tuple[object, object] | None:
    """Return (found, expected) if a state does not have one value for each row."""
    if item.name.slot == EMBEDDING:
        return None  # the plan has checked it
    others = {slot.name: slot for slot in live.other_slots(item.name.table)}
    slot: Thing | SlotSpec = live.inventory.get(item.name) or others[item.name.slot]
    expected = f"{slot.dtype} {(item.thing.rows, *slot.shape)}"
    if not isinstance(value, Tensor | StoredTensor):
        return type(value).__name__, expected
    found = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return None if found == expected else (found, expected)


@dataclass
class _Gathered:
    """A table that gathers rows into tensors, by row number. Its length is 0, so that a load may always fill it."""

    name: str
    columns: Mapping[str, Tensor]

    def ids(self) -> Tensor:
        return torch.arange(len(self.columns[EMBEDDING]), device="cpu")

    def embeddings(self) -> Tensor:
        return self.columns[EMBEDDING]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        return {slot: values for slot, values in self.columns.items() if slot != EMBEDDING}

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
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

    def clear(self) -> None: ...

    def __len__(self) -> int:
        return 0


class TableTensors:
    """The tables of one checkpoint that fill dense tensors. Every rank reads all their rows, as it reads dense state.

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
                slots.setdefault(item.thing.table, {EMBEDDING}).update(self._keys(item)[1].values())
        entries = [entry for entry in source.at.checkpoint.manifest.tables if entry.name in slots]
        self._tables = {entry.name: _gathered(entry, slots[entry.name]) for entry in entries}
        self.bytes_read = 0
        if not entries:
            return
        fillers = [
            Filler(
                target=LoadTarget(self._tables[entry.name]),
                entry=entry,
                slots={slot: slot for slot in self._tables[entry.name].columns},
                with_rows=True,
                clear=True,
                where=RowFilter(),
                is_update=False,
                ages=Ages(),
            )
            for entry in entries
        ]
        links = source.rows(number, fillers, download_dir, concurrency)
        loaded = load_tables(
            links, concurrency=concurrency, advance=lambda n: n, when_checked=lambda: None, meetings=Meetings()
        )
        self.bytes_read = loaded.bytes_read
        for entry in entries:
            if (n_rows := loaded.rows_taken[entry.name]) != entry.rows:
                raise count_error(source.at.checkpoint.directory, entry.name, entry.rows, n_rows)

    def tensor(self, item: Planned) -> Tensor:
        return self._tables[item.thing.table].embeddings()

    def state(self, item: Planned) -> Mapping[str, Any]:
        kind, slots = self._keys(item)
        columns, scalars = self._tables[item.thing.table].columns, self._source.row_scalars()
        values: dict[str, Any] = {key: columns[slot] for key, slot in slots.items()}
        step = int(scalars.get("state", {}).get(item.thing.table, {}).get("step", 0))
        if kind == _INT_STEP:
            values["step"] = step
        elif kind != _WITHOUT_STEP:
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            values["step"] = torch.tensor(float(step), dtype=dtype, device="cpu")
        return values

    def settings(self, item: Planned) -> Mapping[str, Any]:
        for group in self._source.row_scalars().get("param_groups", []):
            if item.thing.table in group["tables"]:
                return {key: value for key, value in group.items() if key != "tables"}
        return {}

    def _keys(self, item: Planned) -> tuple[str, Mapping[str, str]]:
        """Return the class of the optimizer that gets a state, and key -> slot; both empty for a tensor itself."""
        if not item.name.parameter:
            return "", {}
        kind = self._live.inventory[Name("dense_opt", item.name.optimizer)].lineage[0]
        entry = self._source.at.checkpoint.manifest.named_table(item.thing.table)
        return kind, {key: slot.name for slot in entry.slots if (key := key_of(kind, slot.name))}


def _gathered(entry: TableEntry, slots: Collection[str]) -> _Gathered:
    dtypes = entry.reduced.dtypes if entry.reduced is not None else {}
    columns = {}
    for spec in (spec for spec in entry.slots if spec.name in slots):
        dtype = getattr(torch, dtypes.get(spec.name, spec.dtype))
        columns[spec.name] = torch.empty((entry.rows, *spec.shape), dtype=dtype, device="cpu")
    return _Gathered(entry.name, columns)
