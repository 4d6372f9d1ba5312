"""Threads: what they do fails as one, wherever an interrupt strikes and whatever workers are lost."""

import gc
import itertools
import os
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.builders import ClickModel
from support.forked import in_fork
from support.raising import _silent
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import CorruptCheckpointError
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.roll_call import moments
from recckpt.parallel.threads import (
    InOrder,
    Latch,
    StoppedError,
    Worker,
    _Crew,
    aside,
    collected_rarely,
    give_way,
    run_all,
    run_on,
    start,
)


def test_results_come_in_the_order_of_the_items():
    assert run_all(lambda n: n * n, range(50), 4) == [n * n for n in range(50)]
    assert run_all(lambda n: n, [], 4) == []


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_so_many_threads_work_at_once_and_no_more(concurrency):
    together = threading.Barrier(concurrency)
    running, most, lock = [0], [0], threading.Lock()

    def work(n):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(60)
        with lock:
            running[0] -= 1

    run_all(work, range(3 * concurrency), concurrency)
    assert most == [concurrency]


def test_the_first_error_in_the_order_of_the_items_is_raised_and_what_has_not_begun_is_dropped():
    begun, both = [], threading.Barrier(2)

    def alone(n):
        begun.append(n)
        raise KeyError(n)

    def together(n):
        both.wait(60)
        raise ValueError(f"item {n}")

    with pytest.raises(KeyError):
        run_all(alone, range(1000), 1)
    assert begun == [0]
    with pytest.raises(ValueError, match="item 0"):
        run_all(together, range(2), 2)


def test_nothing_runs_any_more_when_an_error_is_raised():
    finished, begun, failing = [], threading.Event(), threading.Event()

    def work(n):
        if n == 0:
            begun.wait(60)
            failing.set()
            raise ValueError("first")
        begun.set()
        failing.wait(60)
        finished.append(n)

    with pytest.raises(ValueError, match="first"):
        run_all(work, range(2), 2)
    assert finished == [1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("recckpt")]


def test_nothing_runs_any_more_when_an_interrupt_is_raised(interrupted, monkeypatch):
    begun, finished, stopped, stop = [], [], threading.Event(), _Crew.stop

    def work(n):
        begun.append(n)
        stopped.wait(60)
        finished.append(sum(range(3_000_000 * (1 - n))))

    monkeypatch.setattr(_Crew, "stop", lambda crew: (stop(crew), stopped.set()))
    with interrupted(lambda: len(begun) == 2):
        run_all(work, range(2), 2)
    assert len(finished) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("recckpt")]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is of the process")
def test_a_thread_that_gives_way_takes_the_threads_it_starts_with_it():
    before, seen = niceness(), []

    def work():
        give_way()
        seen.extend(run_all(lambda n: niceness(), range(4), 2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [min(19, before + 5)] * 4
    assert niceness() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is of the process")
def test_a_save_gives_way_to_training_in_the_background_only(memory_url):
    seen = []
    with Saver(ClickModel(), output_dir=memory_url, on_save=lambda info: seen.append(niceness())) as saver:
        saver.save_async("beside").wait()
        saver.save("alone")
    assert seen == [min(19, niceness() + 5), niceness()]


def test_a_latch_lets_all_go_that_wait_and_all_that_come_later():
    latch, passed = Latch(), []
    assert [latch.wait(limit) for limit in (0, -1, 0.001)] == [False] * 3
    threads = [threading.Thread(target=lambda: passed.append(latch.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not latch.is_set()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join()
    assert (passed, latch.wait(), latch.wait(0)) == ([True] * 3, True, True)


def test_work_goes_on_in_its_order_and_is_done_by_who_waits_where_no_thread_could_be_started(monkeypatch):
    in_order, done = InOrder("recckpt-test"), []
    for number in range(50):
        in_order.submit(lambda number=number: done.append(number))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no room")))
    with pytest.raises(RuntimeError, match="no room"):
        in_order.submit(lambda: done.append(50))
    in_order.finish()
    assert done == list(range(51))


def test_an_error_of_work_aside_is_raised_and_an_interrupt_ends_it(interrupted):
    with pytest.raises(KeyError):
        aside(lambda: {}["x"], lambda: None)
    ended, given_up = [], Latch()
    with interrupted():
        aside(lambda: ended.append(given_up.wait(60)), given_up.set)
    assert ended == [True]


def test_a_worker_does_one_task_after_another_and_is_not_waited_for_in_a_fork():
    worker, may_end, seen = Worker("recckpt-test"), threading.Event(), []
    assert (worker.wait(), worker.task, worker.is_at_work) == (True, None, False)
    worker.begin("a", lambda: seen.append((may_end.wait(60), worker.is_caller)))
    assert (worker.task, worker.is_at_work, worker.is_caller, worker.wait(0)) == ("a", True, False, False)
    assert in_fork(worker.wait) == "True"
    may_end.set()
    assert worker.wait()
    assert seen == [(True, True)]
    worker.begin("b", lambda: seen.append("b"))
    assert (worker.wait(), worker.task, seen[1:]) == (True, "b", ["b"])
    worker.drop()
    assert worker.task is None


def test_a_task_whose_thread_does_not_start_is_called_off_and_not_done(monkeypatch):
    worker, done, start = Worker("recckpt-test"), [], threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.begin("a", lambda: done.append("done"), lambda: done.append("called off"))
    assert (worker.wait(), worker.task, done) == (True, None, ["called off"])


def test_a_future_says_in_its_callbacks_that_it_has_ended():
    future, said = OwnFuture(), []
    future.add_done_callback(lambda ended: said.append((ended.done(), ended.result())))
    start(threading.Thread(target=future.set_result, args=("x",)))
    assert (future.result(60), said) == ("x", [(True, "x")])
    with pytest.raises(TimeoutError):
        OwnFuture().result(0)


class Interrupt:
    """Raises KeyboardInterrupt at an event of what waits: a line, or a return, as that of what has taken a lock."""

    def __init__(self, number):
        self.number, self.where = number, ""

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(
            (threading.__file__, str(Path(run_all.__code__.co_filename).parent))
        ):
            return None
        if event in ("line", "return") and frame.f_lasti not in _silent(frame.f_code):
            self.number -= 1
            if self.number < 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def wait_for_a_future():
    future = OwnFuture()
    start(threading.Thread(target=future.set_result, args=(1,), name="recckpt-test"))
    future.done()
    return future.result()


def work_on_an_executor():
    with ThreadPoolExecutor(2) as threads:
        return run_on(threads, int, [1, 2], on_done=id, is_stopped=lambda: False)


WORKS = [lambda: run_all(int, [1, 2], 2), wait_for_a_future, work_on_an_executor]


def threads_left(before=()):
    """Return what runs of ours, or is about to, and did not before: a roll call that nobody answers may take long."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("recckpt") and thread not in before]


@mostly_slow()
@pytest.mark.parametrize("work", WORKS, ids=["run_all", "future", "executor"])
def test_an_interrupt_at_any_line_or_return_leaves_no_thread_that_hangs(work):
    before = threading.enumerate()
    expected = work()
    for number in itertools.count():
        interrupt = Interrupt(number)
        try:
            with interrupt:
                assert work() == expected
            break
        except KeyboardInterrupt:
            pass
        assert any(not threads_left(before) for _ in moments(60)), (interrupt.where, threads_left(before))
        assert work() == expected
    assert number > 50


def test_a_fork_makes_the_pool_of_torch_once_before_its_threads_compute(monkeypatch):
    calls = []
    real = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: calls.append((n, threading.active_count())) or real(n))

    def work():
        sums = [run_all(lambda n: int(torch.full((100_000,), n).sum()), range(3), 2) for _ in range(2)]
        return sums, calls

    alone = (torch.get_num_threads(), 1)
    assert in_fork(work) == str(([[0, 100_000, 200_000]] * 2, [alone]))


def test_the_process_itself_keeps_its_pool(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", None)
    assert run_all(lambda n: n, range(3), 2) == [0, 1, 2]


@pytest.fixture(params=["an executor", "the caller"])
def executor(request):
    if request.param == "the caller":
        yield None
        return
    with ThreadPoolExecutor(3) as threads:
        yield threads


def go_on():
    return False


def test_results_come_in_the_order_of_the_tasks_and_each_is_said_to_be_done(executor):
    done = []
    found = run_on(executor, lambda n: n * n, range(20), on_done=done.append, is_stopped=go_on)
    assert (found, sorted(done)) == ([n * n for n in range(20)], list(range(20)))


class LosesWorkers:
    """Work whose worker is lost the first times that a task is done."""

    def __init__(self, n_losses):
        self.n_losses, self.tries = n_losses, Counter()

    def __call__(self, task):
        self.tries[task] += 1
        if task == 2 and self.tries[task] <= self.n_losses:
            raise RuntimeError("the worker is gone")
        return task


@pytest.mark.parametrize("n_losses", [1, 2])
def test_what_a_lost_worker_had_is_done_again(n_losses):
    work = LosesWorkers(n_losses)
    with ThreadPoolExecutor(2) as threads:
        assert run_on(threads, work, range(4), on_done=id, is_stopped=go_on) == [0, 1, 2, 3]
    assert work.tries == {0: 1, 1: 1, 2: n_losses + 1, 3: 1}


def test_a_task_that_loses_three_workers_ends_it():
    work = LosesWorkers(3)
    with ThreadPoolExecutor(2) as threads, pytest.raises(RuntimeError, match="the worker is gone"):
        run_on(threads, work, range(4), on_done=id, is_stopped=go_on)
    assert work.tries[2] == 3


@pytest.mark.parametrize("error", [OSError("full"), CorruptCheckpointError("part", "", found="x", expected="y")])
def test_an_error_of_the_storage_or_of_a_file_ends_it_at_once(executor, error):
    tries = Counter()

    def work(task):
        tries[task] += 1
        raise error

    with pytest.raises(type(error)):
        run_on(executor, work, [1], on_done=id, is_stopped=go_on)
    assert tries == {1: 1}


def test_it_stops_when_it_is_asked_to(executor):
    done = []
    with pytest.raises(StoppedError):
        run_on(executor, lambda n: n, range(9), on_done=done.append, is_stopped=lambda: True)
    assert done == []


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_garbage_collector_runs_rarely_within_a_block_and_as_before_after_an_error(thresholds):
    gc.set_threshold(700, 10, 10)
    rare = []
    with suppress(KeyError), collected_rarely():
        rare.append(gc.get_threshold())
        raise KeyError
    assert rare == [(100_000, 10, 10)]
    assert gc.get_threshold() == (700, 10, 10)


def test_blocks_in_which_it_runs_rarely_may_overlap(thresholds):
    gc.set_threshold(700, 10, 10)
    one, other = collected_rarely(), collected_rarely()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() == (100_000, 10, 10)
    other.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (500_000, 5, 5)], ids=["off", "higher"])
def test_a_collector_that_runs_seldom_or_never_is_left_alone(thresholds, own):
    gc.set_threshold(*own)
    with collected_rarely():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_threshold_that_a_program_sets_meanwhile_stays(thresholds):
    with collected_rarely():
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


def test_the_garbage_collector_runs_rarely_during_a_save_and_a_load(thresholds, tmp_path):
    seen = []

    class Looks:
        def load_state_dict(self, state):
            seen.append(gc.get_threshold())

        def state_dict(self):
            seen.append(gc.get_threshold())
            return {}

    gc.set_threshold(700, 10, 10)
    with Saver(nn.Linear(1, 1), output_dir=tmp_path) as saver:
        saver.register_for_checkpointing("looks", Looks())
        saver.save_async("c", step=1).wait()
        assert gc.get_threshold() == (700, 10, 10)
        saver.load()
    assert seen == [(100_000, 10, 10)] * 2
    assert gc.get_threshold() == (700, 10, 10)
