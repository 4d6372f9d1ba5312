"""Threads that are started and waited for so that an interrupt leaves no lock held, and work for them.

An interrupt (Ctrl-C, or any handler that raises) may come between taking the lock of a ``threading.Condition`` and the
block that gives it back, since taking it runs Python. Then it is never given back, and the next taker waits forever.
That holds for everything built on conditions: ``Event``, ``Semaphore``, ``Queue``, ``Future``, executors, and
``Thread.start``, which waits for an ``Event`` that the new thread sets. A plain lock in a ``with`` is safe.
"""

from __future__ import annotations

import _thread
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar
from weakref import WeakSet

from recckpt.errors import RecckptError

_pools_of_parents: list[bool] = []  # one in a fork that has not taken care of it
_T = TypeVar("_T")
_R = TypeVar("_R")
_NICENESS = 5  # a third of the share of another thread; with a tenth, at 10, a save starves if all cores are busy
_LOOK_SEC = 1.0  # how often to ask whether to stop
_TRIES = 3
_NEW_OBJECTS = 100_000  # between two runs of the garbage collector, where it is to run rarely


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _pools_of_parents.append(True))


class Latch:
    """An event that happens once. Thread-safe; each waiter has a lock of its own, so an interrupt leaks none."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True  # first: whoever begins to wait after the last waiter was taken here sees it
        while self._waiters:
            self._waiters.pop().release()

    def wait(self, timeout_sec: float | None = None) -> bool:
        waiter = threading.Lock()
        waiter.acquire()  # given back by set()
        self._waiters.append(waiter)
        if not self._is_set:
            waiter.acquire(timeout=-1 if timeout_sec is None else min(max(0.0, timeout_sec), threading.TIMEOUT_MAX))
        return self._is_set


class Starting:
    """Threads that are being started; if the caller is the main thread, by another one. ``started`` lists them.

    Raises:
        RuntimeError: there is no room for a thread, or the interpreter is about to end; here or in :meth:`wait`.
    """

    def __init__(self, threads: Sequence[threading.Thread]) -> None:
        self.started: list[threading.Thread] = []
        self._threads, self._over, self._errors = threads, Latch(), list[BaseException]()
        if _pools_of_parents:
            # Torch gives up the pool of the parent when a thread first computes in a fork. Where two do so at once, the
            # second may find no pool: "pool INTERNAL ASSERT FAILED ... Invalid thread pool!"
            # (caffe2/utils/threadpool/pthreadpool-cpp.cc takes no lock). So it is made anew before there are two.
            _pools_of_parents.clear()
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(torch.get_num_threads())
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
    """Start a thread, and return once it runs; if this is interrupted, it may run or not."""
    Starting([thread]).wait()


class Errand(Generic[_T]):
    """Work for a thread; ``over`` happens when it has ended."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work, self.over = work, Latch()
        self._results, self._errors = list[_T](), list[BaseException]()

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # raised by who waits
            self._errors.append(error)
        finally:
            self.over.set()

    def result(self) -> _T:
        """Return what it returned, or raise what it raised; only once it is over, and only once."""
        if self._errors:
            raise self._errors.pop()  # which refers to this by its traceback
        return self._results.pop()


def aside(work: Callable[[], _T], give_up: Callable[[], object]) -> _T:
    """Return what work returns, done in another thread if this is the main one, where an interrupt would leak its
    locks.

    If this is interrupted, it calls ``give_up``, which must end the work soon, and raises once that has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    errand = Errand(work)
    starting = Starting([threading.Thread(target=errand.run, name="recckpt-aside")])
    try:
        starting.wait()
        errand.over.wait()
    except BaseException:
        give_up()
        starting.wait()
        errand.over.wait()
        raise
    return errand.result()


class Worker(Generic[_T]):
    """Does one task at a time in a thread of low priority. Not thread-safe.

    ``task`` is the current task, or the last one begun; None before, and after :meth:`drop`.
    """

    def __init__(self, name: str, *, is_daemon: bool = False) -> None:
        self._name, self._is_daemon, self._made_by = name, is_daemon, os.getpid()
        self.task: _T | None = None
        self._thread: threading.Thread | None = None
        self._over = Latch()
        self._over.set()

    @property
    def is_at_work(self) -> bool:
        return not self._over.is_set()

    @property
    def is_caller(self) -> bool:
        """Whether this is called by its task."""
        return self._thread is threading.current_thread()

    def begin(self, task: _T, work: Callable[[], object], called_off: Callable[[], object] = lambda: None) -> None:
        """Begin a task once the previous one is over; ``work`` does it and raises nothing.

        ``called_off`` is called if the task is not begun. Raises RuntimeError if there is no room for a thread, or the
        interpreter is about to end.
        """
        over, may_begin = Latch(), SimpleQueue[bool]()

        def run() -> None:
            try:
                if may_begin.get():  # training goes on first: it would wait 5 ms for the interpreter
                    give_way()
                    work()
            finally:
                over.set()

        thread = threading.Thread(target=run, name=self._name, daemon=self._is_daemon)
        is_begun = False
        try:
            start(thread)
            self._over, self._thread, self.task, is_begun = over, thread, task, True
        finally:  # where this was interrupted, the thread may be there all the same, and does nothing
            may_begin.put(is_begun)
            if not is_begun:
                called_off()

    def wait(self, timeout_sec: float | None = None) -> bool:
        """Wait until the task is over, and say whether it is; a forked child has none."""
        if os.getpid() != self._made_by:
            return True
        # Not Thread.join alone: when that is interrupted, CPython marks the running thread as ended.
        if not self._over.wait(timeout_sec):
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def drop(self) -> None:
        self.task = self._thread = None


class InOrder:
    """Work that threads do one after another, in the order of submission. Thread-safe.

    The interpreter waits for it at its end.
    """

    def __init__(self, name: str) -> None:
        self._name, self._turn = name, threading.Lock()
        self._works: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def submit(self, work: Callable[[], object]) -> None:
        """Have work done; it raises nothing."""
        self._works.put(work)
        start(threading.Thread(target=self.finish, name=self._name))

    def finish(self) -> None:
        """Return once all work is done; this thread does what no other has begun."""
        with self._turn:
            while not self._works.empty():
                self._works.get()()


def give_way() -> None:
    """Lower the priority of this thread, and of those that it starts from now on."""
    if sys.platform == "linux":  # where each thread has a niceness of its own
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may refuse
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


def run_all(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Return ``work`` of each item, in order, done by up to ``concurrency`` threads; with one, by this thread.

    After an error no further work begins, and running work is waited for; then the error of the first item is raised.
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
        crew.over.wait()
    except BaseException:  # an interrupt, or no room for a thread
        crew.stop()
        crew.over.wait()
        raise
    finally:
        # Only now that their work is over: when Thread.join is interrupted, CPython marks a running thread as ended.
        for thread in starting.started if starting else ():
            thread.join()
    return crew.results()


class _Crew(Generic[_T, _R]):
    """Threads that take items one after another until all are taken, or one has failed.

    ``over`` happens once all items are done, or one has failed and nothing runs.
    """

    def __init__(self, work: Callable[[_T], _R], items: list[_T]) -> None:
        self._work, self._items = work, items
        self._results: dict[int, _R] = {}
        self._errors: dict[int, BaseException] = {}
        self._lock, self.over = threading.Lock(), Latch()
        self._next = self._n_running = 0

    def run(self) -> None:
        while True:
            with self._lock:
                if self._next >= len(self._items):
                    return
                number, self._next, self._n_running = self._next, self._next + 1, self._n_running + 1
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

    def results(self) -> list[_R]:
        if self._errors:
            raise self._errors[min(self._errors)]
        return [self._results[number] for number in range(len(self._items))]

    def _end_if_over(self) -> None:
        if self._next >= len(self._items) and not self._n_running:
            self.over.set()


def made_ahead(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> Iterator[_R]:
    """Yield ``work`` of each item, in order; threads make up to two results each ahead.

    With one thread the caller does the work. If the caller stops early, no further work begins.
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


class StoppedError(Exception):
    pass


def run_on(
    executor: Executor | None,
    work: Callable[[_T], _R],
    tasks: Sequence[_T],
    *,
    on_done: Callable[[_T], object],
    is_stopped: Callable[[], bool],
) -> list[_R]:
    """Return ``work`` of each task, in order, done by the workers of an executor, or by the caller without one.

    An error of recckpt or of the storage ends it. After any other, such as a lost worker, the task is done again, three
    times at most. When this returns or raises, no task is running any more, as far as the executor knows. Raises
    StoppedError if ``is_stopped`` says so.
    """
    if executor is None:
        here = list[_R]()
        for task in tasks:
            if is_stopped():
                raise StoppedError
            here.append(work(task))
            on_done(task)
        return here
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


class _Block:
    pass


class _Collector:
    def __init__(self) -> None:
        self._lock, self._blocks = threading.Lock(), WeakSet[_Block]()  # which forget one that an interrupt has ended
        self._before: tuple[int, int, int] | None = None
        self._rare: tuple[int, int, int] | None = None

    @contextmanager
    def rarely(self) -> Iterator[None]:
        """Let the garbage collector run at most once per 100,000 new objects until the end of the block.

        A load of 10,000 tables makes a million objects, none of them garbage, and the collector walks over them again
        and again:
        that is a fifth of the load, and may double the pause of a save. It is not turned off: other threads may serve
        or train during a load. A higher threshold stays, and so does a collector that is off. Blocks may overlap.
        """
        block = _Block()
        try:
            with self._lock:
                if not self._blocks and gc.get_threshold() != self._rare:  # which an interrupt may have left
                    first, second, third = self._before = gc.get_threshold()
                    self._rare = max(first, _NEW_OBJECTS) if first else 0, second, third
                    gc.set_threshold(*self._rare)
                self._blocks.add(block)
            yield
        finally:
            with self._lock:
                self._blocks.discard(block)
                is_ours = gc.get_threshold() == self._rare  # else somebody has set it meanwhile
                if not self._blocks and is_ours and self._before is not None:
                    gc.set_threshold(*self._before)
                    self._rare = None


collected_rarely = _Collector().rarely
