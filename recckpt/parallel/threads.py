"""Work on several threads that fails as one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

from recckpt.parallel.waiting import Latch, Starting

_T = TypeVar("_T")
_R = TypeVar("_R")

_NICENESS = 5  # a third of the share of another thread; with a tenth, at 10, a save starves if all cores are busy


def give_way() -> None:
    """Lower the priority of this thread, and of those that it starts from now on."""
    if sys.platform == "linux":  # where each thread has a niceness of its own
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may refuse
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


def run_all(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Return ``work`` of each item, in order, done by up to ``concurrency`` threads; with one, by this thread.

    After an error no further work begins, and what runs is waited for; then the error of the first item is raised.
    """
    items = list(items)
    if min(concurrency, len(items)) <= 1:
        return [work(item) for item in items]
    crew = _Crew(work, items)
    # Plain threads: an executor refuses work while the interpreter waits for a save at its end.
    threads = [threading.Thread(target=crew.run, name=f"recckpt-{n}") for n in range(min(concurrency, len(items)))]
    starting: Starting | None = None
    try:
        starting = Starting(threads)
        starting.wait()
        crew.wait()
    except BaseException:  # an interrupt, or no room for a thread
        crew.stop()
        crew.wait()
        raise
    finally:
        # Only now that their work is over: when Thread.join is interrupted, CPython marks a running thread as ended.
        for thread in starting.started if starting else ():
            thread.join()
    return crew.results()


class _Crew(Generic[_T, _R]):
    """Threads that take items one after another until all are taken, or one has failed."""

    def __init__(self, work: Callable[[_T], _R], items: list[_T]) -> None:
        self._work, self._items = work, items
        self._results: dict[int, _R] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock, self._over = threading.Lock(), Latch()
        self._next = self._n_running = 0

    def run(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._results[number] = self._work(self._items[number])
            except BaseException as error:
                self._errors[number] = error
                self.stop()
            with self._lock:
                self._n_running -= 1
                self._end_if_over()

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._items)
            self._end_if_over()

    def wait(self) -> None:
        """Wait until all items are done, or one has failed and nothing runs."""
        self._over.wait()

    def results(self) -> list[_R]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in range(len(self._items))]

    def _end_if_over(self) -> None:
        if self._next >= len(self._items) and not self._n_running:
            self._over.set()

    def _take(self) -> int | None:
        with self._lock:
            if self._next >= len(self._items):
                return None
            self._next, self._n_running = self._next + 1, self._n_running + 1
            return self._next - 1
