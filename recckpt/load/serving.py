"""Loads a trained model to evaluate or serve it: once, or again for each checkpoint of a run. Writes nothing."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from recckpt.dense.registered import extra_registry, io_registry
from recckpt.errors import LoadConfError
from recckpt.format.names import GROUPS, ID, Name, slot_name
from recckpt.load.conf import Entry, parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.loader import Loader
from recckpt.load.problems import Problems
from recckpt.load.report import LoadReport
from recckpt.load.source import KnownDamage, LocatedBank, LocatedCheckpoint, OpenCheckpoint, locate_given
from recckpt.output_dir.forget_requests import note_read
from recckpt.output_dir.open_files import first_whole
from recckpt.sparse.table.table import HashTable
from recckpt.sparse.table.tracker import Tracker
from recckpt.storage import Storage, absolute, open_storage

_THREADS = 4  # threads that read


class Taken:
    """The last load in a series. ``names`` are the names of the model that are loaded. Not thread-safe."""

    def __init__(self, names: Collection[Name], source: LocatedCheckpoint, live: LiveState) -> None:
        self._names, self._tracker = names, Tracker()
        self.take(source, live)

    def take(self, source: LocatedCheckpoint, live: LiveState) -> None:
        """Note that a checkpoint was loaded just now."""
        self.manifest = source.checkpoint.manifest
        for table in self._tables(live) or ():
            self._tracker.begin(table, self.manifest.name)

    def is_in(self, live: LiveState) -> bool:
        """Return whether the tables still have the loaded rows. False may be wrong; True is always right."""
        tables = self._tables(live)
        return bool(tables) and all(self._tracker.is_unchanged(table, self.manifest.name) for table in tables or ())

    def since(self, newer: LocatedCheckpoint, live: LiveState) -> LocatedCheckpoint:
        """Return what to read of a newer checkpoint: only its new links, if the tables still have the loaded rows."""
        name = self.manifest.name
        stands_on_it = any(link.manifest.name == name for link in newer.checkpoint.links)
        return replace(newer, loaded_save_id=name) if stands_on_it and self.is_in(live) else newer

    def _tables(self, live: LiveState) -> list[HashTable] | None:
        """Return the tables that are filled; None if one cannot continue from its last load."""
        names, tables = set(self._names), []
        for name in sorted({name.table for name in names if name.is_slot}):
            table = live.tables[name]
            slots = {name for name in live.inventory if name.table == table.name}
            if not isinstance(table, HashTable) or (slot_name(table.name, ID) in names and not slots <= names):
                return None  # a full load also gives other slots their first values
            tables.append(table)
        return tables


def load_into(
    model: nn.Module,
    path: str | os.PathLike[str] | OpenCheckpoint,
    *,
    load_conf: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Load the tables and the dense state of a trained model, to evaluate or serve it; writes nothing.

    Optimizers, registered objects and positions in the data are neither loaded nor required, because only training
    needs them. Call ``model.eval()`` so that look-ups create no rows. Not collective: under ``torchrun`` each rank that
    calls it loads the ids that its tables own. Not thread-safe: the model must not be in use meanwhile.

    Args:
        model: any module; it must have the same names as the checkpoint, unless ``load_conf`` says otherwise.
        path: a checkpoint, or an output dir, which stands for its newest checkpoint; a path or any fsspec URL, which
            need not be writable. Or an open checkpoint, as :func:`recckpt.follow` yields it.
        load_conf: what to take, as in :meth:`recckpt.Saver.load`; None for all of the model.

    Returns:
        What was loaded from which source; ``global_step`` is the step of the checkpoint.

    Raises:
        TypeError: ``model`` is not a module.
        CheckpointNotFoundError: there is no checkpoint.
        LoadConfError, StateMismatchError: requested state does not exist or does not fit; nothing has changed.
        CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or was removed before it was read.
        PartlyLoadedError: reading failed after tables that had rows had changed.
    """
    entry, place = serving_entry(model, load_conf), place_of(path)
    loader = serving_loader(model, place, is_whole=load_conf is None)
    return loader.load_located(lambda: LocatedBank([locate_given(entry, place)], Problems()))


def serving_entry(model: nn.Module, load_conf: Mapping[str, Any] | None) -> Entry:
    """Return the entry for a model that is not trained; TypeError or LoadConfError for wrong arguments."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found a {type(model).__name__}")
    entry = replace(parse_load_conf(load_conf), serves=True)
    groups = [group for group in GROUPS if Name(group, "").is_of_training]
    if asked := [pattern.text for pattern in entry.load if pattern.text in groups]:
        what = f"'load': only training needs {', '.join(map(repr, asked))}: use Saver.load for that"
        raise LoadConfError([f"{entry.label}: {what}"])
    return entry


def place_of(path: str | os.PathLike[str] | OpenCheckpoint) -> str | OpenCheckpoint:
    """Return an absolute path, because the process may change its working directory."""
    return path if isinstance(path, OpenCheckpoint) else absolute(os.fspath(path))


def serving_loader(model: nn.Module, place: str | OpenCheckpoint, *, is_whole: bool = False) -> Loader:
    """Return the loader for a model that is not trained; ``is_whole`` if each load replaces all rows.

    A saver made later for this model must know which ids had not been forgotten yet when the rows were read.
    """

    def before_load(storages: Iterable[Storage]) -> None:
        for storage in storages:
            note_read(model.modules(), storage, is_anew=is_whole)

    storage = place.chain.storage if isinstance(place, OpenCheckpoint) else open_storage(place)
    return Loader(model, None, extra_registry(), io_registry(), storage, _THREADS, None, before_load=before_load)


class Standby:
    """Loads one checkpoint after another into a model, to evaluate or serve it, as :func:`recckpt.load_into` does.

    If a checkpoint is based on the previously loaded one, as deltas of one run are, only the new links are read for
    the tables. All links are read otherwise, or if rows have changed here since the last load. If the checksums show
    that most bytes of the dense tensors are unchanged, only the other tensors are read. Not collective. Not
    thread-safe: during a load, look-ups of other threads may see rows of either checkpoint.

    Args:
        model: any module, as for :func:`recckpt.load_into`.
        load_conf: what to load, as for that function.

    Raises:
        TypeError, LoadConfError: an argument is invalid.
    """

    def __init__(self, model: nn.Module, *, load_conf: Mapping[str, Any] | None = None) -> None:
        self._model, self._entry = model, serving_entry(model, load_conf)
        self._taken: Taken | None = None

    @property
    def global_step(self) -> int | None:
        """The step of the checkpoint that was loaded last; None before the first, or if it was saved without a step."""
        return None if self._taken is None else self._taken.manifest.step

    def load(self, path: str | os.PathLike[str] | OpenCheckpoint) -> LoadReport | None:
        """Load a checkpoint into the model, and return the report; None if the model already has it, unchanged.

        Args:
            path: as for :func:`recckpt.load_into`: an output dir for its newest, or what :func:`recckpt.follow` yields.

        Raises:
            Exception: as :func:`recckpt.load_into`; after a ``PartlyLoadedError`` the next load reads everything.
        """
        place = place_of(path)
        loader = serving_loader(self._model, place)

        def locate() -> LocatedCheckpoint:
            source = locate_given(self._entry, place)
            return source if self._taken is None else self._taken.since(source, loader.live_state())

        def use(source: LocatedCheckpoint) -> LoadReport | None:
            taken = self._taken
            is_there = taken is not None and taken.manifest.name == source.checkpoint.manifest.name
            if taken is not None and is_there and taken.is_in(loader.live_state()):
                return None
            report = loader.load_once(None, LocatedBank([source], Problems()))
            names = frozenset(item.name for item in report.items if item.offer is not None)
            self._taken = Taken(names, source, loader.live_state())
            return report

        return first_whole(locate, use, instead=KnownDamage().stand_in)
