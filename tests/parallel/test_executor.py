"""Work given to an executor: all of it done, in order, whatever workers are lost."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from recckpt.errors import CorruptCheckpointError
from recckpt.parallel.executor import StoppedError, run_on


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
