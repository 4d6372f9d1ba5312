"""Ranks that find out which of them is missing, over a store in memory."""

import threading
import time

import pytest
from support.memory_store import MemoryStore

from recckpt.errors import RankLostError
from recckpt.parallel import lost_ranks
from recckpt.parallel.lost_ranks import RollCall
from recckpt.parallel.threads import run_all


class BrokenStore(MemoryStore):
    """One whose host is gone."""

    def set(self, key, value):
        raise RuntimeError("Broken pipe")


class StoppedStore(MemoryStore):
    """One whose host was stopped: nothing comes back until the end."""

    def __init__(self):
        super().__init__()
        self.over = threading.Event()

    def set(self, key, value):
        self.over.wait(60)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(lost_ranks, "GRACE_SEC", 0.5)


def take(call, *, timed_out=False, cause="closed"):
    return call.take(time.monotonic(), timed_out=timed_out, cause=cause)


def test_all_that_are_there_name_the_one_that_is_not_and_say_so_ever_after():
    store = MemoryStore()
    calls = {rank: RollCall(store, rank, 4, timeout_sec=60.0) for rank in (0, 1, 3)}
    assert not any(call.is_lost for call in calls.values())
    lost = run_all(take, calls.values(), 3)  # a closed connection: they need not wait for the timeout
    assert {(error.ranks, error.rank) for error in lost} == {((2,), 2)}
    assert "rank 2 cannot be reached: its connection was closed (closed)" in str(lost[0])
    for call in calls.values():
        assert call.is_lost
        with pytest.raises(RankLostError, match="rank 2 cannot be reached"):
            call.check()


def test_rank_0_whose_process_may_hold_the_store_leaves_last():
    class Slow(MemoryStore):
        """One that hears of rank 2 only when rank 0 is ready to go."""

        def set(self, key, value):
            if key == "gone/2":
                assert zero_is_ready.wait(60)
            super().set(key, value)
            if key == "gone/0":
                zero_is_ready.set()

    def leave(rank):
        take(RollCall(store, rank, 3, timeout_sec=60.0))
        return store.check(["gone/2"])

    store, zero_is_ready = Slow(), threading.Event()
    assert run_all(leave, (0, 2), 2) == [True, True]


def test_one_that_comes_late_is_told_what_the_others_agreed_on():
    store = MemoryStore()
    calls = [RollCall(store, rank, 4, timeout_sec=0.1) for rank in range(3)]
    first = run_all(lambda call: take(call, timed_out=True, cause="no answer"), calls[:2], 2)
    assert {error.ranks for error in first} == {(2, 3)}
    assert "ranks 2, 3 cannot be reached: it did not answer within 0.1 s" in str(first[0])
    assert take(calls[2], cause="closed").ranks == (2, 3)


def test_where_all_are_there_the_connection_is_to_blame():
    store = MemoryStore()
    store.set("here/1", "1")
    error = take(RollCall(store, 0, 2, timeout_sec=60.0), cause="it was reset")
    assert error.ranks == (0,)
    assert "all ranks are there, but it was reset" in str(error)


@pytest.mark.slow
def test_a_store_that_fails_or_is_silent_stands_for_the_rank_that_holds_it():
    for store in (BrokenStore(), StoppedStore()):
        error = take(RollCall(store, 1, 3, timeout_sec=0.01))
        assert error.ranks == (0,)
        assert "the store by which ranks find each other" in str(error)
        if isinstance(store, StoppedStore):
            store.over.set()
