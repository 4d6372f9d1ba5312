"""Work on several threads that fails as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def run_all(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Return ``work`` of each item, in order, done by up to ``concurrency`` threads.

    Raises:
        BaseException: the first error, in the order of the items; work that has not begun is dropped, and nothing
            runs any more when this returns.
    """
    failed = threading.Event()

    def begin(item: _T) -> _R:
        if failed.is_set():
            raise CancelledError
        try:
            return work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="recckpt") as pool:
        futures = [pool.submit(begin, item) for item in items]
        try:
            wait(futures)
        except BaseException:  # an interrupt
            failed.set()
            raise
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]
