"""All state but the rows of tables: read and checked as a whole, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recckpt.dense.loader import as_live, fitted, has_stand_ins
from recckpt.dense.sharded import is_sharded, may_be_sharded
from recckpt.dense.state_copy import check_rng
from recckpt.dense.tensors import StoredTensor
from recckpt.format import layout
from recckpt.load.dense_optimizers import dense_optimizer_states
from recckpt.load.live_state import Target
from recckpt.load.matching import Planned
from recckpt.load.optimizer_scalars import merged_optimizer_state
from recckpt.load.source import Source

log = logging.getLogger("recckpt")


@dataclass(frozen=True)
class OtherState:
    """What a load gives to those that are no tables.

    Attributes:
        dense: the model's state, by the model's names.
        extra: states of registered objects, and of names that nobody registered.
        io_state: positions of datasets.
        sparse_optim: the sparse optimizer's scalars; None where there are none to take.
        generators: states of random generators; empty where they stay as they are.
    """

    dense: Mapping[str, Any]
    extra: Mapping[str, Any]
    io_state: Mapping[str, Any]
    sparse_optim: dict[str, Any] | None
    generators: Mapping[str, Any]


def read_other_state(
    target: Target,
    live: Mapping[str, Any],
    items: Sequence[Planned],
    by_source: Sequence[Sequence[Planned]],
    sources: Sequence[Source],
    *,
    rng: bool,
) -> OtherState:
    """Read what is planned.

    Args:
        target: what is to be filled.
        live: its dense state.
        items: the plan.
        by_source: the items that come from each source.
        sources: where they come from.
        rng: whether random generators are restored, from the last source.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    return OtherState(
        dense=_dense_state(by_source, sources, live),
        extra={
            **_unclaimed_extra(target, sources),
            **_extra_state(target, by_source, sources),
            **dense_optimizer_states(target, live, items, sources),
        },
        io_state=_io_state(target, by_source, sources),
        sparse_optim=merged_optimizer_state(target.sparse_optim, items, sources),
        generators=_generators(target, sources) if rng else {},
    )


def _dense_state(
    by_source: Sequence[Sequence[Planned]], sources: Sequence[Source], live: Mapping[str, Any]
) -> dict[str, Any]:
    # Every rank reads: 1.1 s for 256 MiB on two ranks of one host, where sending it from rank 0 took 1.3 s.
    state: dict[str, Any] = {}
    for items, source in zip(by_source, sources, strict=True):
        wanted = [item for item in items if item.name.group == "dense"]
        found = source.dense(live) if wanted else {}
        for item in wanted:
            value, there = found[item.source], live[item.name.text]
            if isinstance(value, StoredTensor) or (isinstance(value, torch.Tensor) and is_sharded(there)):
                state[item.name.text] = as_live(value, there, source.tensors)
            else:
                state[item.name.text] = _converted(value, there) if item.conversion else value
    return state


def _converted(found: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to the dtype and last dimension of the live one, which pads it."""
    found = found.to(live.dtype)
    if found.shape == live.shape:
        return found
    padded, width = live.detach().clone().cpu(), min(found.shape[-1], live.shape[-1])
    padded[..., :width] = found[..., :width]
    return padded


def _extra_state(target: Target, by_source: Sequence[Sequence[Planned]], sources: Sequence[Source]) -> dict[str, Any]:
    return {
        item.name.text: _fitted(target, item, source)
        for items, source in zip(by_source, sources, strict=True)
        for item in items
        if item.name.group == "extra"
    }


def _fitted(target: Target, item: Planned, source: Source) -> Any:
    """Return the state of a registered object, its sharded tensors as they lie here."""
    name, saved = item.name.text, _saved_extra(target, item, source)
    try:
        if not (may_be_sharded() or has_stand_ins(saved)):
            return saved
        return fitted(*target.extra.beside(name, saved), source.tensors)
    except RecursionError:  # nested without end: the object may refuse it
        return saved


def _saved_extra(target: Target, item: Planned, source: Source) -> Any:
    if item.source not in source.extras_of_ranks:
        return source.value(layout.EXTRA, item.source)
    if not target.extra.gathers(item.name.text):
        return source.own_state(layout.extra_of, item.source, target.shard)
    order = sorted(range(source.shards), key=lambda shard: shard != target.shard)  # there it all is, most often
    files = (source.read_once(layout.extra_of(shard)) for shard in order)
    return target.extra.gathered(item.name.text, (file[item.source] for file in files if item.source in file))


def _unclaimed_extra(target: Target, sources: Sequence[Source]) -> dict[str, Any]:
    """Return states of names that nobody registered, for ``Saver.get_extra_data``."""
    found: dict[str, Any] = {}
    for source in sources:
        names = [name for name in source.registered if name.group == "extra" and source.entry.wants(name)]
        for name in (name.text for name in names if name.text not in target.extra):
            if name not in source.extras_of_ranks:
                found[name] = source.value(layout.EXTRA, name)
            elif source.shards in (1, target.shards):
                found[name] = source.own_state(layout.extra_of, name, target.shard)
    return found


def _io_state(target: Target, by_source: Sequence[Sequence[Planned]], sources: Sequence[Source]) -> dict[str, Any]:
    states = {}
    for items, source in zip(by_source, sources, strict=True):
        for item in (item for item in items if item.name.group == "io_state"):
            name = item.name.text
            if source.shards == target.shards:
                states[name] = source.own_state(layout.io_state, item.source, target.shard)
            else:
                files = [source.state(layout.io_state(shard)) for shard in range(source.shards)]
                of_all = [found[item.source] for found in files if item.source in found]
                states[name] = target.io_state.merged(name, of_all, target.shard, target.shards)
    return states


def _generators(target: Target, sources: Sequence[Source]) -> Mapping[str, Any]:
    source, name = sources[-1], layout.rng(target.shard)
    if source.shards != target.shards or source.checkpoint.manifest.file(name) is None:
        return {}
    states = source.state(name)
    try:
        check_rng(states)
    except ValueError as error:
        raise source.corrupt(name, "", found=str(error), expected="the states of random generators") from error
    return states
