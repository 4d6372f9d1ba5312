"""What the main thread waits by: no interrupt, wherever it strikes, leaves anybody waiting."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.raising import _silent
from support.sweeps import mostly_slow

from recckpt.parallel import waiting
from recckpt.parallel.attendance import moments
from recckpt.parallel.executor import run_on
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.threads import run_all
from recckpt.parallel.waiting import InOrder, Latch, aside, start


def test_a_latch_lets_all_go_that_wait_and_all_that_come_later():
    latch, passed = Latch(), []
    threads = [threading.Thread(target=lambda: passed.append(latch.wait(60))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not latch.is_set()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join()
    assert (passed, latch.wait(), latch.wait(0)) == ([True] * 3, True, True)


def test_a_wait_for_a_latch_has_a_limit():
    latch = Latch()
    assert [latch.wait(limit) for limit in (0, -1, 0.001)] == [False] * 3


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
        if not frame.f_code.co_filename.startswith((threading.__file__, str(Path(waiting.__file__).parent))):
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
