"""All state but the rows of tables: read and checked as a whole, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recckpt.dense.loader import as_live, is_as_stored
from recckpt.dense.sharded import is_sharded
from recckpt.dense.state_copy import check_rng
from recckpt.dense.tensors import StoredTensor
from recckpt.format import layout
from recckpt.format.names import Name
from recckpt.load.inventory import registered_names
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.optimizer_states import as_here, dense_optimizer_states
from recckpt.load.report import Planned
from recckpt.load.row_optimizer_states import sparse_optimizer_state
from recckpt.load.table_tensors import Converted, TableTensors


@dataclass(frozen=True)
class OtherState:
    """What a load gives to those that are not tables."""

    dense: Mapping[str, Any]  # the model's state, by the model's names
    extra: Mapping[str, Any]  # states of registered objects, and of names that nobody registered
    io_state: Mapping[str, Any]  # positions of datasets
    sparse_optim: dict[str, Any] | None  # the sparse optimizer's scalars; None where there are none to take
    generators: Mapping[str, Any]  # states of random generators; empty where they stay as they are


def read_other_state(
    live: LiveState,
    items: Sequence[Planned],
    sources: Sequence[OpenSource],
    converted: Converted,
    *,
    rng: bool,
) -> OtherState:
    """Read and check what is planned; with ``rng`` also the random generators, from the last source.

    ``converted`` is what each source gives in another form.
    """
    taken: dict[str, list[tuple[Planned, OpenSource]]] = {"dense": [], "extra": [], "io_state": []}
    for item in items:
        if item.offer is not None and item.name.group in taken:
            taken[item.name.group].append((item, sources[item.offer]))
    return OtherState(
        dense=_dense_state(taken["dense"], live, dict(zip(sources, converted.tables, strict=True))),
        extra={
            **_unclaimed_extra(live, sources),
            **{item.name.text: _extra_state(live, item, source) for item, source in taken["extra"]},
            **dense_optimizer_states(live, items, sources, converted.tables),
        },
        io_state={item.name.text: _position(live, item, source) for item, source in taken["io_state"]},
        sparse_optim=sparse_optimizer_state(live.row_optimizers, items, sources, converted.tensors),
        generators=_generators(live, sources[-1]) if rng else {},
    )


def _dense_state(
    taken: Sequence[tuple[Planned, OpenSource]], live: LiveState, tables: Mapping[OpenSource, TableTensors]
) -> dict[str, Any]:
    # Every rank reads: 1.1 s for 256 MiB on two ranks of one host, where sending it from rank 0 took 1.3 s.
    state: dict[str, Any] = {}
    for source in dict.fromkeys(source for _, source in taken):
        items = [item for item, of in taken if of is source]
        same, values = _dense_values([item for item in items if not item.thing.table], live, source)
        for item in (item for item in items if item.name not in same):
            there = live.dense[item.name.text]
            value = tables[source].tensor(item) if item.thing.table else values[item.source]
            if isinstance(value, StoredTensor) or (isinstance(value, torch.Tensor) and is_sharded(there)):
                state[item.name.text] = as_live(value, there, source.tensors)
            else:
                state[item.name.text] = _converted(value, there) if item.conversion else value
    return state


def _dense_values(
    items: Sequence[Planned], live: LiveState, source: OpenSource
) -> tuple[frozenset[Name], Mapping[str, Any]]:
    """Return the names of tensors that a model to be served has already, and what the others are read from."""
    names = live.tensor_names
    stored = source.under_names_of(names, source.tensors.model)
    if source.at.entry.serves and all(item.source in stored for item in items):
        same = frozenset(item.name for item in items if is_as_stored(live.dense[item.name.text], stored[item.source]))
        n_bytes = sum(stored[item.source].nbytes for item in items)
        if 2 * sum(stored[item.source].nbytes for item in items if item.name in same) > n_bytes:
            return same, stored  # few enough to be read one by one, not as a whole file
    return frozenset(), source.dense(names)


def _converted(saved: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to the dtype and shape of the live one, which pads it."""
    saved = saved.to(live.dtype)
    if saved.shape == live.shape:
        return saved
    padded = live.detach().clone().cpu()
    both = tuple(slice(min(sizes)) for sizes in zip(saved.shape, live.shape, strict=True))
    padded[both] = saved[both]
    return padded


def _extra_state(live: LiveState, item: Planned, source: OpenSource) -> Any:
    """Return the state of a registered object, its sharded tensors as they lie here."""
    gathered = live.extra.gathered(item.name.text, _of_all(live, item, source), source.tensors.of_extra)
    if gathered is not None:
        return as_here(gathered[0], lambda: gathered, source)
    saved = source.registered(item.source, live.shard)
    return as_here(saved, lambda: live.extra.beside(item.name.text, saved), source)


def _of_all(live: LiveState, item: Planned, source: OpenSource) -> Iterator[Any]:
    """Yield the states that ranks have saved of an object, that of this rank's number first."""
    if item.source not in source.at.extras_of_ranks:
        yield source.value(layout.EXTRA, item.source)
    else:
        yield from source.registered_on_all(item.source, live.shard)


def _unclaimed_extra(live: LiveState, sources: Sequence[OpenSource]) -> dict[str, Any]:
    """Return states of names that nobody registered, for ``Saver.get_extra_data``."""
    states: dict[str, Any] = {}
    for source in sources:
        names = [name for name in registered_names(source.at.checkpoint) if source.at.entry.wants(name)]
        for name in (name.text for name in names if name.group == "extra" and name.text not in live.extra):
            if name not in source.at.extras_of_ranks or source.at.shards in (1, live.shards):
                states[name] = source.registered(name, live.shard)
    return states


def _position(live: LiveState, item: Planned, source: OpenSource) -> Any:
    """Return this rank's position in the data, made from those of all where another number of ranks saved."""
    if source.at.shards == live.shards:
        return source.own_state(layout.io_state, item.source, live.shard)
    files = [source.state(layout.io_state(shard)) for shard in range(source.at.shards)]
    of_all = [states[item.source] for states in files if item.source in states]
    return live.io_state.merged(item.name.text, of_all, live.shard, live.shards)


def _generators(live: LiveState, source: OpenSource) -> Mapping[str, Any]:
    name = layout.rng(live.shard)
    if source.at.shards != live.shards or source.at.checkpoint.manifest.file(name) is None:
        return {}
    states = source.state(name)
    try:
        check_rng(states)
    except ValueError as error:
        raise source.corrupt(name, "", found=str(error), expected="the states of random generators") from error
    return states
