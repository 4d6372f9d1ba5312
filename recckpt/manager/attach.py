"""One call from a model and its optimizers to a manager, with the options that are recommended."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from recckpt.live.tables import NO_TABLES
from recckpt.manager.answers import answers
from recckpt.manager.habits import ATTACH_LINE, unknown_option
from recckpt.manager.near_steps import near_in_words
from recckpt.manager.options import parse_options
from recckpt.manager.placement import OneOrMany, Placement, TablesOption, place
from recckpt.manager.read_only import ReadOnlyManager
from recckpt.parallel.ranks import this_rank
from recckpt.policies.deltas import Deltas
from recckpt.policies.keep import Keep
from recckpt.policies.when import When
from recckpt.saver import Saver
from recckpt.sparse.split import state_of
from recckpt.text import first_few, plural
from recckpt.types import flag

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("recckpt")

_Manager = TypeVar("_Manager")
_MEANINGS = {"max_keep": "", "async_save": " (training goes on meanwhile)", "deltas": " (what has changed)"}
_OWN = frozenset({"model", "sparse_optim", "output_dir", "tables", "saver", "save_interval"})  # arguments of attach


class Attachable:
    """What makes a :class:`recckpt.CheckpointManager` by one call."""

    @overload
    @classmethod
    def attach(
        cls,
        model: nn.Module,
        *,
        output_dir: str | os.PathLike[str],
        read_only: Literal[True],
        load_conf: Mapping[str, Any] | None = None,
    ) -> ReadOnlyManager: ...

    @overload
    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizers: OneOrMany[Optimizer] = None,
        *,
        schedulers: OneOrMany[Any] = None,
        loader: OneOrMany[Any] = None,
        output_dir: str | os.PathLike[str],
        save_interval: int | When,
        max_keep: int | Keep | None = 2,
        async_save: bool = True,
        deltas: bool | Deltas = True,
        tables: TablesOption = MappingProxyType({}),
        **options: Any,
    ) -> Self: ...

    @classmethod
    @answers(ATTACH_LINE)
    def attach(
        cls,
        model: nn.Module,
        optimizers: OneOrMany[Optimizer] = None,
        *,
        schedulers: OneOrMany[Any] = None,
        loader: OneOrMany[Any] = None,
        output_dir: str | os.PathLike[str],
        save_interval: int | When | None = None,
        max_keep: int | Keep | None = 2,
        async_save: bool = True,
        deltas: bool | Deltas = True,
        tables: TablesOption = MappingProxyType({}),
        read_only: bool = False,
        **options: Any,
    ) -> Self | ReadOnlyManager:
        """Return a manager of all that a run consists of; restores nothing, and logs in a line what it saves and how.

        The tables of the model are found, those of ``nn.Embedding`` and TorchRec too
        (:func:`recckpt.live.live_tables`), and each optimizer is known by what it trains. Call it on each rank once the
        model is wrapped and the optimizers are made. Collective where TorchRec has sharded the model.

        Several things may be given by name, ``{"towers": adam}``; names stand in checkpoints. Without a name they are
        ``dense_optim``, ``scheduler`` and ``loader``, the second of a list ``dense_optim_1``. Register what else has
        state, such as a scaler, by :meth:`register_for_checkpointing`.

        Args:
            model: any module.
            optimizers: all that train it, one of tables (:mod:`recckpt.sparse`) and any number of others.
            schedulers: those of the optimizers.
            loader: what has a position in the data, as :meth:`register_io_state` takes it; several, too.
            output_dir: where checkpoints go, as of :class:`recckpt.Saver`.
            save_interval: steps between checkpoints, or a policy of :mod:`recckpt.policies.when`.
            max_keep: how many to keep: by default two, so that a damaged newest one leaves another.
            async_save: whether training goes on while a checkpoint is written: yes by default, see docs/async.md.
            deltas: whether a save writes only what has changed: yes by default, see docs/deltas.md.
            tables: arguments of ``live_tables``, such as ``{"min_rows": 100}``, or what it has returned; None leaves
                embeddings that are not recckpt's dense.
            read_only: whether to follow a run that another process trains, and write nothing: returns a
                :class:`recckpt.ReadOnlyManager`, which takes ``model``, ``output_dir`` and ``load_conf`` alone.
            options: any others of :class:`recckpt.Saver` and :class:`recckpt.CheckpointManager`.

        Raises:
            TypeError: ``model`` is not a module, or ``save_interval`` is missing.
            ValueError: something is not saved as it is, or not known; all of it, before anything is made. Or a signal
                that cannot be caught, once the output dir is made.
            OSError: the output dir cannot be written.
        """
        pieces = {"optimizers": optimizers, "schedulers": schedulers, "loader": loader, "save_interval": save_interval}
        options |= {"max_keep": max_keep, "async_save": async_save, "deltas": deltas}
        if flag("read_only", read_only):
            return _reading(model, output_dir, {**pieces, **options, "tables": tables})
        if save_interval is None:
            raise TypeError(
                "save_interval=... is missing: steps between checkpoints, or a policy; read_only=True saves none"
            )
        problems = wrong_options(options, save_interval, cls)
        placement = place(model, optimizers, schedulers=schedulers, loader=loader, tables=tables, problems=problems)
        return attached(cls, placement, output_dir, save_interval, options)


def _reading(model: nn.Module, output_dir: str | os.PathLike[str], options: Mapping[str, Any]) -> ReadOnlyManager:
    """Return a manager that only reads; ValueError names what goes with one that saves."""
    defaults = inspect.signature(Attachable.attach).parameters
    taken = {
        name: value for name, value in options.items() if name not in defaults or value is not defaults[name].default
    }
    load_conf = taken.pop("load_conf", None)
    if taken:
        raise ValueError(f"read_only=True loads the model alone, and saves nothing: omit {', '.join(sorted(taken))}")
    return ReadOnlyManager(model, output_dir, load_conf=load_conf)


def wrong_options(options: Mapping[str, Any], save_interval: int | When, manager: Callable[..., object]) -> list[str]:
    """Return what is wrong with the options of a manager, and with the names of those of a saver."""
    known = _options_of(Saver) | _options_of(manager)
    problems = [unknown_option(name, known) for name in sorted(options.keys() - known)]
    checked = inspect.signature(parse_options).parameters.keys() & options.keys()
    try:
        parse_options(save_interval, **{name: options[name] for name in checked})
    except (TypeError, ValueError) as error:
        problems.append(str(error))
    if options.get("near_interval") is not None and options.get("near") is None:
        problems.append("near_interval= needs near=: give near=Near(PATH), or omit both")
    return problems


def attached(
    manager: Callable[..., _Manager],
    placement: Placement,
    output_dir: str | os.PathLike[str],
    save_interval: int | When,
    options: Mapping[str, Any],
) -> _Manager:
    """Make a saver of what was found, and its manager; log in one line what is saved, and how.

    Args:
        manager: the class of the manager.
        placement: what was found.
        output_dir: where checkpoints go.
        save_interval: when they are made.
        options: of the saver and the manager; the log names those that ``attach`` has defaults for.
    """
    of_manager = {name: options[name] for name in _options_of(manager) & options.keys()}
    of_saver = {name: value for name, value in options.items() if name not in of_manager}
    rank, _ = this_rank(options.get("shard_id"), options.get("shard_num"))  # refuses them before anything is made
    place = os.fspath(output_dir) if isinstance(output_dir, os.PathLike) else output_dir
    saver = Saver(placement.model, placement.sparse_optim, place, tables=placement.live, **of_saver)
    for name, obj in placement.objects.items():
        saver.register_for_checkpointing(name, obj)
    for name, obj in placement.positions.items():
        saver.register_io_state(name, obj)
    made = manager(saver, save_interval, **of_manager)
    if rank == 0:
        settings = {"save_interval": save_interval, **{name: options[name] for name in _MEANINGS}}
        how = [f"{name}={value!r}{_MEANINGS.get(name, '') if value else ''}" for name, value in settings.items()]
        if (near := options.get("near")) is not None:
            how.append(near_in_words(near, options.get("near_interval")))
        log.info("%s: saves %s; %s", saver.output_dir, ", ".join(_saved(placement)), ", ".join(how))
    return made


def _options_of(made: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(made).parameters) - _OWN


def _saved(placement: Placement) -> Iterator[str]:
    """Yield what is saved, each in a few words."""
    live = NO_TABLES if placement.live is None else placement.live
    optimizer = placement.sparse_optim
    if placement.tables:
        by = "" if optimizer is None else f" of {type(optimizer).__name__}"
        yield f"{plural(len(placement.tables), 'table')}{by} ({first_few(list(placement.tables))})"
    if live:
        yield f"{plural(len(live), 'live table')} ({first_few(list(live))})"
    dense = live.joined(*state_of(placement.model))[1]
    yield plural(len(dense), "dense tensor")
    for name, obj in {**placement.objects, **placement.positions}.items():
        yield f"{name!r} ({type(obj).__name__})"
