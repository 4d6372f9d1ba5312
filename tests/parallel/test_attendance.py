"""Ranks that come to a place in a shared store and leave it."""

import threading

import pytest
from support.memory_store import MemoryStore

from recckpt.parallel.attendance import Attendance


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
