"""Objects that only the process that made them can use, one thread at a time; forks and copies are refused."""

from __future__ import annotations

import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from recckpt.errors import ForkedError
from recckpt.parallel.threads import Latch

log = logging.getLogger("recckpt")
_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="OneProcess")


class OneProcess(ABC):
    """Base class of objects with threads, locks or claims, which do not exist in a forked child or in a copy.

    As a context manager, the object is closed at the end of the block. If the block raises, an error of ``close()`` is
    logged and not raised.

    Attributes:
        made_at: file and line of the caller that made the object.
    """

    def __init__(self) -> None:
        self.made_at = _caller()
        self._made_by = os.getpid()
        self._lock = threading.RLock()  # reentrant, because a signal handler may run in the thread that holds the lock

    def _turn(self) -> AbstractContextManager[Any]:
        """Return the lock of the object; ForkedError if another process made the object."""
        self._check_process()
        return self._lock  # not a wrapper in Python: an interrupt inside the wrapper would leave the lock locked

    def _check_process(self) -> None:
        if os.getpid() != self._made_by:
            raise ForkedError(f"this {type(self).__name__}, made at {self.made_at}", self._made_by)

    @abstractmethod
    def close(self) -> None:
        """Wait for running work, and raise its error."""

    def __enter__(self: _Self) -> _Self:
        self._check_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because it works only in its process and with its "
            "objects: make a new one where it is needed"
        )


class _Guard(threading.Condition):
    """A condition whose ``with`` uses the lock directly, so that no interrupt can leave the lock locked."""

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class OwnFuture(Future[_T]):
    """A future of a thread of this process; raises ForkedError in a forked child, where the thread does not exist.

    After an interrupted wait, the thread continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Guard()
        self._ended = Latch()
        self._made_by = os.getpid()

    def check_process(self) -> None:
        """Raise ForkedError in a forked child, where even the lock of a future may be locked forever."""
        if os.getpid() != self._made_by:
            raise ForkedError("this save", self._made_by)

    def set_result(self, result: _T) -> None:
        super().set_result(result)
        self._ended.set()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self._ended.set()

    def run(self, work: Callable[[], _T]) -> None:
        """Call ``work`` in this thread, and set its result or error as the result or error of the future."""
        try:
            result = work()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def wait(self, timeout: float | None = None) -> bool:
        return self.done() or self._ended.wait(timeout)

    def done(self) -> bool:
        self.check_process()
        return super().done()

    def result(self, timeout: float | None = None) -> _T:
        if not self.wait(timeout):
            raise futures.TimeoutError
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.wait(timeout):
            raise futures.TimeoutError
        return super().exception()


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "recckpt":
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
