"""The optimizers of all rows, of our tables and of live ones, as one object with the state of a sparse optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from recckpt.live.tables import LiveTables
from recckpt.sparse.optim.param_groups import plain
from recckpt.types import EMBEDDING


class RowOptimizers:
    """What is saved beside the rows of all tables: the steps of each, and the settings of who trains it.

    Args:
        sparse_optim: the optimizer of our tables, None where there is none.
        tables: the live tables, each a group of its own.
    """

    def __init__(self, sparse_optim: Optimizer | None, tables: LiveTables) -> None:
        self._sparse_optim, self._tables = sparse_optim, tables

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings of all groups; those of live tables are copies."""
        own = self._sparse_optim.param_groups if self._sparse_optim is not None else []
        return [*own, *self._groups()]

    def state_dict(self) -> dict[str, Any]:
        """Return the slots of all optimizers, the steps by the names of tables, and the groups."""
        own = self._sparse_optim.state_dict() if self._sparse_optim is not None else {}
        slots = {slot for table in self._tables.values() for slot in table.live.tensors() if slot != EMBEDDING}
        steps = {
            name: {"step": int(step)} for name, table in self._tables.items() if (step := _step(table.live)) is not None
        }
        return {
            "slots": [*own.get("slots", ()), *sorted(slots - {*own.get("slots", ())})],
            "state": {**own.get("state", {}), **steps},
            "param_groups": [*own.get("param_groups", ()), *self._groups()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each optimizer its part of a saved state; a live table of which it has no step begins anew."""
        groups = state["param_groups"]
        if self._sparse_optim is not None:
            ours = [group for group in groups if not {*group["tables"]} <= self._tables.keys()]
            steps = {name: values for name, values in state["state"].items() if name not in self._tables}
            slots = self._sparse_optim.state_dict()["slots"]
            self._sparse_optim.load_state_dict({"slots": slots, "state": steps, "param_groups": ours})
        now = {name: group for group in self._groups() for name in group["tables"]}
        settings = {name: group for group in groups for name in group["tables"] if name in self._tables}
        # Tables may share a group of an optimizer: one that is not loaded leaves what others have brought.
        for name in sorted(settings, key=lambda name: settings[name] != now.get(name)):
            own = {key: value for key, value in settings[name].items() if key != "tables"}
            self._tables[name].live.finish({}, own)
        scalars = {name: state["state"].get(name, {"step": 0}) for name in self._tables}
        # The tables of a kernel have one step, which is that of the last: one that begins anew leaves it to the others.
        for name in sorted(scalars, key=lambda name: int(scalars[name].get("step", 0))):
            self._tables[name].live.finish(scalars[name], {})

    def set_settings(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Give each optimizer the settings of saved groups."""
        groups = list(groups)
        own = self._sparse_optim.param_groups if self._sparse_optim is not None else []
        for now, before in zip(own, groups, strict=False):
            now.update({key: value for key, value in before.items() if key != "params"})
        for group in groups[len(own) :]:
            [name] = group["tables"]
            self._tables[name].live.finish({}, {key: value for key, value in group.items() if key != "tables"})

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {**{key: plain(value) for key, value in table.live.settings().items()}, "tables": [name]}
            for name, table in self._tables.items()
            if table.live.settings()
        ]


def _step(live: Any) -> int | float | None:
    step: int | float | None = live.scalars().get("step")
    return step


def row_optimizers(sparse_optim: Optimizer | None, tables: LiveTables) -> Optimizer | RowOptimizers | None:
    """Return what has the state of the optimizers of all rows; the sparse optimizer itself where no table is live."""
    return RowOptimizers(sparse_optim, tables) if tables else sparse_optim
