"""The hallway of a load: read what is small, check all of it, fill the tables, then the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    dense = _without_module_prefix(files.state(layout.MODEL), live) if "dense" in selection else {}
    extra = files.state(layout.EXTRA) if selection.groups & {"extra", "sparse_opt"} else {}
    io_state = _io_state(files, target) if "io_state" in selection else {}
    generators = files.state(layout.rng(target.shard)) if rng and files.shards == target.shards else {}
    tables = _table_loads(checkpoint, sparse, selection)
    parts = read_parts(checkpoint, storage) if tables else []
    if "dense" in selection:
        check_fits(dense, live, strict=selection.strict)

    with _sparse_optim_loaded(target.sparse_optim, extra if "sparse_opt" in selection else {}):
        _fill_tables(checkpoint, tables, parts, storage, concurrency)
    if "dense" in selection:
        model.load_state_dict({name: dense[name] for name in dense if name in live}, strict=False)
    if "extra" in selection:
        _log_fresh("extra state", target.extra.load(extra))
    if "io_state" in selection:
        _log_fresh("io state", target.io_state.load(io_state))
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


def _table_loads(checkpoint: Checkpoint, sparse: Mapping[str, HashTable], selection: Selection) -> list[TableLoad]:
    if not selection.groups & {"sparse", "sparse_opt"}:
        return []
    return plan_load(
        sparse,
        checkpoint.manifest.tables,
        with_rows="sparse" in selection,
        with_optimizer="sparse_opt" in selection,
        strict=selection.strict,
    )


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
def _sparse_optim_loaded(sparse_optim: Optimizer | None, extra: Mapping[str, Any]) -> Iterator[None]:
    """Load the optimizer's scalars first, since that refuses what does not fit; undo it if the tables fail."""
    if sparse_optim is None or not extra:
        yield
        return
    if SPARSE_OPTIM not in extra:
        _log_fresh("extra state", ["the sparse optimizer"])
        yield
        return
    before = sparse_optim.state_dict()
    sparse_optim.load_state_dict(extra[SPARSE_OPTIM])
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


def _without_module_prefix(dense: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Strip ``module.`` from names that somebody saved from inside a DDP wrapper, where the model has no such."""
    if dense and not any(name in live for name in dense) and all(name.startswith("module.") for name in dense):
        return {name.removeprefix("module."): value for name, value in dense.items()}
    return dense


def _log_fresh(what: str, names: list[str]) -> None:
    for name in names:
        log.warning("%s: %r is not in the checkpoint and keeps its present state", what, name)
