"""What becomes of the errors of saves that steps begin: they are raised, or training goes on for some time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from recckpt.errors import RecckptError, SaveFailedError
from recckpt.parallel.ranks import Ranks

log = logging.getLogger("recckpt")

OnSaveError = Literal["raise", "warn"] | Callable[[SaveFailedError], object]


class SaveErrors:
    """Answers the errors of saves, alike on all ranks, and counts those in a row.

    What another rank, another writer or the caller has done wrong is raised in any case: no later save mends that.

    Args:
        ranks: returns those that save together, as they are now.
        on_save_error: ``"raise"``, ``"warn"``, or what is called on every rank with the error.
        raise_after: how many errors in a row are raised whatever ``on_save_error`` says.
    """

    def __init__(self, ranks: Callable[[], Ranks], on_save_error: OnSaveError, raise_after: int) -> None:
        self._ranks_now, self._on_error, self._raise_after = ranks, on_save_error, raise_after
        self._in_a_row = 0

    @property
    def are_raised(self) -> bool:
        """Whether every error is raised."""
        return self._on_error == "raise"

    def count(self, *, is_failed: bool) -> None:
        """Count a save that has ended."""
        self._in_a_row = self._in_a_row + 1 if is_failed else 0

    def let_pass(self, work: Callable[[], object]) -> bool:
        """Do what may raise the error of a save, and say whether it did not. Collective where it is let pass.

        Raises:
            Exception: the error, where it is not let pass; or what ``on_save_error`` has raised on any rank.
        """
        try:
            work()
        except Exception as error:
            self._answer(error)
            return False
        return True

    def _answer(self, error: Exception) -> None:
        ranks = self._ranks_now()
        if self.are_raised or ranks.has_lost:
            raise error
        if not all(ranks.gather(isinstance(error, SaveFailedError))) or not isinstance(error, SaveFailedError):
            raise error
        if self._in_a_row >= self._raise_after:
            log.error("%d saves in a row have failed, of which the last is raised", self._in_a_row)
            raise error
        answer = self._on_error
        if isinstance(answer, str):
            log.warning("%s (training goes on; %d in a row of %d)", error, self._in_a_row, self._raise_after)
            return
        (ranks if ranks.size == 1 else ranks.raising(_failed)).on_each(lambda: answer(error))


def checked_on_save_error(on_save_error: OnSaveError) -> OnSaveError:
    """Return what is to become of errors; ValueError where that says nothing."""
    if on_save_error in ("raise", "warn") or callable(on_save_error):
        return on_save_error
    what = "on_save_error must be 'raise', 'warn' or a callable (SaveFailedError) -> None"
    raise ValueError(f"{what}, found {on_save_error!r:.100}")


def _failed(rank: int, cause: str) -> RecckptError:
    return RecckptError(f"on_save_error failed on rank {rank}: {cause}")
