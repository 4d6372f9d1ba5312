"""The hallway of a load: read what is small, check all of it, fill the tables, then the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt import layout
from recckpt.dense.loader import check_fits, load_state
from recckpt.errors import StateMismatchError
from recckpt.io_state import SPARSE_OPTIM, Registry, load_rng
from recckpt.listing import Checkpoint
from recckpt.load_conf import Selection
from recckpt.progress import Progress
from recckpt.sparse.catalog import Part
from recckpt.sparse.filler import TableLoad
from recckpt.sparse.loader import load_tables, plan_load
from recckpt.sparse.shards import read_parts
from recckpt.split import split_sparse_dense_state_dict, unwrap
from recckpt.storage import Storage
from recckpt.types import HashTable

log = logging.getLogger("recckpt")

_WRAPPED = "module."
_REMEDY = "pass load_conf={'strict': False} to load what fits by name"


@dataclass(frozen=True)
class Target:
    """What a load fills: the live state of this rank."""

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    shard: int
    shards: int


def load(
    checkpoint: Checkpoint,
    target: Target,
    selection: Selection,
    *,
    storage: Storage,
    concurrency: int,
    rng: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint into live state; names and shapes that do not fit are refused before anything changes.

    Args:
        checkpoint: which.
        target: what to fill.
        selection: which groups to take.
        storage: where the checkpoint lies.
        concurrency: number of reader threads.
        rng: whether to restore the random generators, which is left out when the rank count differs.

    Returns:
        The extra state, registered or not: name -> state.

    Raises:
        StateMismatchError: the state does not fit; all that differs.
        CorruptCheckpointError: a file is damaged.
    """
    files = _Files(checkpoint, storage)
    model = unwrap(target.model)
    sparse, live = split_sparse_dense_state_dict(model.state_dict())
    dense = _with_prefix_of(live, files.state(layout.MODEL)) if "dense" in selection else {}
    extra = files.state(layout.EXTRA) if selection.groups & {"extra", "sparse_opt"} else {}
    optim_state = extra.pop(SPARSE_OPTIM, None)
    io_state = _io_state(files, target) if "io_state" in selection else {}
    generators = files.state(layout.rng(target.shard)) if rng and files.shards == target.shards else {}
    tables = _check_state(checkpoint, sparse, dense, live, selection)
    parts = read_parts(checkpoint, storage) if tables else []

    with ExitStack() as undone_on_error:  # what can refuse its state goes first
        if "sparse_opt" in selection:
            undone_on_error.enter_context(_sparse_optim_loaded(target.sparse_optim, optim_state))
        if "extra" in selection:
            undone_on_error.enter_context(target.extra.loaded(extra))
        _fill_tables(checkpoint, tables, parts, storage, concurrency)
    if "dense" in selection:
        model.load_state_dict({name: dense[name] for name in dense if name in live}, strict=False)
    if "io_state" in selection:
        target.io_state.load(io_state)  # a dataset that is moved may not find back, so it is the last to be
    if generators:
        load_rng(generators)
    return extra


class _Files:
    """The small files of a checkpoint, read and checked when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, storage: Storage) -> None:
        self._checkpoint, self._storage = checkpoint, storage
        self.shards = len(checkpoint.manifest.shards)

    def state(self, name: str) -> dict[str, Any]:
        """Return the dict in a ``.pt`` file, empty where the checkpoint has no such file."""
        entry = self._checkpoint.manifest.file(name)
        return load_state(self._storage, self._checkpoint.directory, entry) if entry else {}


def _check_state(
    checkpoint: Checkpoint,
    sparse: Mapping[str, HashTable],
    dense: Mapping[str, Any],
    live: Mapping[str, Any],
    selection: Selection,
) -> list[TableLoad]:
    """Return the tables to fill, or raise one error for all that differs, tables and tensors."""
    tables: list[TableLoad] = []
    mismatches: list[StateMismatchError] = []
    if selection.groups & {"sparse", "sparse_opt"}:
        try:
            tables = plan_load(
                sparse,
                checkpoint.manifest.tables,
                with_rows="sparse" in selection,
                with_optimizer="sparse_opt" in selection,
                strict=selection.strict,
            )
        except StateMismatchError as error:
            mismatches.append(error)
    if "dense" in selection:
        try:
            check_fits(dense, live, strict=selection.strict)
        except StateMismatchError as error:
            mismatches.append(error)
    if mismatches:
        raise StateMismatchError(
            checkpoint.ckpt_id,
            missing=[name for error in mismatches for name in error.missing],
            unexpected=[name for error in mismatches for name in error.unexpected],
            mismatched={name: pair for error in mismatches for name, pair in error.mismatched.items()},
            remedy=_REMEDY if any(error.missing or error.unexpected for error in mismatches) else "",
        )
    return tables


def _fill_tables(
    checkpoint: Checkpoint, tables: list[TableLoad], parts: list[Part], storage: Storage, concurrency: int
) -> None:
    names = {load.entry.name for load in tables}
    n_bytes = sum(t.rows * t.row_bytes for t in checkpoint.manifest.tables if t.name in names)
    with Progress(f"loading {checkpoint.ckpt_id}", n_bytes) as progress:
        progress.n_rows = load_tables(
            tables, parts, storage, checkpoint.directory, concurrency=concurrency, advance=progress.advance
        )


@contextmanager
def _sparse_optim_loaded(sparse_optim: Optimizer | None, state: Mapping[str, Any] | None) -> Iterator[None]:
    """Load the optimizer's scalars, and undo it if the block fails."""
    if sparse_optim is None or state is None:
        if sparse_optim is not None:
            log.warning("the sparse optimizer is not in the checkpoint and keeps its present state")
        yield
        return
    before = sparse_optim.state_dict()
    sparse_optim.load_state_dict(dict(state))
    try:
        yield
    except BaseException:
        sparse_optim.load_state_dict(before)
        raise


def _io_state(files: _Files, target: Target) -> dict[str, Any]:
    if target.shards != files.shards and target.io_state:
        raise StateMismatchError(
            "io state",
            mismatched={"number of shards": (files.shards, target.shards)},
            remedy="restore on the same number of ranks, or leave it out with load_conf={'exclude': ['io_state']}",
        )
    return files.state(layout.io_state(target.shard))


def _with_prefix_of(live: Mapping[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """Strip or add ``module.`` where the model is wrapped on one side only, in a way that ``unwrap`` cannot see."""
    if not live or not dense or any(name in live for name in dense):
        return dense
    if all(name.startswith(_WRAPPED) for name in dense):
        return {name.removeprefix(_WRAPPED): value for name, value in dense.items()}
    if all(name.startswith(_WRAPPED) for name in live):
        return {_WRAPPED + name: value for name, value in dense.items()}
    return dense
