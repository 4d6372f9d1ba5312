"""The scalars of the sparse optimizer, put together from the checkpoints that its tables come from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from recckpt.errors import RecckptError, StateMismatchError
from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.load.matching import Planned
from recckpt.load.selection import ID, Name
from recckpt.load.source import Source
from recckpt.types import EMBEDDING

log = logging.getLogger("recckpt")
_SCALARS = Name("sparse_opt", SPARSE_OPTIM)


def merged_optimizer_state(
    optimizer: Optimizer | None, items: Iterable[Planned], sources: Sequence[Source]
) -> dict[str, Any] | None:
    """Return the state to load, None where there is none to take.

    The step of a table comes from where its slots come from, since they belong together; it starts from 0 where the
    table is emptied and its slots start fresh. The hyper-parameters come from the checkpoint that ``sparse_optim`` is
    taken from, group by group where one there holds all of its tables; from another run that has to be asked for.
    """
    if optimizer is None:
        return None
    items = list(items)
    scalars = next((i.offer for i in items if i.name.text == SPARSE_OPTIM and not i.name.is_slot), None)
    saved = None if scalars is None else _scalars(sources[scalars])
    live = optimizer.state_dict()
    if not _tables(live):
        return saved if saved is not None else _foreign_steps(live, items, sources)
    steps = dict(live["state"])
    slots: dict[str, list[Planned]] = {table: [] for table in _tables(live)}
    for item in items:
        slots.get(item.name.table, []).append(item)
    for table, its_slots in slots.items():
        origin = _origin(its_slots, live, sources)
        if origin is not None:
            steps[table] = _scalars(sources[origin[0]]).get("state", {}).get(origin[1])
        elif _is_emptied(its_slots, sources):
            steps[table] = None
    steps = {table: step for table, step in steps.items() if step is not None}
    if saved is None:
        return None if steps == live["state"] else {**live, "state": steps}
    there = {item.name.table: item.source.rpartition("@")[0] for item in items if item.offer == scalars}
    groups = [_with_settings(group, saved.get("param_groups", []), there) for group in live["param_groups"]]
    return {**live, "state": steps, "param_groups": groups}


def _origin(slots: Sequence[Planned], live: Mapping[str, Any], sources: Sequence[Source]) -> tuple[int, str] | None:
    """Return the checkpoint and table that the step of a table belongs to, None where it is not loaded."""
    own = [item for item in slots if item.name.group == "sparse_opt"]
    rows = [item for item in slots if item.name.slot == EMBEDDING and _gives_steps(item, live, sources)]
    taken = own or rows  # a rule without slots has a step all the same
    return next(((i.offer, i.source.rpartition("@")[0]) for i in taken if i.offer is not None), None)


def _gives_steps(item: Planned, live: Mapping[str, Any], sources: Sequence[Source]) -> bool:
    """Say whether the step of a table without slots of the optimizer comes along with its rows."""
    if item.offer is None or any(pattern.matches(_SCALARS) for pattern in sources[item.offer].entry.exclude):
        return False
    return bool(_scalars(sources[item.offer]).get("slots") == live.get("slots"))


def _foreign_steps(
    live: Mapping[str, Any], items: Iterable[Planned], sources: Sequence[Source]
) -> dict[str, Any] | None:
    """Return the state of an optimizer that is not ours with the settings it has, from where the last slots come."""
    offers = [item.offer for item in items if item.name.is_slot and item.name.group == "sparse_opt"]
    taken = [offer for offer in offers if offer is not None]
    saved = _scalars(sources[max(taken)]) if taken else {}
    groups = [[len(group.get("params", ())) for group in state.get("param_groups", ())] for state in (saved, live)]
    return {**saved, "param_groups": live["param_groups"]} if saved and groups[0] and groups[0] == groups[1] else None


def _is_emptied(slots: Iterable[Planned], sources: Sequence[Source]) -> bool:
    """Say whether the rows of a table are replaced."""
    ids = next((item.offer for item in slots if item.name.slot == ID), None)
    return ids is not None and sources[ids].entry.hashtable_clear


def _with_settings(
    live: Mapping[str, Any], saved_groups: Iterable[Mapping[str, Any]], there: Mapping[str, str]
) -> dict[str, Any]:
    """Return a group with the hyper-parameters of the saved one that holds its tables, under their names there."""
    tables = {there.get(table, table) for table in live["tables"]}
    saved = next((group for group in saved_groups if tables <= set(group.get("tables", ()))), None)
    if saved is None:
        log.warning("sparse optimizer: %s were in no one group; their hyper-parameters stay", sorted(tables))
    return {**live, **(saved or {}), "tables": live["tables"]}


@contextmanager
def optimizer_loaded(optimizer: Optimizer | None, state: Mapping[str, Any] | None) -> Iterator[None]:
    """Load the optimizer's scalars, and undo it if the block fails."""
    if optimizer is None or state is None:
        yield
        return
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(dict(state))
    except RecckptError:
        raise
    except Exception as error:
        refusal = f"{type(optimizer).__qualname__} refused it: {type(error).__name__}: {error}"
        raise StateMismatchError("the state of the sparse optimizer", remedy=refusal) from error
    try:
        yield
    except BaseException:
        optimizer.load_state_dict(before)
        raise


def _scalars(source: Source) -> dict[str, Any]:
    """Return the scalars in a checkpoint, of the shape that optimizers give; {} where it has none."""
    is_there = _SCALARS in source.registered
    found = source.value(layout.EXTRA, SPARSE_OPTIM) if is_there else {}
    if not _is_state(found):
        expected = "the state dict of an optimizer"
        raise source.corrupt(layout.EXTRA, repr(SPARSE_OPTIM), found=f"{found!s:.80}", expected=expected)
    return dict(found)


def _is_state(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("state", {}), dict):
        return False
    groups = found.get("param_groups", [])
    return isinstance(groups, list) and all(isinstance(group, dict) and _has_names(group) for group in groups)


def _has_names(group: Mapping[str, Any]) -> bool:
    names = group.get("tables", [])
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _tables(state: Mapping[str, Any]) -> list[str]:
    return [name for group in state.get("param_groups", []) for name in group.get("tables", [])]
