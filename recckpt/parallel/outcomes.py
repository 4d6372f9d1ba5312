"""What work gave or raised on a rank, in the form in which other ranks get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from recckpt.errors import RecckptError

_T = TypeVar("_T")

Failed = Callable[[int, str], RecckptError]
Reason = RecckptError | str  # an error of ours as it is, the text of any other


def outcome_of(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what work returns, or what it raises."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def sendable(failure: Exception | None) -> Reason | None:
    """Return an error as it is sent to other ranks: ours as they are, others by their text."""
    if failure is None or isinstance(failure, RecckptError):
        return failure
    return f"{type(failure).__name__}: {failure}"


def error_of(rank: int, reason: Reason, failed: Failed | None) -> RecckptError:
    """Return what a rank raises for the failure of another one.

    Args:
        rank: the one that failed.
        reason: as it was sent.
        failed: makes the error of one that is not ours; None for a plain one.
    """
    if isinstance(reason, RecckptError):
        return reason
    return RecckptError(f"rank {rank} failed: {reason}") if failed is None else failed(rank, reason)
