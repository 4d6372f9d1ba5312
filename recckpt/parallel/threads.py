"""Starts threads, waits for them and gives them work, in ways in which an interrupt leaves no lock locked.

An interrupt (Ctrl-C, or any signal handler that raises) may come after the lock of a ``threading.Condition`` is taken
and before the ``try`` block that releases it, because the condition takes the lock in Python code. Then the lock is
never released, and the next thread that takes it waits forever. The same is true of all classes that use conditions:
``Event``, ``Semaphore``, ``Queue``, ``Future``, executors, and ``Thread.start``, which waits for an ``Event`` that the
new thread sets. A plain lock in a ``with`` is safe.
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

_pools_of_parents: list[bool] = []  # not empty in a forked child that has not yet made torch's thread pool anew
_T = TypeVar("_T")
_R = TypeVar("_R")
_NICENESS = 5  # gives a third of the CPU share of another thread; 10 gives a tenth, too little if all cores are busy
_LOOK_SEC = 1.0  # interval of checks whether to stop
_TRIES = 3
_NEW_OBJECTS = 100_000  # new objects between two runs of the garbage collector inside collected_rarely()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _pools_of_parents.append(True))


class Latch:
    """An event that is set once. Thread-safe; each waiter has its own lock, so an interrupt leaves no lock locked."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True  # before the loop, so that a thread that begins to wait after the loop does not block
        while self._waiters:
            self._waiters.pop().release()

    def wait(self, timeout_sec: float | None = None) -> bool:
        waiter = threading.Lock()
        waiter.acquire()  # set() releases the lock
        self._waiters.append(waiter)
        if not self._is_set:
            waiter.acquire(timeout=-1 if timeout_sec is None else min(max(0.0, timeout_sec), threading.TIMEOUT_MAX))
        return self._is_set


class Starting:
    """Starts threads; if the caller is the main thread, in another thread. ``started`` lists the started threads.

    Raises:
        RuntimeError: here or in :meth:`wait`: the system cannot make a thread, or the interpreter is about to end.
    """

    def __init__(self, threads: Sequence[threading.Thread]) -> None:
        self.started: list[threading.Thread] = []
        self._threads, self._over, self._errors = threads, Latch(), list[BaseException]()
        if _pools_of_parents:
            # Torch drops the parent's thread pool when a thread first computes in a forked child. If two threads do so
            # at the same time, one may find no pool: "pool INTERNAL ASSERT FAILED ... Invalid thread pool!"
            # (caffe2/utils/threadpool/pthreadpool-cpp.cc takes no lock). So make a new pool before threads start.
            _pools_of_parents.clear()
            if (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(torch.get_num_threads())
        if threading.current_thread() is threading.main_thread():
            _thread.start_new_thread(self._run, ())  # returns without waiting, unlike Thread.start
        else:
            self._run()

    def wait(self) -> None:
        """Return once all threads are started, or raise the error of the first that could not start."""
        self._over.wait()
        if self._errors:
            raise self._errors.pop()  # pop, because the traceback of the error refers to this object

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
    """Start a thread, and return once it runs; after an interrupt of this call, the thread may run or not."""
    Starting([thread]).wait()


class Errand(Generic[_T]):
    """Work for a thread; ``over`` is set when the work has ended."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work, self.over = work, Latch()
        self._results, self._errors = list[_T](), list[BaseException]()

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # result() raises it
            self._errors.append(error)
        finally:
            self.over.set()

    def result(self) -> _T:
        """Return the result of the work, or raise its error; call once, after ``over`` is set."""
        if self._errors:
            raise self._errors.pop()  # pop, because the traceback of the error refers to this object
        return self._results.pop()


def aside(work: Callable[[], _T], give_up: Callable[[], object]) -> _T:
    """Return what work returns; if this is the main thread, do the work in another thread.

    The main thread gets interrupts, which would leave locks of the work locked. After an interrupt, this function calls
    ``give_up``, which must make the work end soon, waits for its end, and raises the interrupt.
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

    ``task`` is the last task that began, also after its end; None before the first task and after :meth:`drop`.
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
        """Whether the caller runs in the thread of the task."""
        return self._thread is threading.current_thread()

    def begin(self, task: _T, work: Callable[[], object], called_off: Callable[[], object] = lambda: None) -> None:
        """Begin a task; call this only after the previous task is over.

        Args:
            task: the new value of the attribute ``task``.
            work: does the task; must not raise.
            called_off: called if the task cannot begin.

        Raises:
            RuntimeError: the system cannot make a thread, or the interpreter is about to end.
        """
        over, may_begin = Latch(), SimpleQueue[bool]()

        def run() -> None:
            try:
                if may_begin.get():  # wait, so that the caller continues first and does not wait 5 ms for the GIL
                    give_way()
                    work()
            finally:
                over.set()

        thread = threading.Thread(target=run, name=self._name, daemon=self._is_daemon)
        is_begun = False
        try:
            start(thread)
            self._over, self._thread, self.task, is_begun = over, thread, task, True
        finally:  # after an interrupt, the thread may exist, but then it does no work
            may_begin.put(is_begun)
            if not is_begun:
                called_off()

    def wait(self, timeout_sec: float | None = None) -> bool:
        """Wait until the task is over, and say whether it is; True in a forked child, where no task runs."""
        if os.getpid() != self._made_by:
            return True
        # Wait for the latch first, because CPython marks a running thread as ended if Thread.join is interrupted.
        if not self._over.wait(timeout_sec):
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def drop(self) -> None:
        self.task = self._thread = None


class InOrder:
    """Does submitted work in threads, one piece after another, in the order of submission. Thread-safe.

    The interpreter waits for all work before it ends.
    """

    def __init__(self, name: str) -> None:
        self._name, self._turn = name, threading.Lock()
        self._works: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def submit(self, work: Callable[[], object]) -> None:
        """Do work in a thread after all work submitted before; ``work`` must not raise."""
        self._works.put(work)
        start(threading.Thread(target=self.finish, name=self._name))

    def finish(self) -> None:
        """Return once all submitted work is done; this thread does the work that no other thread has begun."""
        with self._turn:
            while not self._works.empty():
                self._works.get()()


def give_way() -> None:
    """Lower the priority of this thread and of all threads that it starts from now on."""
    if sys.platform == "linux":  # on Linux, each thread has its own niceness
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox may refuse the call
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


def run_all(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Return ``work(item)`` for each item, in order, from up to ``concurrency`` threads; with one, from this thread.

    After an error, no further work begins. Once running work has ended, the function raises the error of the first item
    that failed.
    """
    items = list(items)
    if min(concurrency, len(items)) <= 1:
        return [work(item) for item in items]
    crew = _Crew(work, items)
    # Not an executor, because executors refuse work while the interpreter is ending and waits for a save.
    threads = [threading.Thread(target=crew.run, name=f"recckpt-{n}") for n in range(min(concurrency, len(items)))]
    starting: Starting | None = None
    try:
        starting = Starting(threads)
        starting.wait()
        crew.over.wait()
    except BaseException:  # an interrupt, or the system cannot make a thread
        crew.stop()
        crew.over.wait()
        raise
    finally:
        # Join only after their work is over, because CPython marks a running thread as ended if join is interrupted.
        for thread in starting.started if starting else ():
            thread.join()
    return crew.results()


class _Crew(Generic[_T, _R]):
    """Work for several threads: each takes one item after another until no item is left or one has failed.

    ``over`` is set once all items are done, or once an item has failed and no work is running.
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
    """Yield ``work(item)`` for each item, in order; each thread computes up to two results in advance.

    If ``concurrency`` is 1, the caller does the work. If the caller stops early, no further work begins.
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
    """Return ``work(task)`` for each task, in order, from the workers of an executor, or from this thread without one.

    The function raises the first error of recckpt or of the storage. After any other error, such as a lost worker, it
    repeats the task, up to three times in all. Once the function returns or raises, no task is running as far as the
    executor knows. Raises StoppedError if ``is_stopped()`` is True.
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
    return aside(by, is_interrupted.set)  # because an interrupt may leave locks of futures and executors locked


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
        # Weak, so that a block disappears even if an interrupt skips its end.
        self._lock, self._blocks = threading.Lock(), WeakSet[_Block]()
        self._before: tuple[int, int, int] | None = None
        self._rare: tuple[int, int, int] | None = None

    @contextmanager
    def rarely(self) -> Iterator[None]:
        """Let the garbage collector run at most once per 100,000 new objects until the end of the block.

        A load of 10,000 tables makes a million objects, none of them garbage, and the collector scans them repeatedly.
        This takes a fifth of the time of the load, and may double the pause of a save. The collector is not turned off,
        because other threads may serve or train during a load. If the threshold is higher already, or the collector is
        off, nothing changes. Blocks may overlap.
        """
        block = _Block()
        try:
            with self._lock:
                if not self._blocks and gc.get_threshold() != self._rare:  # equal if an interrupt skipped the reset
                    first, second, third = self._before = gc.get_threshold()
                    self._rare = max(first, _NEW_OBJECTS) if first else 0, second, third
                    gc.set_threshold(*self._rare)
                self._blocks.add(block)
            yield
        finally:
            with self._lock:
                self._blocks.discard(block)
                is_ours = gc.get_threshold() == self._rare  # else other code has changed the threshold
                if not self._blocks and is_ours and self._before is not None:
                    gc.set_threshold(*self._before)
                    self._rare = None


collected_rarely = _Collector().rarely
