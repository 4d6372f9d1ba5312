"""Ranks that wait for each other: all go on, or all learn the same reason why not."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from recckpt.checkpointer.writer import RankFailedError, StoreBarrier

SIZE = 3


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    return dist.HashStore() if request.param == "hash" else dist.FileStore(str(tmp_path / "store"), SIZE)


def ranks(store, timeout_sec=60.0):
    return [StoreBarrier(store, rank, SIZE, timeout_sec) for rank in range(SIZE)]


def outcome(work):
    try:
        work()
    except RankFailedError as error:
        return error.rank, error.reason
    return "good"


def at_once(*works):
    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(outcome, works))


def test_all_go_on_when_all_have_come(store):
    barriers, passed = ranks(store), []

    def save(barrier):
        for step in range(5):
            barrier.begin()
            for question in range(3):
                passed.append((step, question))
                barrier.agree(last=question == 2)

    assert at_once(*(lambda barrier=barrier: save(barrier) for barrier in barriers)) == ["good"] * SIZE
    assert passed == sorted(passed)  # nobody was ahead by more than the one question they were all at


def test_one_that_refuses_fails_all_at_once_with_its_reason_and_of_several_one_is_heard_by_all(store):
    barriers = ranks(store)

    def refuse():
        barriers[2].refuse("disk full")

    for _ in range(2):
        for barrier in barriers:
            barrier.begin()
        assert at_once(barriers[0].agree, barriers[1].agree, refuse) == [(2, "disk full")] * 2 + ["good"]
    for barrier in barriers:
        barrier.begin()
    assert at_once(*(barrier.agree for barrier in barriers)) == ["good"] * SIZE
    for barrier in barriers:
        barrier.begin()
    barriers[1].refuse("first")
    barriers[2].refuse("second")
    assert outcome(barriers[0].agree) == (1, "first")


class Clock:
    """Stands still until some keys are in a store; then it races, and the patience of all is at its end."""

    def __init__(self, store, keys):
        self.store, self.keys, self.now = store, keys, 0.0

    def monotonic(self):
        if self.store.check(self.keys):
            self.now += 1e6
        return self.now

    def sleep(self, _):
        time.sleep(0.001)


@pytest.mark.parametrize("missing", range(SIZE))
def test_one_that_does_not_come_is_named_and_fails_as_well_if_it_comes_later(store, missing, monkeypatch):
    barriers = ranks(store)
    for barrier in barriers:
        barrier.begin()
    there = [rank for rank in range(SIZE) if rank != missing]
    monkeypatch.setattr("recckpt.parallel.roll_call.time", Clock(store, [f"1/1/here/{rank}" for rank in there]))
    found = at_once(*(barriers[rank].agree for rank in there))
    assert found == [(missing, f"rank {missing} did not come to the barrier within 60 s")] * 2
    assert outcome(barriers[missing].agree) == found[0]
    monkeypatch.undo()
    for barrier in barriers:
        barrier.begin()
    assert at_once(*(barrier.agree for barrier in barriers)) == ["good"] * SIZE


def test_the_first_rank_whose_process_may_hold_the_store_leaves_last(store):
    barriers, first_has_left = ranks(store), threading.Event()

    class Slow(StoreBarrier):
        """Has the answer and does not say so, until the first rank has left or seems to wait."""

        def _wait(self, place):
            answer = super()._wait(place)
            self.was_left_alone = first_has_left.wait(0.1)
            return answer

    def leave(barrier):
        barrier.begin()
        barrier.agree(last=True)
        if barrier is barriers[0]:
            first_has_left.set()

    barriers[1] = Slow(store, 1, SIZE, 60.0)
    assert at_once(*(lambda barrier=barrier: leave(barrier) for barrier in barriers)) == ["good"] * SIZE
    assert not barriers[1].was_left_alone


def test_a_store_that_is_gone_is_a_failure_and_telling_of_one_raises_nothing():
    class Gone:
        def __getattr__(self, name):
            raise RuntimeError("connection closed")

    barrier = StoreBarrier(Gone(), 1, SIZE, 60.0)
    barrier.begin()
    assert outcome(barrier.agree) == (1, "the ranks' shared store failed: connection closed")
    barrier.refuse("disk full")


def test_keys_of_earlier_saves_are_forgotten():
    store = dist.HashStore()
    barriers, counts = ranks(store), []

    def save(barrier):
        barrier.begin()
        for question in range(3):
            barrier.agree(last=question == 2)

    for _ in range(4):
        assert at_once(*(lambda barrier=barrier: save(barrier) for barrier in barriers)) == ["good"] * SIZE
        counts.append(store.num_keys())
    assert counts[1:] == counts[1:2] * 3
