"""The state of a dense optimizer follows its parameters, as slots follow ids."""

import pytest
import torch
from support.bank_runs import run
from support.builders import frozen
from support.calls import calls_of
from support.forge import Forge
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import CorruptCheckpointError, StateMismatchError
from recckpt.live import live_tables

LAYERS = ("dense1", "dense2", "head")


def build(url, *, value=0.0, rate=0.5, steps=0, layers=LAYERS, optimizer="dense_optim", width=2):
    """Return a run of some layers under Adam, each step of which has another gradient."""
    modules = {name: nn.Linear(width, 1) for name in layers}
    saver = run(url, value=value, **modules)
    saver.optim = torch.optim.Adam(saver.model.parameters(), lr=rate)
    saver.register_for_checkpointing(optimizer, saver.optim)
    for step in range(steps):
        for number, parameter in enumerate(saver.model.parameters()):
            parameter.grad = torch.full_like(parameter, value + step + number)
        saver.optim.step()
    return saver


def saved(url, **options):
    saver = build(url, **options)
    saver.save("c", step=5)
    return saver


def state(saver, name):
    """Return the state of a parameter, None where it has none."""
    return frozen(saver.optim.state.get(saver.model.get_parameter(name))) or None


def states(saver):
    return {name: state(saver, name) for name, _ in saver.model.named_parameters()}


@pytest.fixture
def old(tmp_path):
    return saved(tmp_path / "old", value=1.0, rate=0.1, steps=3)


@pytest.fixture
def other(tmp_path):
    return saved(tmp_path / "other", value=7.0, rate=0.2, steps=4)


def loaded(tmp_path, bank, **options):
    saver = build(tmp_path / "new", **options)
    saver.report = saver.load_by_config(bank)
    return saver


def entry(saver, **conf):
    return {"path": saver.output_dir, **conf}


# where it comes from


def test_it_comes_from_where_the_parameter_came_from(tmp_path, old, other):
    new = loaded(tmp_path, [entry(old), entry(other, load=["dense*"])])
    assert state(new, "head.weight") == state(old, "head.weight")
    for name in ("dense1.weight", "dense1.bias", "dense2.weight", "dense2.bias"):
        assert state(new, name) == state(other, name) != state(old, name)
    assert new.optim.state[new.model.dense1.weight]["step"] == 4
    assert new.optim.state[new.model.head.weight]["step"] == 3


@pytest.mark.parametrize("load", [["dense"], ["*"], ["dense*", "head*"], ["*.weight", "*.bias"], ["[dh]*"]])
def test_it_comes_along_with_the_parameters_however_they_are_named(tmp_path, old, load):
    new = loaded(tmp_path, [entry(old, load=load)])
    assert states(new) == states(old)


@pytest.mark.parametrize("exclude", ["dense1.*", "dense1.*@dense_optim"])
def test_it_is_not_taken_for_parameters_that_are_left_out_or_whose_state_is(tmp_path, old, exclude):
    new = loaded(tmp_path, [entry(old, exclude=[exclude])])
    assert states(new) == {**states(old), "dense1.weight": None, "dense1.bias": None}
    weight = old.model.dense1.weight.tolist() if "@" in exclude else [[0.0, 0.0]]
    assert new.model.dense1.weight.tolist() == weight
    new = loaded(tmp_path, [entry(old, load=["head.weight"])])
    assert {name for name, found in states(new).items() if found} == {"head.weight"}


def test_it_is_not_taken_for_parameters_that_are_skipped_or_resized(tmp_path, old):
    for action in ("skip", "resize"):
        new = loaded(tmp_path, [entry(old, on_mismatch={"*.weight": action})], width=3)
        assert {name for name, found in states(new).items() if found} == {"dense1.bias", "dense2.bias", "head.bias"}
    assert "its parameter is resized" in str(new.report)


def test_it_comes_under_the_name_that_the_parameter_had_there(tmp_path, old):
    swap = [{"dense1.*": "dense2.*"}, {"dense2.*": "dense1.*"}, {"top.*": "head.*"}]
    new = loaded(tmp_path, [entry(old, oname=swap)], layers=("dense1", "dense2", "top"))
    for name, there in (("dense1", "dense2"), ("dense2", "dense1"), ("top", "head")):
        assert state(new, f"{name}.weight") == state(old, f"{there}.weight") is not None
        assert state(new, f"{name}.bias") == state(old, f"{there}.bias")


def test_two_layers_may_come_from_one(tmp_path, old):
    new = loaded(tmp_path, [entry(old, oname={"copy.*": "head.*"})], layers=("head", "copy"))
    assert state(new, "copy.weight") == state(new, "head.weight") == state(old, "head.weight")
    for parameter in new.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    new.model.copy.weight.grad *= 2
    new.optim.step()
    assert state(new, "copy.weight") != state(new, "head.weight"), "each has its own"


def test_an_optimizer_may_have_another_name_there(tmp_path):
    old = saved(tmp_path / "old", value=1.0, steps=3, optimizer="adam")
    assert states(loaded(tmp_path, [entry(old, oname={"dense_optim": "adam"})])) == states(old)
    new = loaded(tmp_path, [entry(old)])
    assert set(states(new).values()) == {None}
    assert "from scratch: 'dense1.bias@dense_optim', 'dense1.weight@dense_optim', " in str(new.report)
    assert "has no 'dense_optim'" in str(new.report)


def test_two_optimizers_each_take_the_state_of_their_parameters(tmp_path, old):
    new = run(tmp_path / "new", a=nn.Linear(2, 1), b=nn.Linear(2, 1))
    one, two = torch.optim.Adam(new.model.a.parameters()), torch.optim.Adam(new.model.b.parameters())
    new.register_for_checkpointing("one", one)
    new.register_for_checkpointing("two", two)
    rules = {"one": "dense_optim", "two": "dense_optim", "a.*": "dense1.*", "b.*": "head.*"}
    new.load_by_config([entry(old, oname=rules)])
    assert frozen(one.state[new.model.a.weight]) == state(old, "dense1.weight")
    assert frozen(two.state[new.model.b.weight]) == state(old, "head.weight")


# what stays


@pytest.mark.parametrize("exclude", ["dense_opt", "dense_optim", "dense_op*", "extra", "*@dense_optim"])
def test_it_may_be_left_where_it_is(tmp_path, old, exclude):
    new = loaded(tmp_path, [entry(old, exclude=[exclude])], value=2.0, steps=1)
    fresh = build(tmp_path / "new", value=2.0, steps=1)
    assert new.model.head.weight.tolist() == old.model.head.weight.tolist()
    assert states(new) == states(fresh)


def test_a_parameter_that_had_no_state_there_loses_what_it_has_here(tmp_path):
    old = saved(tmp_path / "old", value=1.0)
    frozen_head = saved(tmp_path / "frozen", value=1.0)
    frozen_head.optim.param_groups[0]["params"] = list(frozen_head.model.dense1.parameters())
    frozen_head.save("d")
    for source in (old, frozen_head):
        new = loaded(tmp_path, [entry(source, load=["head.*"])], value=2.0, steps=1)
        assert state(new, "head.weight") is None, "moments of weights that are gone"
        assert state(new, "dense1.weight") == state(build(tmp_path / "new", value=2.0, steps=1), "dense1.weight")
    assert "'dense_optim' there does not train 'head.weight'" in str(new.report)


# settings


@pytest.mark.parametrize(("load", "rate"), [(["*"], 0.5), (["dense", "dense_opt"], 0.5), (["*", "dense_optim"], 0.1)])
def test_the_settings_of_another_run_are_taken_where_the_optimizer_is_named(tmp_path, old, load, rate):
    new = loaded(tmp_path, [entry(old, load=load)])
    assert [group["lr"] for group in new.optim.param_groups] == [rate]
    assert states(new) == states(old)
    new = loaded(tmp_path, [entry(old, load=["dense_optim"])], layers=("top", "dense1"))
    assert new.optim.param_groups[0]["lr"] == 0.1, "alone"
    assert set(states(new).values()) == {None}


def test_an_optimizer_or_state_that_is_named_without_its_parameters_warns_that_their_state_stays(tmp_path, old):
    new = loaded(tmp_path, [entry(old, load=["head.weight@dense_optim"])])
    assert state(new, "head.weight") is None
    assert any("comes with its parameters only" in text for text in new.report.warnings)
    warning = "'load': 'dense_optim' means the settings of the optimizer; a parameter's state comes with the parameter"
    new = loaded(tmp_path, [entry(old, load=["dense_optim"])])
    assert [text for text in new.report.warnings if warning in text]
    new = loaded(tmp_path, [entry(old, load=["dense_optim", "head.weight"])])
    assert not new.report.warnings


class Tied(nn.Module):
    """Two layers that share their weight, of which one is the first."""

    def __init__(self, *names):
        super().__init__()
        weight = nn.Parameter(torch.zeros(1, 2))
        for name in names:
            self.add_module(name, nn.Linear(2, 1, bias=False))
            self.get_submodule(name).weight = weight


@pytest.mark.parametrize("conf", [{}, {"oname": {"tied.*": "tied.*"}}])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("c", "b", "a"), ("a",), ("b",)])
def test_a_tied_parameter_finds_its_state_by_any_of_its_names(tmp_path, names, conf):
    def tied(url, *names, rate):
        saver = run(url, tied=Tied(*names))
        saver.optim = torch.optim.Adam(saver.model.parameters(), lr=rate)
        saver.register_for_checkpointing("opt", saver.optim)
        return saver

    old = tied(tmp_path / "old", "a", "b", rate=0.1)
    old.model.tied.a.weight.grad = torch.ones(1, 2)
    old.optim.step()
    old.save("c")
    new = tied(tmp_path / "new", *names, rate=0.5)
    new.load_by_config([entry(old, load=["dense", "opt"], strict=False, **conf)])
    assert new.optim.param_groups[0]["lr"] == 0.1
    assert frozen(list(new.optim.state.values())) == frozen(list(old.optim.state.values()))


def test_settings_go_by_the_names_that_parameters_had(tmp_path):
    def grouped(url, first, second):
        saver = run(url, **{first: nn.Linear(1, 1), second: nn.Linear(1, 1)})
        groups = [{"params": module.parameters()} for module in (saver.model.get_submodule(n) for n in (first, second))]
        saver.optim = torch.optim.SGD(groups, lr=0.5)
        saver.register_for_checkpointing("sgd", saver.optim)
        return saver

    old = grouped(tmp_path / "old", "a", "b")
    old.optim.param_groups[0]["lr"], old.optim.param_groups[1]["lr"] = 0.1, 0.2
    old.save("c")
    new = grouped(tmp_path / "new", "x", "y")
    new.load_by_config([entry(old, load=["sgd"], oname={"x.*": "b.*", "y.*": "a.*"})])
    assert [group["lr"] for group in new.optim.param_groups] == [0.2, 0.1]


def test_a_resume_brings_state_and_settings_back_and_adds_what_the_bank_has_of_new_layers(tmp_path, other):
    own = build(tmp_path / "new", value=1.0, rate=0.1, steps=3, layers=("dense1",))
    CheckpointManager(own, 1).step()
    new = build(tmp_path / "new", layers=("dense1", "head"))
    CheckpointManager(new, 1).load_model_bank([entry(other, load=["dense*", "head*"])])
    assert (state(new, "dense1.weight"), state(new, "head.weight")) == (
        state(own, "dense1.weight"),
        state(other, "head.weight"),
    )
    assert new.optim.param_groups[0]["lr"] == 0.1


def test_a_dynamic_entry_brings_the_state_again(tmp_path, old):
    manager = CheckpointManager(build(tmp_path / "new"), 10)
    manager.load_model_bank([entry(old, load=["head.*"], is_dynamic=True)])
    for parameter in old.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    old.optim.step()
    old.save("d", step=6)
    [report] = manager.reload_dynamic()
    assert state(manager.saver, "head.weight") == state(old, "head.weight")
    assert {item.name.text for item in report.taken} >= {"head.weight", "head.weight@dense_optim"}
    assert state(manager.saver, "dense1.weight") is None


# patterns, plans


def test_a_pattern_that_means_only_registered_objects_warns_and_takes_no_moments(tmp_path, old, caplog):
    new = loaded(tmp_path, [entry(old, load=["dense_*"])])
    assert set(states(new).values()) == {None}
    assert "'load': 'dense_*' matches only registered objects: 'dense_optim'" in caplog.text
    caplog.clear()
    loaded(tmp_path, [entry(old, load=["dense*", "h*"], exclude=["*@dense_optim"])])
    assert "registered objects" not in caplog.text
    caplog.clear()
    loaded(tmp_path, [entry(old, load=["head.*"])])
    assert "@dense_optim" not in caplog.text, "of state that stays with its parameter"
    with pytest.raises(ValueError, match="'@'"):
        new.register_for_checkpointing("a@b", torch.optim.Adam(new.model.parameters()))
    new.register_for_checkpointing("a@b", 3)


def test_a_plan_says_of_each_parameter_where_its_state_comes_from(tmp_path, old, other):
    bank = [entry(old, exclude=["dense1.*"]), entry(other, load=["dense2.*"])]
    new = build(tmp_path / "new")
    plan = new.plan(bank)
    found = {item.name.text: plan.source_of(item) or item.reason for item in plan.items if "@" in item.name.text}
    one, two = f"{old.output_dir}/c", f"{other.output_dir}/c"
    assert found == {
        **{f"dense1.{name}@dense_optim": "its parameter is not loaded" for name in ("weight", "bias")},
        **{f"dense2.{name}@dense_optim": two for name in ("weight", "bias")},
        **{f"head.{name}@dense_optim": one for name in ("weight", "bias")},
    }
    assert "@dense_optim" not in "".join(line for line in str(plan).splitlines() if line.startswith("from scratch"))
    assert new.load_by_config(bank).items == plan.items


# what is special about a parameter, or about its state there


def test_a_parameter_that_is_not_in_the_model_resumes_and_does_not_travel(tmp_path):
    def with_loss(url, steps=0):
        saver, loss = run(url, top=nn.Linear(1, 1)), nn.Linear(1, 1)
        optim = torch.optim.Adam([*saver.model.parameters(), *loss.parameters()])
        saver.register_for_checkpointing("optim", optim)
        for _ in range(steps):
            for parameter in optim.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            optim.step()
        return saver, optim

    old, trained = with_loss(tmp_path / "old", 2)
    old.save("c")
    again, optim = with_loss(tmp_path / "old")
    again.load()
    assert frozen(optim.state_dict()) == frozen(trained.state_dict())
    new, optim = with_loss(tmp_path / "new")
    new.load_by_config([entry(old)])
    have = [bool(optim.state.get(parameter)) for parameter in optim.param_groups[0]["params"]]
    assert have == [True, True, False, False]


def test_state_without_names_resumes_by_place_and_does_not_travel(tmp_path):
    class Plain:
        def __init__(self, optim):
            self.state_dict, self.load_state_dict = optim.state_dict, optim.load_state_dict

    old = run(tmp_path / "old", top=nn.Linear(1, 1))
    trained = torch.optim.Adam(old.model.parameters())
    for parameter in old.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.step()
    old.register_for_checkpointing("optim", Plain(trained))
    old.save("c")
    for url, taken in ((tmp_path / "old", True), (tmp_path / "new", False)):
        new = run(url, top=nn.Linear(1, 1))
        optim = torch.optim.Adam(new.model.parameters())
        new.register_for_checkpointing("optim", optim)
        report = new.load(str(tmp_path / "old"))
        assert (frozen(optim.state_dict()) == frozen(trained.state_dict())) == taken
        assert ("there has no names of parameters" in str(report)) == (not taken)
        assert bool(report.fresh_parameters) == (not taken)


def test_a_failure_later_on_gives_the_optimizer_back_what_it_had(tmp_path, old):
    new = build(tmp_path / "new", value=2.0, steps=1)
    old.register_for_checkpointing("value", 3)
    old.save("d")
    before = states(new)
    refusing = nn.Linear(1, 1)
    refusing.load_state_dict = lambda state: (_ for _ in ()).throw(RuntimeError("no"))
    new.register_for_checkpointing("value", refusing)
    with pytest.raises(StateMismatchError, match="'value'"):
        new.load_by_config([entry(old)])
    assert states(new) == before


def test_names_of_parameters_that_the_manifest_does_not_list_are_damage_and_change_nothing(tmp_path, old):
    Forge(tmp_path / "old" / "c").edit_manifest(lambda values: values["names"].pop("dense_opt"))
    saver = build(tmp_path / "old", value=3.0, steps=2)
    before = states(saver)
    with pytest.raises(CorruptCheckpointError, match=r"'dense_optim'.*found the names of its parameters"):
        saver.load()
    assert states(saver) == before


@pytest.mark.slow
def test_what_a_load_does_grows_with_the_parameters_and_not_with_their_square(tmp_path):
    def trained(directory, n_layers):
        model = nn.ModuleList([nn.Linear(1, 1) for _ in range(n_layers)])
        optim = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optim.step()
        saver = Saver(model, output_dir=str(tmp_path / directory))
        saver.register_for_checkpointing("optim", optim)
        return saver

    counts = []
    for n_layers in (100, 100, 800):  # the first one imports
        saver = trained(f"{len(counts)}", n_layers)
        saver.save("c")
        counts.append(calls_of(saver.load))
    assert counts[2] < 8 * counts[1]


@pytest.mark.parametrize("is_table", [False, True])
def test_a_resume_says_whose_state_was_saved_though_no_optimizer_has_them_here(tmp_path, is_table):
    """As where a group of layers that were frozen at first is added behind the restore."""

    def made():
        model = nn.ModuleDict({"words": nn.Embedding(20, 3).requires_grad_(False), "head": nn.Linear(3, 1)})
        optimizer = torch.optim.Adam(model["head"].parameters())
        tables = live_tables(model, optimizer, min_rows=1) if is_table else None
        saver = Saver(model, output_dir=tmp_path, tables=tables)
        saver.register_for_checkpointing("dense_optim", optimizer)
        return model, optimizer, saver

    def thawed(model, optimizer):
        optimizer.add_param_group({"params": list(model["words"].requires_grad_(True).parameters())})

    def about_states(saver):
        return [text for text in saver.load().warnings if "no registered optimizer has here" in text]

    model, optimizer, saver = made()
    thawed(model, optimizer)
    model["head"](model["words"](torch.arange(20))).sum().backward()
    optimizer.step()
    saver.save("1")
    assert about_states(saver) == []
    model, optimizer, late = made()
    [warning] = about_states(late)
    assert "'words.weight@dense_optim'; add them, as by add_param_group, before it is loaded" in warning
    thawed(model, optimizer)
    assert about_states(late) == []
    bank = {"path": str(tmp_path), "load": ["dense"]}
    assert not any("no registered" in text for text in made()[2].load_by_config([bank]).warnings), "of another run"
