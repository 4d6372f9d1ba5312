"""The scalars of the sparse optimizer, put together from the checkpoints that its tables come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from recckpt import layout
from recckpt.load_plan import Planned
from recckpt.names import SPARSE_OPTIM
from recckpt.target import Source


def merged_optimizer_state(
    optimizer: Optimizer | None, items: Iterable[Planned], sources: Sequence[Source]
) -> dict[str, Any] | None:
    """Return the state to load, None where there is none to take.

    The hyper-parameters come from the checkpoint that the scalars are taken from, where its groups hold the
    same tables; each table's step comes from where its optimizer slots come from, since they belong together.
    """
    if optimizer is None:
        return None
    items = list(items)
    scalars = next((i for i in items if i.name.text == SPARSE_OPTIM and not i.name.is_slot), None)
    moved = {
        item.name.table: (item.offer, item.source.rsplit("@", 1)[0])
        for item in items
        if item.name.is_slot and item.name.group == "sparse_opt" and item.offer is not None
    }
    if (scalars is None or scalars.offer is None) and not moved:
        return None
    state: Mapping[str, Any] = optimizer.state_dict()
    if scalars is not None and scalars.offer is not None:
        saved = _scalars(sources[scalars.offer])
        state = saved if _same_tables(saved, state) else {**state, "state": _steps(saved, state)}
    steps = dict(state.get("state", {}))
    for table, (offer, there) in moved.items():
        found = _scalars(sources[offer]).get("state", {}).get(there) if offer is not None else None
        if found is not None:
            steps[table] = found
    return {**state, "state": steps}


@contextmanager
def optimizer_loaded(optimizer: Optimizer | None, state: Mapping[str, Any] | None) -> Iterator[None]:
    """Load the optimizer's scalars, and undo it if the block fails."""
    if optimizer is None or state is None:
        yield
        return
    before = optimizer.state_dict()
    optimizer.load_state_dict(dict(state))
    try:
        yield
    except BaseException:
        optimizer.load_state_dict(before)
        raise


def _scalars(source: Source) -> Mapping[str, Any]:
    found: Mapping[str, Any] = source.state(layout.EXTRA).get(SPARSE_OPTIM, {})
    return found


def _same_tables(saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    return _groups(saved) == _groups(live)


def _groups(state: Mapping[str, Any]) -> set[frozenset[str]]:
    return {frozenset(group.get("tables", [])) for group in state.get("param_groups", [])}


def _steps(saved: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name for group in _groups(live) for name in group}
    found = {name: state for name, state in saved.get("state", {}).items() if name in tables}
    return {**live.get("state", {}), **found}
