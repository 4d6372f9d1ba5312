"""The optimizers of all rows as one: their steps and settings are saved once, and go back where they belong."""

import copy

import pytest
import torch
from support.live_runs import DIM, OPTIMIZERS, Run, assert_same
from support.sweeps import mostly_slow
from torch import nn, optim

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.policies import Choose
from recckpt.sparse import HashTable, SparseAdagrad, SparseSGD

# One of each kind of state that a rule may have by then, or not: the slow suite tries the others.
FEW_RULES = ("SparseAdam", "sparse Adagrad", "Adagrad", "SGD momentum", "Adam")
BEFORE_ITS_FIRST_STEP = [
    pytest.param(rule, 0, marks=[] if rule in FEW_RULES else pytest.mark.slow) for rule in OPTIMIZERS
]


@mostly_slow()
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("rule", "n_before"), [*((rule, 3) for rule in OPTIMIZERS), *BEFORE_ITS_FIRST_STEP])
def test_steps_and_settings_are_restored(tmp_path, rule, n_before):
    run = Run(tmp_path, rule)
    run.train(n_before)
    run.saver.save("a")
    state = run.state()
    run.row_optim.param_groups[0]["lr"] = 9.0
    run.train(2)
    run.saver.load(load_conf=None)
    assert_same(run.state(), state)


def test_state_that_other_code_keeps_in_the_optimizer_of_a_table_is_refused(tmp_path):
    model = nn.ModuleDict({"word": nn.Embedding(20, DIM)})
    optimizer = optim.Adam(model.parameters())
    saver = Saver(model, output_dir=tmp_path, tables=live_tables(model, optimizer, min_rows=1))
    saver.save("a")
    optimizer.state[model["word"].weight]["ema"] = torch.zeros(20, DIM)
    with pytest.raises(LiveTableError, match=r"other code keeps 'ema' in the state of its Adam, .* by exclude="):
        saver.save("b")


def test_settings_that_are_tensors_stay_tensors_and_take_the_saved_values(tmp_path):
    def made(lr, beta):
        model = nn.ModuleDict({"word": nn.Embedding(20, DIM)})
        betas = torch.tensor(beta), torch.tensor(0.75)
        optimizer = optim.Adam(model.parameters(), lr=torch.tensor(lr), betas=betas, foreach=False)
        return Saver(model, output_dir=tmp_path, tables=live_tables(model, optimizer, min_rows=1)), optimizer

    made(0.5, 0.25)[0].save("a")
    saver, optimizer = made(0.125, 0.5)
    group = optimizer.param_groups[0]
    own = group["lr"], *group["betas"]
    saver.load()
    assert all(a is b for a, b in zip((group["lr"], *group["betas"]), own, strict=True))
    assert [float(each) for each in own] == [0.5, 0.25, 0.75]


@mostly_slow()
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_run_that_was_restored_elsewhere_goes_on_as_the_first_did(tmp_path, rule):
    run, other = Run(tmp_path, rule), Run(tmp_path, rule, seed=1)
    run.train(3)
    run.saver.save("a")
    other.saver.load()
    other.random.set_state(run.random.get_state())
    run.train(3)
    other.train(3)
    assert_same(other.state(), run.state())


def mixed(tmp_path):
    """Return a model of a table of ours, one of torch and a dense layer, where one optimizer trains the latter two."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"ours": HashTable(DIM, name="ours"), "theirs": nn.Embedding(20, DIM), "top": nn.Linear(DIM, 1)}
    )
    sparse_optim = SparseAdagrad([model["ours"]], lr=0.1)
    optimizer = optim.Adagrad([*model["theirs"].parameters(), *model["top"].parameters()], lr=0.1)
    tables = live_tables(model, optimizer, min_rows=1)
    saver = Saver(model, sparse_optim, str(tmp_path), tables=tables, deltas=Deltas(max_dirty=1))
    saver.register_for_checkpointing("optim", optimizer)
    return model, sparse_optim, optimizer, saver


def train(model, *optimizers):
    for _ in range(2):
        ids = torch.randint(0, 20, (5,))
        model["top"](model["ours"](ids) + model["theirs"](ids)).square().sum().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()


def state_of(model, sparse_optim, optimizer):
    table = model["ours"]
    order = table.ids().argsort()
    rows = [table.ids()[order], table.embeddings()[order], *(values[order] for values in table.slots.values())]
    dense = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return copy.deepcopy([rows, dense, optimizer.state_dict(), sparse_optim.state_dict()["state"]])


def test_tables_of_ours_and_live_ones_are_saved_together_and_their_states_once(tmp_path, caplog):
    model, sparse_optim, optimizer, saver = mixed(tmp_path)
    train(model, sparse_optim, optimizer)
    saver.save("a", step=1)
    names = saver.names()
    assert not any(name.startswith("theirs.weight") for name in names)
    assert any(name.startswith("theirs@sparse_adagrad_sum") for name in names)
    assert any(name.startswith("top.weight@optim") for name in names)
    train(model, sparse_optim, optimizer)
    state, record = state_of(model, sparse_optim, optimizer), saver.save("b", step=2)
    assert record.kind == "delta"
    train(model, sparse_optim, optimizer)
    saver.load()
    assert_same(state_of(model, sparse_optim, optimizer), state)
    other = mixed(tmp_path)
    other[3].load()
    assert_same(state_of(*other[:3]), state)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("first", [["theirs", "sparse_optim"], ["dense", "extra", "optim"]])
def test_rows_and_the_rest_of_an_optimizer_are_loaded_in_either_order(tmp_path, first):
    model, sparse_optim, optimizer, saver = mixed(tmp_path)
    train(model, sparse_optim, optimizer)
    saver.save("a")
    state = state_of(model, sparse_optim, optimizer)
    train(model, sparse_optim, optimizer)
    saver.load(load_conf={"load": first, "hashtable_clear": True})
    saver.load(load_conf={"load": ["*"], "exclude": first})
    saver.load(load_conf={"load": ["sparse_optim"]})
    assert_same(state_of(model, sparse_optim, optimizer), state)


@pytest.mark.parametrize("conf", [None, {"load": ["*"], "exclude": ["sparse_optim"]}], ids=["all", "without"])
def test_each_group_of_an_optimizer_gets_its_settings_back(tmp_path, conf):
    def made():
        model = nn.ModuleDict({"one": nn.Embedding(20, DIM), "other": nn.Embedding(20, DIM), "top": nn.Linear(DIM, 1)})
        groups = [{"params": list(model[name].parameters()), "lr": 0.1} for name in ("one", "other", "top")]
        optimizer = optim.AdamW(groups)
        saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1))
        saver.register_for_checkpointing("optim", optimizer)
        return saver, optimizer

    saver, optimizer = made()
    for number, group in enumerate(optimizer.param_groups):
        group["lr"], group["weight_decay"] = number + 1, number + 2
    saver.save("a")
    saver, optimizer = made()
    saver.load(load_conf=conf)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == ([1, 2, 3] if conf is None else [0.1, 0.1, 3])


@pytest.mark.parametrize("loaded", ["one", "other"])
def test_a_table_that_is_not_loaded_leaves_the_settings_of_the_group_that_it_shares(tmp_path, loaded):
    def made(rate):
        model = nn.ModuleDict({"one": nn.Embedding(20, DIM), "other": nn.Embedding(20, DIM)})
        optimizer = optim.Adagrad(model.parameters(), lr=rate)
        return Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1)), optimizer

    made(0.7)[0].save("a")
    saver, optimizer = made(0.1)
    saver.load(load_conf={"load": [f"{loaded}@*", "sparse_optim"]})
    assert optimizer.param_groups[0]["lr"] == 0.7


def warnings_of(caplog):
    return [text for one in caplog.records if "registered optimizer" in (text := one.getMessage())]


def test_an_optimizer_that_trains_other_parameters_than_live_tables_too_has_to_be_registered(tmp_path, caplog):
    run = Run(tmp_path / "alone")
    run.train(2)
    run.saver.save("a")
    assert warnings_of(caplog) == []
    model = nn.ModuleDict({"theirs": nn.Embedding(20, DIM), "top": nn.Linear(DIM, 1)})
    optimizer = optim.Adam(model.parameters())
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1))
    model["top"](model["theirs"](torch.tensor([1]))).sum().backward()
    optimizer.step()
    saver.save("a")
    [text] = warnings_of(caplog)
    assert text.startswith("2 parameters of the model ('top.weight', 'top.bias') train")


def test_a_weight_that_another_optimizer_comes_to_train_keeps_its_states_there(tmp_path):
    model = nn.Sequential(nn.Embedding(20, DIM))
    model[0].weight.requires_grad_(False)
    tables = live_tables(model, [], min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    model[0].weight.requires_grad_(True)
    optimizer = optim.Adam(model.parameters())
    saver.register_for_checkpointing("late", optimizer)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    saver.save("a")
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    saver.load()
    assert_same(optimizer.state_dict(), state)


def test_a_run_that_keeps_its_settings_takes_no_state_for_those_of_the_checkpoint(tmp_path):
    run, other = Run(tmp_path, "SGD", seed=1), Run(tmp_path, "SGD")
    run.row_optim.param_groups[0]["momentum"] = 0.9
    run.train(3)
    run.saver.save("a", step=3)
    CheckpointManager(other.saver, 10).restore(hyper_parameters="keep")
    assert other.row_optim.param_groups[0]["momentum"] == 0
    assert list(other.tables["users"].live.tensors()) == ["embedding"]
    assert_same(other.state()["model"], run.state()["model"])
    CheckpointManager(other.saver, 10).restore()
    assert other.row_optim.param_groups[0]["momentum"] == 0.9


@mostly_slow()
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rule", ["SparseAdam", "Adagrad"])
@pytest.mark.parametrize("conf", [None, {"exclude": ["sparse_opt"]}])
def test_slots_that_nothing_gives_begin_anew_in_a_run_that_has_trained(tmp_path, rule, conf):
    fresh, run = (
        Run(tmp_path / "fresh", rule),
        Run(tmp_path, rule, choose=Choose(slots=["!*@sparse_*"] if conf is None else None)),
    )
    run.train(3)
    run.saver.save("a")
    run.train(3)
    report = run.saver.load(load_conf=conf)
    assert {"users@embedding"} < {item.name.text for item in report.taken}
    for name, table in fresh.tables.items():
        assert_same(dict(run.tables[name].slots), dict(table.slots))
        assert run.tables[name].live.scalars() == {"step": 0}


def test_rows_that_are_merged_in_leave_slots_that_nothing_gives_as_they_are(tmp_path):
    run = Run(tmp_path)
    run.train(3)
    run.saver.save("a")
    run.train(3)
    state = run.state()
    run.saver.load(load_conf={"load": ["users@embedding"], "hashtable_clear": False})
    assert_same(run.state()["0"], state["0"])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("rule", "options", "key"),
    [("SGD", {"momentum": 0.9}, "momentum_buffer"), ("Adam", {"amsgrad": True}, "max_exp_avg_sq")],
)
def test_settings_bring_the_state_that_they_need(tmp_path, rule, options, key):
    run, other = Run(tmp_path, rule, seed=1), Run(tmp_path, rule, deltas=True)
    run.row_optim.param_groups[0].update(options)
    for table in run.tables.values():
        table.prepare()  # makes the state that these settings need
    run.train(3)
    run.saver.save("a")
    report = other.saver.load()
    assert_same(other.state(), run.state())
    assert other.row_optim.state[other.model.users.weight][key].any()
    assert not report.warnings
    assert other.saver.save("b").kind == "delta"  # it is all that the checkpoint has
    for each in (run, other):
        each.random.manual_seed(1)
        each.train(2)
    assert_same(other.state(), run.state())


@pytest.mark.parametrize("of_ours", [SparseAdagrad, SparseSGD])
def test_a_live_table_that_is_new_leaves_the_settings_of_ours_to_the_checkpoint(tmp_path, of_ours):
    model = nn.ModuleDict({"ours": HashTable(DIM, name="ours")})
    Saver(model, of_ours([model["ours"]], lr=0.7), str(tmp_path)).save("a")
    model["theirs"] = nn.Embedding(20, DIM)
    optimizers = of_ours([model["ours"]], lr=0.1), optim.Adam(model["theirs"].parameters(), lr=0.1)
    saver = Saver(model, optimizers[0], str(tmp_path), tables=live_tables(model, optimizers[1], min_rows=1))
    saver.load(load_conf={"exclude": ["theirs"]})
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.7, 0.1]


def test_a_live_table_of_another_optimizer_leaves_the_settings_of_the_others_to_the_checkpoint(tmp_path, caplog):
    def made(other):
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Embedding(20, DIM) for name in ("same", "other")})
        optimizers = [optim.Adam(model["same"].parameters(), lr=0.1), other(model["other"].parameters(), lr=0.1)]
        tables = live_tables(model, optimizers, min_rows=1)
        return Saver(model, output_dir=str(tmp_path), tables=tables), optimizers

    saver, optimizers = made(optim.Adagrad)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.7
    saver.save("a")
    saver, optimizers = made(optim.AdamW)
    saver.load()
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.7, 0.1]
    assert "sparse optimizer: ['other'] had other slots; this run's hyper-parameters stay" in caplog.text


@pytest.mark.parametrize("of", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_an_optimizer_that_is_made_anew_is_warned_of(tmp_path, caplog, of):
    model = nn.ModuleDict({"user": nn.Embedding(100, 2, sparse=True)})
    first = of(list(model.parameters()))
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizers=[first], min_rows=1))
    for name, optimizer in (("a", first), ("b", of(list(model.parameters())))):
        assert not caplog.records
        model["user"](torch.arange(5)).sum().backward()
        optimizer.step()
        saver.save(name)
    [text] = warnings_of(caplog)
    assert text.startswith(
        "registered optimizer 'optimizers[0] of live_tables' has not stepped while its parameters ch"
    )
