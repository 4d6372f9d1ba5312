"""The live tables of a model, and those in the memory of somebody else: made once, for as long as somebody has them."""

import gc
import weakref

import pytest
import torch
from support.live_runs import Clicks, Run, assert_saved
from torch import nn, optim

import recckpt.live
from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import LiveTableError, MissedRowsError
from recckpt.live import live_tables
from recckpt.sparse import HashTable
from recckpt.types import Box


def made(**options):
    model = Clicks()
    optimizer = optim.Adagrad(model.parameters())
    return model, optimizer, live_tables(model, optimizer, min_rows=10, **options)


def n_hooks(model, optimizer):
    of_modules = [(m._load_state_dict_pre_hooks, m._load_state_dict_post_hooks) for m in model.modules()]
    hooks = [*of_modules, (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)]
    return sum(len(some) for pair in hooks for some in pair)


@pytest.mark.parametrize("other", ["optimizer", "names"])
def test_a_second_call_gives_the_same_tables_and_one_that_asks_for_others_is_refused_until_they_are_closed(other):
    model, optimizer, tables = made()
    n_before = n_hooks(model, optimizer)
    assert live_tables(model, [optimizer], min_rows=10) is tables
    assert n_hooks(model, optimizer) == n_before
    if other == "optimizer":
        optimizer = optim.SGD(model.parameters())
    names = {"users": "u"} if other == "names" else None
    with pytest.raises(LiveTableError, match=r"already has live tables.*close\(\)"):
        live_tables(model, optimizer, min_rows=10, names=names)
    tables.close()
    assert live_tables(model, optimizer, min_rows=10, names=names) is not tables


def test_closing_removes_all_hooks_and_ends_what_savers_can_do(tmp_path):
    model, optimizer, tables = made()
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    tables.close()
    tables.close()
    assert n_hooks(model, optimizer) == 0
    with pytest.raises(LiveTableError, match="'users': it is closed"):
        saver.save("a")
    with pytest.raises(LiveTableError, match="are closed: call live_tables again"):
        Saver(model, output_dir=str(tmp_path), tables=tables)


def test_once_nobody_has_the_tables_their_hooks_do_nothing_and_keep_nothing():
    model, optimizer, tables = made()
    store, of_optimizer = weakref.ref(tables["users"].store), weakref.ref(optimizer)
    del tables
    gc.collect()
    assert store() is None
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    del optimizer
    gc.collect()
    assert of_optimizer() is None
    assert model.users.weight.grad is not None


def test_a_saver_keeps_the_tables_for_its_own_life(tmp_path):
    model, optimizer, tables = made()
    saver, store = (
        Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True),
        weakref.ref(tables["users"].store),
    )
    del tables
    gc.collect()
    saver.save("a")
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    assert saver.save("b").tables[0].delta.upserts == 1
    saver.close()
    assert store() is not None
    del saver
    gc.collect()
    assert store() is None


def test_two_savers_of_the_same_tables_count_each_for_itself(tmp_path):
    run = Run(tmp_path / "one", "Adagrad", deltas=True)
    other = run.new_saver(tmp_path / "two", deltas=True)
    for saver in (run.saver, other):
        saver.save("base")
    for id_ in (3, 4):
        run.model.users(torch.tensor([id_])).sum().backward()
        run.step()
        if id_ == 3:
            assert run.saver.save("next").tables[0].delta.upserts == 1
    upserts = {table.name: table.delta.upserts for table in other.save("next").tables}
    assert upserts == {"users": 2, "items": 0}


def test_tables_of_another_model_and_a_live_one_with_the_name_of_one_of_ours_are_refused(tmp_path):
    for tables, error, message in (
        (made()[2], ValueError, "found live tables of another model: give live_tables and Saver the same"),
        ({}, TypeError, "found a dict"),
    ):
        with pytest.raises(error, match=message):
            Saver(Clicks(), output_dir=str(tmp_path), tables=tables)
    model = nn.ModuleDict({"a": nn.Embedding(20, 2), "b": HashTable(2, name="a")})
    tables = live_tables(model, optim.SGD(model["a"].parameters()), min_rows=1)
    with pytest.raises(ValueError, match="two tables are named 'a': rename the live one with names="):
        Saver(model, output_dir=str(tmp_path), tables=tables)


def test_all_that_is_wrong_with_the_tables_is_said_and_nothing_is_hooked():
    model = nn.ModuleDict({"good": nn.Embedding(20, 2), "one": nn.Embedding(20, 2), "other": nn.Embedding(20, 2)})
    for name in ("one", "other"):
        model[name].weight = nn.Parameter(torch.zeros(2, 20).T)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LiveTableError, match=r"table 'one': .*not contiguous.*; table 'other': .*not contiguous"):
        live_tables(model, optimizer, min_rows=1)
    assert not optimizer._optimizer_step_pre_hooks
    assert list(live_tables(model, optimizer, min_rows=1, exclude={"one", "other"})) == ["good"]


def test_a_delta_holds_all_rows_of_a_table_that_was_not_live_in_its_base(tmp_path):
    ours = nn.ModuleDict({"user": HashTable(4, name="user")})
    ours["user"].insert(torch.arange(50), torch.rand(50, 4))
    Saver(ours, output_dir=str(tmp_path)).save("ckpt_1", step=1)
    model = nn.ModuleDict({"user": nn.Embedding(50, 4)})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    tables = live_tables(model, optimizer, min_rows=10)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=Deltas(max_dirty=1, max_chain_bytes=100))
    CheckpointManager(saver, 10**9).restore()
    kinds = []
    for number in (2, 3):
        model["user"](torch.tensor([number])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        [table] = saver.save(f"ckpt_{number}", step=number).tables
        kinds.append((table.delta and (table.delta.replaced, table.delta.upserts), table.live.n_rows))
    saver.close()
    tables.close()
    assert kinds == [((True, 50), 50), ((False, 1), 50)]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": "model"}, TypeError, "model must be a torch.nn.Module"),
        ({"optimizers": ["adam"]}, TypeError, "optimizers must be optimizers of torch, found a str"),
        ({"optimizers": optim.Adam}, TypeError, "optimizers must be optimizers of torch, found the class Adam"),
        ({"optimizers": None}, TypeError, "optimizers must be optimizers of torch, found a NoneType"),
        ({"min_rows": 0}, ValueError, "min_rows"),
        ({"names": ["users"]}, TypeError, "names must be a dict, path of a module -> name of its table, found"),
        ({"names": {"users": ""}}, ValueError, "a table name must be a non-empty string"),
        ({"names": {"users.weight": "u"}}, LiveTableError, "'users.weight' is not .*; did you mean 'users'?"),
        ({"exclude": "users"}, TypeError, "exclude must be a list of paths"),
        ({"marks": None}, TypeError, "marks must be 'auto' or 'fingerprints', or a dict, .*, found None"),
        ({"marks": "hooks"}, ValueError, "marks: found 'hooks', expected 'auto' or 'fingerprints'"),
        ({"marks": {"usrs": "auto"}}, ValueError, "marks: 'usrs' is not a live table; did you mean 'users'?"),
        ({"audit": True}, ValueError, "audit must be an int of at least 0, found True"),
        ({"adapters": object()}, TypeError, "adapters must be a list of tables, found a object"),
        (
            {"adapters": [object()]},
            TypeError,
            "adapters must be tables as recckpt.types.LiveTable, found a object",
        ),
    ],
)
def test_arguments_are_checked(arguments, error, text):
    model = Clicks()
    arguments = {"model": model, "optimizers": optim.SGD(model.parameters()), "min_rows": 1, **arguments}
    with pytest.raises(error, match=text):
        live_tables(**arguments)


@pytest.mark.parametrize("made", [lambda one: one, lambda one: {one}, lambda one: (each for each in [one])])
def test_optimizers_may_be_one_or_several(made):
    model = Clicks()
    assert set(live_tables(model, made(optim.SGD(model.parameters())), min_rows=1)) == {"users", "items"}


class Memory:
    """A table of its own rows, of which ``door`` is told."""

    def __init__(self, name="own", n_rows=50):
        self.name, self.n_rows, self.door = name, n_rows, None
        self.values, self.settings_taken = torch.rand(n_rows, 2), []

    def box(self):
        return Box((0, self.n_rows))

    def prepare(self):
        pass

    def tensors(self):
        return {"embedding": self.values}

    def attach(self, door):
        self.door = door
        return lambda: setattr(self, "door", None)

    def scalars(self):
        return {}

    def settings(self):
        return {"lr": 0.5}

    def finish(self, scalars, settings):
        self.settings_taken.append(settings)


def saver_of(tmp_path, memory, **options):
    model = nn.ModuleDict({"top": nn.Linear(2, 1)})
    tables = live_tables(model, adapters=[memory], **options)
    return Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9), tables


def upserts(record):
    [entry] = record.tables
    return entry.delta and entry.delta.upserts


def test_an_adapter_is_a_table_like_others_and_gets_its_settings_back(tmp_path):
    memory = Memory()
    saver, tables = saver_of(tmp_path, memory)
    assert "own    50 x 2      Memory  -      own" in str(tables)
    saver.save("c0")
    saver.load()
    assert {} in memory.settings_taken
    assert {"lr": 0.5} in memory.settings_taken


def test_an_adapter_that_announces_all_rows_has_deltas_by_fingerprints_and_an_audit_finds_what_it_does_not(tmp_path):
    memory = Memory()
    saver, tables = saver_of(tmp_path / "prints", memory, marks="fingerprints")
    saver.save("c0")
    memory.door.announce_all()
    memory.values[7] += 1
    assert upserts(saver.save("c1")) == 1
    assert_saved(tables, tmp_path / "prints")
    memory = Memory()
    saver, _ = saver_of(tmp_path / "audit", memory, audit=1)
    saver.save("c0")
    memory.values[7] += 1
    with pytest.raises(MissedRowsError, match="7"):
        saver.save("c1")


def test_what_is_no_table_is_refused_and_so_are_two_of_one_name():
    model, memory = nn.Module(), Memory()
    for adapters, error, message in (
        ([{}], TypeError, r"adapters must be tables as recckpt.types.LiveTable, found a dict$"),
        (
            [HashTable(2, name="own")],
            TypeError,
            r"found a HashTable, a SavableTable: return it from the state dict of the mo",
        ),
        ([Memory(), Memory()], LiveTableError, r"'adapters\[0\]' and 'adapters\[1\]' are both named 'own'"),
    ):
        with pytest.raises(error, match=message):
            live_tables(model, adapters=adapters)
    with pytest.raises(AttributeError, match=r"no attribute 'LibraryTable': a hash table of your own is a .*SavableTa"):
        recckpt.live.LibraryTable  # noqa: B018
    tables = live_tables(model, adapters=[memory])
    assert live_tables(model, adapters=[memory]) is tables
    with pytest.raises(LiveTableError, match="the model already has live tables that differ from the requested ones"):
        live_tables(model, adapters=[Memory()])
