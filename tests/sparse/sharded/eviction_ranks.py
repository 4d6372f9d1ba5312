"""What each of several real processes does for test_eviction_ranks.py: run it as ``eviction_ranks.py ROOT SIZE...``."""

import pickle
import sys
from pathlib import Path

import torch
from support.rank_processes import fork_ranks

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import LookupFailedError
from recckpt.policies.evict import Capacity, LowCount, SmallNorm, Unseen, UnseenFor
from recckpt.sparse import Constant, ShardedHashTable, SparseSGD
from recckpt.sparse.table import eviction

N_STEPS, MIDDLE, DAY = 20, 10, 86_400.0
eviction.MIN_PART_ROWS = 8  # as in a table of a thousand times the rows


class Model(torch.nn.Module):
    """A table whose values are exact, in whatever order the ranks are added up."""

    def __init__(self, by):
        super().__init__()
        rules = [Unseen(steps=15), UnseenFor(days=40), LowCount(2) & Unseen(steps=4), SmallNorm(0.1) & Unseen(steps=9)]
        self.table = ShardedHashTable(
            1,
            name="t",
            initializer=Constant(0),
            gradients="sum",
            track=("count", "step", "time"),
            evict=[*rules, Capacity(60, by=by, room=0.3)],
            evict_every=5,
            on_evict=lambda name, ids: self.told.extend(ids.tolist()),
        )
        self.told = []


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, 9, (12,), generator=draw) ** 2 + 2 * step


def train(model, optim, step, rank, size):
    before, n_told = {*model.table.ids().tolist()}, len(model.told)
    model.table(batch(step)[rank::size]).sum().backward()
    optim.step()
    gone = {*model.told[n_told:]}  # of this rank, some of which are back
    assert before - {*model.table.ids().tolist()} <= gone <= before
    assert len(model.told) == model.table.n_evicted


def rows_of(table):
    columns = torch.stack([table.embeddings()[:, 0], *(some.double() for some in table.slots.values())], 1)
    return dict(zip(table.ids().tolist(), columns.tolist(), strict=True))


def run(by, rank, size, root):
    """Train and save deltas, and return the rows of each save."""
    model = Model(by)
    optim = SparseSGD([model.table], lr=0.25)
    infos = []
    saver = Saver(
        model,
        optim,
        str(root / f"{by}-{size}"),
        None,
        deltas=Deltas(full_every=100, max_dirty=1.0, max_chain_bytes=100.0),
        on_save=infos.append,
    )
    rows = {}
    with CheckpointManager(saver, 5, shard_id=rank, shard_num=size) as manager:
        model.table.event_time = 0.0
        for step in range(N_STEPS):
            train(model, optim, step, rank, size)
            manager.step(event_time=5 * DAY * step)
            rows[step + 1] = rows_of(model.table)
    return rows, model.table.n_evicted, infos[-1].n_evicted


def resume(by, rank, size, root):
    """Go on from what another number of ranks has saved in the middle."""
    model = Model(by)
    optim = SparseSGD([model.table], lr=0.25)
    saved = root / f"{by}-{size - 1 or 1}"
    Saver(model, optim, str(root / f"resumed-{by}-{size}")).load(str(saved), f"ckpt_{MIDDLE}")
    for step in range(MIDDLE, N_STEPS):
        model.table.step, model.table.event_time = step, 5 * DAY * (step - 1)
        train(model, optim, step, rank, size)
    return rows_of(model.table)


def evict_at_once(rank, size, root):
    """Evict by hand what is beyond a capacity of all ranks."""
    table = ShardedHashTable(1, name="t", track="count")
    table(torch.arange(100)[rank::size])
    table(torch.arange(90, 100)[rank::size])
    n_evicted = table.evict(Capacity(15, by="count"))
    return n_evicted, sorted(table.ids().tolist())


def be_at_another_step(rank, size, root):
    """Look up where the ranks are not at the same step."""
    model = Model("count")
    model.table.step = rank
    try:
        model.table(torch.arange(3))
    except LookupFailedError as error:
        return str(error)
    return None


class FailsOnOne:
    """A policy of a user that fails on the last of several ranks, until it is mended."""

    needs = ("last_step",)

    def __init__(self, is_broken):
        self.is_broken = is_broken

    def evicted(self, rows, now):
        if self.is_broken:
            raise ZeroDivisionError("of the user")
        return rows["last_step"] < now.step - 3


def fail_on_one(rank, size, evict, by_hand):
    """Return what each rank is told where a policy fails on one, and the rows after it was mended."""
    policy = FailsOnOne(is_broken=size > 1 and rank == size - 1)
    others = {} if by_hand else {"evict": [policy, *evict], "evict_every": 1}
    table = ShardedHashTable(1, name="t", track="step", **others)
    said = []
    for step in range(4):
        table.step = step
        try:
            table(torch.arange(step, step + 5))
            if by_hand:
                table.evict(policy, *evict)
        except (LookupFailedError, ZeroDivisionError) as error:
            said.append(str(error))
            policy.is_broken = step < 2 and policy.is_broken
    return said, sorted(table.ids().tolist())


def play(rank, size, root):
    return {
        "fails": [
            fail_on_one(rank, size, evict, by_hand)
            for evict, by_hand in (([], False), ([Capacity(100)], False), ([Capacity(100)], True))
        ],
        **{by: run(by, rank, size, root) for by in ("last_step", "count")},
        **{f"resumed by {by}": resume(by, rank, size, root) for by in ("last_step", "count")},
        "at_once": evict_at_once(rank, size, root),
        "apart": be_at_another_step(rank, size, root),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    (root / "0-of-1").write_bytes(pickle.dumps(play(0, 1, root)))  # here, so that what it loads the others have, too
    for size in map(int, sys.argv[2:]):
        fork_ranks(size, root, play)
