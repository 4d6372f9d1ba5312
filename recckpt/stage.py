"""Take what a save writes: checked in full here, so that nothing is written of a state that cannot be saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.portable import portable
from recckpt.io_state import SPARSE_OPTIM, Registry, dump_rng
from recckpt.manifest import Scalar
from recckpt.sparse.source import TableSource, source_of
from recckpt.split import split_sparse_dense_state_dict, unwrap


@dataclass(frozen=True)
class Staged:
    """The state of one step on this rank.

    Attributes:
        tables: rows that this rank writes.
        dense: tensor name -> tensor; written by rank 0.
        extra: registered name -> state; written by rank 0.
        io_state: registered name -> state of this shard.
        rng: generator -> state of this rank.
        step: global step, None where the caller counts none.
        state: what readers without torch want to know of the training.
    """

    tables: list[TableSource]
    dense: dict[str, Any]
    extra: dict[str, Any]
    io_state: dict[str, Any]
    rng: dict[str, Any]
    step: int | None
    state: Mapping[str, Scalar]

    @property
    def sparse_bytes(self) -> int:
        """Bytes of all rows, ids included."""
        return sum(t.n_rows * (8 + sum(slot.row_bytes for slot in t.slots)) for t in self.tables)

    @property
    def n_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.n_rows for table in self.tables)


def stage(
    model: nn.Module,
    sparse_optim: Optimizer | None,
    extra: Registry,
    io_state: Registry,
    *,
    step: int | None,
    state: Mapping[str, Scalar] | None = None,
) -> Staged:
    """Take the state of a model and its companions as it is now.

    Raises:
        ValueError: two tables of one name, or a value that could not be loaded back safely; names it.
        StateMismatchError: a foreign table that does not fit the protocol.
    """
    sparse, dense = split_sparse_dense_state_dict(unwrap(model).state_dict())
    extras = extra.dump()
    if sparse_optim is not None:
        extras[SPARSE_OPTIM] = portable("the sparse optimizer", sparse_optim.state_dict())
    return Staged(
        tables=[source_of(table) for table in sparse.values()],
        dense={name: portable(name, value) for name, value in dense.items()},
        extra=extras,
        io_state=io_state.dump(),
        rng=dump_rng(),
        step=step,
        state={**_learning_rates(sparse_optim), **(state or {})},
    )


def _learning_rates(sparse_optim: Optimizer | None) -> dict[str, Scalar]:
    if sparse_optim is None:
        return {}
    return {f"sparse_lr_{i}": float(group["lr"]) for i, group in enumerate(sparse_optim.param_groups)}
