"""What the main thread starts other threads and waits for them by, so that an interrupt there leaves no lock held.

An interrupt (Ctrl-C, or any handler that raises) may come between taking the lock of a ``threading.Condition`` and the
block that gives it back, since taking it runs Python. Nobody gives it back then, and whoever takes it next waits for
ever. That is true of all that is built on one: ``Event``, ``Semaphore``, ``Queue``, ``Future``, executors, and
``Thread.start``, which waits for an ``Event`` that the new thread sets. A plain lock in a ``with`` is safe.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from recckpt.parallel.forks import renew_torch_pool

_T = TypeVar("_T")


class Latch:
    """An event that happens once. Thread-safe; each that waits has a lock of its own, so an interrupt leaks none."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Say whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Let it happen: all that wait go on."""
        self._is_set = True  # first: whoever begins to wait after the last waiter was taken here sees it
        while self._waiters:
            self._waiters.pop().release()

    def wait(self, timeout_sec: float | None = None) -> bool:
        """Wait until it has happened, or for so many seconds; say whether it has."""
        waiter = threading.Lock()
        waiter.acquire()  # given back by set()
        self._waiters.append(waiter)
        if not self._is_set:
            waiter.acquire(timeout=-1 if timeout_sec is None else min(max(0.0, timeout_sec), threading.TIMEOUT_MAX))
        return self._is_set


class Starting:
    """Threads that are being started: where the caller is the main thread, by another one.

    Attributes:
        started: those that are.

    Raises:
        RuntimeError: there is no room for a thread, or the interpreter is about to end; here or in :meth:`wait`.
    """

    def __init__(self, threads: Sequence[threading.Thread]) -> None:
        self.started: list[threading.Thread] = []
        self._threads, self._over, self._errors = threads, Latch(), list[BaseException]()
        renew_torch_pool()
        if threading.current_thread() is threading.main_thread():
            _thread.start_new_thread(self._run, ())  # which waits for nothing
        else:
            self._run()

    def wait(self) -> None:
        """Return once all are started, or raise the error of the first that could not be."""
        self._over.wait()
        if self._errors:
            raise self._errors.pop()  # which refers to this by its traceback

    def _run(self) -> None:
        try:
            for thread in self._threads:
                thread.start()
                self.started.append(thread)
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._over.set()


def start(thread: threading.Thread) -> None:
    """Start a thread, and return once it runs; where that is interrupted, it may run or not."""
    Starting([thread]).wait()


def aside(work: Callable[[], _T], give_up: Callable[[], object]) -> _T:
    """Return what work returns, which waits by what an interrupt may leak: in another thread, if this is the main one.

    Where this is interrupted, it calls ``give_up``, which is to end the work soon, and raises once that has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results, errors, over = list[_T](), list[BaseException](), Latch()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    starting = Starting([threading.Thread(target=run, name="recckpt-aside")])
    try:
        starting.wait()
        over.wait()
    except BaseException:
        give_up()
        starting.wait()
        over.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]


class InOrder:
    """Work that threads do one after another, in the order in which it came. Thread-safe.

    An interpreter that ends waits for it.
    """

    def __init__(self, name: str) -> None:
        self._name, self._turn = name, threading.Lock()
        self._works: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def submit(self, work: Callable[[], object]) -> None:
        """Have work done; it raises nothing."""
        self._works.put(work)
        start(threading.Thread(target=self.finish, name=self._name))

    def finish(self) -> None:
        """Return once all work is done: that which no thread has begun, by this one."""
        with self._turn:
            while not self._works.empty():
                self._works.get()()
