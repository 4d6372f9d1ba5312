"""Writes that nobody announced are noticed by the versions of tensors."""

import threading

import pytest
import torch

from recckpt.live.write_guard import WriteGuard


class Guarded:
    def __init__(self):
        self.tensors, self.n_unseen = {"embedding": torch.zeros(4), "sum": torch.zeros(4)}, 0
        self.guard = WriteGuard(lambda: self.tensors, self.count)

    def count(self):
        self.n_unseen += 1


def test_a_write_in_place_is_noticed_once():
    guarded = Guarded()
    guarded.guard.look()
    guarded.tensors["sum"][2] = 1
    guarded.guard.look()
    guarded.guard.look()
    assert guarded.n_unseen == 1


def test_a_write_between_begin_and_end_is_known():
    guarded = Guarded()
    guarded.guard.begin()
    guarded.tensors["embedding"].add_(1)
    guarded.guard.look()  # as the thread of a save does
    guarded.guard.end()
    guarded.guard.look()
    assert guarded.n_unseen == 0


def test_a_write_before_a_known_one_is_noticed_when_that_begins():
    guarded = Guarded()
    guarded.tensors["embedding"].add_(1)
    guarded.guard.begin()
    assert guarded.n_unseen == 1


@pytest.mark.parametrize("look", ["settle", "begin"])
def test_a_write_after_a_step_that_raised_is_noticed(look):
    guarded = Guarded()
    guarded.guard.begin()  # and no end
    getattr(guarded.guard, look)()
    assert guarded.n_unseen == 0
    guarded.tensors["embedding"].add_(1)
    getattr(guarded.guard, look)()
    assert guarded.n_unseen == 1


def test_a_step_that_raised_leaves_nothing_open():
    guarded = Guarded()
    guarded.guard.begin()
    guarded.guard.settle()
    guarded.tensors["embedding"].add_(1)
    guarded.guard.look()
    assert guarded.n_unseen == 1


def test_tensors_that_lie_elsewhere_by_now_are_not_compared():
    guarded = Guarded()
    guarded.tensors = {"embedding": torch.ones(4), "other": torch.zeros(4)}
    guarded.tensors["embedding"].add_(1)
    guarded.guard.look()
    assert guarded.n_unseen == 0


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
