"""Take what a save writes: checked in full here, so that nothing is written of a state that cannot be saved."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.optimizers import state_names
from recckpt.dense.rank_digests import RankDigest
from recckpt.dense.registered import Registry
from recckpt.dense.sharded import ShardedState, ShardedTensors, is_sharded, local_bytes
from recckpt.dense.state_copy import Copy, DenseBuffers, as_it_is, dump_rng, portable, without_values
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.manifest import Scalar
from recckpt.save.training_state import as_scalars
from recckpt.sparse.files.table_rows import TableSource, source_of, source_to_save
from recckpt.sparse.split import state_of


@dataclass(frozen=True)
class Staged:
    """The state of one step on this rank.

    Attributes:
        tables: rows that this rank writes.
        dense: tensor name -> tensor; written by rank 0, empty elsewhere.
        extra: registered name -> state; written by rank 0, empty elsewhere.
        own_extra: registered name -> state of this rank.
        io_state: registered name -> state of this shard.
        rng: generator -> state of this rank.
        step: global step, None where the caller counts none.
        state: what readers without torch want to know of the training.
        sharded: this rank's pieces of sharded tensors.
        digest: what other ranks compare with theirs; None where there are none.
    """

    tables: list[TableSource]
    dense: dict[str, Any]
    extra: dict[str, Any]
    io_state: dict[str, Any]
    rng: dict[str, Any]
    step: int | None
    state: Mapping[str, Scalar]
    sharded: ShardedState = field(default_factory=ShardedState)
    own_extra: dict[str, Any] = field(default_factory=dict)
    digest: RankDigest | None = None

    @property
    def sparse_bytes(self) -> int:
        """Bytes of all rows, ids included."""
        return sum(t.n_rows * (8 + sum(slot.row_bytes for slot in t.slots)) for t in self.tables)

    @property
    def dense_opt(self) -> tuple[str, ...]:
        """``parameter@name`` of the dense optimizers among the registered objects."""
        return state_names({**self.extra, **self.own_extra})

    def close(self) -> None:
        """Let go of the tables, so that training copies no rows aside any more."""
        for table in self.tables:
            table.close()

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
    buffers: DenseBuffers | None = None,
    rank: int = 0,
    digest: RankDigest | None = None,
) -> Staged:
    """Take the state of a model and its companions as it is now.

    Of our tables a snapshot is taken, which goes on when they change.

    Args:
        model: any module.
        sparse_optim: the optimizer of its tables.
        extra: registered objects.
        io_state: registered datasets.
        step: global step, None where the caller counts none.
        state: what readers without torch want to know.
        buffers: where all other tensors are copied to; None where nothing changes before all is written.
        rank: of those that stage together; what is the same on all is looked at by each, and taken by the first.
        digest: takes digests of that; None where there is one rank.

    Raises:
        ValueError: two tables of one name, or a value that could not be loaded back safely; names it. Or a step that
            is no count, or an entry of ``state`` that is neither number nor string.
        TypeError: ``state`` is no mapping.
        StateMismatchError: a foreign table that does not fit the protocol, or has an id twice.
    """
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"step must be an int of at least 0 or None, found {step!r}")
    sparse, dense = state_of(model)
    scalars = {**_learning_rates(sparse_optim), **as_scalars(state)}
    sharded = ShardedTensors()
    dense = sharded.take_from_model(dense)
    with buffers.copying() if buffers else nullcontext(as_it_is) as copy:
        copy_common = copy if rank == 0 else without_values
        common = _common(dense, extra, sparse_optim, sharded, digest.noting(copy_common) if digest else copy_common)
        tensors, extras = common if rank == 0 else ({}, {})
        staged = Staged(
            tables=[],
            dense=tensors,
            extra=extras,
            io_state=io_state.dump(copy),
            rng=dump_rng(),
            step=step,
            state=scalars,
            sharded=sharded.staged(copy),
            own_extra=extra.dump(copy, of_ranks=True),
            digest=digest,
        )
    staged.tables.extend(source_to_save(table, detached=buffers is not None) for table in sparse.values())
    return staged


def _common(
    dense: Mapping[str, Any], extra: Registry, sparse_optim: Optimizer | None, sharded: ShardedTensors, copy: Copy
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return dense tensors and extras, which are the same on all ranks."""
    extras = extra.dump(sharded.from_extra(copy))
    if sparse_optim is not None:
        extras[SPARSE_OPTIM] = portable("the sparse optimizer", copy(("sparse optimizer",), sparse_optim.state_dict()))
    for name, value in dense.items():
        if isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") not in NUMPY_DTYPES:
            raise ValueError(f"{name}: a tensor of {value.dtype} cannot be saved; cast it")
    return {name: portable(name, copy(("dense", name), value)) for name, value in dense.items()}, extras


def estimated_bytes(model: nn.Module, rank: int) -> int:
    """Return about how many bytes a rank writes of a model: its rows, its pieces, and as rank 0 the dense state.

    0 where nothing can be said, of a state that staging refuses.
    """
    try:
        sparse, dense = state_of(model)
        sources = [source_of(table) for table in sparse.values()]
        rows = sum(source.n_rows * (8 + sum(slot.row_bytes for slot in source.slots)) for source in sources)
        return rows + sum(_written_bytes(value, rank) for value in dense.values() if isinstance(value, Tensor))
    except Exception:
        return 0


def _written_bytes(value: Tensor, rank: int) -> int:
    if is_sharded(value):
        return local_bytes(value)
    return value.nbytes if rank == 0 else 0


def _learning_rates(sparse_optim: Optimizer | None) -> dict[str, Scalar]:
    if sparse_optim is None:
        return {}
    return as_scalars({f"sparse_lr_{i}": float(group["lr"]) for i, group in enumerate(sparse_optim.param_groups)})
