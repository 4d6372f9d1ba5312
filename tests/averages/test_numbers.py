"""The average of a table has the numbers of that of an nn.Embedding, whatever ids come, go and come back."""

from __future__ import annotations

import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recckpt.averages import RowAverage, store
from recckpt.averages.store import ticks
from recckpt.policies.admit import MinCount
from recckpt.policies.evict import Capacity
from recckpt.sparse import HashTable, SparseAdam, SparseSGD
from recckpt.sparse.table.nn_module import first_embeddings

N, DIM = 400, 4


def warm_up(n):
    return min((1 + n) / (10 + n), 0.99)


DECAYS = {
    "ema": lambda n: 0.9,
    "swa": lambda n: n / (n + 1),
    "warm-up": warm_up,
    "copy": lambda n: 0.0,
    "as it was": lambda n: 1.0,
}


class Clicks(nn.Module):
    """A model with a table, or the same with an nn.Embedding."""

    def __init__(self, table):
        super().__init__()
        self.table, self.top = table, nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.top(self.table(ids)).squeeze(-1)


def batch(step, n=16):
    """Return ids, of which there are more as training goes on, and labels."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, min(N, 20 + 2 * step), (n,), generator=generator), torch.rand(n, generator=generator)


def pair():
    """Return a model with a table and one with an nn.Embedding that is equal to it, whatever ids come."""
    torch.manual_seed(0)
    ours = Clicks(HashTable(DIM, name="t"))
    dense = Clicks(nn.Embedding(N, DIM))
    dense.top.load_state_dict(ours.top.state_dict())
    dense.table.weight.data.copy_(first_embeddings(ours.table, torch.arange(N).numpy()))
    return ours, dense


def trained(model, step, lr=0.5):
    ids, labels = batch(step)
    nn.functional.mse_loss(model(ids), labels).backward()
    optimizers = [torch.optim.SGD(model.top.parameters(), lr=lr)]
    if isinstance(model.table, nn.Embedding):
        optimizers.append(torch.optim.SGD(model.table.parameters(), lr=lr))
    else:
        optimizers.append(SparseSGD([model.table], lr=lr))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def of_embedding(model, decay):
    """Return torch's average of a model without tables."""
    return AveragedModel(model, avg_fn=lambda averaged, now, n: decay(int(n)) * averaged + (1 - decay(int(n))) * now)


@mostly_slow("name")
@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("every", [1, 3])
def test_the_average_of_a_table_is_that_of_an_embedding(name, every):
    ours, dense = pair()
    decay = DECAYS[name]
    average, expected = RowAverage(ours, 0.5), of_embedding(dense, decay)
    for step in range(40):
        trained(ours, step), trained(dense, step)
        if step % every == 0:
            average.update(decay(step // every) if step else 0.0)  # torch's first update is a copy
            expected.update_parameters(dense)
    seen, own = ours.table.ids(), average.tables["t"]
    assert torch.equal(own.ids().sort().values, seen.sort().values)
    assert (own.lookup(seen)[0] - expected.module.table.weight[seen]).abs().max() < 1e-6
    with average.swap():
        assert (ours.table(seen[:50]) - expected.module.table(seen[:50])).abs().max() < 1e-6
    if name not in ("copy", "as it was"):
        assert (own.lookup(seen)[0] - ours.table.lookup(seen)[0]).abs().max() > 1e-3


def test_what_an_update_touches_are_the_rows_that_have_changed(monkeypatch):
    model, _ = pair()
    average = RowAverage(model, 0.9)
    model.table(torch.arange(N))
    average.update()
    touched, update = [], store.AverageStore.update
    monkeypatch.setattr(
        store.AverageStore, "update", lambda self, ids, *rest: (touched.append(len(ids)), update(self, ids, *rest))
    )
    for step in range(5):
        trained(model, step)
        average.update()
    assert len(touched) == 5
    assert max(touched) <= 16


@pytest.mark.slow
def test_a_long_rest_and_a_row_that_comes_back_cost_no_digits():
    ours, dense = pair()
    average = RowAverage(ours, 0.999)
    expected = AveragedModel(dense, multi_avg_fn=get_ema_multi_avg_fn(0.999))  # rounds less
    trained(ours, 0), trained(dense, 0)
    average.update(0.0), expected.update_parameters(dense)
    trained(ours, 1), trained(dense, 1)
    for _ in range(1000):
        average.update(), expected.update_parameters(dense)
    trained(ours, 1), trained(dense, 1)
    average.update(), expected.update_parameters(dense)
    seen = ours.table.ids()
    assert (average.tables["t"].lookup(seen)[0] - expected.module.table.weight[seen]).abs().max() < 1e-6


def test_a_clock_that_begins_anew_changes_no_average(monkeypatch):
    ids, expected = torch.arange(4), None
    for end in (store._CLOCK_END, 10 * ticks(0.9)):
        monkeypatch.setattr(store, "_CLOCK_END", end)
        model, _ = pair()
        average = RowAverage(model, 0.9)
        for step in range(60):
            model.table.insert(ids[[step // 4 % 4]], torch.full((1, DIM), float(step)))
            average.update()
        own = average.tables["t"]
        rows = own.lookup(ids)[0]
        expected = rows if expected is None else expected
        assert torch.equal(rows, expected)
        assert (own.store.clock < 12 * ticks(0.9)) == (end < 1 << 60)


def test_erased_evicted_inserted_and_cleared_rows_are_followed():
    model, _ = pair()
    table, average = model.table, RowAverage(model, 0.9)
    own = average.tables["t"]
    table(torch.arange(10))
    average.update()
    assert torch.equal(own.embeddings(), table.embeddings())
    table.erase(torch.tensor([3, 4]))
    ones = torch.ones(1, DIM)
    table.insert(torch.tensor([99]), ones)  # a row of another origin begins at what it is
    table.insert(torch.tensor([5]), ones)  # one that was there is averaged
    before = own.lookup(torch.tensor([5]))[0]
    average.update()
    assert sorted(own.ids().tolist()) == sorted(table.ids().tolist())
    assert torch.equal(own.lookup(torch.tensor([99]))[0], ones)
    assert torch.allclose(own.lookup(torch.tensor([5]))[0], 0.9 * before + 0.1)
    table.clear()
    table.insert(torch.tensor([77]), ones)
    average.update()
    assert own.ids().tolist() == [77]
    assert torch.equal(own.embeddings(), ones)
    table(torch.arange(10))
    average.update()
    table.erase(torch.tensor([77]))
    table(torch.tensor([77]))  # another row, of the same id
    average.update()
    assert torch.equal(own.lookup(torch.tensor([77]))[0], table.lookup(torch.tensor([77]))[0])


def erased(table):
    table.erase(torch.arange(10))


def loaded(table):
    table.load_state_dict(Clicks(HashTable(DIM, name="t")).table.state_dict(), strict=False)


@pytest.mark.parametrize("drop", [HashTable.clear, erased, loaded])
def test_ids_that_come_back_after_all_rows_went_begin_anew(drop):
    table = HashTable(DIM, name="t")
    average, ids = RowAverage(Clicks(table), 0.5), torch.arange(10)
    table(ids)
    average.update()
    drop(table)
    table.insert(ids, torch.full((10, DIM), 3.0))
    average.update()
    assert torch.equal(average.tables["t"].embeddings(), torch.full((10, DIM), 3.0))
    table.add_slot("extra", ())  # marks all rows as changed, and drops none
    table.insert(ids, torch.full((10, DIM), 5.0))
    average.update()
    assert torch.equal(average.tables["t"].embeddings(), torch.full((10, DIM), 4.0))


def test_evicted_rows_go_and_an_id_that_comes_back_begins_anew():
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t", evict=Capacity(8, by="last_step"), evict_every=1, track=("step",)))
    average = RowAverage(model, 0.5)
    for step in range(6):
        model.table.step = step
        model(torch.arange(4 * step, 4 * step + 4))
        average.update()
        assert {*average.tables["t"].ids().tolist()} == {*model.table.ids().tolist()}
    assert average.tables["t"].evicts == ()


def test_look_ups_of_an_average_insert_count_and_evict_nothing_even_in_training_mode():
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t", track=("count", "step"), admit=MinCount(2)))
    SparseAdam([model.table], lr=0.1)
    average = RowAverage(model, 0.5)
    model(torch.tensor([1, 1, 2]))
    average.update()
    own = average.tables["t"].train()
    state = own.ids().tolist(), own.embeddings()
    for admit in (None, True, None):
        own(torch.tensor([1, 2, 3]), admit=admit).sum().backward()
        own.bag(torch.tensor([[1, 2], [3, 4]]))
    assert own.ids().tolist() == state[0] == [1]
    assert torch.equal(own.embeddings(), state[1])
    assert own.grad is None
    assert own.candidates is None
    assert not own.slots
    with pytest.raises(ValueError, match="is an average"):
        SparseAdam([own], lr=0.1)


def test_the_step_and_the_event_time_of_a_run_reach_averages_of_tables_that_the_clock_has_dated():
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t", track=("step", "time")))
    SparseAdam([model.table], lr=0.1)
    model(torch.tensor([1, 2]))
    average = RowAverage(model, 0.9)
    average.tables["t"].event_time = 5.0
    with average.swap():
        model.table.step, model.table.event_time = 7, 5.0
        model(torch.tensor([1, 2]))
    model.table.event_time = 6.0
    assert model.table.slots["last_time"].tolist() == [6.0, 6.0]


@mostly_slow()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_tables_of_other_dtypes_are_averaged_within_what_the_dtype_gives(dtype):
    table = HashTable(DIM, name="t", dtype=dtype)
    average, ids = RowAverage(nn.ModuleDict({"table": table}), 0.5), torch.arange(3)
    expected = None
    for step in range(4):
        rows = torch.full((3, DIM), 3 * step).to(dtype)
        table.insert(ids, rows)
        average.update()
        expected = rows.double() if expected is None else (expected + rows.double()) / 2
    own = average.tables["t"].lookup(ids)[0]
    assert own.dtype == dtype
    assert torch.allclose(own.double(), expected, atol=1.0 if dtype == torch.int64 else 0.1)
