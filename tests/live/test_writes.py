"""Writes are noticed by hooks, which hold a door weakly, and by versions that torch counts."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from recckpt.live.writes import WeakDoor, WriteGuard


class Noting:
    """A door that notes what comes through it."""

    def __init__(self):
        self.calls = []

    def announce(self, rows):
        self.calls.append(rows.tolist())

    def announce_all(self):
        self.calls.append("all")

    def replaced(self):
        self.calls.append("replaced")

    def failed(self, error):
        self.calls.append(error)


def call_all(door):
    error = ValueError()
    door.announce(torch.tensor([1]))
    door.announce_all()
    door.replaced()
    door.failed(error)
    return error


def test_all_goes_on_to_each_door_and_one_error_fails_one_save():
    doors = [Noting(), Noting()]
    error = call_all(WeakDoor(*doors))
    assert [door.calls for door in doors] == [[[1], "all", "replaced", error], [[1], "all", "replaced", "replaced"]]


def test_without_the_door_nothing_happens():
    door = Noting()
    weak, reference = WeakDoor(door), weakref.ref(door)
    del door
    gc.collect()
    assert reference() is None
    call_all(weak)


def test_copies_and_pickles_reach_no_door():
    door = Noting()
    weak = WeakDoor(door)
    call_all(copy.deepcopy(weak))
    call_all(pickle.loads(pickle.dumps(weak)))
    assert door.calls == []


class Guarded:
    def __init__(self):
        self.tensors, self.n_unseen = {"embedding": torch.zeros(4), "sum": torch.zeros(4)}, 0
        self.guard = WriteGuard(lambda: self.tensors, self.count)

    def count(self):
        self.n_unseen += 1


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        (("look", "write", "look", "look"), 1),
        (
            ("begin", "write", "look", "end", "look"),
            0,
        ),  # known, also to a save that looks meanwhile
        (("write", "begin"), 1),  # a write before a known one
        (("begin", "settle", "write", "look"), 1),  # a step that raised leaves nothing open
        (("other tensors", "write", "look"), 0),  # they lie elsewhere by now
    ],
)
def test_a_write_in_place_that_is_not_known_is_noticed_once(moments, expected):
    guarded = Guarded()
    for moment in moments:
        if moment == "write":
            guarded.tensors["embedding"].add_(1)
        elif moment == "other tensors":
            guarded.tensors = {"embedding": torch.ones(4), "other": torch.zeros(4)}
        else:
            getattr(guarded.guard, moment)()
    assert guarded.n_unseen == expected


@pytest.mark.parametrize("look", ["settle", "begin"])
def test_a_write_after_a_step_that_raised_is_noticed(look):
    guarded = Guarded()
    guarded.guard.begin()  # and no end
    getattr(guarded.guard, look)()
    assert guarded.n_unseen == 0
    guarded.tensors["embedding"].add_(1)
    getattr(guarded.guard, look)()
    assert guarded.n_unseen == 1


def test_looking_beside_a_write_in_another_thread_sees_it_as_known():
    guarded, stop = Guarded(), threading.Event()

    def look():
        while not stop.is_set():
            guarded.guard.look()

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        guarded.guard.begin()
        guarded.tensors["embedding"].add_(1)
        guarded.guard.end()
    stop.set()
    thread.join()
    assert guarded.n_unseen == 0
