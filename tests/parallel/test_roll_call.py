"""Ranks find out which of them is missing, and all say the same."""

import threading
import time

import pytest
from support.thread_ranks import MemoryStore

from recckpt.errors import RankLostError
from recckpt.parallel import roll_call
from recckpt.parallel.roll_call import Attendance, RollCall
from recckpt.parallel.threads import run_all


@pytest.mark.parametrize("missing", [[], [0], [4], [1, 2], [0, 1, 2, 3, 4]])
def test_those_that_have_not_come_are_named(missing):
    store = MemoryStore()
    for rank in set(range(5)) - set(missing):
        Attendance(store, rank, 5, "a/").come()
    assert Attendance(store, 0, 5, "a/").missing() == missing
    assert Attendance(store, 0, 5, "a/").all_here() == (not missing)
    assert Attendance(store, 0, 5, "b/").missing() == [0, 1, 2, 3, 4]


def test_rank_0_waits_for_all_but_the_lost_ones_to_leave():
    store = MemoryStore()
    first = Attendance(store, 0, 3)
    assert not first.leave(0.0, lost=[1])
    assert Attendance(store, 2, 3).leave(0.0)
    assert first.leave(0.0, lost=[1])
    assert not first.leave(0.0)
    leaving = threading.Thread(target=Attendance(store, 1, 3).leave, args=(0.0,))
    leaving.start()
    assert first.leave(60.0)
    leaving.join()


def test_what_is_forgotten_leaves_no_key():
    store = MemoryStore()
    place = Attendance(store, 0, 1)
    place.come()
    place.leave(0.0)
    place.forget()
    assert store.keys() == []


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
    monkeypatch.setattr(roll_call, "GRACE_SEC", 0.5)


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
        assert "the store of the process group, usually in rank 0, does not answer either" in str(error)
        if isinstance(store, StoppedStore):
            store.over.set()
