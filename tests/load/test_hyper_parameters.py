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
from recckpt.sparse import HashTable, SparseAdam


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


def test_of_several_groups_the_line_says_which(tmp_path, infos):
    Run(tmp_path, 0.1, groups=2).step()
    run = Run(tmp_path, 0.1, groups=2)
    run.dense.param_groups[1]["betas"] = (0.5, 0.9)
    run.manager.restore()
    assert infos()[0].endswith(": dense_optim[1] betas (0.5, 0.9) -> (0.9, 0.999)")


def test_nothing_is_said_where_nothing_differs(tmp_path, infos):
    Run(tmp_path, 0.1).step()
    Run(tmp_path, 0.1).manager.restore()
    assert infos() == []


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
        optimizer, optimizer.param_groups[0]["lr"], 4 * optimizer.param_groups[0]["lr"], 3, cycle_momentum=False
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


def test_a_schedule_by_what_was_measured_lowers_the_kept_rate_from_there_on(tmp_path):
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


def test_a_scheduler_that_is_made_after_the_restore_begins_at_the_kept_rate(tmp_path):
    old = Run(tmp_path, 0.1, SCHEDULES["exponential"])
    old.step()
    run = Run(tmp_path, 0.02)
    run.manager.restore(hyper_parameters="keep")
    assert "initial_lr" not in run.dense.param_groups[0]
    assert schedules.ExponentialLR(run.dense, 0.5).base_lrs == [0.02]


def test_a_run_that_resumes_by_its_bank_may_keep_its_own_too(tmp_path):
    Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01)
    run.manager.load_model_bank([], hyper_parameters="keep")
    assert run.rates == [0.01, 0.01]
    assert run.manager.restore() == 1
    assert run.rates == [0.01, 0.01]


def test_it_is_too_late_to_keep_them_once_the_bank_has_replaced_them(tmp_path):
    Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01)
    run.manager.load_model_bank([])
    with pytest.raises(ValueError, match="load_model_bank has restored the run already"):
        run.manager.restore(hyper_parameters="keep")


@pytest.mark.parametrize("value", ["Keep", None, True, []])
def test_what_is_neither_is_refused(tmp_path, value):
    run = Run(tmp_path)
    for load in (run.manager.restore, partial(run.manager.load_model_bank, [])):
        with pytest.raises(ValueError, match="hyper_parameters must be 'load' or 'keep', found"):
            load(hyper_parameters=value)


def test_a_restore_that_is_refused_changes_no_hyper_parameters(tmp_path):
    Run(tmp_path, 0.1).step()
    run = Run(tmp_path, 0.01)
    with pytest.raises(LoadConfError):
        run.manager.restore(hyper_parameters="keep", load_conf={"load": ["nothing"]})
    assert run.rates == [0.01, 0.01]
