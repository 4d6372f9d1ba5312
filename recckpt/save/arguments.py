"""Checks the arguments of savers, of saves and of steps."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.optimizers import by_name
from recckpt.dense.state_copy import portable
from recckpt.format import layout
from recckpt.format.codec import COUNT_LIMIT, MAX_DIGITS
from recckpt.format.layout import is_encodable
from recckpt.format.manifest import MAX_NESTED, StateValue
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.output_dir.checkpoint_dir import refuse_checkpoint
from recckpt.output_dir.notes import refuse_mirror
from recckpt.policies.keep import as_keep
from recckpt.policies.options import Near, Transfers
from recckpt.sparse.optim.joint import JointOptimizer
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.split import parameters_of, state_of
from recckpt.sparse.table.table import HashTable
from recckpt.storage import NotPlainError, Storage, open_storage
from recckpt.storage.transfers import VISIBLE, Transport, UploadSlots, WorkDir
from recckpt.types import SavableTable, flag, positive_int


def check_parts(model: object, sparse_optim: object) -> dict[str, SavableTable]:
    """Return the tables of a model.

    Raises TypeError or ValueError if the optimizer trains other tables, or dense parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found a {type(model).__name__}")
    tables, dense = state_of(model)
    if sparse_optim is None:
        return tables
    if not isinstance(sparse_optim, Optimizer):
        several = ": CheckpointManager.attach takes several" if isinstance(sparse_optim, list | tuple | dict) else ""
        kind = type(sparse_optim).__name__
        raise TypeError(f"sparse_optim must be an optimizer of tables or None, found a {kind}{several}")
    trained = {id(parameter) for group in sparse_optim.param_groups for parameter in group["params"]}
    names = [name for name, parameter in parameters_of(model) if id(parameter) in trained]
    if names:
        name = next((name for name in names if name in dense), names[0])  # table parameters are not in ``dense``
        raise ValueError(
            f"sparse_optim must be an optimizer of tables, found {type(sparse_optim).__name__} of the dense parameter "
            f"{name!r}; save it by register_for_checkpointing"
        )
    check_trained(sparse_optim, tables)
    return tables


def live_tables_of(model: nn.Module, tables: object) -> LiveTables:
    """Return the live tables that a saver is given, NO_TABLES for None.

    Raises TypeError if ``tables`` is something else, ValueError if the live tables belong to another model,
    LiveTableError if they are closed.
    """
    if tables is None:
        return NO_TABLES
    if not isinstance(tables, LiveTables):
        raise TypeError(f"tables must be the result of live_tables(model, optimizers), found a {type(tables).__name__}")
    if tables.model is not model:
        raise ValueError(
            "tables must be the live tables of the saver's model, found live tables of another model: give "
            "live_tables and Saver the same model"
        )
    tables.check_open()
    tables.joined(*state_of(model))
    return tables


def form_of_registered(model: nn.Module, live: LiveTables) -> Callable[[Any], Any]:
    """Return the function that converts a registered object to the form in which it is saved: :func:`by_name`."""
    return lambda obj: by_name(obj, lambda: parameters_of(model), lambda one: live.is_live(one, obj), live.has_key)


def checked_options(max_keep: Any, concurrency: Any, on_save: Any, transfers: Any) -> Transfers:
    as_keep(max_keep)
    positive_int("concurrency", concurrency)
    if on_save is not None and not callable(on_save):
        raise TypeError(f"on_save must be a callable (SaveInfo) -> None, or None, found {on_save!r}")
    if not isinstance(transfers, Transfers | None):
        raise TypeError(f"transfers must be a recckpt.policies.Transfers, or None, found {transfers!r:.200}")
    return transfers or Transfers()


def check_near(near: object, *, has_deltas: bool) -> None:
    if near is None:
        return
    if not isinstance(near, Near):
        raise TypeError(f"near must be a recckpt.Near, or None, found {near!r:.100}")
    if not has_deltas:
        raise ValueError("near= is for savers that write deltas, found deltas=False: give deltas=True, or omit near=")


def transport_of(transfers: Transfers, output_dir: Any) -> Transport:
    """Return the transport for the files of a saver. Create its work dir; OSError if the work dir is not writable."""
    slots, url, work_dir = None, str(output_dir), None
    if transfers.max_uploads is not None:
        to = url if "://" in url else str(Path(url).absolute())
        slots = UploadSlots(transfers.max_uploads, to, transfers.timeout_sec)
    if transfers.work_dir is not None:
        work_dir = WorkDir(os.fspath(transfers.work_dir))
        work_dir.prepare()
    downloads = (work_dir or WorkDir(tempfile.gettempdir())) if transfers.pre_download else None
    visible = replace(VISIBLE, deadline_sec=min(transfers.visible_sec, transfers.timeout_sec / 2))
    return Transport(slots, work_dir, downloads, visible)


def output_dir_of(path: Any, run: Any) -> tuple[Storage, str]:
    """Create the output dir, and test that it is writable; return the output dir and the name of the job in metrics.

    Raises TypeError or ValueError for wrong arguments, RecckptError for a mirror, OSError if the dir is not writable.
    """
    storage = open_storage(os.fspath(path) if isinstance(path, os.PathLike) else path)
    if run is not None and (not isinstance(run, str) or not run):
        raise TypeError(f"run must be the name of this job, or None, found {run!r}")
    with suppress(NotPlainError):  # a link in place of the claim is refused by the first save
        refuse_mirror(storage)
    storage.prepare()
    refuse_checkpoint(storage)
    return storage, run or storage.url


def check_registered(name: str, obj: object, sparse_optim: Optimizer | None) -> None:
    what = f"register_for_checkpointing: {name!r} is an optimizer of tables"
    if obj is sparse_optim and obj is not None:
        raise ValueError(f"{what}, which the saver already saves: do not register it")
    inner = _unprepared(obj)
    if isinstance(inner, SparseOptimizer):
        raise ValueError(
            f"{what}, which is saved together with the tables: pass it to Saver(model, sparse_optim) instead"
        )
    if isinstance(inner, JointOptimizer):
        raise ValueError(
            f"register_for_checkpointing: {name!r} is a JointOptimizer, whose optimizers are saved one by one: "
            "register its dense optimizer, and give its sparse optimizer to Saver(model, sparse_optim)"
        )
    if isinstance(name, str) and "@" in name and isinstance(obj, Optimizer):
        raise ValueError(f"register_for_checkpointing: the name of an optimizer must not contain '@', found {name!r}")


def _unprepared(obj: object) -> object:
    return getattr(obj, "optimizer", obj) if isinstance(obj, Optimizer) else obj


def check_trained(sparse_optim: Optimizer | None, tables: Mapping[str, SavableTable]) -> None:
    """Raise ValueError if the optimizer trains tables that the model lacks: their rows would not be saved."""
    inner = _unprepared(sparse_optim)
    if not isinstance(inner, SparseOptimizer):
        return
    others = [name for name, table in inner.tables.items() if tables.get(name) is not table]
    if others:
        raise ValueError(
            f"sparse_optim trains tables that are not in the model: {', '.join(map(repr, others))}; the model has "
            f"{sorted(tables)}{', and others of the same name' if set(others) & set(tables) else ''}: make them "
            "attributes of its modules, and give the optimizer those of this model"
        )


def check_save(ckpt_id: str, step: int | None, *, overwrite: bool, ephemeral: bool) -> None:
    layout.encode_id(ckpt_id)
    flag("overwrite", overwrite)
    flag("ephemeral", ephemeral)
    if step is not None and (type(step) is not int or not 0 <= step < COUNT_LIMIT):
        raise ValueError(f"step must be an int of at least 0, below 10^18, or None, found {step!r}")


def tables_in(model: nn.Module) -> list[HashTable]:
    return [module for module in model.modules() if isinstance(module, HashTable)]


def check_moment(tables: Iterable[HashTable]) -> None:
    """Raise RuntimeError if this thread is changing a table: it holds the table's lock, so a save could deadlock."""
    for table in tables:
        lock: Any = table.store.lock
        if lock._is_owned():  # whether this thread holds the lock; an undocumented method
            raise RuntimeError(
                f"a saver or its manager was called in the middle of a change of table {table.name!r}, from a signal "
                "handler or an initializer: set a flag there, and save in the training loop (CheckpointManager has "
                "save_on_signal)"
            )


def check_state(state: Mapping[str, StateValue] | None, metrics: Mapping[str, float] | None) -> None:
    """Raise if a save would refuse these values. Cheap enough for each batch, because it waits for no device."""
    for name, value in _mapping("state", state).items():
        _as_value(_named("state", name), value, waits=False)
    for name, value in _mapping("metrics", metrics).items():
        if not _is_number_tensor(value):
            _as_number(name, value)


def as_state_values(
    state: Mapping[str, StateValue] | None, what: str = "state", level: int = 0
) -> dict[str, StateValue]:
    return {name: _as_value(_named(what, name), value, level) for name, value in _mapping(what, state).items()}


def as_numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {name: _as_number(name, value) for name, value in _mapping("metrics", metrics).items()}


def _as_value(place: str, value: Any, level: int = 0, *, waits: bool = True) -> StateValue:
    """Return a value as JSON stores it; with ``waits=False``, None for a number that may still be on a device."""
    if level > MAX_NESTED:
        raise ValueError(f"{place:.200}: the value contains itself, or is nested more than {MAX_NESTED} deep")
    if isinstance(value, Mapping):
        return {name: _as_value(_named(place, name), each, level + 1, waits=waits) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_value(f"{place}[{i}]", each, level + 1, waits=waits) for i, each in enumerate(value)]
    if not waits and _is_number_tensor(value):
        return None
    # JSON has no NaN and no infinity: their names are stored.
    found = portable(place, value)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, str | int | float | None):
        raise ValueError(
            f"{place}: found {value!r:.200}, expected a name and a number, string, bool or None, or lists and dicts of "
            "these"
        )
    if isinstance(found, int) and abs(found) >= 10**MAX_DIGITS:
        raise ValueError(f"{place}: found an int of {len(str(abs(found)))} digits, expected at most {MAX_DIGITS}")
    if isinstance(found, str) and not is_encodable(found):
        raise ValueError(f"{place}: found {value!r:.200}, expected text that is encodable as UTF-8")
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def _named(place: str, name: Any) -> str:
    """Return the place of an entry, for messages; ValueError if JSON cannot store its name."""
    if not isinstance(name, str) or not is_encodable(name):
        raise ValueError(f"{place}[{name!r}]: expected a name that is text, encodable as UTF-8")
    return f"{place}[{name!r}]"


def _as_number(name: Any, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # float() would parse these
            raise TypeError("text is not a number")
        return float(value.detach() if isinstance(value, Tensor) else value)  # torch warns of tensors with a gradient
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"metrics[{name!r}]: found {value!r:.200}, expected a number") from error


def _is_number_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _mapping(what: str, value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping of names to values, or None, found {value!r:.200}")
    return value
