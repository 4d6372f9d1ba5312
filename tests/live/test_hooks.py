"""Hooks hold a door weakly, and what is copied or pickled with a model holds none."""

import copy
import gc
import pickle
import weakref

import torch

from recckpt.live.hooks import WeakDoor


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


def test_all_goes_on_to_the_door():
    door = Noting()
    error = call_all(WeakDoor(door))
    assert door.calls == [[1], "all", "replaced", error]


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
