"""Groups of options of savers and managers; each group is a frozen object that checks its values when it is made."""

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
    """Which slots and rows of tables to save, and in which dtypes; by default all, in their own dtypes. docs/save.md.

    Args:
        slots: patterns of the slots to save in addition to embeddings, such as ``"*@count"``; ``"!..."`` excludes
            matching slots. ``[]`` saves embeddings only, None all slots.
        where: table or pattern -> conditions on the rows to save, with the syntax of ``where`` in a ``load_conf``.
        store: slot or pattern -> a narrower dtype to store the slot in, such as ``{"*@*exp_avg*": "bfloat16"}``.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    slots: Sequence[str] | None = None
    where: Mapping[str, Any] | None = None
    store: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _ = self.patterns, self.row_filters, self.dtypes  # each raises an error for what it cannot parse

    @cached_property
    def patterns(self) -> tuple[tuple[Pattern, ...] | None, tuple[Pattern, ...]]:
        """Internal: (patterns of slots to save or None for all, patterns of slots to exclude)."""
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
        """Internal: (pattern of tables, filter of their rows) for each entry of ``where``."""
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
        """Internal: (pattern of slots, name of the dtype to store them in) for each entry of ``store``."""
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
        raise TypeError(f"Choose: {what} must be a dict, name or pattern -> its setting, found {value!r:.200}")
    return list(value.items())


def _pattern(what: str, text: str) -> Pattern:
    if text in GROUPS and text not in _GROUPS:
        raise ValueError(
            f"Choose: {what}: found the group {text!r}, expected {' or '.join(_GROUPS)}, or names of slots"
        )
    return Pattern(text)


@dataclass(frozen=True)
class Near:
    """Near saves: every few steps, write the changes since the newest checkpoint to the host itself; docs/near.md.

    If processes die, the run restores the newest near save, which is newer than the newest checkpoint. Near saves never
    replace checkpoints.

    Args:
        path: a directory on this host, such as one below ``/dev/shm``. Ranks that see the same directory are on one
            host.
        interval: when a manager makes near saves between its checkpoints; a number of steps, or a policy of
            :mod:`recckpt.policies.when`. Before the first checkpoint, the manager makes a checkpoint instead. With
            None, the manager makes no near saves, but restores existing ones.
        max_bytes: limit for the bytes of all near saves of one output dir in ``path``, such as ``"16GiB"``; allow three
            times the largest near save. None for no limit. A near save that does not fit is omitted, with a warning.
        timeout_sec: how long ranks wait for each other in a near save.
        copies: how many other hosts get a copy of what a host writes, so that a near save survives the loss of the
            host; None for one copy if ranks are on several hosts. If there are too few hosts, fewer copies are made,
            with a warning.

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
    """How saves and loads transfer files, and how long ranks wait for each other; docs/storage.md.

    Args:
        timeout_sec: how long a rank waits for other ranks; at least the time from the fastest to the slowest writer.
        visible_sec: how long ranks look for files of other ranks, because NFS may show new files late; at most half of
            ``timeout_sec``.
        min_free_bytes: refuse a save if, by an estimate, less free space than this would remain; ignored if the storage
            does not report its free space.
        max_uploads: how many files all ranks of a host together upload in parallel; None for one per thread.
        work_dir: a directory on this host where a save writes its files before it uploads them. Once they are written,
            training no longer copies rows that it changes. The directory is empty except during a save or load.
        pre_download: whether a load from an object store first copies files to ``work_dir``, or ``TMPDIR`` without it.

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


Signals = Sequence[int | str] | int | str  # numbers or names


@dataclass(frozen=True)
class OnSignal:
    """Signals that make the next step save, and how long that save may take.

    Args:
        signals: names or numbers of signals, such as ``("SIGTERM", "SIGUSR1")``.
        grace_sec: after so many seconds the process ends even if the save is not complete; None for no limit.

    Raises:
        ValueError: a signal does not exist, or ``grace_sec`` is not a number above 0.
    """

    signals: Signals = ()
    grace_sec: float | None = None

    def __post_init__(self) -> None:
        _ = self.numbers
        if self.grace_sec is not None:
            positive_number("OnSignal: grace_sec", self.grace_sec)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The distinct numbers of the signals."""
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
    """Lets training continue after failed saves, up to a number of consecutive failures.

    Args:
        raise_after: number of consecutive failed saves at which the step raises an error.
        call: function that gets the error of each earlier failure, on every rank, and may raise; None to log the error.

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
    """Return the policy for an argument ``on_save_error``; None if each error is raised.

    Raises:
        ValueError: ``on_save_error`` is not "raise", "warn", a callable or a :class:`Tolerate`.
    """
    if isinstance(on_save_error, Tolerate):
        return on_save_error
    if on_save_error in ("raise", "warn"):
        return Tolerate() if on_save_error == "warn" else None
    if not callable(on_save_error):
        what = "on_save_error must be 'raise', 'warn', a callable (SaveFailedError) -> None, or Tolerate(...)"
        raise ValueError(f"{what}, found {on_save_error!r:.100}")
    return Tolerate(call=on_save_error)
