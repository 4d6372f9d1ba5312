"""A run that goes on from a checkpoint evicts the rows that it would have evicted without it, pauses included."""

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn

from recckpt import CheckpointManager, Saver
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies.evict import Capacity, LowCount, Unseen
from recckpt.sparse import Constant, HashTable, SparseSGD
from recckpt.sparse.table import eviction_plan

N_STEPS = 40
POLICIES = [Unseen(steps=12), LowCount(2) & Unseen(steps=3), Capacity(60, room=0.2)]


class Run:
    """A table that some steps do not look up, and a manager that counts all of them."""

    def __init__(self, root, every, *evict):
        track = ("count", "step")
        self.table = HashTable(1, name="t", initializer=Constant(0), track=track, evict=evict, evict_every=every)
        self.optim = SparseSGD([self.table], lr=0.1)
        saver = Saver(torch.nn.ModuleDict({"t": self.table}), self.optim, str(root), deltas=True)
        self.manager = CheckpointManager(saver, save_interval=10**9)

    def train(self, batches, begin, end):
        for step in range(begin, end):
            if batches[step]:
                self.table(torch.tensor(batches[step])).sum().backward()
                self.optim.step()
            self.manager.step()

    @property
    def rows(self):
        slots = self.table.slots
        columns = (slots["count"], slots["last_step"], self.table.embeddings()[:, 0])
        return dict(zip(self.table.ids().tolist(), zip(*(c.tolist() for c in columns), strict=True), strict=True))


@drawn(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, N_STEPS - 1), few=4, many=100)
def test_a_run_with_pauses_that_is_resumed_at_any_step_evicts_what_it_would_have(seed, every, at):
    draw = np.random.default_rng(seed)
    sizes = 12 * (draw.random(N_STEPS).cumsum().astype(int) % 2)  # pauses of several steps
    batches = [(draw.integers(0, 15, size) ** 2 + step).tolist() for step, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as root:
        patch.setattr(eviction_plan, "MIN_PART_ROWS", 8)
        run = Run(root, every, *POLICIES)
        run.train(batches, 0, at)
        run.manager.save()
        run.train(batches, at, N_STEPS)
        resumed = Run(root, every, *POLICIES)
        assert resumed.manager.restore() == at
        resumed.train(batches, at, N_STEPS)
    assert resumed.rows == run.rows


def test_a_run_that_is_resumed_in_a_pause_makes_up_for_the_parts_of_the_steps_before(tmp_path):
    batches = [[*range(300)] if step == 0 else [300] if step in (5, 30) else [] for step in range(N_STEPS)]
    run = Run(tmp_path, 20, Unseen(steps=12))
    run.train(batches, 0, 22)
    run.manager.save()
    [entry] = next(c.manifest.tables for c in list_checkpoints(run.manager.saver.storage).committed)
    assert (entry.rows, entry.evicted_to) == (301, 5)
    resumed = Run(tmp_path, 20, Unseen(steps=12))
    resumed.manager.restore()
    for each in (run, resumed):
        each.train(batches, 22, N_STEPS)
        assert len(each.table) == 1
    assert resumed.rows == run.rows
