"""Options that belong together, each group a frozen object that is checked as it is made: of a saver, of a manager."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from recckpt.errors import SaveFailedError
from recckpt.parallel.ranks import DEFAULT_TIMEOUT_SEC, VISIBLE_SEC
from recckpt.text import nearest
from recckpt.types import flag, positive_int, positive_number


@dataclass(frozen=True)
class Transfers:
    """How files and messages of saves and loads travel, and how long they may take; docs/storage.md.

    Args:
        timeout_sec: how long a rank waits for the others: at least what the slowest writes longer than the fastest.
        visible_sec: how long ranks look for files of others, which NFS may show late; at most half of ``timeout_sec``.
        min_free_bytes: a save that would leave less room, by an estimate, is refused; where the storage knows its room.
        max_uploads: how many files one host sends to the output dir at once, over all its ranks; None: one a thread.
        work_dir: a directory on this host where a save writes its files first; training copies nothing aside any more
            once they are there, though they still have to go up. Empty but while a save or load is at work.
        pre_download: whether a load first copies what it reads of an object store to ``work_dir``, else to ``TMPDIR``.

    Raises:
        ValueError: an argument is invalid.
    """

    timeout_sec: float = DEFAULT_TIMEOUT_SEC
    visible_sec: float = VISIBLE_SEC
    min_free_bytes: int = 0
    max_uploads: int | None = None
    work_dir: str | os.PathLike[str] | None = None
    pre_download: bool = False

    def __post_init__(self) -> None:
        positive_number("Transfers: timeout_sec", self.timeout_sec)
        visible, work_dir = self.visible_sec, self.work_dir
        if type(visible) not in (int, float) or not 0 <= visible < float("inf"):
            raise ValueError(f"Transfers: visible_sec must be a finite number of at least 0, found {visible!r}")
        if type(self.min_free_bytes) is not int or self.min_free_bytes < 0:
            raise ValueError(f"Transfers: min_free_bytes must be an int of at least 0, found {self.min_free_bytes!r}")
        if self.max_uploads is not None:
            positive_int("Transfers: max_uploads", self.max_uploads)
        if not isinstance(work_dir, str | os.PathLike | None) or "://" in str(work_dir) or work_dir == "":
            raise ValueError(f"Transfers: work_dir must be a path on this host, found {work_dir!r}")
        flag("Transfers: pre_download", self.pre_download)


Signals = Sequence[int | str] | int | str  # by number or name


@dataclass(frozen=True)
class OnSignal:
    """Signals after which the next step saves, and how long that may take.

    Args:
        signals: such as ``("SIGTERM", "SIGUSR1")``, or their numbers.
        grace_sec: how long such a save may take before the process ends without it; None for as long as it takes.

    Raises:
        ValueError: there is no such signal, or ``grace_sec`` is not a number above 0.
    """

    signals: Signals = ()
    grace_sec: float | None = None

    def __post_init__(self) -> None:
        _ = self.numbers
        if self.grace_sec is not None:
            positive_number("OnSignal: grace_sec", self.grace_sec)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The signals by their numbers, each once."""
        chosen = [self.signals] if isinstance(self.signals, str | int) else self.signals
        try:
            return tuple(dict.fromkeys(map(_number, chosen)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"save_on_signal={self.signals!r}: {error}; name signals that can be caught, in the main thread"
            ) from error


def _number(value: int | str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):  # True is an int, 1 for SIGHUP
        raise ValueError(f"{value!r} is not a signal")
    if not isinstance(value, str):
        return value
    name = f"SIG{value.upper().removeprefix('SIG')}"
    number = getattr(signal, name, None)
    if not isinstance(number, signal.Signals):
        raise ValueError(f"{value!r} is not the name of a signal{nearest(name, signal.Signals.__members__)}")
    return number


def as_on_signal(save_on_signal: Signals | OnSignal) -> OnSignal:
    """Return what signals alone stand for, which let a save take as long as it does."""
    return save_on_signal if isinstance(save_on_signal, OnSignal) else OnSignal(save_on_signal)


@dataclass(frozen=True)
class Tolerate:
    """Lets training go on after saves that failed, a few in a row.

    Args:
        raise_after: how many failed saves in a row are an error of the step all the same.
        call: gets the error of each of the others, on every rank, and may raise another; None logs it.

    Raises:
        ValueError: ``raise_after`` is not an int of at least 1, or ``call`` cannot be called.
    """

    raise_after: int = 3
    call: Callable[[SaveFailedError], object] | None = None

    def __post_init__(self) -> None:
        positive_int("Tolerate: raise_after", self.raise_after)
        if self.call is not None and not callable(self.call):
            raise ValueError(f"Tolerate: call must be a callable (SaveFailedError) -> None, found {self.call!r:.100}")


OnSaveError = Literal["raise", "warn"] | Callable[[SaveFailedError], object] | Tolerate


def as_tolerate(on_save_error: Any) -> Tolerate | None:
    """Return what an argument ``on_save_error`` stands for, None where each error is raised.

    Raises:
        ValueError: it is neither one of the two words, nor a callable, nor a :class:`Tolerate`.
    """
    if isinstance(on_save_error, Tolerate):
        return on_save_error
    if on_save_error in ("raise", "warn"):
        return Tolerate() if on_save_error == "warn" else None
    if not callable(on_save_error):
        what = "on_save_error must be 'raise', 'warn', a callable (SaveFailedError) -> None, or Tolerate(...)"
        raise ValueError(f"{what}, found {on_save_error!r:.100}")
    return Tolerate(call=on_save_error)
