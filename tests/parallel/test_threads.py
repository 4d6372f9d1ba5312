import os
import sys
import threading

import pytest
from support.builders import ClickModel

from recckpt import Saver
from recckpt.parallel.threads import _Crew, give_way, run_all


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


def test_an_error_is_raised_and_what_has_not_begun_is_dropped():
    begun = []

    def work(n):
        begun.append(n)
        raise KeyError(n)

    with pytest.raises(KeyError):
        run_all(work, range(1000), 1)
    assert begun == [0]


def test_the_first_error_in_the_order_of_the_items_is_the_one():
    both = threading.Barrier(2)

    def work(n):
        both.wait(60)
        raise ValueError(f"item {n}")

    with pytest.raises(ValueError, match="item 0"):
        run_all(work, range(2), 2)


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
