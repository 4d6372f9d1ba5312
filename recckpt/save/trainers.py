"""Who trains a model: the optimizers that step it, and which of them would be missing from a checkpoint."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from recckpt.dense.keyed_optimizer import fused_optimizers, is_keyed
from recckpt.dense.optimizer_class import lineage_of, updater
from recckpt.dense.optimizers import has_values
from recckpt.dense.registered import Registry
from recckpt.format.training import Unsaved
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.save.choice import Choice
from recckpt.sparse.optim import optimizer as sparse_optimizers
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.split import parameters_of, state_of
from recckpt.sparse.table.table import HashTable
from recckpt.text import plural
from recckpt.types import SavableTable

log = logging.getLogger("recckpt")

_MANY_PASSES = 2  # whose gradients wait in a table without an optimizer: those of one may be about to be used by hand
_NAMED = 3  # parameters in a message
_TRAIN_TABLES = "make one of the tables, such as SparseAdam(recckpt.filter_out_sparse_param(model)), give it to"

_Optimizers = weakref.WeakValueDictionary[int, Optimizer]  # by id; references can be listed while another thread adds
_savers: weakref.WeakValueDictionary[int, Trainers] = weakref.WeakValueDictionary()  # those of this process, by id


class Trainers:
    """The optimizers that train the model of a saver. Logs a warning, once, for each whose state is not saved.

    Optimizers are seen when they step. None is missing that another saver of this process saves, nor where the saver
    leaves the slots of optimizers out on purpose.

    Args:
        model: its parameters and tables are looked up anew at each save.
        sparse_optim: the optimizer of the tables that the saver has.
        extra: the registered objects.
        choice: which slots and rows of the tables are saved.
        live_tables: those of the model whose optimizers' states are saved with their rows.
    """

    def __init__(
        self,
        model: nn.Module,
        sparse_optim: Optimizer | None,
        extra: Registry,
        choice: Choice,
        live_tables: LiveTables = NO_TABLES,
    ) -> None:
        self._model, self._sparse_optim, self._extra, self._live_tables = model, sparse_optim, extra, live_tables
        self._is_for_serving = choice.leaves_out_optimizers and sparse_optim is None
        self._logged: set[Hashable] = set()
        self._stepped: _Optimizers = weakref.WeakValueDictionary()
        _savers[id(self)] = self
        _note_steps()
        self._whole = [*live_tables.optimizers, *fused_optimizers(model)]  # not the parts of which one consists
        for optimizer in self._whole:  # fused ones step in backward passes, without hooks
            self.note_step(optimizer)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped, whosever parameters it trains."""
        if id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = optimizer

    @contextmanager
    def noting_states(self) -> Iterator[set[int]]:
        """Note the optimizers whose ``state_dict()`` is called in the block, which takes that of registered objects.

        These belong to registered objects that are not optimizers themselves.
        """
        noted = set[int]()
        with ExitStack() as hooked:
            for optimizer in (one for one, _ in self._left() if not is_keyed(one)):  # TorchRec's have no such hooks
                handle = optimizer.register_state_dict_pre_hook(lambda one: noted.add(id(one)))
                hooked.callback(handle.remove)
            yield noted

    def unsaved(self, tables: Mapping[str, SavableTable], noted: Container[int], *, is_logged: bool) -> Unsaved:
        """Return what a save lacks that has taken the state of the ``noted`` optimizers; log it if ``is_logged``."""
        if self._is_for_serving:
            return Unsaved()
        dense = defaultdict[str, list[str]](list)  # class -> parameters: each may have an optimizer of its own
        for one, names in self._left():
            if id(one) not in noted:
                dense[lineage_of(one)[0]] += names
                if is_keyed(one) and not is_logged:  # each rank has the states of tables of its own
                    self._warn_of_dense(lineage_of(one)[0], names)
        trained, piled = self._tables_left(tables)
        if is_logged:
            for kind, names in dense.items():
                self._warn_of_dense(kind, names)
            self._warn_of_tables(trained, piled)
        return Unsaved(tuple(dense), trained, piled)

    def check_restore(self, *, is_logged: bool) -> None:
        """Warn before a restore of tables alone: optimizers of dense parameters are seen when they step."""
        if is_logged and not self._is_for_serving:
            self._warn_of_tables(self._tables_left(state_of(self._model)[0])[0], ())

    def _left(self) -> list[tuple[Optimizer, list[str]]]:
        """Return the optimizers of dense parameters that are not registered, and the names of what they train here."""
        stepped = [] if self._is_for_serving else _alive(self._stepped)
        return [(optimizer, names) for optimizer in stepped if (names := self._names_left(optimizer))]

    def _names_left(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the parameters of the model that an optimizer trains, and none that is saved."""
        if isinstance(optimizer, SparseOptimizer) or self._saves(optimizer):
            return []
        if any(saver._saves(optimizer) for saver in _alive(_savers)):
            return []
        if is_keyed(optimizer) and any(optimizer is one for one in self._whole):
            return self._keys_left(optimizer)
        left = set(_values_of(optimizer))
        if is_keyed(optimizer):  # it may consist of others, which are registered by themselves
            left -= {number for one in self._registered for number in _values_of(one)}
        dense = self._live_tables.without(parameters_of(self._model), optimizer)
        return [name for name, parameter in dense if id(parameter) in left]

    def _keys_left(self, optimizer: Any) -> list[str]:
        """Return the names of the parameters of which an optimizer of TorchRec has a state that is not saved."""
        registered = self._registered
        keyed: list[Any] = [one for one in registered if is_keyed(one)]
        saved = {key for one in keyed for key in one.params}
        values = {number for one in registered for number in _values_of(one)}
        return [
            key
            for key, state in optimizer.state_dict()["state"].items()
            if state and not self._live_tables.has_key(key) and key not in saved
            if id(optimizer.params[key]) not in values
        ]

    def _saves(self, optimizer: Optimizer) -> bool:
        """Say whether what an optimizer trains is trained by registered ones."""
        registered = self._registered
        if any(updater(saved) is updater(optimizer) for saved in registered):
            return True
        return set(_values_of(optimizer)) <= {number for saved in registered for number in _values_of(saved)}

    def _tables_left(self, tables: Mapping[str, SavableTable]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tables whose optimizer is not saved, and those whose gradients no optimizer takes."""
        known = [*_alive(sparse_optimizers.made), *_alive(self._stepped)]
        optimizers = [optimizer for optimizer in known if isinstance(optimizer, SparseOptimizer)]
        saved = [saver._sparse_optim for saver in _alive(_savers)]
        trained, piled = list[str](), list[str]()
        for name, table in tables.items():
            if isinstance(table, HashTable):
                own = [optimizer for optimizer in optimizers if optimizer.trains(table)]
                if own and not any(optimizer is one for optimizer in own for one in saved):
                    trained.append(name)
                if not own and table.pending_gradients.passes_waiting(table.store) >= _MANY_PASSES:
                    piled.append(name)
        return tuple(trained), tuple(piled)

    @property
    def _registered(self) -> list[Optimizer]:
        return [obj for obj in self._extra.objects.values() if isinstance(obj, Optimizer)]

    def _idle(self) -> list[str]:
        """Return the classes of the optimizers of nothing but empty parameters, of which the model has some."""
        idle = [one for one in (*self._registered, *_alive(self._stepped)) if _is_idle(one)]
        own = {id(parameter) for parameter in self._model.parameters()} if idle else set()
        return list(dict.fromkeys(lineage_of(one)[0] for one in idle if own & set(map(id, _parameters(one)))))

    def _warn_of_dense(self, kind: str, names: Sequence[str]) -> None:
        new = [name for name in dict.fromkeys(names) if (kind, name) not in self._logged]
        self._logged.update((kind, name) for name in new)
        if new:
            log.warning("%s", _dense_text(kind, new))

    def _warn_of_tables(self, trained: Sequence[str], piled: Sequence[str]) -> None:
        idle = self._idle()
        for kind in idle:
            self._warn(
                ("idle", kind),
                f"{kind} trains nothing: all its parameters are empty, since model.parameters() has no rows of tables; "
                f"{_TRAIN_TABLES} Saver(model, sparse_optim)",
            )
        for name in () if idle else piled:
            self._warn(
                ("piled", name),
                f"no optimizer trains table {name!r}, whose gradients wait for one: {_TRAIN_TABLES} "
                "Saver(model, sparse_optim), and call its step()",
            )
        if trained:
            self._warn(
                ("trained", *trained),
                f"a sparse optimizer trains {', '.join(map(repr, trained))}, and the Saver was not given it: its steps "
                "and hyper-parameters are not saved; make the saver by Saver(model, sparse_optim), with one optimizer "
                "of all tables",
            )

    def _warn(self, key: Hashable, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            log.warning("%s", text)


@cache
def _note_steps() -> None:
    """Note every step of this process from now on, with one hook that stays.

    A hook that went with its saver could go in the middle of a step, by the garbage collector, while torch walks the
    hooks: the step would end with "OrderedDict mutated during iteration".
    """
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for saver in _alive(_savers):
        saver.note_step(optimizer)


def _alive(known: weakref.WeakValueDictionary[int, Any]) -> list[Any]:
    return [one for reference in known.valuerefs() if (one := reference()) is not None]


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _values_of(optimizer: Optimizer) -> Iterator[int]:
    """Yield the parameters that have values, by id: one without marks a module that has no parameters of its own."""
    return (id(parameter) for parameter in _parameters(optimizer) if has_values(parameter))


def _is_idle(optimizer: Optimizer) -> bool:
    is_dense = not isinstance(optimizer, SparseOptimizer)
    return is_dense and any(True for _ in _parameters(optimizer)) and not any(True for _ in _values_of(optimizer))


def _dense_text(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
    return (
        f"{kind} trains {plural(len(names), 'parameter')} of the model ({shown}), and no registered object has its "
        "state: a resume starts it from scratch; call register_for_checkpointing('dense_optim', optimizer) before "
        "restore()"
    )
