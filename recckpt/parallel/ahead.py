"""Work on several threads whose results are taken one after the other, while the next ones are made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def made_ahead(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> Iterator[_R]:
    """Yield ``work`` of each item, in order; threads make up to two results each before they are asked for.

    With one thread the caller does the work. Where the caller stops early, no further work begins.
    """
    if concurrency <= 1:
        yield from map(work, items)
        return
    pending: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(concurrency, thread_name_prefix="recckpt-ahead") as threads:
        try:
            for item in items:
                pending.append(threads.submit(work, item))
                if len(pending) > 2 * concurrency:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
