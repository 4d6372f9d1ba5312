"""Reading while a writer rotates: what is gone is looked for again (no torch here)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError

log = logging.getLogger("recckpt")

_TRIES = 3  # looks after the first one
_Found = TypeVar("_Found")
_Result = TypeVar("_Result")


def until_whole(find: Callable[[], _Found], use: Callable[[_Found], _Result], first: _Found | None = None) -> _Result:
    """Find a checkpoint and use it; where its writer removes it meanwhile, find and use what is there by then.

    Args:
        find: looks at what is committed.
        use: reads it; may be called again, and has to make up for what it has done so far.
        first: what has been found already; None where ``find`` is to look first.

    Raises:
        CheckpointRemovedError: each of four times it was gone before it was read.
    """
    try:
        return use(find() if first is None else first)
    except CheckpointRemovedError as error:
        removed = error
    for _ in range(_TRIES):
        log.info("%s; looking again", removed)
        try:
            return use(find())
        except CheckpointRemovedError as error:
            removed = error
        except CheckpointNotFoundError:
            continue  # there is none at this moment, or the one that was asked for by name is gone for good
    raise removed
