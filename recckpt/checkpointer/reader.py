"""Read the file of one rank: all of it, or what a state dict asks for and no other bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recckpt.checkpointer.filler import Filler
from recckpt.checkpointer.rank import RankInfo
from recckpt.checkpointer.stored_state import StoredState
from recckpt.checkpointer.template import Comparison, fill
from recckpt.checkpointer.writer import storage_at
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from recckpt.storage import Storage

_log = logging.getLogger(__name__)
_MAX_SHOWN = 10


class StateReader:
    """Reads ``<path>/checkpoint_<rank>.pt``, without running any code from it.

    Args:
        rank_info: this rank.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        self._name = rank_info.file_name

    def read(
        self,
        path: str | os.PathLike[str],
        state_dict: dict[str, Any] | None = None,
        *,
        map_location: Any = None,
        strict: bool = False,
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the state and the dotted paths that are missing; as :meth:`Checkpointer.load` does."""
        if state_dict is not None and not isinstance(state_dict, dict):
            raise TypeError(f"state_dict is a dict or None, found a {type(state_dict).__name__}")
        storage = storage_at(path)
        place = f"{storage.url}/{self._name}"
        try:
            file = storage.open(self._name)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(self._missing(storage, place)) from error
        with file, _remedy_of_a_state():
            stored = StoredState(file, place)
            asked = Comparison(state_dict, stored.tree)
            if asked.mismatched or (strict and asked.missing):
                remedy = "pass strict=False to load what is there" if not asked.mismatched else ""
                raise StateMismatchError(place, missing=asked.missing, mismatched=asked.mismatched, remedy=remedy)
            state = fill("", state_dict, stored.tree, Filler(stored, asked.wholes, map_location))
        if asked.missing:
            shown = ", ".join(asked.missing[:_MAX_SHOWN]) + (", ..." if len(asked.missing) > _MAX_SHOWN else "")
            _log.warning("%s: %d keys are missing and stay as they are: %s", place, len(asked.missing), shown)
        return state, asked.missing

    def _missing(self, storage: Storage, place: str) -> str:
        """Say what is there instead; another number of ranks has written other files."""
        try:
            others = [name for name in storage.list_files("") if "/" not in name]
        except OSError:
            others = []
        hint = f"found {', '.join(others[:_MAX_SHOWN])}" if others else "there is nothing at all"
        return f"{place}: no such file; {hint}. A state is loaded by as many ranks as saved it"


@contextmanager
def _remedy_of_a_state() -> Iterator[None]:
    """Say of damage what helps here: the commands know no such files."""
    try:
        yield
    except CorruptCheckpointError as error:
        if error.remedy != CorruptCheckpointError.REMEDY:
            raise
        raise CorruptCheckpointError(
            error.path, error.where, found=error.found, expected=error.expected, remedy="load another checkpoint"
        ) from error
