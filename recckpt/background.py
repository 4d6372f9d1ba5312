"""Work on several threads that fails as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def run_all(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Return ``work`` of each item, in order, done by up to ``concurrency`` threads.

    Raises:
        BaseException: the first error, in the order of the items; work that has not begun is dropped, and nothing
            runs any more when this returns.
    """
    with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="recckpt") as pool:
        futures = [pool.submit(work, item) for item in items]
        _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
    return [future.result() for future in futures if not future.cancelled()]
