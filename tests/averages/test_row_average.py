"""RowAverage beside the tables of a model: saved and restored with it, shown in its place, given to it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.averages import RowAverage
from recckpt.policies import Choose
from recckpt.policies.admit import MinCount
from recckpt.policies.evict import SmallNorm
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import EmbeddingCollection, FromRow, HashTable, ShardedHashTable, SparseAdam, SparseSGD
from recckpt.sparse.table.nn_module import first_embeddings

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


CHANGES = {
    "insert": lambda table, run: table.insert(torch.arange(3), torch.zeros(3, DIM)),
    "erase": lambda table, run: table.erase(torch.arange(3)),
    "clear": lambda table, run: table.clear(),
    "set_slot": lambda table, run: table.set_slot("embedding", torch.arange(3), torch.zeros(3, DIM)),
    "evict": lambda table, run: table.evict(SmallNorm(100.0)),
    "load_state_dict": lambda table, run: table.load_state_dict(Clicks().table.state_dict(), strict=False),
    "a load": lambda table, run: run.load(ckpt_id="a"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_inside_swap_a_table_refuses_by_name_to_be_changed_and_stays_as_its_average_does(model, tmp_path, what):
    run = Saver(model, output_dir=str(tmp_path))
    model.table(torch.arange(N))
    average, ids = RowAverage(model, DECAY), torch.arange(N)
    run.save("a")
    model.table.set_slot("embedding", ids, torch.ones(N, DIM))
    average.update()
    rows = [table.lookup(ids)[0] for table in (model.table, average.tables["t"])]
    with average.swap():
        with pytest.raises(RuntimeError, match=r"table 't': found .* inside RowAverage\.swap\(\)") as refused:
            CHANGES[what](model.table, run)
        assert what in str(refused.value)
        twin = copy.deepcopy(model).eval()
        twin.table.erase(torch.arange(3))  # of a copy nothing is shown
    assert all(torch.equal(a, b.lookup(ids)[0]) for a, b in zip(rows, (model.table, average.tables["t"]), strict=True))
    CHANGES[what](model.table, run)
    assert not torch.equal(model.table.lookup(ids)[0], rows[0])


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
    RowAverage(model, DECAY)
    with pytest.raises(ValueError, match="'average' already"):
        RowAverage(model, DECAY)


def test_a_table_that_came_later_or_was_resized_is_refused_by_name(model):
    average = RowAverage(model, DECAY)
    model.other = HashTable(2, name="later")
    with pytest.raises(ValueError, match="later"):
        average.update()
    del model.other
    average.update()
    model.table.resize(2)
    with pytest.raises(ValueError, match="resized"):
        average.update()


def test_an_average_has_the_width_and_the_slots_of_its_own(model):
    average = RowAverage(model, DECAY)
    with pytest.raises(ValueError, match=r"'t.average' is an average, .* cannot be resized: do that to the table"):
        average.tables["t"].resize(2)
    with average.swap(), pytest.raises(ValueError, match=r"'t' is an average, .* cannot have a slot 'more'"):
        model.table.add_slot("more", ())
    model.table.add_slot("more", ())


def test_all_tables_of_a_collection_are_averaged_and_saved_rows_are_the_averages(tmp_path):
    model = nn.ModuleDict({"rows": EmbeddingCollection([ShardedHashTable(2, name=name) for name in "ab"])})
    optimizer = SparseSGD(list(model["rows"].tables), lr=1.0)
    average = RowAverage(model, 0.75)
    for step in range(3):
        out = model["rows"]({"a": torch.tensor([1, 2 + step]), "b": torch.tensor([3])})
        sum(rows.sum() for rows in out.values()).backward()
        optimizer.step(), optimizer.zero_grad()
        average.update()
    Saver(model, optimizer, output_dir=str(tmp_path)).save("1")
    reader = CheckpointReader(str(tmp_path))
    for name, table in average.tables.items():
        ids = table.ids()
        found = torch.from_numpy(reader.lookup(f"{name}.average", ids.numpy()).values)
        assert torch.equal(found, table.embeddings())
        assert not torch.equal(found, model["rows"].tables["ab".index(name)].lookup(ids)[0])


def test_the_averages_of_a_checkpoint_go_into_a_plain_model_and_a_model_into_an_average(model, tmp_path):
    optimizer, average = SparseAdam([model.table], lr=0.5), RowAverage(model, DECAY)
    for step in range(5):
        trained(model, optimizer, step)
        average.update()
    ids, own = model.table.ids(), average.tables["t"]
    with average.swap():
        Saver(model, output_dir=str(tmp_path / "average"), choose=Choose(slots=[])).save("1")
        shown = copy.deepcopy(model)
    Saver(model, optimizer, output_dir=str(tmp_path / "model")).save("1")
    plain = Clicks()
    Saver(plain, output_dir=str(tmp_path / "average")).load(load_conf={"strict": False})
    for each in (plain, shown):
        assert torch.equal(each.table.lookup(ids)[0], own.lookup(ids)[0])
        assert not each.table.slots
    other = Clicks()
    other_average = RowAverage(other, DECAY)
    bank = {"path": str(tmp_path / "model"), "load": ["t.average"], "oname": {"t.average": "t"}}
    CheckpointManager(Saver(other, output_dir=str(tmp_path / "other")), 1).load_model_bank([bank])
    assert torch.equal(other_average.tables["t"].lookup(ids)[0], model.table.lookup(ids)[0])


def test_state_dicts_take_the_averages_along_bit_for_bit(model):
    optimizer, average = SparseSGD([model.table], lr=0.5), RowAverage(model, DECAY)
    for step in range(5):
        trained(model, optimizer, step)
        average.update()
    other = Clicks()
    again = RowAverage(other, DECAY)
    other.load_state_dict(model.state_dict())
    ids, rows = model.table.ids(), torch.ones(3, DIM)
    for one, its in ((model, average), (other, again)):
        one.table.insert(torch.arange(3), rows)
        its.update()
    assert torch.equal(again.tables["t"].lookup(ids)[0], average.tables["t"].lookup(ids)[0])


def test_an_average_of_a_row_that_began_as_another_begins_at_the_row_itself():
    table = HashTable(2, name="t", initializer=FromRow(5))
    average = RowAverage(nn.ModuleDict({"t": table}), decay=0.5)
    table.insert(torch.tensor([5]), torch.ones(1, 2))
    table(torch.tensor([6]))
    table.insert(torch.tensor([5]), torch.full((1, 2), 101.0))
    average.update()
    assert average.tables["t"](torch.tensor([6])).tolist() == [[1.0, 1.0]]
