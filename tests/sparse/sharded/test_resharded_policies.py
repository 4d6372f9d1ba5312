"""A run that goes on upon other numbers of ranks, with pauses and deltas, has the rows of one that never stopped."""

import random
import tempfile
import threading

import numpy as np
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.thread_ranks import on_ranks

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.policies.admit import Bloom, MinCount, Probability
from recckpt.policies.evict import Capacity, LowCount, SmallNorm, Unseen, UnseenFor
from recckpt.sparse import Constant, ShardedHashTable, SparseSGD

N_STEPS, DAY = 16, 86_400.0
ADMIT = [None, MinCount(3), MinCount(2, Bloom(1000, 0.1)), Probability(0.5), lambda ids, step: (ids + step) % 3 > 0]
EVICT = [
    [Unseen(steps=5)],
    [LowCount(2) & Unseen(steps=3), Capacity(40, room=0.3)],
    [Capacity(50, by="count", room=0.4), UnseenFor(days=2)],
    [Unseen(steps=7), SmallNorm(0.6) & Unseen(steps=2)],
]


class ThreadExchange:
    """Ranks that are threads, and send each other rows in memory."""

    def __init__(self, rank, size, sent, barrier):
        self.rank, self.size, self._sent, self._barrier = rank, size, sent, barrier

    def all_to_all(self, rows, sent, received):
        self._sent[self.rank] = torch.split(rows.detach(), list(sent))
        self._barrier.wait(60)
        got = torch.cat([self._sent[rank][self.rank] for rank in range(self.size)])
        self._barrier.wait(60)
        return got


def train(root, rank, exchange, connect, options, batches, begin, end):
    """Go on from the newest checkpoint on one rank, save, and return its rows and the counts of those that wait."""
    tracked = ("count", "step", "time")
    shared = {"group": exchange} if exchange.size > 1 else {}
    table = ShardedHashTable(
        1, name="t", initializer=Constant(0.25), gradients="sum", track=tracked, **options, **shared
    )
    optim = SparseSGD([table], lr=0.25)
    deltas = Deltas(full_every=3, max_dirty=1.0, max_chain_bytes=100.0)
    saver = connect(Saver(torch.nn.ModuleDict({"t": table}), optim, root, None, deltas=deltas))
    with CheckpointManager(saver, 5, shard_id=rank, shard_num=exchange.size) as manager:
        table.event_time = 0.0
        assert manager.restore() == begin
        for step in range(begin, end):
            if batches[step]:
                table(torch.tensor(batches[step])[rank :: exchange.size]).sum().backward()
                optim.step()
            manager.step(event_time=0.3 * DAY * step)
        manager.save()
    columns = [table.embeddings()[:, 0], *table.slots.values()]
    rows = dict(zip(table.ids().tolist(), zip(*(c.tolist() for c in columns), strict=True), strict=True))
    waiting = table.candidates
    counts = {} if waiting is None else dict(zip(waiting.ids().tolist(), waiting.embeddings().tolist(), strict=True))
    return rows, counts


def run(root, segments, options, batches):
    """Train segment by segment, each on some ranks, and return all rows and counts."""
    begin = 0
    for size, end in segments:
        sent, barrier = [None] * size, threading.Barrier(size)

        def work(rank, connect, size=size, end=end, begin=begin, sent=sent, barrier=barrier):
            exchange = ThreadExchange(rank, size, sent, barrier)
            return train(root, rank, exchange, connect, options, batches, begin, end)

        of_ranks, begin = on_ranks(size, work), end
    return tuple({id_: row for each in of_ranks for id_, row in each[kind].items()} for kind in (0, 1))


@drawn(st.integers(0, 2**32), few=1, many=100)
def test_rows_and_counts_are_those_of_one_rank_that_never_stopped(seed):
    choose, draw = random.Random(seed), np.random.default_rng(seed)
    options = {"admit": choose.choice(ADMIT), "evict": choose.choice(EVICT), "evict_every": choose.randrange(1, 15)}
    sizes = draw.integers(2, 14, N_STEPS) * (draw.random(N_STEPS).cumsum().astype(int) % 3 > 0)  # pauses between
    batches = [(draw.integers(0, 15, size) ** 2 + 2 * step).tolist() for step, size in enumerate(sizes)]
    cuts = sorted(choose.sample(range(1, N_STEPS), 2))
    segments = [(choose.randrange(1, 4), end) for end in (*cuts, N_STEPS)]
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as other:
        assert run(other, segments, options, batches) == run(alone, [(1, N_STEPS)], options, batches)
