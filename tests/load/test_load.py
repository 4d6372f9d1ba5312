"""The hallway of a load: read what is small, check all of it, fill the tables, then the rest."""

import pytest
import torch
from support.builders import OPTIMIZERS, ClickModel, bits, flip_bit, table_state
from support.foreign import ForeignTable
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import CorruptCheckpointError, StateMismatchError
from recckpt.sparse import HashTable, Normal
from recckpt.sparse.files.part_reader import PartReader


def with_tables(*tables):
    """Return a model whose state dict holds tables, ours or not."""

    class Holder(nn.Module):
        def state_dict(self, *args, **kwargs):
            return {table.name: table for table in tables}

    return Holder()


def saved(url, n_rows=1000, max_keep=1, optimizer="adagrad"):
    """Save a model with rows, and return it with its saver."""
    model = ClickModel()
    optim = OPTIMIZERS[optimizer](model.tables)
    for table in model.tables:
        table(torch.arange(n_rows)).sum().backward()
    optim.step()
    saver = Saver(model, optim, url, max_keep=max_keep)
    saver.save("c")
    return model, saver


def tables(model):
    return {table.name: table_state(table) for table in model.tables}


def test_what_is_loaded_replaces_what_was_there_and_a_tensor_stays_where_it_is(url):
    model, saver = saved(url)
    before, weight, address = tables(model), model.top.weight, model.top.weight.data_ptr()
    values = weight.tolist()
    model.users.insert(torch.tensor([-7, 3]), torch.ones(2, 4))
    model.items.erase(torch.arange(500))
    with torch.no_grad():
        weight.zero_()
    for _ in range(2):
        model.users(torch.arange(5)).sum().backward()
        saver.load()
        assert tables(model) == before
    saver.sparse_optim.step()
    assert tables(model) == before, "pending gradients do not outlive a load"
    assert model.top.weight is weight
    assert (weight.data_ptr(), weight.requires_grad, weight.tolist()) == (address, True, values)


def test_rows_that_arrive_after_a_load_start_as_they_would_have_anyway(tmp_path):
    def table():
        return HashTable(3, name="t", initializer=Normal(0.0, 1.0))

    straight, resumed = table(), table()
    straight(torch.arange(10))
    Saver(with_tables(straight), output_dir=str(tmp_path)).save("c")
    Saver(with_tables(resumed), output_dir=str(tmp_path)).load()
    straight(torch.arange(20))
    resumed(torch.arange(19, -1, -1))
    assert table_state(resumed) == table_state(straight)


def test_a_table_of_another_library_loads_what_ours_saved_and_back(url):
    ids, values = torch.tensor([5, -1, 2**62]), torch.randn(3, 2)
    ours = HashTable(2, name="t")
    ours.add_slot("sum", ())
    ours.insert(ids, values, {"sum": torch.arange(3.0)})
    Saver(with_tables(ours), output_dir=url).save("a")
    none = torch.tensor([9]), torch.zeros(1, 2)
    foreign = ForeignTable("t", *none, {"sum": torch.zeros(1)})
    saver = Saver(with_tables(foreign), output_dir=url)
    saver.load()
    assert table_state(foreign) == table_state(ours)
    saver.save("b")
    other = HashTable(2, name="t")
    other.add_slot("sum", ())
    Saver(with_tables(other), output_dir=url).load(ckpt_id="b")
    assert table_state(other) == table_state(ours)


@mostly_slow()
@pytest.mark.parametrize("with_rows", [True, False], ids=["rows in the way", "empty tables"])
@pytest.mark.parametrize(
    "file", ["sparse/00000-of-00001.g0.00.arrow", "sparse/00000-of-00001.json", "model.pt", "extra.pt"]
)
def test_damage_is_found_and_changes_nothing(tmp_path, file, with_rows):
    saved(str(tmp_path))
    model = ClickModel()
    optim = OPTIMIZERS["adagrad"](model.tables)
    loader = Saver(model, optim, str(tmp_path))
    if with_rows:
        model.users.insert(torch.arange(5), torch.ones(5, 4))
    before = tables(model), model.top.weight.tolist(), optim.state_dict()
    flip_bit(tmp_path / "c" / file)
    with pytest.raises(CorruptCheckpointError, match=file):
        loader.load()
    assert (tables(model), model.top.weight.tolist(), optim.state_dict()) == before


def test_a_checkpoint_of_a_model_without_tables_or_without_tensors_loads(tmp_path):
    dense, twin = nn.Linear(2, 1), nn.Linear(2, 1)
    Saver(dense, output_dir=str(tmp_path / "dense")).save("c")
    Saver(twin, output_dir=str(tmp_path / "dense")).load()
    assert torch.equal(dense.weight, twin.weight)
    table, other = HashTable(1, name="t"), HashTable(1, name="t")
    table(torch.arange(3))
    Saver(with_tables(table), output_dir=str(tmp_path / "sparse")).save("c")
    Saver(with_tables(other), output_dir=str(tmp_path / "sparse")).load()
    assert table_state(other) == table_state(table)


def test_a_foreign_table_takes_whole_rows_of_one_checkpoint_or_nothing(tmp_path):
    none = torch.tensor([9]), torch.zeros(1, 2)
    foreign, ours = ForeignTable("t", *none, {"sparse_sum": torch.zeros(1)}), HashTable(2, name="ours")
    twin = HashTable(2, name="t")
    twin.add_slot("sparse_sum", ())
    twin(torch.arange(3))
    filled = HashTable(2, name="ours")
    filled(torch.arange(3))
    Saver(with_tables(twin, filled), output_dir=str(tmp_path)).save("c")
    saver = Saver(with_tables(foreign, ours), output_dir=str(tmp_path))
    for conf in ({"load": ["sparse_opt"]}, {"load": ["ours", "t@id"], "exclude": ["t@embedding"]}):
        before = table_state(foreign)
        with pytest.raises(StateMismatchError, match=r"'t': found only .*not a recckpt.sparse.HashTable"):
            saver.load(load_conf=conf)
        assert (table_state(foreign), len(ours)) == (before, 0)
    saver.load(load_conf={"exclude": ["t"]})
    assert (len(foreign), len(ours)) == (1, 3)
    saver.load()
    assert table_state(foreign) == table_state(twin)


def test_slots_that_come_from_elsewhere_are_read_once(tmp_path, monkeypatch):
    for name in ("a", "b"):
        saved(str(tmp_path / name))
    read, seen = PartReader.read, []
    monkeypatch.setattr(PartReader, "read", lambda self, *args: (seen.append(self.path), read(self, *args))[1])
    model = ClickModel()
    saver = Saver(model, OPTIMIZERS["adagrad"](model.tables), str(tmp_path / "own"))
    bank = [
        {"path": str(tmp_path / "a"), "load": ["user/1", "item"], "exclude": ["sparse_opt"]},
        {"path": str(tmp_path / "b"), "load": ["sparse_opt"]},
    ]
    report = saver.load_by_config(bank)
    assert len(seen) == 4, "two tables of two checkpoints"
    assert report.rows_taken == {"user/1": 1000, "item": 1000}, "each row once, wherever its slots come from"


def test_damage_in_the_second_of_two_checkpoints_changes_no_table(tmp_path):
    """Neither one that has rows to lose nor one that was empty."""
    saved(str(tmp_path / "a"), 50)
    model, _ = saved(str(tmp_path / "b"), 60)
    [part] = (tmp_path / "b" / "c" / "sparse").glob("*.arrow")
    flip_bit(part, part.read_bytes().index(bits(model.items.lookup(torch.tensor([7]))[0])))
    bank = [{"path": str(tmp_path / "a"), "load": ["user/1"]}, {"path": str(tmp_path / "b"), "load": ["item"]}]
    for n_rows in (0, 5):
        model = ClickModel()
        model.users(torch.arange(n_rows))
        saver = Saver(model, OPTIMIZERS["adagrad"](model.tables), str(tmp_path / "own"))
        before = tables(model)
        with pytest.raises(CorruptCheckpointError, match="arrow"):
            saver.load_by_config(bank)
        assert tables(model) == before


def test_a_parameter_and_a_plain_value_are_not_the_same_thing(tmp_path):
    class Odd(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def state_dict(self, *args, **kwargs):
            return {"x": self.value}

    Saver(Odd("text"), output_dir=str(tmp_path)).save("c")
    with pytest.raises(StateMismatchError) as caught:
        Saver(Odd(torch.ones(2)), output_dir=str(tmp_path)).load()
    assert caught.value.mismatched == {"x": ("plain data", "float32 (2,)")}


@pytest.mark.parametrize("with_rows", [False, True])
def test_a_damaged_part_moves_no_object_that_cannot_go_back(tmp_path, with_rows):
    class Position:
        def __init__(self, at):
            self.at = at

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def saver_of(table, *positions):
        saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path))
        saver.register_for_checkpointing("extra", positions[0])
        saver.register_io_state("data", positions[1])
        return saver

    table = HashTable(2, name="t")
    table.insert(torch.arange(9), torch.ones(9, 2))
    saver_of(table, Position(3), Position(4)).save("c")
    flip_bit(next(tmp_path.glob("c/sparse/*.arrow")))
    live, positions = HashTable(2, name="t"), (Position(7), Position(8))
    if with_rows:
        live.insert(torch.arange(3), torch.ones(3, 2))
    with pytest.raises(CorruptCheckpointError):
        saver_of(live, *positions).load()
    assert ([position.at for position in positions], len(live)) == ([7, 8], 3 * with_rows)


@pytest.mark.parametrize("with_rows", [False, True])
def test_an_object_that_refuses_its_state_leaves_tables_as_they_were(tmp_path, with_rows):
    class Refusing:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise KeyError("other")

    def saver_of(table):
        saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path))
        saver.register_io_state("data", Refusing())
        return saver

    table = HashTable(2, name="t")
    table.insert(torch.arange(9), torch.ones(9, 2))
    saver_of(table).save("c")
    live = HashTable(2, name="t")
    if with_rows:
        live.insert(torch.arange(3), torch.zeros(3, 2))
    with pytest.raises(StateMismatchError, match="'data'"):
        saver_of(live).load()
    assert sorted(live.ids().tolist()) == [0, 1, 2][: 3 * with_rows]
    assert not live.embeddings().any()
