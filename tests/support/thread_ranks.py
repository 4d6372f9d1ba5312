"""Ranks that are threads of this process: a group of them in memory, and the store that they share."""

import pickle
import threading

import numpy as np

from recckpt.parallel.ranks import Connection, Meetings, Ranks
from recckpt.parallel.threads import run_all


class Wire:
    """What the ranks of one job send each other; ``n_bytes`` arrived at a rank that did not send them."""

    def __init__(self, size):
        self.size, self.barrier = size, threading.Barrier(size)
        self.messages, self.n_bytes = [], 0
        self._sent, self._lock = [b""] * size, threading.Lock()

    def exchange(self, kind, rank, value, is_taken):
        """Return the values of the ranks that ``is_taken`` says yes to, pickled as they would be; None of others."""
        self._sent[rank] = pickle.dumps(value)
        self.barrier.wait(60)
        taken = [data if is_taken(sender) else None for sender, data in enumerate(self._sent)]
        with self._lock:
            self.n_bytes += sum(len(data) for sender, data in enumerate(taken) if data is not None and sender != rank)
            if rank == 0:
                self.messages.append(kind)
        self.barrier.wait(60)
        return [None if data is None else pickle.loads(data) for data in taken]


class ThreadGroup:
    """Ranks that are threads."""

    is_lost = is_over = False

    def __init__(self, rank, wire):
        self.rank, self.size, self.wire = rank, wire.size, wire

    def all_gather(self, value):
        return self.wire.exchange("all_gather", self.rank, value, lambda sender: True)

    def gather_to_first(self, value):
        values = self.wire.exchange("gather", self.rank, value, lambda sender: self.rank == 0)
        return values if self.rank == 0 else None

    def broadcast(self, value):
        return self.wire.exchange("broadcast", self.rank, value, lambda sender: sender == 0)[0]

    def exchange(self, mark, parcels, into=None):
        sent = [None if to == self.rank else np.array(parcel) for to, parcel in enumerate(parcels)]
        of_ranks = self.wire.exchange("exchange", self.rank, (mark, sent), lambda sender: True)
        own = [np.empty(0, np.uint8) if sent[self.rank] is None else sent[self.rank] for _, sent in of_ranks]
        return [mark for mark, _ in of_ranks], own

    def twin(self):
        return self


def no_others():
    """Return the meetings of a rank that loads alone."""
    return Meetings()


def alone(group):
    """Return what a saver has of its ranks: saves in the background would have a group of their own."""
    return Ranks(group.rank, group.size, Connection(lambda: group))


def on_ranks(size, work, wire=None):
    """Do work on several ranks at once: ``work(rank, connect)``; return what each of them returned."""
    wire = wire or Wire(size)

    def on_rank(rank):
        def connect(saver):
            saver.ranks[rank, size] = alone(ThreadGroup(rank, wire))
            return saver

        return work(rank, connect)

    return run_all(on_rank, range(size), size)


class MemoryStore:
    """What the ranks of torch.distributed share, in this process."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def set(self, key, value):
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key):
        return self._values[key]

    def check(self, keys):
        with self._lock:
            return all(key in self._values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._lock:
            return self._values.setdefault(key, desired.encode())

    def delete_key(self, key):
        return self._values.pop(key, None) is not None

    def keys(self):
        return list(self._values)
