"""Work on several threads that fails as one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

_NICENESS = 5  # a third of the share of another thread; at 10, a tenth, a save starves where no core is idle


def give_way() -> None:
    """Let other threads have the cores first, before this one and those that it starts from now on."""
    if sys.platform == "linux":  # where each thread has a niceness of its own
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may refuse
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


def run_all(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Return ``work`` of each item, in order, done by up to ``concurrency`` threads; one needs no thread at all.

    Raises:
        BaseException: the first error, in the order of the items; work that has not begun is dropped, and nothing
            runs any more when this returns.
    """
    items = list(items)
    if min(concurrency, len(items)) <= 1:
        return [work(item) for item in items]
    crew = _Crew(work, items)
    # Plain threads: an executor takes no work any more while the interpreter waits for a save at its end.
    threads = [threading.Thread(target=crew.run, name=f"recckpt-{n}") for n in range(min(concurrency, len(items)))]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:  # an interrupt, or no room for a thread
        crew.stop()
        for thread in started:
            thread.join()
        raise
    return crew.results()


class _Crew(Generic[_T, _R]):
    """Threads that take items one after another until there are none, or one has failed."""

    def __init__(self, work: Callable[[_T], _R], items: list[_T]) -> None:
        self._work, self._items = work, items
        self._results: dict[int, _R] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock = threading.Lock()
        self._next = 0

    def run(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._results[number] = self._work(self._items[number])
            except BaseException as error:
                self._errors[number] = error
                self.stop()

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._items)

    def results(self) -> list[_R]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in range(len(self._items))]

    def _take(self) -> int | None:
        with self._lock:
            number = self._next
            self._next += 1
        return number if number < len(self._items) else None
