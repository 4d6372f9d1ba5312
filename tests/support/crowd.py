"""Several threads that begin the same work at once."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def crowd(n_threads: int, work: Callable[[int], _T]) -> list[_T | BaseException]:
    """Return what ``work`` of the number of its thread returned or raised in each of the threads."""
    barrier, outcomes = threading.Barrier(n_threads), {}

    def run(number: int) -> None:
        barrier.wait()
        try:
            outcomes[number] = work(number)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[number] for number in range(n_threads)]
