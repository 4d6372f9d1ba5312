"""The loop that looks again where a checkpoint turns out to be removed or damaged while it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError, CorruptCheckpointError

log = logging.getLogger("recckpt")

_LOOKS_AGAIN = 3
_Located = TypeVar("_Located")
_Result = TypeVar("_Result")


def first_whole(
    locate: Callable[[], _Located],
    use: Callable[[_Located], _Result],
    *,
    instead: Callable[[_Located, CorruptCheckpointError], _Located | None] = lambda located, error: None,
    first: _Located | None = None,
) -> _Result:
    """Locate a checkpoint and use it; look again where its writer removes it meanwhile, or where it is damaged.

    Ranks that act together all call this: ``locate`` and ``instead`` return the same on all of them, and an error of
    ``use`` on one of them is raised on all, so that all look again alike.

    Args:
        locate: returns what is there now.
        use: may be called again, and has to make up for what it has done so far.
        instead: returns what to use in place of what an error names as damaged, such as another form of it; None where
            there is nothing.
        first: what was located already.

    Raises:
        CheckpointNotFoundError: there was nothing at the first look.
        CheckpointRemovedError: what was located was removed before it was read, each of four times.
        CorruptCheckpointError: there is nothing to use in place of what is damaged.
    """
    located, removed, n_left = first, None, _LOOKS_AGAIN
    while True:
        try:
            located = locate() if located is None else located
            return use(located)
        except CorruptCheckpointError as error:
            located = None if located is None else instead(located, error)
            if located is None:
                raise
        except (CheckpointRemovedError, CheckpointNotFoundError) as error:
            # After a removal there may be no checkpoint for a moment, or the one that was asked for never comes back.
            removed = error if isinstance(error, CheckpointRemovedError) else removed
            if removed is None:
                raise
            if n_left == 0:
                raise removed from removed.__cause__
            log.info("%s; looking again", removed)
            located, n_left = None, n_left - 1
