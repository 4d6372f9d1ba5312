"""Reads and checks all state except table rows, and fills a model with dense state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recckpt.dense.data_loaders import check_rng
from recckpt.dense.loader import as_live, is_as_stored
from recckpt.dense.registered import is_filled, is_overlapping, is_read_only
from recckpt.dense.sharded import is_sharded
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import StateMismatchError
from recckpt.format import layout
from recckpt.format.names import Name
from recckpt.load.converted import TableTensors, TensorRows
from recckpt.load.inventory import registered_names
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.optimizer_states import as_here, dense_optimizer_states, sparse_optimizer_state
from recckpt.load.report import Planned
from recckpt.sparse.split import LOADS_AS_TORCH, unwrapped, wrappers_in
from recckpt.types import GEOMETRY

log = logging.getLogger("recckpt")
_READ_ONLY = "its memory is read-only: map it for writing, or leave it out with 'exclude': [{!r}]"
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class OtherState:
    dense: Mapping[str, Any]  # the model's state, by the model's names
    extra: Mapping[str, Any]  # states of registered objects and of unregistered names
    io_state: Mapping[str, Any]  # positions of datasets
    sparse_optim: dict[str, Any] | None  # scalars of the sparse optimizer; None to keep its own
    generators: Mapping[str, Any]  # states of random generators; empty to keep them
    notes: Sequence[str] = ()  # on what starts fresh, as far as only read states show it


def read_other_state(
    live: LiveState,
    items: Sequence[Planned],
    sources: Sequence[OpenSource],
    tensors: Sequence[TensorRows],
    tables: Sequence[TableTensors],
    *,
    rng: bool,
) -> OtherState:
    """Read and check the planned state; with ``rng``, also the random generators, from the last source.

    ``tensors``: per source, its dense tensors that are table rows here. ``tables``: per source, its tables that are
    dense tensors here.
    """
    taken: dict[str, list[tuple[Planned, OpenSource]]] = {"dense": [], "extra": [], "io_state": []}
    for item in items:
        if item.offer is not None and item.name.group in taken:
            taken[item.name.group].append((item, sources[item.offer]))
    of_optimizers, notes = dense_optimizer_states(live, items, sources, tables)
    return OtherState(
        dense=_dense_state(taken["dense"], live, dict(zip(sources, tables, strict=True))),
        extra={
            **_unclaimed_extra(live, sources),
            **{item.name.text: _extra_state(live, item, source) for item, source in taken["extra"]},
            **of_optimizers,
        },
        io_state={item.name.text: _position(live, item, source) for item, source in taken["io_state"]},
        sparse_optim=sparse_optimizer_state(live.row_optimizers, items, sources, tensors),
        generators=_generators(live, sources[-1]) if rng else {},
        notes=notes,
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
                continue
            if item.conversion:
                value = value.to(there.dtype)
                if value.shape != there.shape:  # the live tensor is larger: its padding is kept
                    padded = there.detach().clone().cpu()
                    both = tuple(slice(min(sizes)) for sizes in zip(value.shape, there.shape, strict=True))
                    padded[both] = value[both]
                    value = padded
            state[item.name.text] = value
    return state


def _dense_values(
    items: Sequence[Planned], live: LiveState, source: OpenSource
) -> tuple[frozenset[Name], Mapping[str, Any]]:
    """Return the names whose values a served model already has, and a mapping from which to read the others."""
    names = live.tensor_names
    stored = source.under_names_of(names, source.tensors.model)
    if source.at.entry.serves and all(item.source in stored for item in items):
        same = frozenset(item.name for item in items if is_as_stored(live.dense[item.name.text], stored[item.source]))
        n_bytes = sum(stored[item.source].nbytes for item in items)
        if 2 * sum(stored[item.source].nbytes for item in items if item.name in same) > n_bytes:
            return same, stored  # few enough to be read one by one, not as a whole file
    return frozenset(), source.dense(names)


def _extra_state(live: LiveState, item: Planned, source: OpenSource) -> Any:
    of_all = source.registered_on_all(item.source, live.shard)
    gathered = live.extra.gathered(item.name.text, of_all, source.tensors.of_extra)
    if gathered is not None:
        return as_here(gathered[0], lambda: gathered, source)
    saved = source.registered(item.source, live.shard)
    return as_here(saved, lambda: live.extra.beside(item.name.text, saved), source)


def _unclaimed_extra(live: LiveState, sources: Sequence[OpenSource]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for source in sources:
        names = [name for name in registered_names(source.at.checkpoint) if source.at.entry.wants(name)]
        for name in (name.text for name in names if name.group == "extra" and name.text not in live.extra):
            if name not in source.at.extras_of_ranks or source.at.shards in (1, live.shards):
                states[name] = source.registered(name, live.shard)
    return states


def _position(live: LiveState, item: Planned, source: OpenSource) -> Any:
    """Return this rank's position in the data; merged from all positions if another number of ranks saved."""
    if source.at.shards == live.shards:
        return source.own_state("io_state", item.source, live.shard)
    files = [source.state(layout.of_rank("io_state", shard)) for shard in range(source.at.shards)]
    of_all = [states[item.source] for states in files if item.source in states]
    return live.io_state.merged(item.name.text, of_all, live.shard, live.shards)


def _generators(live: LiveState, source: OpenSource) -> Mapping[str, Any]:
    name = layout.of_rank("rng", live.shard)
    if source.at.shards != live.shards or source.at.checkpoint.manifest.file(name) is None:
        return {}
    states = source.state(name)
    try:
        check_rng(states)
    except ValueError as error:
        raise source.corrupt(name, "", found=str(error), expected="the states of random generators") from error
    return states


class ModelLoad:
    """A load of dense state into a model; the model may keep the given tensors.

    Raises:
        StateMismatchError: live tensors in read-only memory have other values; the message names all.
    """

    def __init__(self, live: LiveState, state: Mapping[str, Any]) -> None:
        self._live, self._model = live, live.model
        own = {name: live.dense[name] for name in state if isinstance(live.dense[name], Tensor)}
        unwritable = {name for name, to in own.items() if not (is_lazy(to) or is_sharded(to) or is_filled(to))}
        same = {name for name in unwritable if torch.equal(own[name].detach().cpu(), state[name].to(own[name].dtype))}
        read_only = [name for name in unwritable - same if is_read_only(own[name])]
        if read_only:
            remedy = _READ_ONLY.format(sorted(read_only)[0])
            mismatched = dict.fromkeys(sorted(read_only), ("other values", "those of the model"))
            raise StateMismatchError("the dense state of the model", mismatched=mismatched, remedy=remedy)
        self._put = {name: state[name] for name in unwritable - same}
        self._state = {name: value for name, value in state.items() if name not in unwritable}
        self.may_be_refused = bool(self._state) and any(map(_has_own_load, live.model.modules()))

    def load(self) -> None:
        if self._state:
            self._live.live_tables.load_dense(self._model, self._state)
        if self._put:
            self._set(self._put)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        """Set tensors that torch's load cannot fill: inference tensors in place, others by replacing their memory."""
        for name, value in values.items():
            module, key = self._owner(name)
            members: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
            live = members[key]
            whole = value.detach().to(live.device, live.dtype, copy=True)
            if isinstance(live, nn.Parameter) and not live.is_inference():
                with torch.no_grad():
                    live.set_(whole.untyped_storage(), 0, whole.shape, whole.stride())  # in place: its optimizer has it
            elif live.is_inference() and not (is_overlapping(live) or is_read_only(live)):
                with torch.inference_mode():
                    live.copy_(value)
            else:
                members[key] = nn.Parameter(whole, live.requires_grad) if isinstance(live, nn.Parameter) else whole

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Fill the model; restore its former state if the model refuses some state, or the ``with`` block fails."""
        own = {name: self._live.dense[name] for name in self._state}
        before = {name: value.clone() for name, value in own.items() if _can_go_back(value)}
        before |= {name: copy.deepcopy(value) for name, value in own.items() if not isinstance(value, Tensor)}
        put = {name: self._live.dense[name].clone() for name in self._put}
        members = [(m, dict(m._parameters), dict(m._buffers)) for m in self._model.modules()]
        try:
            try:
                self.load()
            except Exception as error:
                refusal = (
                    f"{type(self._model).__qualname__}.load_state_dict refused it: {type(error).__name__}: {error}"
                )
                raise StateMismatchError("the dense state of the model", remedy=refusal) from error
            yield
        except BaseException:
            for module, parameters, buffers in members:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
            self._set(put)
            for name, value in before.items():
                self._put_back(name, value)
            raise

    def _put_back(self, name: str, value: Any) -> None:
        there = self._live.dense[name]
        try:
            if name.rpartition(".")[2] == _EXTRA_STATE:
                self._owner(name)[0].set_extra_state(value)
            elif isinstance(there, Tensor):
                with torch.no_grad():
                    there.copy_(value)
        except Exception:
            log.warning("%s: the load failed, but the model keeps the loaded state: load again", name, exc_info=True)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        key = name.rpartition(".")[2]
        wrappers = wrappers_in(self._model)
        names = self._model.named_modules(remove_duplicate=False)
        return next(
            (module, key)
            for own, module in names
            if unwrapped(f"{own}.{key}" if own else key, wrappers) == name
            and (key == _EXTRA_STATE or key in module._parameters or key in module._buffers)
        )


def _can_go_back(live: Any) -> bool:
    """Return whether a tensor can be copied and later filled again: lazy tensors and TorchRec's cannot."""
    if not isinstance(live, Tensor) or is_lazy(live):
        return False
    return not is_sharded(live) or hasattr(live, "device_mesh") or hasattr(live, GEOMETRY[1])


def _has_own_load(module: nn.Module) -> bool:
    """Return whether a module, or a hook of it, customizes how state is loaded."""
    kind = type(module)
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    for method in (kind._load_from_state_dict, kind.load_state_dict, kind.set_extra_state, *hooks):
        function: Any = getattr(method, "hook", method)  # torch wraps hooks that take the module as an argument
        while isinstance(function, partial):
            function = function.func
        if str(getattr(function, "__module__", "")).partition(".")[0] not in LOADS_AS_TORCH:
            return True
    return False
