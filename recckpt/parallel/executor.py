"""Work given to an executor piece by piece, and given again where a worker was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from typing import TypeVar

from recckpt.errors import RecckptError
from recckpt.parallel.waiting import Latch, aside

_T = TypeVar("_T")
_R = TypeVar("_R")

_LOOK_SEC = 1.0  # how often to ask whether to stop
_TRIES = 3


class StoppedError(Exception):
    """The caller asked to stop."""


def run_on(
    executor: Executor | None,
    work: Callable[[_T], _R],
    tasks: Sequence[_T],
    *,
    on_done: Callable[[_T], object],
    is_stopped: Callable[[], bool],
) -> list[_R]:
    """Return ``work`` of each task, in order, done by the workers of an executor, or else by the caller.

    An error of recckpt or of the storage ends it; any other, such as that a worker was lost, has the task done again,
    three times at most. When this returns or raises, no task runs any more, as far as the executor knows.

    Raises:
        StoppedError: ``is_stopped`` said so.
    """
    if executor is None:
        return [_run_here(work, task, on_done, is_stopped) for task in tasks]
    is_interrupted = Latch()
    by = partial(_run_on, executor, work, tasks, on_done, lambda: is_interrupted.is_set() or is_stopped())
    return aside(by, is_interrupted.set)  # the locks of futures and executors are such as an interrupt may leak


def _run_on(
    executor: Executor,
    work: Callable[[_T], _R],
    tasks: Sequence[_T],
    on_done: Callable[[_T], object],
    is_stopped: Callable[[], bool],
) -> list[_R]:
    results: dict[int, _R] = {}
    pending: dict[Future[_R], tuple[int, int]] = {}
    try:
        for number, task in enumerate(tasks):
            pending[executor.submit(work, task)] = number, 1
        while pending:
            done, _ = wait(pending, timeout=_LOOK_SEC, return_when=FIRST_COMPLETED)
            if is_stopped():
                raise StoppedError
            for future in done:
                number, n_tries = pending.pop(future)
                try:
                    results[number] = future.result()
                except (RecckptError, OSError):
                    raise
                except Exception:
                    if n_tries == _TRIES:
                        raise
                    pending[executor.submit(work, tasks[number])] = number, n_tries + 1
                else:
                    on_done(tasks[number])
    finally:
        wait([future for future in pending if not future.cancel()])
    return [results[number] for number in range(len(tasks))]


def _run_here(
    work: Callable[[_T], _R], task: _T, on_done: Callable[[_T], object], is_stopped: Callable[[], bool]
) -> _R:
    if is_stopped():
        raise StoppedError
    result = work(task)
    on_done(task)
    return result
