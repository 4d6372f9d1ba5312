"""AveragedModel of torch averages tables as it does nn.Embedding: the same function, new ids, resumes, saves."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

from recckpt import CheckpointReader, Saver
from recckpt.policies.admit import MinCount
from recckpt.policies.evict import Capacity
from recckpt.sparse import EmbeddingCollection, HashTable, RowAverage, ShardedHashTable, SparseAdam, SparseSGD
from recckpt.sparse.average import store
from recckpt.sparse.average.mixing import ticks
from recckpt.sparse.table.first_values import first_embeddings

N, DIM = 400, 4


def warm_up(averaged, current, n):
    decay = torch.clamp((1 + n) / (10 + n), max=0.99)
    return averaged * decay + current * (1 - decay)


FUNCTIONS = {
    "ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.99)},
    "ema of each": lambda: {"avg_fn": get_ema_avg_fn(0.9)},
    "swa": lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    "swa of each": lambda: {"avg_fn": get_swa_avg_fn()},
    "torch's own": dict,
    "warm-up": lambda: {"avg_fn": warm_up},
    "copy": lambda: {"avg_fn": lambda averaged, current, n: current.clone()},
    "as it was": lambda: {"avg_fn": lambda averaged, current, n: averaged.clone()},
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


def pair(kind=HashTable):
    """Return a model with a table and one with an nn.Embedding that is equal to it, whatever ids come."""
    torch.manual_seed(0)
    ours = Clicks(kind(DIM, name="t"))
    dense = Clicks(nn.Embedding(N, DIM))
    dense.top.load_state_dict(ours.top.state_dict())
    dense.table.weight.data.copy_(first_embeddings(ours.table, torch.arange(N).numpy()))
    return ours, dense


def trained(model, optimizers, step):
    ids, labels = batch(step)
    nn.functional.mse_loss(model(ids), labels).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def optimizers_of(model, lr=0.5):
    dense = torch.optim.SGD(model.top.parameters(), lr=lr)
    if isinstance(model.table, nn.Embedding):
        return [dense, torch.optim.SGD(model.table.parameters(), lr=lr)]
    return [dense, SparseSGD([model.table], lr=lr)]


def rows_of(averaged, n=N):
    table = averaged.module.table
    return table.weight.data[:n] if isinstance(table, nn.Embedding) else table.lookup(torch.arange(n))[0]


@mostly_slow("name")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("every", [1, 3])
def test_the_average_of_a_table_is_that_of_an_embedding(name, every):
    models = pair()
    averages = [AveragedModel(model, **FUNCTIONS[name]()) for model in models]
    optimizers = [optimizers_of(model) for model in models]
    for step in range(40):
        for model, average, some in zip(models, averages, optimizers, strict=True):
            trained(model, some, step)
            if step % every == 0:
                average.update_parameters(model)
    seen = models[0].table.ids()
    assert torch.equal(averages[0].module.table.ids().sort().values, seen.sort().values)
    assert (rows_of(averages[0])[seen] - rows_of(averages[1])[seen]).abs().max() < 1e-6
    ids = seen[:50]
    assert (averages[0](ids) - averages[1](ids)).abs().max() < 1e-5
    if name not in ("copy", "as it was"):
        assert (rows_of(averages[0])[seen] - models[0].table.lookup(seen)[0]).abs().max() > 1e-3


def test_what_an_update_touches_are_the_rows_that_have_changed(monkeypatch):
    model, _ = pair()
    optimizers, average = optimizers_of(model), AveragedModel(model, **FUNCTIONS["ema"]())
    model.table(torch.arange(N))
    average.update_parameters(model)
    touched, update = [], store.AverageStore.update
    monkeypatch.setattr(
        store.AverageStore, "update", lambda self, ids, *rest: (touched.append(len(ids)), update(self, ids, *rest))
    )
    for step in range(5):
        trained(model, optimizers, step)
        average.update_parameters(model)
    assert len(touched) == 5
    assert max(touched) <= 16


@pytest.mark.slow
def test_a_long_rest_and_a_row_that_comes_back_cost_no_digits():
    models = pair()
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)) for model in models]
    optimizers = [optimizers_of(model) for model in models]
    for model, average, some in zip(models, averages, optimizers, strict=True):
        trained(model, some, 0)
        average.update_parameters(model)
        trained(model, some, 1)
        for _ in range(1000):
            average.update_parameters(model)
        trained(model, some, 1)
        average.update_parameters(model)
    seen = models[0].table.ids()
    assert (rows_of(averages[0])[seen] - rows_of(averages[1])[seen]).abs().max() < 1e-6


def test_a_clock_that_begins_anew_changes_no_average(monkeypatch):
    ids, expected = torch.arange(4), None
    for end in (store._CLOCK_END, 10 * ticks(0.9)):
        monkeypatch.setattr(store, "_CLOCK_END", end)
        model, _ = pair()
        average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
        for step in range(60):
            model.table.insert(ids[[step // 4 % 4]], torch.full((1, DIM), float(step)))
            average.update_parameters(model)
        rows = average.module.table.lookup(ids)[0]
        expected = rows if expected is None else expected
        assert torch.equal(rows, expected)
        assert (average.module.table.store.clock < 12 * ticks(0.9)) == (end < 1 << 60)


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, lambda a, b: a + b, lambda a, b: 2 * a - b])
def test_a_function_that_is_no_average_is_refused_by_name_when_the_average_is_made(function):
    def peak(averaged, current, n):
        return function(averaged, current)

    model, dense = pair()
    with pytest.raises(ValueError, match=r"peak gives .* not an average"):
        AveragedModel(model, avg_fn=peak)
    AveragedModel(dense, avg_fn=peak)  # which is torch's alone


def test_erased_evicted_inserted_and_cleared_rows_are_followed():
    model, _ = pair()
    table, average = model.table, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    own = average.module.table
    table(torch.arange(10))
    average.update_parameters(model)
    assert torch.equal(own.embeddings(), table.embeddings())
    table.erase(torch.tensor([3, 4]))
    ones = torch.ones(1, DIM)
    table.insert(torch.tensor([99]), ones)  # a row of another origin begins at what it is
    table.insert(torch.tensor([5]), ones)  # one that was there is averaged
    before = own.lookup(torch.tensor([5]))[0]
    average.update_parameters(model)
    assert sorted(own.ids().tolist()) == sorted(table.ids().tolist())
    assert torch.equal(own.lookup(torch.tensor([99]))[0], ones)
    assert torch.allclose(own.lookup(torch.tensor([5]))[0], 0.9 * before + 0.1)
    table.clear()
    table.insert(torch.tensor([77]), ones)
    average.update_parameters(model)
    assert own.ids().tolist() == [77]
    assert torch.equal(own.embeddings(), ones)
    table(torch.arange(10))
    average.update_parameters(model)
    table.erase(torch.tensor([77]))
    table(torch.tensor([77]))  # another row, of the same id
    average.update_parameters(model)
    assert torch.equal(own.lookup(torch.tensor([77]))[0], table.lookup(torch.tensor([77]))[0])


def test_evicted_rows_go_and_an_id_that_comes_back_begins_anew():
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t", evict=Capacity(8, by="last_step"), evict_every=1, track=("step",)))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(6):
        model.table.step = step
        model(torch.arange(4 * step, 4 * step + 4))
        average.update_parameters(model)
        assert {*average.module.table.ids().tolist()} == {*model.table.ids().tolist()}
    assert average.module.table.evicts == ()


def test_look_ups_of_an_average_insert_count_and_evict_nothing_even_in_training_mode():
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t", track=("count", "step"), admit=MinCount(2)))
    SparseAdam([model.table], lr=0.1)
    average = AveragedModel(model)
    model(torch.tensor([1, 1, 2]))
    average.update_parameters(model)
    average.train()
    own = average.module.table
    state = own.ids().tolist(), own.embeddings()
    for _ in range(3):
        average(torch.tensor([1, 2, 3])).sum().backward()
        own.bag(torch.tensor([[1, 2], [3, 4]]))
    assert own.ids().tolist() == state[0] == [1]
    assert torch.equal(own.embeddings(), state[1])
    assert own.grad is None
    assert own.candidates is None
    update_bn([torch.tensor([5, 6])], average)
    assert len(own) == 1
    with pytest.raises(ValueError, match="is an average"):
        SparseAdam([own], lr=0.1)


def test_the_step_and_the_event_time_of_a_run_reach_averages_of_tables_that_the_clock_has_dated():
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t", track=("step", "time")))
    SparseAdam([model.table], lr=0.1)
    model(torch.tensor([1, 2]))
    average = AveragedModel(model)
    average.update_parameters(model)
    average.module.table.event_time = 5.0
    beside = RowAverage(model, 0.9)
    with beside.swap():
        model.table.step, model.table.event_time = 7, 5.0
        model(torch.tensor([1, 2]))
    model.table.event_time = 6.0
    assert model.table.slots["last_time"].tolist() == [6.0, 6.0]


def test_all_tables_of_a_collection_are_averaged_and_saved_rows_are_the_averages(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.top = nn.Linear(1, 1)
            self.rows = EmbeddingCollection([ShardedHashTable(2, name=name) for name in "ab"])

    model = Two()
    optimizer = SparseSGD(list(model.rows.tables), lr=1.0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for step in range(3):
        out = model.rows({"a": torch.tensor([1, 2 + step]), "b": torch.tensor([3])})
        sum(rows.sum() for rows in out.values()).backward()
        optimizer.step(), optimizer.zero_grad()
        average.update_parameters(model)
    Saver(average, output_dir=str(tmp_path)).save("1")
    reader = CheckpointReader(str(tmp_path))
    for name, table in zip("ab", average.module.rows.tables, strict=True):
        ids = table.ids()
        assert torch.equal(torch.from_numpy(reader.lookup(name, ids.numpy()).values), table.embeddings())


def run(saver_dir, steps, *, resume=False, save_at=None, deltas=False):
    """Train with an average, from the newest checkpoints on where ``resume``; return both."""
    torch.manual_seed(0)
    model = Clicks(HashTable(DIM, name="t"))
    dense, sparse = torch.optim.Adam(model.top.parameters()), SparseAdam([model.table], lr=0.05)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    saver = Saver(model, sparse, output_dir=str(saver_dir / "model"), deltas=deltas)
    saver.register_for_checkpointing("adam", dense)
    averages = Saver(average, output_dir=str(saver_dir / "average"), deltas=deltas)
    begin = 0
    if resume:
        saver.load()
        averages.load()
        begin = save_at
    for step in range(begin, steps):
        trained(model, [dense, sparse], step)
        average.update_parameters(model)
        if step + 1 == save_at and not resume:
            saver.save(str(step)), averages.save(str(step))
    return model, average, averages


@mostly_slow()
@pytest.mark.parametrize("deltas", [False, True])
def test_an_average_resumed_in_the_middle_is_bit_for_bit_that_of_a_straight_run(tmp_path, deltas):
    straight_model, straight, _ = run(tmp_path / "straight", 60)
    run(tmp_path / "halves", 30, save_at=30, deltas=deltas)
    model, resumed, saver = run(tmp_path / "halves", 60, resume=True, save_at=30, deltas=deltas)
    ids = model.table.ids()
    assert torch.equal(model.table.lookup(ids)[0], straight_model.table.lookup(ids)[0])
    assert torch.equal(resumed.module.table.lookup(ids)[0], straight.module.table.lookup(ids)[0])
    assert all(map(torch.equal, resumed.parameters(), straight.parameters()))
    saver.save("60")
    found = CheckpointReader(str(tmp_path / "halves" / "average")).lookup("t", ids.numpy()).values
    assert torch.equal(torch.from_numpy(found), straight.module.table.lookup(ids)[0])


def test_the_averages_of_a_checkpoint_go_into_a_plain_model_and_a_model_into_an_average(tmp_path):
    model, _ = pair()
    optimizers, average = optimizers_of(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(5):
        trained(model, optimizers, step)
        average.update_parameters(model)
    ids, plain, other = model.table.ids(), Clicks(HashTable(DIM, name="t")), AveragedModel(pair()[0])
    Saver(average, output_dir=str(tmp_path / "average")).save("1")
    Saver(plain, output_dir=str(tmp_path / "average")).load(load_conf={"strict": False})
    assert torch.equal(plain.table.lookup(ids)[0], average.module.table.lookup(ids)[0])
    assert torch.equal(plain.top.weight, average.module.top.weight)
    assert not plain.table.slots
    Saver(model, optimizers[1], output_dir=str(tmp_path / "model")).save("1")
    Saver(other, output_dir=str(tmp_path / "model")).load(load_conf={"strict": False})
    assert torch.equal(other.module.table.lookup(ids)[0], model.table.lookup(ids)[0])
    assert torch.equal(other.module.top.weight, model.top.weight)


def test_state_dicts_take_the_averages_to_a_plain_model_and_back():
    model, _ = pair()
    optimizers, average = optimizers_of(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(5):
        trained(model, optimizers, step)
        average.update_parameters(model)
    ids = model.table.ids()
    plain = Clicks(HashTable(DIM, name="t"))
    plain.load_state_dict(average.module.state_dict())
    assert torch.equal(plain.table.lookup(ids)[0], average.module.table.lookup(ids)[0])
    assert not plain.table.slots
    twin = copy.deepcopy(average)
    other = AveragedModel(Clicks(HashTable(DIM, name="t")), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    other.load_state_dict(average.state_dict())
    trained(model, optimizers, 6)
    for each in (average, twin, other):
        each.update_parameters(model)
    rows = [each.module.table.lookup(model.table.ids())[0] for each in (average, twin, other)]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_a_table_that_came_later_or_was_resized_is_refused_by_name():
    model, _ = pair()
    average = AveragedModel(model)
    model.other = HashTable(2, name="later")
    with pytest.raises(ValueError, match="later"):
        average.update_parameters(model)
    assert average.n_averaged == 0
    del model.other
    average.update_parameters(model)
    model.table.resize(2)
    with pytest.raises(ValueError, match="resized"):
        average.update_parameters(model)
    with pytest.raises(ValueError, match="is an average"):
        average.module.table.resize(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_tables_of_other_dtypes_are_averaged_within_what_the_dtype_gives(dtype):
    table = HashTable(DIM, name="t", dtype=dtype)
    model = nn.ModuleDict({"table": table})
    average, ids = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5)), torch.arange(3)
    expected = None
    for step in range(4):
        rows = torch.full((3, DIM), 3 * step).to(dtype)
        table.insert(ids, rows)
        average.update_parameters(model)
        expected = rows.double() if expected is None else (expected + rows.double()) / 2
    own = average.module["table"].lookup(ids)[0]
    assert own.dtype == dtype
    assert torch.allclose(own.double(), expected, atol=1.0 if dtype == torch.int64 else 0.1)


def test_a_copy_of_a_model_in_training_warns_once_and_one_for_an_average_never(caplog):
    model, _ = pair()
    model.more = HashTable(2, name="more")
    with caplog.at_level(logging.WARNING, "recckpt"):
        AveragedModel(model)
        copy.deepcopy(model.state_dict())
        copy.deepcopy(model.eval())
        assert not caplog.records
        model.train()
        for _ in range(2):
            target = copy.deepcopy(model)
            copy.deepcopy(target)
    assert len(caplog.records) == 1
    assert "AveragedModel" in caplog.text
    assert "RowAverage" in caplog.text
