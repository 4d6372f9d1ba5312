"""Options that belong together, each group a frozen object that is checked as it is made: of a saver, of a manager."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from recckpt.errors import SaveFailedError
from recckpt.format.names import GROUPS, ID, Pattern
from recckpt.format.tables import FLOATS
from recckpt.parallel.ranks import DEFAULT_TIMEOUT_SEC, VISIBLE_SEC
from recckpt.policies.row_filter import RowFilter, parse_row_filter
from recckpt.policies.when import When, as_when
from recckpt.text import nearest
from recckpt.types import EMBEDDING, byte_count, flag, is_list, positive_int, positive_number

_GROUPS = ("sparse", "sparse_opt")  # groups of load_conf with slots of tables


@dataclass(frozen=True)
class Choose:
    """Which slots and rows of tables are saved, and how narrow; docs/save.md. By default all, as they are.

    Args:
        slots: patterns of the slots that are saved beside embeddings, such as ``"*@count"``; ``"!..."`` excludes what
            matches; ``[]`` saves embeddings only, None all slots.
        where: table or pattern -> conditions on the rows to save, as ``where`` of a ``load_conf``.
        store: slot or pattern -> a narrower dtype in which it is stored, such as ``{"*@*exp_avg*": "bfloat16"}``.

    Raises:
        TypeError, ValueError: an argument is invalid; says which.
    """

    slots: Sequence[str] | None = None
    where: Mapping[str, Any] | None = None
    store: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _ = self.patterns, self.row_filters, self.dtypes  # each refuses what it cannot parse

    @cached_property
    def patterns(self) -> tuple[tuple[Pattern, ...] | None, tuple[Pattern, ...]]:
        """Internal: the slots to save, None for all, and exceptions."""
        if self.slots is None:
            return None, ()
        if not is_list(self.slots) or not all(isinstance(name, str) and name.removeprefix("!") for name in self.slots):
            raise TypeError(
                "Choose: slots must be a list of patterns such as ['*@count'] or ['!*@*exp_avg*'], [] for embeddings "
                f"alone, or None for all, found {self.slots!r:.200}"
            )
        kept = tuple(_pattern("slots", name) for name in self.slots if not name.startswith("!"))
        without = tuple(_pattern("slots", name[1:]) for name in self.slots if name.startswith("!"))
        for pattern in without:
            if pattern.text.rpartition("@")[2] in (ID, EMBEDDING) and "@" in pattern.text:
                raise ValueError(f"Choose: slots: found '!{pattern.text}', but ids and embeddings are always saved")
        return (None if without and not kept else kept), without

    @cached_property
    def row_filters(self) -> tuple[tuple[Pattern, RowFilter], ...]:
        """Internal: the conditions of rows, by tables."""
        filters = []
        for name, value in _pairs("where", self.where):
            pattern = _pattern("where", name)
            try:
                filters.append((pattern, parse_row_filter(value)))
            except ValueError as error:
                raise ValueError(f"Choose: where[{name!r}]: {error}") from error
        return tuple(filters)

    @cached_property
    def dtypes(self) -> tuple[tuple[Pattern, str], ...]:
        """Internal: the names of dtypes, by slots."""
        dtypes = []
        for name, dtype in _pairs("store", self.store):
            pattern, text = _pattern("store", name), str(dtype).removeprefix("torch.")
            if text not in FLOATS:
                expected = f"one of {', '.join(FLOATS)}{nearest(text, FLOATS)}"
                raise ValueError(f"Choose: store[{name!r}]: found {dtype!r:.100}, expected {expected}")
            dtypes.append((pattern, text))
        return tuple(dtypes)


def _pairs(what: str, value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise TypeError(f"Choose: {what} must be a dict, name or pattern -> what is said of it, found {value!r:.200}")
    return list(value.items())


def _pattern(what: str, text: str) -> Pattern:
    if text in GROUPS and text not in _GROUPS:
        raise ValueError(
            f"Choose: {what}: found the group {text!r}, expected {' or '.join(_GROUPS)}, or names of slots"
        )
    return Pattern(text)


@dataclass(frozen=True)
class Near:
    """Near saves: what has changed since the newest checkpoint, on the host itself, every few steps; docs/near.md.

    After the death of processes a run restores a newer state with them. They never replace a checkpoint.

    Args:
        path: a directory of this host, such as one below ``/dev/shm``. Ranks that see the same one are on one host.
        interval: when a manager makes them, between its checkpoints; steps or a policy of :mod:`recckpt.policies.when`.
            If there is no checkpoint yet to stand on, one is made instead. None makes no near saves, but restores
            existing ones.
        max_bytes: how much near saves of one output dir may take there, such as ``"16GiB"``; allow for three times the
            largest one. None for no limit. One that does not fit is not made, with a warning.
        timeout_sec: how long ranks wait for each other in a near save.
        copies: how many other hosts get a copy of what a host writes, so that a near save survives the loss of the
            host; None for one copy if ranks are on several hosts. With too few hosts there are fewer, with a warning.

    Raises:
        ValueError: an argument is invalid.
    """

    path: str | os.PathLike[str]
    interval: int | When | None = None
    max_bytes: int | str | None = None
    timeout_sec: float = 60.0
    copies: int | None = None

    def __post_init__(self) -> None:
        path = self.path
        if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "://" in str(path) or "\0" in str(path):
            raise ValueError(f"Near: path must be a directory of this host, found {path!r}")
        _ = self.when
        if self.max_bytes is not None:
            byte_count("Near: max_bytes", self.max_bytes)
        positive_number("Near: timeout_sec", self.timeout_sec)
        if self.copies is not None and (type(self.copies) is not int or self.copies < 0):
            raise ValueError(f"Near: copies must be an int of at least 0, or None, found {self.copies!r}")

    @property
    def when(self) -> When | None:
        """Internal: ``interval`` as a policy."""
        return None if self.interval is None else as_when(self.interval, "Near: interval")

    @property
    def most_bytes(self) -> int | None:
        """Internal: ``max_bytes`` as a number."""
        return None if self.max_bytes is None else byte_count("Near: max_bytes", self.max_bytes)


@dataclass(frozen=True)
class Transfers:
    """How files and messages of saves and loads travel, and how long they may take; docs/storage.md.

    Args:
        timeout_sec: how long a rank waits for the others; at least the time between the fastest and the slowest writer.
        visible_sec: how long ranks look for files of others, which NFS may show late; at most half of ``timeout_sec``.
        min_free_bytes: refuses a save that would leave less room, by an estimate, if the storage knows its free room.
        max_uploads: how many files all ranks of a host upload at once; None for one a thread.
        work_dir: a directory on this host where a save writes its files before it uploads them; once they are there,
            training need not copy rows aside any more. Empty except during a save or load.
        pre_download: whether a load from an object store copies files first, to ``work_dir`` or else ``TMPDIR``.

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


@dataclass(frozen=True)
class Tolerate:
    """Lets training go on after saves that failed, a few in a row.

    Args:
        raise_after: number of failed saves in a row after which the step raises an error.
        call: gets each error before that, on every rank, and may raise another; None logs it.

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
