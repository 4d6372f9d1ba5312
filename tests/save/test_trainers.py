"""What trains a model and is not saved is said once, with the line that mends it; nothing else is."""

import copy
import logging

import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.format.manifest import Unsaved
from recckpt.inspect.report import report
from recckpt.policies import Choose
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import HashTable, JointOptimizer, SparseAdam, SparseSGD

DENSE = "2 parameters of the model ('dense.weight', 'dense.bias') train, and no registered optimizer has them"
BOTH = Unsaved(parameters=("dense.weight", "dense.bias"))
SPARSE = "a sparse optimizer that was not given to the Saver trains 'user'"


class Clicks(nn.Module):
    """A table and a dense layer, of which each step trains both."""

    def __init__(self):
        super().__init__()
        self.user = HashTable(2, name="user")
        self.dense = nn.Linear(2, 1)

    def backward(self):
        self.dense(self.user(torch.arange(3))).sum().backward()


def step(model, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model.backward()
    for optimizer in optimizers:
        optimizer.step()


def step_dense(model, optimizer):
    """Train the dense layer alone, and clear the gradients before anybody saves."""
    for _ in range(2):
        model.dense(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def said(caplog):
    """Return what has been said in warnings so far, but for what a load leaves as it is."""
    caplog.set_level(logging.WARNING)
    return lambda: [text for record in caplog.records if not (text := record.getMessage()).startswith("from scratch")]


@pytest.fixture
def silent(said):
    """Check at the end of a test that nothing has been said."""
    yield
    assert said() == []


def only(lines, *beginnings):
    """Check that there is one line for each beginning, and no other."""
    assert len(lines) == len(beginnings), lines
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in lines), (beginning, lines)


@pytest.fixture
def model():
    return Clicks()


def saver_of(model, root):
    """Return the optimizers of a model, and a saver that has both."""
    dense, sparse = torch.optim.Adam(model.dense.parameters(), lr=0.1), SparseAdam([model.user])
    saver = Saver(model, sparse, root)
    saver.register_for_checkpointing("dense_optim", dense)
    return dense, sparse, saver


# exactly one


def test_a_dense_optimizer_that_is_not_registered_is_said_once_and_kept_in_the_checkpoint(tmp_path, model, said):
    dense, sparse = torch.optim.Adam(model.dense.parameters()), SparseAdam([model.user])
    saver = Saver(model, sparse, tmp_path)
    step(model, dense, sparse)
    assert said() == []
    records = []
    for name in "ab":
        records.append(saver.save(name))
        step(model, dense, sparse)
        assert len(said()) == 1
    records.append(saver.save("nothing has trained since"))
    (line,) = said()
    assert line.startswith(DENSE)
    assert "register_for_checkpointing('dense_optim', optimizer) before restore(), or attach(model, [" in line
    assert [record.training.unsaved for record in records] == [BOTH] * 3

    saver.register_for_checkpointing("dense_optim", dense)
    record = saver.save("c")
    assert (record.training.unsaved, record.training.optimizers) == (Unsaved(), {"dense_optim": ("Adam",)})
    assert len(said()) == 1


def test_optimizers_of_one_parameter_each_are_said_in_one_line(tmp_path, model, said):
    """As they are where each steps in the backward pass as soon as its gradient is there."""
    sparse = SparseAdam([model.user])
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.dense.parameters()]
    saver = Saver(model, sparse, tmp_path)
    for name in "ab":
        step(model, sparse, *each)
        record = saver.save(name)
    assert record.training.unsaved == BOTH
    only(said(), DENSE)
    other = Saver(model, sparse, tmp_path / "other")
    step(model, sparse, *each)
    other.save("a")
    only(said(), DENSE, DENSE)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_parameters_are_seen_to_train_after_their_gradients_were_cleared(tmp_path, model, said, kind, foreach):
    dense = kind(model.dense.parameters(), lr=0.1, foreach=foreach)
    saver = Saver(model, output_dir=tmp_path)
    step_dense(model, dense)
    assert saver.save("a").training.unsaved == BOTH
    only(said(), DENSE)


def test_parameters_that_begin_to_train_later_are_said_then(tmp_path, model, said):
    model.dense.weight.requires_grad_(False)
    dense = torch.optim.Adam(model.dense.parameters())
    saver = Saver(model, output_dir=tmp_path)
    for name in "abc":
        step_dense(model, dense)
        saver.save(name)
        model.dense.weight.requires_grad_(name != "c")
    one = "1 parameter of the model ('dense.{}') train, and no registered optimizer has them"
    only(said(), one.format("bias"), one.format("weight"))
    assert saver.save("d").training.unsaved == Unsaved(parameters=("dense.bias",))  # the other one is frozen by now


@mostly_slow()
@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}), (torch.optim.LBFGS, {})],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_optimizer_that_was_made_anew_after_the_one_that_is_registered_is_said(
    tmp_path, model, said, kind, options, is_wrapped
):
    registered = kind(model.dense.parameters(), lr=0.1, **options)
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("dense_optim", Wrapper(registered) if is_wrapped else registered)
    again = torch.optim.AdamW(model.dense.parameters(), lr=0.1)
    for name in "ab":
        step_dense(model, again)
        saver.save(name)
    record = saver.save("nothing has trained since")
    (line,) = said()
    assert line.startswith(
        "registered optimizer 'dense_optim' has not stepped while its parameters changed: was another"
    )
    assert "give it to attach() or register_for_checkpointing('dense_optim', optimizer)" in line
    assert record.training.unsaved == Unsaved(optimizers=("dense_optim",))

    def loss():
        registered.zero_grad()
        value = model.dense(torch.ones(2)).sum()
        value.backward()
        return value

    registered.step(loss)
    assert saver.save("d").training.unsaved == Unsaved()  # the one that is saved trains again
    assert len(said()) == 1


def test_an_optimizer_that_is_registered_beside_the_one_that_rests_is_saved(tmp_path, model, said):
    first, second = (torch.optim.Adam(model.dense.parameters()) for _ in range(2))
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("first", first)
    step_dense(model, second)
    assert saver.save("a").training.unsaved == Unsaved(optimizers=("first",))
    saver.register_for_checkpointing("second", second)
    step_dense(model, second)
    assert saver.save("b").training.unsaved == Unsaved()
    only(said(), "registered optimizer 'first' has not stepped")


@pytest.mark.parametrize(
    "resume",
    [lambda manager: manager.restore(), lambda manager: manager.load_model_bank([]), lambda manager: None],
    ids=["restore", "bank", "first save"],
)
def test_a_sparse_optimizer_that_the_saver_was_not_given_is_said_at_a_restore_or_the_first_save(
    tmp_path, model, said, resume
):
    sparse = SparseSGD([model.user])
    manager = CheckpointManager(Saver(model, output_dir=tmp_path), 1)
    resume(manager)
    step(model, sparse)
    manager.step()
    only(said(), SPARSE)
    assert "Saver(model, sparse_optim)" in said()[0]
    assert manager.saver.save("a").training.unsaved == Unsaved(tables=("user",))
    only(said(), SPARSE)
    model.second = HashTable(2, name="second")
    another = SparseAdam([model.second])
    Saver(model, sparse, tmp_path / "other").save("a")
    only(said(), SPARSE, "a sparse optimizer that was not given to the Saver trains 'second'")
    assert another.tables


def test_of_two_models_in_one_saver_each_optimizer_counts(tmp_path, said):
    pair = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=0.1) for name, module in pair.items()}
    saver = Saver(pair, output_dir=tmp_path)
    saver.register_for_checkpointing("generator", optimizers["generator"])
    for _ in range(2):
        pair["critic"](pair["generator"](torch.ones(1, 2))).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        saver.save("a", overwrite=True)
    only(said(), "2 parameters of the model ('critic.weight', 'critic.bias') train, and no registered")


def test_an_object_that_saves_one_of_two_optimizers_does_not_save_the_other(tmp_path, model, said):
    model.top = nn.Linear(1, 1)
    optimizers = [torch.optim.Adam(module.parameters()) for module in (model.dense, model.top)]
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("trainer", Trainer(optimizers[0]))
    for _ in range(2):
        model.top(model.dense(torch.ones(2))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    saver.save("a")
    only(said(), "4 parameters of the model ('dense.weight', 'dense.bias', 'top.weight' and 1 more) train, and no")


def test_a_scheduler_that_is_registered_holds_no_state_of_its_optimizer(tmp_path, model, said):
    dense = torch.optim.Adam(model.dense.parameters())
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("schedule", torch.optim.lr_scheduler.StepLR(dense, 1))
    step_dense(model, dense)
    saver.save("a")
    only(said(), DENSE)


def test_a_table_whose_gradients_nobody_takes_is_said(tmp_path, model, said):
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("dense_optim", dense)
    records = []
    for name in "abc":
        step(model, dense)
        records.append(saver.save(name))
    only(
        said(),
        "no optimizer trains table 'user', so its gradients are never used: model.parameters() has no rows of tab",
    )
    assert [record.training.unsaved.gradients for record in records] == [(), ("user",), ("user",)]


@pytest.mark.parametrize("is_registered", [True, False])
def test_an_optimizer_of_nothing_but_a_mark_of_a_table_is_said_to_train_nothing(tmp_path, model, said, is_registered):
    model = nn.ModuleDict({"user": model.user})
    model.mark = nn.Parameter(torch.empty(0))
    dense = torch.optim.Adam(model.parameters())
    manager = CheckpointManager(Saver(model, output_dir=tmp_path), 1)
    if is_registered:
        manager.register_for_checkpointing("dense_optim", dense)
        manager.restore()
        only(said(), "Adam trains nothing: all its parameters are empty")
    for _ in range(3):
        model["user"](torch.arange(3)).sum().backward()
        dense.step()
        manager.step()
    registered, other = "Adam trains nothing: all its parameters are empty", "no optimizer trains table 'user'"
    only(said(), registered if is_registered else other)
    assert "make an optimizer of the tables, such as SparseAdam(" in said()[0]


def test_a_restore_says_what_its_checkpoint_lacks(tmp_path, model, said, caplog):
    dense = torch.optim.Adam(model.dense.parameters())
    manager = CheckpointManager(Saver(model, output_dir=tmp_path), 1)
    step(model, dense)
    manager.step()
    caplog.clear()
    again = CheckpointManager(Saver(Clicks(), output_dir=tmp_path), 1)
    again.restore()
    (line,) = said()
    assert line.endswith("ckpt_1 lacks the state of the optimizer that trained 'dense.weight', 'dense.bias'")
    (finding,) = report(tmp_path).findings
    assert finding.level == "warning"
    lacks = "the state of the optimizer that trained 'dense.weight', 'dense.bias'"
    assert finding.what == f"the newest checkpoint lacks {lacks}"


FAMILIES = {
    "dense": nn.Linear(2, 1),
    "live": nn.ModuleDict({"rows": nn.Embedding(1000, 2), "top": nn.Linear(2, 1)}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_before", [0, 4])
def test_an_optimizer_that_is_made_anew_after_attach_is_said(tmp_path, said, family, n_before):
    model = copy.deepcopy(FAMILIES[family])
    optimizer = torch.optim.Adam(model.parameters())
    manager = CheckpointManager.attach(model, optimizer, output_dir=tmp_path, save_interval=2, async_save=False)
    for number in range(n_before + 4):
        if number == n_before:
            optimizer = torch.optim.Adam(model.parameters())
        rows = torch.ones(2) if family == "dense" else model["rows"](torch.tensor(number))
        (model if family == "dense" else model["top"])(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step()
    only(said(), "registered optimizer 'dense_optim' has not stepped while its parameters changed")


class Warmup:
    """A scheduler that is none of torch's and leaves the mark of timm's in the groups."""

    def __init__(self, optimizer):
        self.optimizer, self.n_epochs = optimizer, 0
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def state_dict(self):
        return {"n_epochs": self.n_epochs}

    def load_state_dict(self, state):
        self.n_epochs = state["n_epochs"]

    def step(self):
        self.n_epochs += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] / (1 + self.n_epochs)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


SCHEDULERS = {"torch": step_lr, "timm": Warmup}


@mostly_slow()
@pytest.mark.parametrize("of", ["dense_optim", "sparse_optim"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_that_is_not_registered_is_said_once_and_a_restore_says_it_too(tmp_path, model, said, make, of):
    optimizers = {"dense_optim": torch.optim.Adam(model.dense.parameters()), "sparse_optim": SparseAdam([model.user])}
    manager = CheckpointManager.attach(model, list(optimizers.values()), output_dir=tmp_path, save_interval=1)
    scheduler = make(optimizers[of])
    for _ in range(3):
        step(model, *optimizers.values())
        scheduler.step()
        manager.step()
    manager.wait_until_finished()
    assert manager.saver.save("last").training.unsaved == Unsaved(schedules=(of,))
    only(said(), f"a scheduler sets the learning rate of optimizer '{of}', and is not saved")
    assert "register_for_checkpointing('scheduler', scheduler) before restore(), or attach(..., sched" in said()[0]

    other = Clicks()
    again = CheckpointManager(Saver(other, SparseAdam([other.user]), output_dir=tmp_path), 1)
    again.register_for_checkpointing("dense_optim", torch.optim.Adam(other.dense.parameters()))
    again.restore()
    assert any(f"lacks the position in the learning-rate schedule of '{of}'" in line for line in said())


class Sharpness(torch.optim.Optimizer):
    """As the SAM that most programs copy: it steps an optimizer of its own, whose moments its state dict lacks."""

    def __init__(self, params, base):
        super().__init__(params, {})
        self.base_optimizer = base(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.clone()
        self.base_optimizer.step()


def test_an_optimizer_inside_another_whose_state_is_saved_nowhere_is_said_until_it_is_registered(tmp_path, said):
    def run(path, base, *, is_whole):
        model = nn.ModuleDict({"dense": nn.Linear(2, 1)})
        outer, saver = Sharpness(model.parameters(), base), Saver(model, output_dir=path)
        saver.register_for_checkpointing("sam", outer)
        if is_whole:
            saver.register_for_checkpointing("base_optimizer", outer.base_optimizer)
        for name in "12":
            step_dense(model, outer)
            saver.save(name)

    run(tmp_path / "sgd", torch.optim.SGD, is_whole=False)
    run(tmp_path / "whole", torch.optim.Adam, is_whole=True)
    assert said() == []
    run(tmp_path / "left", torch.optim.Adam, is_whole=False)
    only(said(), "registered optimizer 'sam' steps another one, its base_optimizer, whose state its own state_dict()")


class HalfPrecision(torch.optim.Optimizer):
    """A wrapper without groups that trains copies of the parameters, as SafeFP16Optimizer of pytorch-optimizer."""

    def __init__(self, optimizer):
        self.optimizer, [group] = optimizer, optimizer.param_groups
        self.own = group["params"]
        group["params"] = self.copies = [nn.Parameter(one.detach().double()) for one in self.own]

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    @torch.no_grad()
    def step(self):
        for copy_, one in zip(self.copies, self.own, strict=True):
            copy_.grad = one.grad.double()
        self.optimizer.step()
        for copy_, one in zip(self.copies, self.own, strict=True):
            one.copy_(copy_)

    def zero_grad(self):
        for one in self.own:
            one.grad = None


def test_of_a_wrapper_without_groups_the_copies_that_it_trains_are_said_until_they_are_saved(tmp_path, said):
    def run(path, n_steps, *, is_whole):
        torch.manual_seed(0)
        model = nn.ModuleDict({"dense": nn.Linear(2, 1)})
        wrapper = HalfPrecision(torch.optim.Adam(model.parameters(), lr=0.1))
        manager = CheckpointManager(Saver(model, output_dir=tmp_path / path), 1)
        manager.register_for_checkpointing("dense_optim", wrapper)
        if is_whole:
            manager.register_for_checkpointing("weights", nn.ParameterList(wrapper.copies))
        manager.restore(hyper_parameters="keep")  # which looks at the groups
        for _ in range(n_steps):
            model["dense"](torch.ones(2)).sum().backward()
            wrapper.step()
            wrapper.zero_grad()
            manager.step()
        return model["dense"].weight, manager.saver.save("last", overwrite=True).training.unsaved

    _, unsaved = run("in part", 2, is_whole=False)
    assert unsaved == Unsaved(weights=("dense_optim",))
    only(said(), "registered optimizer 'dense_optim' trains 2 parameters that the model does not have")
    straight, unsaved = run("straight", 4, is_whole=True)
    assert unsaved == Unsaved()
    assert len(said()) == 1
    run("resumed", 2, is_whole=True)
    assert torch.equal(run("resumed", 2, is_whole=True)[0], straight)
    model = Clicks()
    wrapper = HalfPrecision(torch.optim.Adam(model.dense.parameters()))
    with pytest.raises(ValueError, match="Adam trains 2 parameters that the model does not have"):
        CheckpointManager.attach(model, [wrapper, SparseAdam([model.user])], output_dir=tmp_path, save_interval=1)


# none


class Run:
    """An object of the user's own that saves a scheduler."""

    def __init__(self, scheduler):
        self._schedule = scheduler

    def state_dict(self):
        return {"epoch": 0, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state):
        self._schedule.load_state_dict(state["schedule"])


class Prepared:
    """A scheduler around another one, as accelerate's."""

    def __init__(self, scheduler):
        self.scheduler, self.optimizers = scheduler, [scheduler.optimizer]
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict


REGISTERED = {
    "itself": step_lr,
    "several": lambda some: torch.optim.lr_scheduler.SequentialLR(some, [step_lr(some), step_lr(some)], [2]),
    "in another": lambda some: Prepared(step_lr(some)),
    "of the user's own": lambda some: Run(step_lr(some)),
    "timm": Warmup,
}


@mostly_slow()
@pytest.mark.parametrize("make", REGISTERED.values(), ids=REGISTERED)
def test_a_scheduler_that_is_saved_is_not_missed(tmp_path, model, silent, make):
    dense, sparse, saver = saver_of(model, tmp_path)
    saver.register_for_checkpointing("scheduler", scheduler := make(dense))
    for name in "abc":
        step(model, dense, sparse)
        for group in dense.param_groups:
            group["lr"] *= 0.9
        assert saver.save(name).training.unsaved == Unsaved(), scheduler


def test_a_scheduler_of_a_joint_optimizer_is_that_of_its_parts(tmp_path, model, silent):
    joint = JointOptimizer(torch.optim.Adam(model.dense.parameters()), SparseAdam([model.user]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(joint, 0.5)
    manager = CheckpointManager.attach(
        model, joint, schedulers=scheduler, output_dir=tmp_path, save_interval=1, async_save=False
    )
    for _ in range(3):
        step(model, joint)
        scheduler.step()
        manager.step()


@pytest.mark.parametrize(
    ("mark", "rates", "join"),
    [
        ({"initial_lr": 0.1}, (0.1, 0.1, 0.1), lambda *all_: all_),  # as a load leaves it of a run that had one
        ({}, (0.1, 0.05, 0.025), lambda *all_: all_),
        ({}, (0.1, 0.1, 0.1), lambda *all_: [JointOptimizer(*all_)]),
    ],
    ids=["a mark of a schedule of before", "a rate by hand", "a joint optimizer"],
)
def test_a_rate_without_a_scheduler_needs_none_and_a_joint_optimizer_steps_those_that_are_registered(
    tmp_path, model, silent, mark, rates, join
):
    dense, sparse, saver = saver_of(model, tmp_path)
    dense.param_groups[0].update(mark)
    for number, rate in enumerate(rates):
        dense.param_groups[0]["lr"] = rate
        step(model, *join(dense, sparse))
        assert saver.save(f"{number}").training.unsaved == Unsaved()


def test_nothing_is_said_where_all_is_saved(tmp_path, model, said):
    dense, sparse = torch.optim.Adam(model.parameters()), SparseAdam(filter_out_sparse_param(model))
    saver = Saver(model, sparse, tmp_path)
    saver.register_for_checkpointing("dense_optim", dense)
    manager = CheckpointManager(saver, 1)
    manager.restore()
    for _ in range(3):
        step(model, dense, sparse)
        manager.step()
    model.backward()
    record = saver.save("between backward and step")
    assert said() == []
    assert record.training.unsaved == Unsaved()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


class Trainer:
    """An object of the user's own that saves its optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])


class Forwarding:
    """What is no optimizer and has all that one has, as Lightning's."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.__dict__["_optimizer"], name)


@pytest.mark.parametrize("holder", [Wrapper, Trainer, Forwarding])
def test_an_optimizer_inside_of_a_registered_object_is_saved(tmp_path, model, said, holder):
    dense = torch.optim.Adam(model.dense.parameters())
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("holder", holder(dense))
    for name in "abc":
        step_dense(model, dense)
        training = saver.save(name).training
        assert training.unsaved == Unsaved()
    assert said() == []
    assert holder is not Wrapper or training.optimizers == {"holder": ("Adam",)}
    assert not dense._optimizer_state_dict_pre_hooks


def test_savers_that_export_or_serve_need_no_optimizer_beside_the_one_that_has_it(tmp_path, model, silent):
    dense, sparse, run = saver_of(model, tmp_path / "run")
    export = Saver(model, output_dir=tmp_path / "export")
    serving = Saver(model, output_dir=tmp_path / "serving", choose=Choose(slots=[]))
    step(model, dense, sparse)
    for saver in (export, serving, run, Saver(model, output_dir=tmp_path / "made after it was trained")):
        saver.save("a")
    alone = Clicks()
    dense, sparse = torch.optim.Adam(alone.dense.parameters()), SparseAdam([alone.user])
    saver = Saver(alone, output_dir=tmp_path / "alone", choose=Choose(slots=[]))
    step(alone, dense, sparse)
    assert saver.save("a").training.unsaved == Unsaved()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_towers_that_are_frozen_or_not_trained_need_no_optimizer(tmp_path, model, silent, is_frozen):
    model.dense.requires_grad_(not is_frozen)
    sparse = SparseAdam([model.user])
    saver = Saver(model, sparse, tmp_path)
    for name in "abc":
        step(model, sparse)
        if is_frozen:
            with torch.no_grad():
                model.dense.weight.mul_(0.9).add_(0.1)  # as a target that follows another tower
        else:
            assert model.dense.weight.grad is not None
        saver.save(name)


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_loop_that_loads_and_saves_trains_nothing(tmp_path, model, silent, is_registered):
    """As one that converts checkpoints, by the saver or by torch, also where gradients are left from before."""
    model.dense(torch.ones(2)).sum().backward()
    saver = Saver(model, output_dir=tmp_path, max_keep=9)
    if is_registered:
        saver.register_for_checkpointing("dense_optim", torch.optim.Adam(model.dense.parameters()))
    saver.save("0")
    for number in range(1, 4):
        saver.load("0")
        saver.load("0")
        assert saver.save(f"{number}").training.unsaved == Unsaved()
    model.zero_grad()
    for number in range(4, 7):
        model.load_state_dict({**model.state_dict(), "dense.bias": torch.full((1,), float(number))})
        assert saver.save(f"{number}").training.unsaved == Unsaved()


def test_two_models_with_a_saver_each_need_their_own_optimizers_alone(tmp_path, silent):
    pair = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers, savers = [torch.optim.Adam(one.parameters()) for one in pair], []
    for number, optimizer in enumerate(optimizers):
        savers.append(Saver(pair[number], output_dir=tmp_path / f"{number}"))
        savers[-1].register_for_checkpointing("dense_optim", optimizer)
    for turn in (0, 1, 0, 0, 1):  # in each of which one trains, and both have gradients
        pair[1](pair[0](torch.ones(1, 2))).sum().backward()
        optimizers[turn].step()
        for saver in savers:
            assert saver.save("a", overwrite=True).training.unsaved == Unsaved()


def test_of_two_optimizers_of_the_same_parameters_one_may_rest(tmp_path, model, silent):
    """As where training begins with one and goes on with another, or takes turns."""
    saver, kinds = Saver(model, output_dir=tmp_path), (torch.optim.SGD, torch.optim.Adam)
    optimizers = [kind(model.dense.parameters(), lr=0.1) for kind in kinds]
    for name, optimizer in zip(("begin", "go_on"), optimizers, strict=True):
        saver.register_for_checkpointing(name, optimizer)
    for number, turn in enumerate((0, 1, 1, 0, 0)):
        step_dense(model, optimizers[turn])
        assert saver.save(f"{number}").training.unsaved == Unsaved()


class SignSGD(torch.optim.Optimizer):
    """One that keeps no state."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sign())


@pytest.mark.parametrize(
    "make",
    [SignSGD, lambda some: torch.optim.SGD(some, lr=0.1), lambda some: torch.optim.Adam(some, fused=True)],
    ids=["of somebody else", "plain", "fused"],
)
def test_a_registered_optimizer_that_steps_is_not_stale_though_it_keeps_no_state_or_torch_counts_little(
    tmp_path, model, silent, make
):
    dense, saver = make(model.dense.parameters()), Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("dense_optim", dense)
    for name in "abc":
        step_dense(model, dense)
        assert saver.save(name).training.unsaved == Unsaved()


def test_an_optimizer_of_another_model_and_gradients_that_are_taken_by_hand_are_none_of_this_one(
    tmp_path, model, silent
):
    other, saver = nn.Linear(2, 1), Saver(model, output_dir=tmp_path)
    optimizer = torch.optim.Adam(other.parameters())
    for number in range(5):
        other(torch.ones(2)).sum().backward()
        optimizer.step()
        model.backward()
        model.user.take_gradients()
        saver.save(f"{number}")


def test_what_torch_does_not_count_is_not_seen(tmp_path, model, silent):
    """The limit that docs/resume.md names."""
    dense, saver = torch.optim.Adam(model.dense.parameters(), fused=True), Saver(model, output_dir=tmp_path)
    for name in "ab":
        model.dense(torch.ones(2)).sum().backward()
        dense.step()
        model.dense.weight.data.add_(1)
        saver.save(name)


def test_a_copy_of_a_model_is_trained_by_nobody(tmp_path, model, said):
    sparse = SparseAdam([model.user])
    step(model, sparse)
    manager = CheckpointManager(Saver(copy.deepcopy(model), output_dir=tmp_path), 1)
    manager.restore()
    manager.step()
    only(said(), "table 'user': was copied")


def test_optimizers_get_no_hooks_and_hear_nothing_of_savers(tmp_path, model):
    from torch.optim import optimizer as of_torch

    def hooks():
        own = [*vars(dense).items(), *vars(of_torch).items()]
        return {name: dict(value) for name, value in own if name.endswith("_hooks") and isinstance(value, dict)}

    dense = torch.optim.Adam(model.dense.parameters())
    before = hooks()
    assert len(before) > 2
    savers = [Saver(model, output_dir=tmp_path) for _ in range(2)]
    model.dense(torch.ones(2)).sum().backward()
    dense.step()
    savers[-1].save("a")
    assert hooks() == before


@mostly_slow()
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
def test_a_registered_optimizer_that_rests_is_not_stale_while_no_other_one_trains(tmp_path, model, silent, kind):
    dense = kind(model.dense.parameters(), lr=0.1)
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("dense_optim", dense)
    for number in range(6):
        with torch.no_grad():
            model.dense.weight.add_(1)  # by hand, as where averages are swapped in
        assert saver.save(f"{number}").training.unsaved == Unsaved()


def test_one_object_is_not_registered_as_an_object_and_as_a_position(tmp_path, model):
    class Loader:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    loader, saver = Loader(), Saver(model, output_dir=tmp_path)
    saver.register_io_state("clicks", loader)
    with pytest.raises(ValueError, match="'clicks' and 'loader' are the same Loader"):
        saver.register_for_checkpointing("loader", loader)
    saver.register_for_checkpointing("other", other := Loader())
    with pytest.raises(ValueError, match="'other' and 'data' are the same Loader"):
        saver.register_io_state("data", other)
