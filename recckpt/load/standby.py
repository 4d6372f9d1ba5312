"""A hot standby: a model that is kept at the checkpoints of a run, of which it reads what is new to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from recckpt.load.load_into import place_of, serving_entry, serving_loader
from recckpt.load.loader import Loader
from recckpt.load.other_forms import KnownDamage
from recckpt.load.problems import Problems
from recckpt.load.report import LoadReport
from recckpt.load.source import LocatedBank, LocatedCheckpoint, OpenCheckpoint, locate_given
from recckpt.load.taken import Taken
from recckpt.output_dir.first_whole import first_whole


class Standby:
    """Loads one checkpoint after another into a model, to evaluate or serve it, as :func:`recckpt.load_into` does.

    Where a checkpoint stands on the one that was loaded before, as deltas of one run do, the tables read only the links
    that are new; otherwise, and where rows have changed here since, all is read. Dense tensors that the model has
    already, by their checksums, are not read where they are most of the bytes. Not collective. Not thread-safe: while
    it loads, look-ups of other threads may meet rows of either checkpoint.

    Args:
        model: any module, as of :func:`recckpt.load_into`.
        load_conf: what to take, as there.

    Raises:
        TypeError, LoadConfError: an argument is invalid.
    """

    def __init__(self, model: nn.Module, *, load_conf: Mapping[str, Any] | None = None) -> None:
        self._model, self._entry = model, serving_entry(model, load_conf)
        self._taken: Taken | None = None

    @property
    def global_step(self) -> int | None:
        """The step of the checkpoint that was loaded last; None before the first, and of one saved without a step."""
        return None if self._taken is None else self._taken.manifest.step

    def load(self, path: str | os.PathLike[str] | OpenCheckpoint) -> LoadReport | None:
        """Bring the model to a checkpoint, and say what was read; None where it is there, and its tables are unchanged.

        Args:
            path: as of :func:`recckpt.load_into`: an output dir for its newest, or what :func:`recckpt.follow` yields.

        Raises:
            Exception: as :func:`recckpt.load_into`; after ``PartlyLoadedError`` the next load reads all.
        """
        place = place_of(path)
        loader = serving_loader(self._model, place)

        def use(source: LocatedCheckpoint) -> LoadReport | None:
            return None if self._has(source, loader) else self._load(source, loader)

        return first_whole(lambda: self._located(place, loader), use, instead=KnownDamage().other_form)

    def _located(self, place: str | OpenCheckpoint, loader: Loader) -> LocatedCheckpoint:
        source = locate_given(self._entry, place)
        return source if self._taken is None else self._taken.since(source, loader.live_state())

    def _has(self, source: LocatedCheckpoint, loader: Loader) -> bool:
        """Say whether the model is at a checkpoint, and its tables are as they were loaded."""
        taken = self._taken
        is_there = taken is not None and taken.manifest.origin == source.checkpoint.manifest.origin
        return taken is not None and is_there and taken.is_in(loader.live_state())

    def _load(self, source: LocatedCheckpoint, loader: Loader) -> LoadReport:
        report = loader.load_once(None, LocatedBank([source], Problems()))
        names = frozenset(item.name for item in report.items if item.offer is not None)
        self._taken = Taken(names, source, loader.live_state())
        return report
