"""Ranks that are threads of this process, and a group of them in memory."""

import pickle
import threading

from recckpt.parallel.ranks import Connection, Ranks
from recckpt.parallel.threads import run_all


class ThreadGroup:
    """Ranks that are threads; what they tell each other is pickled, as it would be."""

    is_lost = is_over = False

    def __init__(self, rank, size, shared, barrier):
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def all_gather(self, value):
        self._shared[self.rank] = pickle.dumps(value)
        self._barrier.wait(60)
        values = [pickle.loads(data) for data in self._shared]
        self._barrier.wait(60)
        return values

    def broadcast(self, value):
        return self.all_gather(value)[0]

    def twin(self):
        return self


def alone(group):
    """Return what a saver has of its ranks: saves in the background would have a group of their own."""
    return Ranks(group.rank, group.size, Connection(lambda: group))


def on_ranks(size, work):
    """Do work on several ranks at once: ``work(rank, connect)``; return what each of them returned."""
    shared, barrier = [b""] * size, threading.Barrier(size)

    def on_rank(rank):
        def connect(saver):
            saver.ranks[rank, size] = alone(ThreadGroup(rank, size, shared, barrier))
            return saver

        return work(rank, connect)

    return run_all(on_rank, range(size), size)
