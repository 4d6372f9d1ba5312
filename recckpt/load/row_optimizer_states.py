"""The state of the optimizers of rows, put together from the checkpoints that the rows of tables come from."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch.optim import Optimizer

from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import ID, Name
from recckpt.live.optimizers import RowOptimizers
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.load.tensor_rows import TensorRows
from recckpt.types import EMBEDDING, is_optimizer_slot

log = logging.getLogger("recckpt")
_SCALARS = Name("sparse_opt", SPARSE_OPTIM)


def sparse_optimizer_state(
    optimizer: Optimizer | RowOptimizers | None,
    items: Sequence[Planned],
    sources: Sequence[OpenSource],
    tensors: Sequence[TensorRows],
) -> dict[str, Any] | None:
    """Return the scalars to load into the sparse optimizer, None where there are none to take.

    The step of a table comes from where its slots come from, since they belong together; it starts from 0 where the
    table is emptied and its slots start fresh. The hyper-parameters come from the checkpoint that ``sparse_optim`` is
    taken from, group by group where one there holds all of its tables, and has the slots that they have; from another
    run that has to be asked for.

    Args:
        optimizer: of the rows.
        items: what is planned.
        sources: the checkpoints.
        tensors: what each of them gives to live tables as rows.
    """
    if optimizer is None:
        return None
    saved_by = [_Saved(*each) for each in zip(sources, tensors, strict=True)]
    scalars = next((i.offer for i in items if i.name == _SCALARS), None)
    saved = None if scalars is None else saved_by[scalars].scalars
    live = optimizer.state_dict()
    slots: dict[str, list[Planned]] = {name: [] for g in live.get("param_groups", []) for name in g.get("tables", [])}
    if not slots:
        return saved if saved is not None else _foreign_steps(live, items, sources)
    for item in items:
        slots.get(item.name.table, []).append(item)
    steps = dict(live["state"])
    for table, its_slots in slots.items():
        origin = _origin(its_slots, saved_by)
        if origin is not None:
            steps[table] = saved_by[origin[0]].scalars.get("state", {}).get(origin[1])
        elif _is_emptied(its_slots, sources):
            steps[table] = None
    steps = {table: step for table, step in steps.items() if step is not None}
    if saved is None or scalars is None:
        return None if steps == live["state"] else {**live, "state": steps}
    there = {table: _table_there(its_slots, scalars) or table for table, its_slots in slots.items()}
    alike = {table for table in slots if saved_by[scalars].has_slots(there[table], _slots(slots[table]))}
    groups = [_with_settings(group, saved.get("param_groups", []), there, alike) for group in live["param_groups"]]
    return {**live, "state": steps, "param_groups": groups}


class _Saved:
    """What a checkpoint has of the optimizers of rows."""

    def __init__(self, source: OpenSource, tensors: TensorRows) -> None:
        self._source, self._tensors = source, tensors

    @cached_property
    def scalars(self) -> dict[str, Any]:
        """The scalars, of tables and of dense tensors that are taken as tables."""
        own, of_tensors = scalars_in(self._source), self._tensors.scalars
        return {
            **own,
            "state": {**own.get("state", {}), **of_tensors["state"]},
            "param_groups": [*own.get("param_groups", []), *of_tensors["param_groups"]],
        }

    def has_slots(self, table: str, slots: Iterable[str]) -> bool:
        """Say whether the optimizer of a table kept just these slots, as far as is known."""
        entry = self._source.at.checkpoint.manifest.table(table)
        if entry is None:
            return True
        left_out = entry.reduced.slots if entry.reduced is not None else ()
        there = {slot for slot in (*(spec.name for spec in entry.slots), *left_out) if is_optimizer_slot(slot)}
        return there == set(slots)

    @property
    def gives_steps(self) -> bool:
        """Whether the entry asks for steps that come along with rows."""
        return not any(pattern.matches(_SCALARS) for pattern in self._source.at.entry.exclude)


def _slots(items: Iterable[Planned]) -> list[str]:
    return [item.name.slot for item in items if item.name.group == "sparse_opt"]


def _table_there(items: Iterable[Planned], number: int) -> str | None:
    """Return what a table is called in the checkpoint of a number, None where nothing of it comes from there."""
    return next((item.source.rpartition("@")[0] for item in items if item.offer == number), None)


def _origin(items: Sequence[Planned], saved_by: Sequence[_Saved]) -> tuple[int, str] | None:
    """Return the checkpoint and table that the step of a table belongs to, None where it is not loaded.

    A rule without slots has a step all the same, which comes along with the rows.
    """
    own = [item for item in items if item.name.group == "sparse_opt"]
    taken = next((item for item in own or items if item.offer is not None and item.name.slot != ID), None)
    if taken is None or taken.offer is None:
        return None
    table, saved = taken.source.rpartition("@")[0], saved_by[taken.offer]
    is_given = bool(own) or (taken.name.slot == EMBEDDING and saved.gives_steps and saved.has_slots(table, ()))
    return (taken.offer, table) if is_given else None


def _foreign_steps(
    live: Mapping[str, Any], items: Iterable[Planned], sources: Sequence[OpenSource]
) -> dict[str, Any] | None:
    """Return the state of an optimizer that is not ours with the settings it has, from where the last slots come."""
    offers = [item.offer for item in items if item.name.is_slot and item.name.group == "sparse_opt"]
    taken = [offer for offer in offers if offer is not None]
    saved = scalars_in(sources[max(taken)]) if taken else {}
    groups = [[len(group.get("params", ())) for group in state.get("param_groups", ())] for state in (saved, live)]
    return {**saved, "param_groups": live["param_groups"]} if saved and groups[0] and groups[0] == groups[1] else None


def _is_emptied(slots: Iterable[Planned], sources: Sequence[OpenSource]) -> bool:
    """Say whether the rows of a table are replaced."""
    ids = next((item.offer for item in slots if item.name.slot == ID), None)
    return ids is not None and sources[ids].at.entry.hashtable_clear


def _with_settings(
    live: Mapping[str, Any],
    saved_groups: Iterable[Mapping[str, Any]],
    there: Mapping[str, str],
    alike: Container[str],
) -> dict[str, Any]:
    """Return a group with the hyper-parameters of the saved one that holds its tables, under their names there.

    Those of a group with other slots than the tables have, which are not in ``alike``, are those of another optimizer.
    """
    tables = {there.get(table, table) for table in live["tables"]}
    if others := [table for table in live["tables"] if table not in alike]:
        log.warning("sparse optimizer: %s had other slots; the hyper-parameters here stay", sorted(others))
        return dict(live)
    saved = next((group for group in saved_groups if tables <= set(group.get("tables", ()))), None)
    if saved is None:
        log.warning("sparse optimizer: %s were in no one group; their hyper-parameters stay", sorted(tables))
    return {**live, **(saved or {}), "tables": live["tables"]}


def scalars_in(source: OpenSource) -> dict[str, Any]:
    """Return the scalars in a checkpoint, of the shape that optimizers give; {} where it has none."""
    is_there = SPARSE_OPTIM in source.at.checkpoint.manifest.names.extra
    state = source.value(layout.EXTRA, SPARSE_OPTIM) if is_there else {}
    if not _is_state(state):
        expected = "the state dict of an optimizer"
        raise source.corrupt(layout.EXTRA, repr(SPARSE_OPTIM), found=f"{state!s:.80}", expected=expected)
    return dict(state)


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or not isinstance(state.get("state", {}), dict):
        return False
    groups = state.get("param_groups", [])
    return isinstance(groups, list) and all(isinstance(group, dict) and _has_names(group) for group in groups)


def _has_names(group: Mapping[str, Any]) -> bool:
    names = group.get("tables", [])
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
