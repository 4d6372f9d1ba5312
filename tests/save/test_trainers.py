"""What trains a model and is not saved is said once, with the line that mends it; nothing else is."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from recckpt import CheckpointManager, Saver, filter_out_sparse_param
from recckpt.format.training import Unsaved
from recckpt.inspect.report.report import report
from recckpt.sparse import HashTable, SparseAdam, SparseSGD

SPARSE = "a sparse optimizer trains 'user', and the Saver was not given it"


class Clicks(nn.Module):
    """A table and a dense layer, of which each step trains both."""

    def __init__(self):
        super().__init__()
        self.user = HashTable(2, name="user")
        self.dense = nn.Linear(2, 1)

    def backward(self):
        self.dense(self.user(torch.arange(3))).sum().backward()


def step(model, *optimizers):
    model.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def said(caplog):
    """Return what has been said in warnings so far, but for what a load leaves as it is."""
    caplog.set_level(logging.WARNING)
    return lambda: [text for record in caplog.records if not (text := record.getMessage()).startswith("from scratch")]


def only(lines, *beginnings):
    """Check that there is one line for each beginning, and no other."""
    assert len(lines) == len(beginnings), lines
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in lines), (beginning, lines)


@pytest.fixture
def model():
    return Clicks()


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
    (line,) = said()
    assert line.startswith("Adam trains 2 parameters of the model ('dense.weight', 'dense.bias'), and no registered")
    assert "register_for_checkpointing('dense_optim', optimizer) before restore()" in line
    assert [record.training.unsaved for record in records] == [Unsaved(optimizers=("Adam",))] * 2

    saver.register_for_checkpointing("dense_optim", dense)
    record = saver.save("c")
    assert (record.training.unsaved, record.training.optimizers) == (Unsaved(), {"dense_optim": ("Adam",)})
    assert len(said()) == 1


def test_optimizers_of_one_parameter_each_are_said_in_one_line(tmp_path, model, said):
    """As they are where each steps in the backward pass as soon as its gradient is there."""
    sparse = SparseAdam([model.user])
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.dense.parameters()]
    saver = Saver(model, sparse, tmp_path)
    for name, steps in {"a": 1, "b": 2, "c": 2}.items():
        step(model, sparse, *each[:steps])
        record = saver.save(name)
    assert record.training.unsaved == Unsaved(optimizers=("SGD",))
    lines = [f"SGD trains 1 parameter of the model ('dense.{name}'), and no" for name in ("weight", "bias")]
    only(said(), *lines)
    other = Saver(model, sparse, tmp_path / "other")
    step(model, sparse, *each)
    other.save("a")
    only(said(), *lines, "SGD trains 2 parameters of the model ('dense.weight', 'dense.bias'), and no")


def test_a_sparse_optimizer_that_the_saver_was_not_given_is_said_at_the_first_save(tmp_path, model, said):
    sparse = SparseSGD([model.user])
    saver = Saver(model, output_dir=tmp_path)
    step(model, sparse)
    record = saver.save("a")
    saver.save("b")
    only(said(), SPARSE)
    assert "Saver(model, sparse_optim)" in said()[0]
    assert record.training.unsaved == Unsaved(tables=("user",))


@pytest.mark.parametrize("resume", [lambda manager: manager.restore(), lambda manager: manager.load_model_bank([])])
def test_a_sparse_optimizer_that_the_saver_was_not_given_is_said_at_a_restore(tmp_path, model, said, resume):
    sparse = SparseSGD([model.user])
    manager = CheckpointManager(Saver(model, output_dir=tmp_path), 1)
    resume(manager)
    only(said(), SPARSE)
    step(model, sparse)
    manager.step()
    only(said(), SPARSE)


def test_a_second_sparse_optimizer_is_one_too(tmp_path, said):
    first, second = HashTable(2, name="first"), HashTable(2, name="second")
    one, two = SparseAdam([first]), SparseAdam([second])
    Saver(nn.ModuleList([first, second]), one, tmp_path).save("a")
    only(said(), "a sparse optimizer trains 'second', and")
    assert two.tables


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
    only(said(), "SGD trains 2 parameters of the model ('critic.weight', 'critic.bias')")


def test_a_scheduler_that_is_registered_holds_no_state_of_its_optimizer(tmp_path, model, said):
    dense = torch.optim.Adam(model.dense.parameters())
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("schedule", torch.optim.lr_scheduler.StepLR(dense, 1))
    model.dense(torch.ones(2)).sum().backward()
    dense.step()
    saver.save("a")
    only(said(), "Adam trains 2 parameters")


def test_a_table_whose_gradients_nobody_takes_is_said(tmp_path, model, said):
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("dense_optim", dense)
    records = []
    for name in "abc":
        step(model, dense)
        records.append(saver.save(name))
    only(
        said(), "no optimizer trains table 'user', whose gradients wait for one: make one of the tables, such as Sparse"
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
    only(said(), "Adam trains nothing: all its parameters are empty")


def test_a_restore_says_what_its_checkpoint_lacks(tmp_path, model, said, caplog):
    dense = torch.optim.Adam(model.dense.parameters())
    manager = CheckpointManager(Saver(model, output_dir=tmp_path), 1)
    step(model, dense)
    manager.step()
    caplog.clear()
    again = CheckpointManager(Saver(Clicks(), output_dir=tmp_path), 1)
    again.restore()
    (line,) = said()
    assert line.endswith("ckpt_1 lacks the state of Adam, which trained dense parameters")
    (finding,) = report(tmp_path).findings
    assert finding.level == "warning"
    assert finding.what == "the newest checkpoint lacks the state of Adam, which trained dense parameters"


# none


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


@pytest.mark.parametrize("holder", [Wrapper, Trainer])
def test_an_optimizer_inside_of_a_registered_object_is_saved(tmp_path, model, said, holder):
    dense = torch.optim.Adam(model.dense.parameters())
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("holder", holder(dense))
    model.dense(torch.ones(2)).sum().backward()
    dense.step()
    assert saver.save("a").training.unsaved == Unsaved()
    assert said() == []
    assert not dense._optimizer_state_dict_pre_hooks


def test_two_savers_of_one_model_need_its_optimizers_once(tmp_path, model, said):
    dense, sparse = torch.optim.Adam(model.dense.parameters()), SparseAdam([model.user])
    run, export = Saver(model, sparse, tmp_path / "run"), Saver(model, output_dir=tmp_path / "export")
    run.register_for_checkpointing("dense_optim", dense)
    step(model, dense, sparse)
    for saver in (export, run):
        saver.save("a")
    assert said() == []


def test_a_saver_for_serving_needs_no_optimizer(tmp_path, model, said):
    dense, sparse = torch.optim.Adam(model.dense.parameters()), SparseAdam([model.user])
    saver = Saver(model, output_dir=tmp_path, save_slots=[])
    step(model, dense, sparse)
    assert saver.save("a").training.unsaved == Unsaved()
    assert said() == []


def test_a_model_that_was_trained_before_its_saver_was_made_is_an_export(tmp_path, model, said):
    dense = torch.optim.Adam(model.dense.parameters())
    step(model, dense)
    Saver(model, output_dir=tmp_path).save("a")
    assert said() == []


def test_frozen_towers_and_tables_that_are_trained_alone_need_no_dense_optimizer(tmp_path, model, said):
    model.dense.requires_grad_(False)
    sparse = SparseAdam([model.user])
    saver = Saver(model, sparse, tmp_path)
    for name in "ab":
        step(model, sparse)
        saver.save(name)
    assert said() == []


def test_an_optimizer_of_another_model_is_none_of_this_one(tmp_path, model, said):
    other = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(other.parameters())
    saver = Saver(model, output_dir=tmp_path)
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    saver.save("a")
    assert said() == []


def test_a_copy_of_a_model_is_trained_by_nobody(tmp_path, model, said):
    sparse = SparseAdam([model.user])
    step(model, sparse)
    manager = CheckpointManager(Saver(copy.deepcopy(model), output_dir=tmp_path), 1)
    manager.restore()
    manager.step()
    only(said(), "table 'user' was copied")


def test_gradients_that_are_taken_by_hand_do_not_pile_up(tmp_path, model, said):
    saver = Saver(model, output_dir=tmp_path)
    for number in range(5):
        model.backward()
        model.user.take_gradients()
        saver.save(f"{number}")
    assert said() == []


def test_a_saver_that_goes_in_the_middle_of_a_step_does_not_end_it(tmp_path, model):
    """torch walks its hooks after a step, and the garbage collector may run meanwhile."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    savers = [Saver(model, output_dir=tmp_path)]
    gone = weakref.ref(savers[0])

    def collect(*_):
        savers.clear()
        gc.collect()

    later = []  # a hook behind the one that collects: torch has yet to walk on to it
    hooks = [register_optimizer_step_post_hook(hook) for hook in (collect, lambda *_: later.append("called"))]
    try:
        torch.optim.SGD(model.dense.parameters(), lr=0.1).step()
    finally:
        for hook in hooks:
            hook.remove()
    assert gone() is None
    assert later == ["called"]


def test_many_savers_note_steps_by_one_hook(tmp_path, model):
    from torch.optim.optimizer import _global_optimizer_post_hooks

    first = Saver(model, output_dir=tmp_path)
    before = len(_global_optimizer_post_hooks)
    savers = [Saver(model, output_dir=tmp_path) for _ in range(3)]
    assert len(_global_optimizer_post_hooks) == before
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    optimizer.step()
    assert all(len(each.trainers._stepped) == 1 for each in (first, *savers))


def test_the_class_is_that_of_the_optimizer_inside_of_a_wrapper(tmp_path, model):
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("wrapped", Wrapper(torch.optim.Adam(model.dense.parameters())))
    assert saver.save("a").training.optimizers == {"wrapped": ("Adam",)}


def test_one_object_is_not_registered_as_an_object_and_as_a_position(tmp_path, model):
    class Loader:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    loader, saver = Loader(), Saver(model, output_dir=tmp_path)
    saver.register_io_state("clicks", loader)
    with pytest.raises(ValueError, match="'clicks' and 'loader' are one Loader, which is registered once"):
        saver.register_for_checkpointing("loader", loader)
    saver.register_for_checkpointing("other", other := Loader())
    with pytest.raises(ValueError, match="'other' and 'data' are one Loader"):
        saver.register_io_state("data", other)
