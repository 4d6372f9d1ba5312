"""One call from a model and its optimizers to a manager, with the options that are recommended."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from recckpt.live.tables import NO_TABLES
from recckpt.manager.habits import unknown_option
from recckpt.manager.near_steps import NO_NEAR
from recckpt.manager.options import parse_options
from recckpt.manager.placement import Placement
from recckpt.parallel.ranks import this_rank
from recckpt.policies.when import When
from recckpt.saver import Saver
from recckpt.sparse.split import state_of
from recckpt.text import first_few, plural

log = logging.getLogger("recckpt")

_Manager = TypeVar("_Manager")
_MEANINGS = {"max_keep": "", "async_save": " (training goes on meanwhile)", "deltas": " (what has changed)"}
_OWN = frozenset({"model", "sparse_optim", "output_dir", "tables", "saver", "save_interval"})  # arguments of attach


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
        problems.append(NO_NEAR)
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
    saver = Saver(placement.model, placement.sparse_optim, os.fspath(output_dir), tables=placement.live, **of_saver)
    for name, obj in placement.objects.items():
        saver.register_for_checkpointing(name, obj)
    for name, obj in placement.positions.items():
        saver.register_io_state(name, obj)
    made = manager(saver, save_interval, **of_manager)
    if rank == 0:
        settings = {"save_interval": save_interval, **{name: options[name] for name in _MEANINGS}}
        how = (f"{name}={value!r}{_MEANINGS.get(name, '') if value else ''}" for name, value in settings.items())
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
