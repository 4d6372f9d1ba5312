"""Rows of live tables from a checkpoint in which they are dense tensors, with what optimizers have kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from recckpt.format.names import ID, slot_name
from recckpt.format.tables import TableEntry
from recckpt.live.optimizer_slots import key_of
from recckpt.load.inventory import Thing
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.sparse.files.batch_rows import BatchRows
from recckpt.sparse.files.load_target import TableLoad
from recckpt.types import EMBEDDING, SlotSpec

_STEP_BYTES = 16 << 20  # of the rows that are read at a time
_STATE_REMEDY = "leave it out with 'exclude', and it starts fresh"


class TensorRows:
    """The dense tensors of one checkpoint that fill live tables, as tables of their names.

    Args:
        live: what is filled.
        items: what is planned.
        source: the checkpoint.
        number: of it among the sources.

    Raises:
        StateMismatchError: the state of an optimizer is not one of these rows; names all.
        CorruptCheckpointError: a registered state is not what the manifest says.
    """

    def __init__(self, live: LiveState, items: Sequence[Planned], source: OpenSource, number: int) -> None:
        self._live, self._source = live, source
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
        """Return what is planned without the slots of which the optimizer has no state, as before its first step.

        Those that only the settings of the checkpoint make slots of the table stand behind its ids.
        """
        planned = {item.name: [self._settled(item)] for item in self._planned}
        names = {item.name for item in items}
        for item in self._planned:
            if item.name not in names:
                planned[slot_name(item.name.table, ID)] += planned.pop(item.name)
        return [each for item in items for each in planned.get(item.name, [item])]

    def _of_settings(self) -> list[Planned]:
        """Return the slots that a table has only with the settings of the checkpoint, where there is such a state."""
        names = {item.name for item in self._planned}
        others = [
            replace(item, name=slot_name(item.name.table, slot.name), source=f"{item.thing.tensor}@{slot.name}")
            for item in self._planned
            if item.name.slot == ID and item.thing.optimizer
            for slot in self._live.other_slots(item.name.table)
        ]
        return [item for item in others if item.name not in names and self._value(item) is not None]

    def _settled(self, item: Planned) -> Planned:
        if item.name.slot == ID or _slot_there(item) in self._columns[item.thing.tensor]:
            return item
        reason = f"{item.thing.optimizer!r} there has no such state of {item.thing.tensor!r}"
        return Planned(item.name, reason=reason)

    @property
    def entries(self) -> dict[str, TableEntry]:
        """Tensor -> what it is as a table."""
        n_rows = {item.thing.tensor: item.thing.rows for item in self._planned}
        return {
            tensor: TableEntry(tensor, n_rows[tensor], tuple(_spec(slot, value) for slot, value in columns.items()))
            for tensor, columns in self._columns.items()
        }

    @cached_property
    def scalars(self) -> Mapping[str, Any]:
        """The steps of the tensors, and the settings of who trained them, as a sparse optimizer gives its own."""
        trained = {item.thing.tensor: item.thing.optimizer for item in self._planned if item.thing.optimizer}
        steps, groups = {}, []
        for tensor, optimizer in trained.items():
            values, settings = self._state(tensor, optimizer)
            if "step" in values:
                steps[tensor] = {"step": self._step(optimizer, values["step"])}
            groups.append({**settings, "tables": [tensor]})
        return {"state": steps, "param_groups": groups}

    def _step(self, optimizer: str, step: Any) -> int:
        if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1):
            return int(step)
        found = f"a step of {type(step).__name__}"
        raise self._source.corrupt(layout.EXTRA, repr(optimizer), found=found, expected="a number")

    def read(self, load: TableLoad) -> Iterator[BatchRows]:
        """Yield the rows of a tensor that this rank has in a table, and those that no rank has, some at a time."""
        tensor, n_rows = load.entry.name, load.entry.rows
        table = self._live.live_tables[load.table.name]
        (first, end), size = table.rows.box.rows, table.live.n_rows
        columns = {slot: value for slot, value in self._columns[tensor].items() if slot in load.columns}
        path = layout.join(self._source.at.checkpoint.directory, layout.MODEL)
        n_step = max(1, _STEP_BYTES // load.row_bytes)
        for begin in chain(range(first, min(end, n_rows), n_step), range(size, n_rows, n_step)):
            stop = min(begin + n_step, n_rows, end if begin < size else n_rows)
            values = {slot: _bytes_of(self._box(value, begin, stop)) for slot, value in columns.items()}
            yield BatchRows(tensor, 0, path, np.arange(begin, stop, dtype=np.int64), values)

    def _box(self, value: StoredValue, begin: int, end: int) -> Tensor:
        rest = value.shape[1:]
        return box_of(value, (begin, *(0 for _ in rest)), (end - begin, *rest), self._source.tensors)

    def _value(self, item: Planned) -> StoredValue | None:
        """Return what fills a slot; None for ids, and where there is no such state."""
        tensor, slot = item.thing.tensor, _slot_there(item)
        if slot == ID:
            return None
        if slot == EMBEDDING:
            return self._tensors[tensor]
        if item.thing.state:
            return self._source.tensors.of_extra(item.thing.state)
        kind = self._source.at.checkpoint.manifest.training.optimizers[item.thing.optimizer][0]
        value: Any = self._state(tensor, item.thing.optimizer)[0].get(key_of(kind, slot) or "")
        return self._source.tensors.of_extra(value[STAND_IN]) if stands_in(value) else value

    @cached_property
    def _tensors(self) -> Mapping[str, StoredTensor]:
        return self._source.under_names_of(self._live.tensor_names, self._source.tensors.model)

    def _state(self, tensor: str, optimizer: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return what a registered optimizer has of a tensor, and its settings."""
        if (tensor, optimizer) not in self._states:
            self._states[tensor, optimizer] = self._read_state(tensor, optimizer)
        return self._states[tensor, optimizer]

    def _read_state(self, tensor: str, optimizer: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        source, shard = self._source, self._live.shard
        place = self._tensors[tensor].place
        tied = [name for name, stored in self._tensors.items() if stored.place == place]
        is_of_ranks = optimizer in source.at.extras_of_ranks
        saved = source.registered_on_all(optimizer, shard) if is_of_ranks else [source.registered(optimizer, shard)]
        found: tuple[Mapping[str, Any], Mapping[str, Any]] = {}, {}
        for state in saved:
            if not is_named(state):
                expected = "the state of an optimizer with the names of its parameters, as the manifest says"
                raise source.corrupt(layout.EXTRA, repr(optimizer), found=type(state).__name__, expected=expected)
            states = source.under_names_of(self._live.tensor_names, states_by_name(state))
            values = next((states[name][1] for name in tied if name in states and states[name][1]), {})
            if not isinstance(values, Mapping):
                found_kind = type(values).__name__
                raise source.corrupt(layout.EXTRA, repr(optimizer), found=found_kind, expected="a state by names")
            if values or not found[1]:
                found = values, self._settings(state, tied)
            if values:
                break
        return found

    def _settings(self, state: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        for group in state["param_groups"]:
            called = self._source.under_names_of(self._live.tensor_names, dict.fromkeys(group[NAMES]))
            if not called.keys().isdisjoint(names):
                return {key: value for key, value in group.items() if key not in ("params", NAMES, SHAPES)}
        return {}


def tensor_rows(live: LiveState, items: Sequence[Planned], sources: Sequence[OpenSource]) -> list[TensorRows]:
    """Return the dense tensors of each source that fill live tables; errors as of :class:`TensorRows`."""
    return [TensorRows(live, items, source, number) for number, source in enumerate(sources)]


def settled(items: Sequence[Planned], tensors: Sequence[TensorRows]) -> tuple[Planned, ...]:
    """Return what is planned without the slots of which there is no state."""
    for rows in tensors:
        items = rows.settled(items)
    return tuple(items)


def _slot_there(item: Planned) -> str:
    return item.source.rpartition("@")[2]


def _misfit(item: Planned, value: Any, live: LiveState) -> tuple[object, object] | None:
    """Return (found, expected) where a state is not one of the rows of a table."""
    if item.name.slot == EMBEDDING:
        return None  # the plan has looked at it
    others = {slot.name: slot for slot in live.other_slots(item.name.table)}
    slot: Thing | SlotSpec = live.inventory.get(item.name) or others[item.name.slot]
    expected = f"{slot.dtype} {(item.thing.rows, *slot.shape)}"
    if not isinstance(value, Tensor | StoredTensor):
        return type(value).__name__, expected
    found = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return None if found == expected else (found, expected)


def _spec(slot: str, value: StoredValue) -> SlotSpec:
    return SlotSpec(slot, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))


def _bytes_of(values: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data: np.ndarray[Any, np.dtype[np.uint8]] = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data
