"""The states of optimizers of all classes, of rows and of dense parameters, come back from where they are."""

import copy
import logging

import pytest
import torch
from support.bank_runs import run
from support.builders import frozen
from support.optimizer_runs import by_closure, classes_of, differences
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.dense.optimizers import NamedOptimizer
from recckpt.errors import StateMismatchError
from recckpt.live import live_tables
from recckpt.load import optimizer_states
from recckpt.load.inventory import list_inventory, listed_inventory
from recckpt.load.open_source import OpenSource

SAID = "from scratch: 'dense.bias@dense_optim', 'dense.weight@dense_optim', 'dense_optim': saved by {}, this one is {}"
LAYERS = ("one", "two")


def manager_of(url, make):
    saver = run(url, value=1.0, dense=nn.Linear(2, 1))
    saver.optim = make(saver.model.parameters())
    saver.register_for_checkpointing("dense_optim", saver.optim)
    return CheckpointManager(saver, save_interval=1)


def stepped(manager):
    for parameter in manager.saver.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    manager.saver.optim.step()
    manager.step()
    return manager


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.25)


class Slower(torch.optim.Adam):
    """An Adam of the user's own."""


@mostly_slow()
@pytest.mark.parametrize("deep", [0, 1])
@pytest.mark.parametrize(("before", "after", "names"), [(adam, sgd, ("Adam", "SGD")), (sgd, adam, ("SGD", "Adam"))])
def test_state_of_another_class_is_not_merged_in_and_the_log_says_so(tmp_path, caplog, before, after, names, deep):
    stepped(manager_of(tmp_path, before))
    manager = manager_of(tmp_path, after)
    settings = [{**group, "params": None} for group in manager.saver.optim.param_groups]
    if deep:  # it has state of its own by then
        stepped(manager_of(tmp_path / "elsewhere", after))
        manager.saver.optim.state.update({p: {"mine": 1} for p in manager.saver.model.parameters()})
    caplog.clear()
    assert manager.restore() == 1
    assert not manager.saver.optim.state
    assert [{**group, "params": None} for group in manager.saver.optim.param_groups] == settings
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [SAID.format(*names)]
    stepped(manager)  # and trains on


@pytest.mark.parametrize(("before", "after"), [(adam, Slower), (Slower, adam)])
def test_a_class_that_inherits_from_the_other_goes_on_with_its_state(tmp_path, caplog, before, after):
    old = stepped(manager_of(tmp_path, before)).saver.optim
    manager = manager_of(tmp_path, after)
    manager.restore()
    assert frozen(manager.saver.optim.state_dict()) == frozen(old.state_dict())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_after_the_next_save_the_new_class_resumes_and_a_list_of_names_has_the_class_too(tmp_path):
    stepped(manager_of(tmp_path, adam))
    changed = manager_of(tmp_path, sgd)
    changed.restore()
    stepped(changed)
    resumed = manager_of(tmp_path, sgd)
    assert resumed.restore() == 2
    assert frozen(resumed.saver.optim.state_dict()) == frozen(changed.saver.optim.state_dict())
    listed = listed_inventory(list_inventory(resumed.saver.loader.live_state().inventory))
    assert {name.text: thing.lineage for name, thing in listed.items() if thing.lineage} == {"dense_optim": ("SGD",)}


def test_a_scheduler_of_the_new_optimizer_goes_on_from_the_place_with_the_rate_of_this_run(tmp_path):
    def scheduled(make):
        manager = manager_of(tmp_path, make)
        manager.schedule = torch.optim.lr_scheduler.LambdaLR(manager.saver.optim, lambda step: 0.5**step)
        manager.register_for_checkpointing("schedule", manager.schedule)
        return manager

    old = scheduled(adam)
    stepped(old)
    old.schedule.step()
    stepped(old)
    new = scheduled(sgd)
    new.restore()
    assert new.saver.optim.param_groups[0]["lr"] == 0.5 / 2
    stepped(new)
    new.schedule.step()
    assert new.saver.optim.param_groups[0]["lr"] == 0.5 / 4


class Items(nn.Module):
    """An embedding that attach() makes a live table, one that is too small for that, and a layer."""

    def __init__(self):
        super().__init__()
        self.large, self.small, self.top = nn.Embedding(2000, 4), nn.Embedding(5, 4), nn.Linear(4, 1)


def attached(tmp_path, make, parts=("large", "small", "top"), steps=0):
    model = Items()
    optimizer = make([one for part in parts for one in getattr(model, part).parameters()])
    manager = CheckpointManager.attach(
        model, optimizer, output_dir=tmp_path, save_interval=steps or 1, async_save=False
    )
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        manager.step()
    return model, optimizer, manager


def kept(optimizer, parameter):
    return {key: frozen(value) for key, value in optimizer.state.get(parameter, {}).items() if value is not None}


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.5, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.5),
}


@mostly_slow()
@pytest.mark.parametrize("parts", [("large", "small", "top"), ("large",)], ids=["all", "live"])
@pytest.mark.parametrize(
    ("before", "after"), [("SGD", "momentum"), ("momentum", "SGD"), ("Adam", "amsgrad"), ("amsgrad", "Adam")]
)
def test_settings_come_back_where_the_same_class_keeps_more_or_less_of_a_row(tmp_path, caplog, before, after, parts):
    model, old, _ = attached(tmp_path, OPTIMIZERS[before], parts, steps=2)
    other, new, manager = attached(tmp_path, OPTIMIZERS[after], parts)
    caplog.set_level(logging.INFO, "recckpt")
    manager.restore()
    settings = [{key: value for key, value in each.param_groups[0].items() if key != "params"} for each in (old, new)]
    assert settings[0] == settings[1]
    assert f"lr {OPTIMIZERS[after](model.parameters()).param_groups[0]['lr']} -> {settings[0]['lr']}" in caplog.text
    assert "saved by" not in caplog.text
    for part in parts:
        for one, twin in zip(*(getattr(each, part).parameters() for each in (model, other)), strict=True):
            assert kept(new, twin) == kept(old, one)


DECAY = ("weight_decay", "decoupled_weight_decay")


@mostly_slow()
@pytest.mark.parametrize("parts", [("large", "small", "top"), ("large",)], ids=["all", "live"])
@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [("Adam", "AdamW", "0.01, not 0"), ("AdamW", "Adam", "0, not 0.01"), ("amsgrad", "AdamW", "0.01, not 0")],
)
def test_adam_and_adamw_go_on_with_each_others_moments_and_settings_but_weight_decay(
    tmp_path, caplog, before, after, stays, parts
):
    model, old, _ = attached(tmp_path, OPTIMIZERS[before], parts, steps=2)
    other, new, manager = attached(tmp_path, OPTIMIZERS[after], parts)
    own = {key: new.param_groups[0][key] for key in DECAY}
    manager.restore()
    assert {key: new.param_groups[0][key] for key in DECAY} == own
    for key in ("lr", "betas", "amsgrad"):
        assert new.param_groups[0][key] == old.param_groups[0][key]
    for part in parts:
        for one, twin in zip(*(getattr(each, part).parameters() for each in (model, other)), strict=True):
            assert kept(new, twin) == kept(old, one)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings
    assert all("the weight decay of this run stays" in text and f"weight_decay {stays}" in text for text in warnings)
    for parameter in (one for group in new.param_groups for one in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    new.step()


def test_a_plan_says_that_the_weight_decay_of_this_run_stays(tmp_path):
    stepped(manager_of(tmp_path, adam))
    saver = manager_of(tmp_path, torch.optim.AdamW).saver
    plan = saver.plan([{"path": saver.output_dir, "load": ["*", "dense_optim"]}])
    [item] = [item for item in plan.items if item.name.text == "dense_optim"]
    assert item.conversion == "the weight decay of this run stays: saved by Adam, this one is AdamW"
    assert item.conversion in str(plan)


@pytest.mark.parametrize(("before", "after"), [("live", "dense"), ("dense", "live")])
def test_moments_go_on_between_live_tables_and_tensors_of_related_classes(tmp_path, before, after):
    def built(kind, make):
        model = Items()
        optimizer = make(model.parameters())
        tables = live_tables(model, optimizer) if kind == "live" else None
        saver = Saver(model, output_dir=tmp_path, tables=tables)
        saver.register_for_checkpointing("dense_optim", optimizer)
        return model, optimizer, saver

    model, old, saver = built(before, OPTIMIZERS["Adam"])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    old.step()
    saver.save("c")
    other, new, saver = built(after, OPTIMIZERS["AdamW"])
    saver.load()
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert kept(new, twin) == kept(old, one)
    assert (new.param_groups[0]["lr"], new.param_groups[0]["weight_decay"]) == (0.1, 0.01)


EVERY_OPTIMIZER = {
    **{
        name: lambda model, kind=kind: kind(model.parameters(), lr=0.01)
        for name, kind in classes_of(torch.optim).items()
    },
    "AdamAmsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "RMSpropCentered": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    "SGDMomentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4),
}
if "Muon" in EVERY_OPTIMIZER:  # since torch 2.9, of matrices alone
    EVERY_OPTIMIZER["Muon"] = lambda model: torch.optim.Muon(
        [one for one in model.parameters() if one.dim() == 2], lr=0.01
    )


def _sparse_adam(model):
    model.items.sparse = True
    return torch.optim.SparseAdam([model.items.weight])


EVERY_OPTIMIZER["SparseAdam"] = _sparse_adam


@mostly_slow()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_equals_a_straight_one(tmp_path, dtype):
    runs = {name: (make, by_closure) for name, make in EVERY_OPTIMIZER.items()}
    assert differences(tmp_path, runs, dtype) == {}


class Counting(torch.optim.SGD):
    """Keeps a count of steps, a word, an average of all parameters and another optimizer beside their states."""

    def __init__(self, parameters, lr=0.1, momentum=0.9):
        super().__init__(parameters, lr=lr, momentum=momentum)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"])
        self.n_steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.inner.step()
        self.n_steps += 1
        self.state["k"] = torch.tensor(self.n_steps, dtype=torch.int64)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["word"] = f"step {self.n_steps}"

    def state_dict(self):
        return {**super().state_dict(), "n_steps": self.n_steps, "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.n_steps = state["n_steps"]
        self.inner.load_state_dict(state["inner"])


def build(url, *, steps=0, layers=LAYERS, make=Counting, dtype=torch.float32, width=2):
    saver = run(url, value=1.0, **{name: nn.Linear(width, 1, dtype=dtype) for name in layers})
    saver.optim = make(saver.model.parameters())
    saver.register_for_checkpointing("opt", saver.optim)
    trained(saver, steps)
    return saver


def trained(saver, steps):
    for number in range(steps):
        for name, parameter in saver.model.named_parameters():
            parameter.grad = torch.full_like(parameter, number + len(name))
        saver.optim.step()


def saved(url, **options):
    saver = build(url, **options)
    saver.save("c", step=3)
    return saver


def test_a_resume_brings_it_back_and_training_goes_on_as_if_it_had_not_stopped(tmp_path):
    saved(tmp_path / "none")
    new = build(tmp_path / "none", steps=2)
    new.load()
    assert "k" not in new.optim.state, "a load forgets what the optimizer had"
    assert new.optim.n_steps == 0
    old, new = saved(tmp_path, steps=3), build(tmp_path)
    new.load()
    assert frozen(new.optim.state_dict()) == frozen(old.optim.state_dict())
    for saver in (old, new):
        trained(saver, 2)
    assert frozen(new.optim.state_dict()) == frozen(old.optim.state_dict())
    assert frozen(new.model.state_dict()) == frozen(old.model.state_dict())


def test_after_layers_were_reordered_what_goes_by_their_places_starts_fresh_and_the_load_says_so(tmp_path, caplog):
    old = saved(tmp_path, steps=3)
    new = build(tmp_path, layers=LAYERS[::-1])
    report = new.load()
    assert (new.optim.n_steps, int(new.optim.state["k"])) == (3, 3), "counts are those of all"
    assert not new.optim.inner.state, "the inner optimizer knows its parameters by number"
    for name in ("one.weight", "two.bias"):
        state = (frozen(each.optim.state[each.model.get_parameter(name)]) for each in (old, new))
        assert next(state) == next(state)
    line = "'opt': 'inner' in its state, which belongs to no single parameter, starts fresh"
    assert [text for text in report.warnings if line in text]
    assert [record for record in caplog.records if line in record.getMessage() and record.levelno == logging.WARNING]


@pytest.mark.parametrize(("conf", "n_steps"), [({}, 3), ({"load": ["one.*"]}, 0), ({"exclude": ["opt"]}, 0)])
def test_it_comes_to_another_run_with_the_state_of_all_parameters(tmp_path, conf, n_steps):
    old = saved(tmp_path / "old", steps=3)
    new = build(tmp_path / "new")
    new.load_by_config([{"path": old.output_dir, **conf}])
    assert new.optim.n_steps == n_steps
    assert ("k" in new.optim.state) == bool(n_steps)


def test_a_parameter_keeps_an_empty_state_as_it_was(tmp_path):
    old = build(tmp_path, make=torch.optim.SGD)
    for parameter in old.model.parameters():
        old.optim.state[parameter] = {}
    old.save("c")
    new = build(tmp_path, make=torch.optim.SGD)
    new.load()
    assert frozen(new.optim.state_dict()) == frozen(old.optim.state_dict())


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, history_size=3)


def descended(saver, steps):
    def closure():
        saver.optim.zero_grad()
        loss = sum((number + 1) * (each - 3).square().sum() for number, each in enumerate(saver.model.parameters()))
        loss.backward()
        return loss

    for _ in range(steps):
        saver.optim.step(closure)
    return saver


def test_lbfgs_goes_on_where_its_parameters_lie_as_they_did(tmp_path):
    old = descended(build(tmp_path, make=lbfgs), 2)
    old.save("c")
    new = build(tmp_path, make=lbfgs)
    new.load()
    assert frozen(descended(new, 1).model.state_dict()) == frozen(descended(old, 1).model.state_dict())


@mostly_slow()
@pytest.mark.parametrize("options", [{"layers": LAYERS[::-1]}, {"layers": (*LAYERS, "three")}, {"layers": ("one",)}])
def test_lbfgs_starts_fresh_where_they_do_not_and_the_load_says_so(tmp_path, caplog, options):
    descended(build(tmp_path, make=lbfgs), 2).save("c")
    new = build(tmp_path, make=lbfgs, **options)
    report = new.load(load_conf={"strict": False})
    line = "'opt' starts fresh: it depends on the order of the parameters, which differs here"
    assert line in report.warnings
    assert line in caplog.text
    assert not any(new.optim.state.values())
    descended(new, 1)


class Precise(torch.optim.SGD):
    """Keeps a momentum of float32 of each weight, whatever that is of, and a scale in a list."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
            momentum.mul_(0.9).add_(parameter.grad.float(), alpha=1 / 3)
            state["scales"] = [torch.tensor([1 / 3]), (torch.tensor([2 / 3], dtype=torch.float64), "x")]
            parameter.data.add_(momentum.to(parameter.dtype), alpha=-0.1)


def precise(parameters):
    return Precise(parameters, lr=0.1)


def test_state_of_another_dtype_than_its_parameter_keeps_it_bit_for_bit_and_the_order_of_its_dimensions(tmp_path):
    old = build(tmp_path, make=precise, dtype=torch.bfloat16, steps=3)
    old.optim.state[old.model.one.weight]["basis"] = torch.arange(12.0).reshape(3, 4).T
    old.save("c", step=3)
    new = build(tmp_path, make=precise, dtype=torch.bfloat16)
    new.load()
    state = new.optim.state[new.model.one.weight]
    assert state["momentum"].dtype == torch.float32
    assert state["basis"].stride() == (1, 4)
    assert frozen(new.optim.state_dict()) == frozen(old.optim.state_dict())
    again = copy.deepcopy(new.optim)
    again.load_state_dict(new.optim.state_dict())
    assert frozen(again.state_dict()) != frozen(old.optim.state_dict()), "torch alone casts it"


def test_a_load_that_fails_gives_it_back_as_it_was(tmp_path):
    class Refusing:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise RuntimeError("not me")

    savers = [build(tmp_path, make=precise, dtype=torch.bfloat16, steps=3) for _ in range(2)]
    for saver in savers:
        saver.register_for_checkpointing("refusing", Refusing())
    savers[0].save("c")
    trained(savers[1], 1)
    before = frozen(savers[1].optim.state_dict())
    with pytest.raises(StateMismatchError, match="not me"):
        savers[1].load()
    assert frozen(savers[1].optim.state_dict()) == before


def test_moments_are_cast_where_their_parameter_is(tmp_path):
    old = saved(tmp_path / "old", make=torch.optim.Adam, steps=3)
    new = build(tmp_path / "new", make=torch.optim.Adam, dtype=torch.bfloat16)
    new.load_by_config([{"path": old.output_dir, "on_mismatch": "cast"}])
    state = new.optim.state[new.model.one.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)
    trained(new, 1)


def test_names_are_looked_up_as_often_for_many_parameters_and_groups_as_for_few(tmp_path, monkeypatch):
    monkeypatch.setattr(
        optimizer_states, "may_be_sharded", lambda: True
    )  # each state is then laid out as its parameter
    lookups = []

    def counted(kind, method):
        call = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda self, *args: lookups.append(method) or call(self, *args))

    counted(NamedOptimizer, "_named_groups")
    counted(OpenSource, "under_names_of")
    counts = []
    for layers in (("a", "b"), tuple(f"layer{number}" for number in range(20))):
        options = {"layers": layers, "make": lambda parameters: torch.optim.Adam([{"params": [p]} for p in parameters])}
        saved(tmp_path / f"{len(layers)}", steps=1, **options)
        new = build(tmp_path / f"{len(layers)}", **options)
        lookups.clear()
        new.load()
        counts.append(len(lookups))
    assert counts[0] == counts[1]
