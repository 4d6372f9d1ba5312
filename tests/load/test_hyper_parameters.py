"""A resume brings hyper-parameters back and says which it replaced; or the run keeps those that it has."""

import logging
from functools import partial

import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn
from torch.optim import lr_scheduler as schedules

from recckpt import CheckpointManager, Saver
from recckpt.errors import LoadConfError
from recckpt.live import live_tables
from recckpt.load.inventory import list_inventory, listed_inventory
from recckpt.sparse import HashTable, SparseAdagrad, SparseAdam


class Run:
    """A run of a table and a dense layer, each with an optimizer and, where asked, a schedule."""

    def __init__(self, url, rate=0.01, schedule=None, groups=1, **dense):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"user": HashTable(2, name="user"), "dense": nn.Linear(2, 1)})
        self.sparse = SparseAdam([self.model["user"]], lr=rate)
        layer = self.model["dense"]
        parameters = [{"params": [parameter]} for parameter in layer.parameters()] if groups > 1 else layer.parameters()
        self.dense = torch.optim.Adam(parameters, lr=rate, **dense)
        self.manager = CheckpointManager(Saver(self.model, self.sparse, url), 1)
        self.manager.register_for_checkpointing("dense_optim", self.dense)
        self.schedules = [schedule(optimizer) for optimizer in (self.dense, self.sparse)] if schedule else []
        for number, each in enumerate(self.schedules):
            self.manager.register_for_checkpointing(f"schedule_{number}", each)

    def step(self):
        self.model["dense"](self.model["user"](torch.arange(4))).square().sum().backward()
        for each in (self.dense, self.sparse):
            each.step()
            each.zero_grad()
        for each in self.schedules:
            each.step(1.0) if isinstance(each, schedules.ReduceLROnPlateau) else each.step()
        self.manager.step()
        return self

    @property
    def rates(self):
        return [group["lr"] for optimizer in (self.dense, self.sparse) for group in optimizer.param_groups]


@pytest.fixture
def infos(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [r.getMessage() for r in caplog.records if "hyper-parameters" in r.getMessage()]


def test_a_resume_says_in_one_line_what_it_replaced(tmp_path, infos):
    Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01, weight_decay=0.5)
    run.manager.restore()
    assert run.rates == [0.1, 0.1]
    assert infos() == [
        f"{tmp_path}/ckpt_1: replaced hyper-parameters of this run: dense_optim lr 0.01 -> 0.1, dense_optim "
        "weight_decay 0.5 -> 0, sparse_optim lr 0.01 -> 0.1"
    ]
    Run(tmp_path, 0.1).manager.restore()
    assert len(infos()) == 1, "nothing is said where nothing differs"
    Run(tmp_path / "groups", 0.1, groups=2).step()
    run = Run(tmp_path / "groups", 0.1, groups=2)
    run.dense.param_groups[1]["betas"] = (0.5, 0.9)
    run.manager.restore()
    assert infos()[1].endswith(": dense_optim[1] betas (0.5, 0.9) -> (0.9, 0.999)")


def test_of_several_groups_of_tables_the_line_names_the_tables(tmp_path, infos):
    def saver(rate):
        tables = [HashTable(2, name=name) for name in ("user", "item", "ad")]
        model = nn.ModuleDict({table.name: table for table in tables})
        model["word"] = nn.Embedding(10, 2, sparse=True)
        words = torch.optim.SparseAdam(model["word"].parameters(), lr=rate)
        groups = [{"tables": tables[:1]}, {"tables": tables[1:], "lr": rate}]
        live = live_tables(model, words, min_rows=1)
        return Saver(model, SparseAdam(groups, lr=0.1), str(tmp_path), tables=live)

    saver(0.1).save("ckpt_1", step=1)
    CheckpointManager(saver(0.2), 1).restore()
    assert infos()[0].endswith(": sparse_optim of 'item', 'ad' lr 0.2 -> 0.1, sparse_optim of 'word' lr 0.2 -> 0.1")


def test_a_run_may_keep_its_own_and_goes_on_with_the_state(tmp_path, infos):
    old = Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01, weight_decay=0.5)
    own = [dict(group) for optimizer in (run.dense, run.sparse) for group in optimizer.param_groups]
    assert run.manager.restore(hyper_parameters="keep") == 1
    kept = [dict(group) for optimizer in (run.dense, run.sparse) for group in optimizer.param_groups]
    assert [{**group, "params": None} for group in kept] == [{**group, "params": None} for group in own]
    assert all(one is other for one, other in zip(run.dense.param_groups[0]["params"], own[0]["params"], strict=True))
    moments = [[state["exp_avg"] for state in each.dense.state.values()] for each in (run, old)]
    assert all(map(torch.equal, *moments))
    assert run.sparse.state_dict()["state"] == {"user": {"step": 1}}
    assert infos() == [
        f"{tmp_path}/ckpt_1: this run keeps its hyper-parameters: dense_optim lr 0.01, not 0.1, dense_optim "
        "weight_decay 0.5, not 0, sparse_optim lr 0.01, not 0.1"
    ]
    run.step()


class Counting(torch.optim.Adam):
    """Counts in its groups, as schedule-free optimizers and those of pytorch-optimizer do."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in (self.defaults, *self.param_groups):
            group["k"] = 0

    def step(self):
        for group in self.param_groups:
            group["k"], group["step"] = group["k"] + 1, group.get("step", 0) + 1
        return super().step()


def test_what_training_counts_in_the_groups_is_no_setting_that_a_run_keeps(tmp_path, infos):
    def made(rate):
        model = nn.Linear(2, 1)
        optimizer = Counting(model.parameters(), rate)
        return optimizer, CheckpointManager.attach(model, optimizer, output_dir=tmp_path, save_interval=1)

    optimizer, manager = made(0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    manager.step()
    manager.close()
    optimizer, manager = made(0.2)
    manager.restore(hyper_parameters="keep")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["k"], group["step"]) == (0.2, 1, 1)
    assert infos()[0].endswith("this run keeps its hyper-parameters: dense_optim lr 0.2, not 0.1")
    manager.close()
    optimizer, manager = made(0.2)
    manager.saver.load_by_config([{"path": str(tmp_path)}])
    group = optimizer.param_groups[0]
    assert (group["lr"], group["k"], group["step"]) == (0.2, 1, 1), "a warm start has it with the moments"


def sequence(optimizer):
    parts = [schedules.LinearLR(optimizer, 0.5, total_iters=2), schedules.ExponentialLR(optimizer, 0.9)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES = {
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.9),
    "step": partial(schedules.StepLR, step_size=2),
    "exponential": partial(schedules.ExponentialLR, gamma=0.9),
    "polynomial": partial(schedules.PolynomialLR, total_iters=20, power=2.0),
    "cosine": partial(schedules.CosineAnnealingLR, T_max=20),
    "restarts": partial(schedules.CosineAnnealingWarmRestarts, T_0=4),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 3 * optimizer.param_groups[0]["lr"], total_steps=20),
    "cyclic": lambda optimizer: schedules.CyclicLR(
        optimizer, optimizer.param_groups[0]["lr"], 4 * optimizer.param_groups[0]["lr"], 3
    ),
    "sequence": sequence,
    "chain": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 3), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")
@mostly_slow()
@pytest.mark.parametrize("name", SCHEDULES)
def test_kept_rates_follow_the_schedule_from_the_place_that_was_loaded(tmp_path, name):
    """As if the run had had them all along."""
    old, straight = Run(tmp_path / "run", 0.1, SCHEDULES[name]), Run(tmp_path / "straight", 0.02, SCHEDULES[name])
    for _ in range(3):
        old.step()
        straight.step()
    run = Run(tmp_path / "run", 0.02, SCHEDULES[name])
    assert run.manager.restore(hyper_parameters="keep") == 3
    for _ in range(4):
        assert run.rates == pytest.approx(straight.rates, rel=1e-9)
        assert [each.get_last_lr() for each in run.schedules] == [
            pytest.approx(each.get_last_lr(), rel=1e-9) for each in straight.schedules
        ]
        run.step()
        straight.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", ["one cycle", "cyclic"])
def test_kept_betas_follow_a_schedule_that_moves_them_too(tmp_path, name):
    old, straight = Run(tmp_path / "run", 0.1, SCHEDULES[name]), Run(tmp_path / "straight", 0.02, SCHEDULES[name])
    for _ in range(3):
        old.step()
        straight.step()
    run = Run(tmp_path / "run", 0.02, SCHEDULES[name])
    run.manager.restore(hyper_parameters="keep")
    for one, other in ((run.dense, straight.dense), (run.sparse, straight.sparse)):
        assert one.param_groups[0]["betas"] == other.param_groups[0]["betas"] != (0.9, 0.999)


@pytest.mark.parametrize("has_live", [False, True])
@pytest.mark.parametrize(("how", "first"), [("load", 0.5), ("keep", 0.25)])
def test_new_rows_begin_with_the_first_sum_of_the_settings_that_the_run_has_then(tmp_path, how, first, has_live):
    def made(value):
        model = nn.ModuleDict({"user": HashTable(2, name="user"), "word": nn.Embedding(10, 2, sparse=True)})
        words = torch.optim.SparseAdam(model["word"].parameters()) if has_live else ()
        tables = live_tables(model, words, min_rows=1) if has_live else None
        sparse = SparseAdagrad([model["user"]], initial_accumulator_value=value)
        return model["user"], CheckpointManager(Saver(model, sparse, str(tmp_path), tables=tables), 1)

    made(0.5)[1].step()
    user, manager = made(0.25)
    manager.restore(hyper_parameters=how)
    user(torch.arange(1))
    assert user.slots["sparse_adagrad_sum"].tolist() == [[first, first]]


def test_a_schedule_by_what_was_measured_or_made_after_the_restore_begins_at_the_kept_rate(tmp_path):
    plateau = partial(schedules.ReduceLROnPlateau, patience=0, factor=0.5)
    old = Run(tmp_path, 0.1, plateau)
    for _ in range(2):
        old.step()
    assert old.rates == [0.05, 0.05]
    run = Run(tmp_path, 0.02, plateau)
    run.manager.restore(hyper_parameters="keep")
    assert run.rates == [0.02, 0.02]
    run.step()
    assert run.rates == [0.01, 0.01]
    Run(tmp_path / "late", 0.1, SCHEDULES["exponential"]).step()
    run = Run(tmp_path / "late", 0.02)
    run.manager.restore(hyper_parameters="keep")
    assert "initial_lr" not in run.dense.param_groups[0]
    assert schedules.ExponentialLR(run.dense, 0.5).base_lrs == [0.02]


def test_a_run_that_resumes_by_its_bank_may_keep_its_own_too_and_once_they_are_replaced_it_is_too_late(tmp_path):
    Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01)
    run.manager.load_model_bank([], hyper_parameters="keep")
    assert run.rates == [0.01, 0.01]
    assert run.manager.restore() == 1
    assert run.rates == [0.01, 0.01]
    late = Run(tmp_path, 0.01)
    late.manager.load_model_bank([])
    with pytest.raises(ValueError, match="load_model_bank has already restored the run"):
        late.manager.restore(hyper_parameters="keep")


@pytest.mark.parametrize("value", ["Keep", None, True, []])
def test_what_is_neither_is_refused_and_changes_no_hyper_parameters(tmp_path, value):
    Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01)
    for load in (run.manager.restore, partial(run.manager.load_model_bank, [])):
        with pytest.raises(ValueError, match="hyper_parameters must be 'load' or 'keep', found"):
            load(hyper_parameters=value)
    with pytest.raises(LoadConfError):
        run.manager.restore(hyper_parameters="keep", load_conf={"load": ["nothing"]})
    assert run.rates == [0.01, 0.01]


# schedules of other runs


def decay(optimizer):
    return schedules.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 3))


def warm_start(path, bank, schedule=decay):
    """Return a new run that starts from another one, and the plan of that."""
    run = Run(path, 0.1, schedule)
    plan = run.manager.plan(bank)
    run.manager.load_model_bank(bank)
    return run, plan


def test_a_warm_start_leaves_the_schedule_of_the_new_run_and_the_plan_says_so(tmp_path, caplog):
    run = Run(tmp_path / "old", 0.1, decay)
    for _ in range(3):
        run.step()
    assert run.rates == [0, 0]
    new, plan = warm_start(tmp_path / "new", [{"path": tmp_path / "old"}])
    reasons = {item.name.text: item.reason for item in plan.items if item.offer is None}
    assert reasons["schedule_0"] == reasons["schedule_1"] == "the schedule of this run stays"
    assert "from scratch" not in caplog.text  # nobody expects it
    assert new.schedules[0].last_epoch == 0
    assert new.rates == [0.1, 0.1]
    assert new.step().rates == pytest.approx([0.2 / 3, 0.2 / 3])


def test_a_schedule_that_is_named_comes_and_the_rate_with_it_and_a_list_of_names_says_which_those_are(tmp_path):
    Run(tmp_path / "old", 0.1, decay).step()
    new, _ = warm_start(tmp_path / "new", [{"path": tmp_path / "old", "load": ["*", "schedule_0"]}])
    assert [schedule.last_epoch for schedule in new.schedules] == [1, 0]
    assert new.rates == pytest.approx([0.2 / 3, 0.1])
    lines = new.manager.saver.names()
    assert "schedule_0\textra\tplain data\t\tschedule" in lines
    listed = listed_inventory(lines)
    assert [name.text for name, thing in listed.items() if thing.is_schedule] == ["schedule_0", "schedule_1"]
    assert list_inventory(listed) == lines


def test_a_wrapper_of_a_schedule_stays_as_it_does(tmp_path):
    class Wrapper:
        def __init__(self, scheduler):
            self.scheduler, self.step = scheduler, scheduler.step
            self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict

    Run(tmp_path / "old", 0.1, lambda optimizer: Wrapper(decay(optimizer))).step()
    bank = [{"path": tmp_path / "old"}]
    new, _ = warm_start(tmp_path / "new", bank, lambda optimizer: Wrapper(decay(optimizer)))
    assert new.schedules[0].scheduler.last_epoch == 0


def test_a_load_from_another_output_dir_leaves_it_too_and_a_bank_that_resumes_brings_it_back(tmp_path):
    Run(tmp_path / "old", 0.1, decay).step()
    other = Run(tmp_path / "new", 0.1, decay)
    other.manager.saver.load(tmp_path / "old")
    assert other.schedules[0].last_epoch == 0
    other.step().step()
    again, _ = warm_start(tmp_path / "new", [{"path": tmp_path / "old"}])
    assert again.schedules[0].last_epoch == 2
    assert again.rates == other.rates


@mostly_slow()
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_without_its_optimizer_sets_the_rate_of_its_place(tmp_path, name):
    first, straight = Run(tmp_path / "run", 0.1, SCHEDULES[name]), Run(tmp_path / "other", 0.1, SCHEDULES[name])
    for _ in range(3):
        first.step()
        straight.step()
    run = Run(tmp_path / "run", 0.1, SCHEDULES[name])
    run.manager.restore(load_conf={"exclude": ["dense_opt", "sparse_optim"]})
    assert run.rates == pytest.approx(first.rates)
    assert run.step().rates == pytest.approx(straight.step().rates)


def test_so_does_one_of_an_optimizer_that_nobody_registered(tmp_path):
    def run():
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        schedule = schedules.StepLR(optimizer, 1, gamma=0.5)
        saver = Saver(layer, output_dir=tmp_path)
        saver.register_for_checkpointing("schedule", schedule)
        return saver, optimizer, schedule

    saver, optimizer, schedule = run()
    for _ in range(2):
        optimizer.step()
        schedule.step()
    saver.save("1")
    saver, optimizer, schedule = run()
    saver.load()
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 0.025
