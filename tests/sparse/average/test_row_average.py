"""RowAverage for loops that average parameters themselves: in a copy, or beside the tables of the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recckpt import CheckpointManager, CheckpointReader, Saver, filter_out_sparse_param
from recckpt.policies.admit import MinCount
from recckpt.sparse import HashTable, RowAverage, SparseAdam, SparseSGD
from recckpt.sparse.table.first_values import first_embeddings

N, DIM, DECAY = 60, 4, 0.9


class Clicks(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.top = HashTable(DIM, name="t", **options), nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.top(self.table(ids)).squeeze(-1)


def trained(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    model(torch.randint(0, N, (8,), generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Oracle:
    """The average of all rows that there can be, each update over all of them."""

    def __init__(self, table):
        self.table, self.ids = table, torch.arange(N)
        self.first = first_embeddings(table, self.ids.numpy())
        self.rows = self.first.clone()

    def update(self, decay=DECAY):
        found, seen = self.table.lookup(self.ids)
        now = torch.where(seen[:, None], found, self.first)
        self.rows = decay * self.rows + (1 - decay) * now

    def is_that_of(self, average):
        rows, seen = average.lookup(self.ids)
        return bool(seen.any()) and torch.allclose(rows[seen], self.rows[seen], rtol=0, atol=1e-6)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Clicks()


def test_a_loop_over_the_parameters_of_a_copy_gets_the_rows_beside_it(model, tmp_path):
    optimizer, shadow, oracle = SparseSGD([model.table], lr=0.5), copy.deepcopy(model), Oracle(model.table)
    average = RowAverage(model, DECAY, into=shadow)
    for step in range(20):
        trained(model, optimizer, step)
        decay = min(DECAY, (1 + step) / (10 + step))
        average.update(decay)
        oracle.update(decay)
    assert oracle.is_that_of(shadow.table)
    assert average.tables == {"t": shadow.table}
    assert torch.equal(shadow.train().table(oracle.ids), shadow.eval().table(oracle.ids))
    Saver(shadow, output_dir=str(tmp_path)).save("1")
    found = CheckpointReader(str(tmp_path)).lookup("t", shadow.table.ids().numpy()).values
    assert torch.equal(torch.from_numpy(found), shadow.table.embeddings())


def test_averages_beside_a_model_are_saved_and_restored_with_it_bit_for_bit(tmp_path):
    def run(name, steps, deltas=False):
        torch.manual_seed(0)
        model = Clicks(track=("count",), admit=MinCount(2))
        optimizer = SparseAdam(filter_out_sparse_param(model), lr=0.1)
        average, slow = RowAverage(model, DECAY), RowAverage(model, 0.99, name="slow")
        saver = Saver(model, optimizer, output_dir=str(tmp_path / name), deltas=deltas)
        with CheckpointManager(saver, save_interval=10) as manager:
            for step in range(manager.restore() or 0, steps):
                trained(model, optimizer, step)
                average.update(), slow.update()
                manager.step()
        return model, average, slow

    _, *straight = run("straight", 35)
    run("halves", 20, deltas=True)
    model, *resumed = run("halves", 35, deltas=True)
    ids = model.table.ids()
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one.tables["t"].lookup(ids)[0], other.tables["t"].lookup(ids)[0])
    names = CheckpointReader(str(tmp_path / "halves")).tables()
    assert sorted(names) == ["t", "t.average", "t.candidates", "t.slow"]


def test_inside_swap_the_model_reads_and_saves_the_averages_and_trains_on_afterwards(model, tmp_path):
    optimizer, oracle = SparseAdam([model.table], lr=0.5), Oracle(model.table)
    average, ids = RowAverage(model, DECAY), torch.arange(N)
    for step in range(10):
        trained(model, optimizer, step)
        average.update()
        oracle.update()
    live, known = model.table.lookup(ids)[0], model.table.ids().sort().values
    with average.swap():
        assert oracle.is_that_of(model.table)
        assert torch.equal(model.table(ids), average.tables["t"](ids))
        model.eval()
        assert torch.equal(model.table(ids), model.table.lookup(ids)[0])
        Saver(model, output_dir=str(tmp_path)).save("best")
        model.train()
        assert model.table(ids + 1000).abs().sum() == 0  # nothing is inserted
        with pytest.raises(ValueError, match="optimizer"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="swapped in"):
            average.update()
    assert model.table.training
    assert torch.equal(model.table.ids().sort().values, known)
    assert torch.equal(model.table.lookup(ids)[0], live)
    found = CheckpointReader(str(tmp_path)).lookup("t", known.numpy()).values
    assert torch.equal(torch.from_numpy(found), average.tables["t"].lookup(known)[0])
    for step in range(10, 15):
        trained(model, optimizer, step)
        average.update()
        oracle.update()
    assert oracle.is_that_of(average.tables["t"])


def test_an_id_that_stands_for_none_stays_out_of_the_bags_of_an_average(model):
    model.table.insert(torch.arange(3), torch.ones(3, DIM))
    average = RowAverage(model, DECAY)
    model.table.padding_id = 0
    average.update()
    assert torch.equal(average.tables["t"].bag(torch.tensor([[0, 1, 2]])), torch.full((1, DIM), 2.0))


def test_apply_gives_the_model_the_averages_and_keeps_the_moments(model):
    optimizer, average = SparseAdam([model.table], lr=0.5), RowAverage(model, DECAY)
    for step in range(5):
        trained(model, optimizer, step)
        average.update()
    ids, moments = model.table.ids(), dict(model.table.slots)
    assert not torch.equal(average.tables["t"].lookup(ids)[0], model.table.embeddings())
    average.apply()
    assert torch.equal(average.tables["t"].lookup(ids)[0], model.table.embeddings())
    assert all(torch.equal(moments[name], slot) for name, slot in model.table.slots.items())


def test_what_cannot_be_averaged_is_refused(model):
    for decay in (-0.1, 1.5, True, "0.9", float("nan")):
        with pytest.raises(ValueError, match="decay"):
            RowAverage(model, decay)
    with pytest.raises(ValueError, match="no table in Linear"):
        RowAverage(nn.Linear(1, 1), DECAY)
    with pytest.raises(ValueError, match="expected copies"):
        RowAverage(model, DECAY, into=model)
    RowAverage(model, DECAY)
    with pytest.raises(ValueError, match="'average' already"):
        RowAverage(model, DECAY)
