"""What Lightning's own checkpoints bring back, the callback's bring back: each case resumes from either."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from support.rank_processes import run_script
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recckpt import find_checkpoint, list_checkpoints, load_into
from recckpt.integrations.lightning import LightningCallback
from recckpt.policies.keep import Best
from recckpt.policies.when import EveryEpochs

N_IDS, BATCHES = 20, 8  # batches of an epoch


class Clicks(pl.LightningModule):
    """Writes down what happens to it, and is killed before a step."""

    def __init__(self, killed=None):
        super().__init__()
        self.embedding, self.top = nn.Embedding(N_IDS, 4), nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))
        self.events, self.killed, self.brought_back = [], killed, []

    def note(self, *event):
        if not self.trainer.sanity_checking:
            self.events.append((self.global_step, self.current_epoch, *event))

    def training_step(self, batch, number):
        ids, clicks = batch
        if self.global_step == self.killed:
            raise ChildProcessError
        self.note("batch", number, ids.tolist(), self.trainer.fit_loop.epoch_loop._batches_that_stepped)
        loss = nn.functional.mse_loss(self.top(self.embedding(ids)).squeeze(1), clicks)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        self.log("val", float([4, 2, 1, 3, 5, 6, 7, 8][self.global_step // 4 % 8]), on_epoch=True)

    def on_validation_end(self):
        self.note("validated")

    def on_train_epoch_start(self):
        self.note("epoch begins")

    def on_train_epoch_end(self):
        self.note("epoch ends")
        self.log("late", [5.0, 1.0, 3.0, 4.0, 6.0, 7.0, 8.0][self.current_epoch])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["of the module"] = self.global_step

    def on_load_checkpoint(self, checkpoint):
        self.brought_back.append(("module", checkpoint["of the module"], set(checkpoint["state_dict"])))


class Grows(pl.Callback):
    """Has no state before the first step."""

    def __init__(self):
        self.seen, self.found = [], None

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(module.global_step)

    def state_dict(self):
        return {"seen": self.seen} if self.seen else {}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["of a callback"] = [*self.seen]

    def on_load_checkpoint(self, trainer, module, checkpoint):
        module.brought_back.append(("callback", checkpoint["of a callback"]))


class Data(pl.LightningDataModule):
    """Has a state of its own."""

    def __init__(self, batch_size=4):
        super().__init__()
        self.batches, self.batch_size = 0, batch_size

    def loader(self, shuffle):
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, N_IDS, (4 * BATCHES,), generator=generator)
        data = TensorDataset(ids, torch.rand(len(ids), generator=generator))
        return StatefulDataLoader(data, batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self):
        return self.loader(shuffle=True)

    def val_dataloader(self):
        return self.loader(shuffle=False)

    def on_after_batch_transfer(self, batch, _):
        self.batches += self.trainer.training
        return batch

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]
        self.trainer.lightning_module.brought_back.append(("data", self.batches))


def fit(path, *callbacks, killed=None, ckpt_path=None, kind=Clicks, batch_size=4, **options):
    torch.manual_seed(0)
    module = kind(killed)
    given = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = pl.Trainer(callbacks=list(callbacks), default_root_dir=str(path), **{**given, **options})
    try:
        trainer.fit(module, datamodule=Data(batch_size), ckpt_path=ckpt_path)
    except ChildProcessError:
        assert killed is not None
    return module, trainer


def ours(path, interval, **options):
    return LightningCallback(str(path), interval, tables=None, **options)


def test_all_that_a_resume_of_lightning_brings_back_ours_does(tmp_path):
    """Each kind of state, from a checkpoint of step 6 of either."""
    theirs = ModelCheckpoint(tmp_path / "theirs", filename="last", every_n_train_steps=6)
    fit(tmp_path, theirs, Grows(), killed=7, max_steps=12)
    fit(tmp_path, ours(tmp_path / "ours", 6), Grows(), killed=7, max_steps=12)
    expected, _ = fit(tmp_path, of_theirs := Grows(), max_steps=12, ckpt_path=tmp_path / "theirs/last.ckpt")
    resumed, _ = fit(tmp_path, ours(tmp_path / "ours", 6), of_ours := Grows(), max_steps=12)
    assert sorted(resumed.brought_back) == sorted(expected.brought_back)
    assert {name for name, *_ in resumed.brought_back} == {"module", "callback", "data"}
    assert of_ours.seen == of_theirs.seen == list(range(1, 13))


# Steps between validations and between saves, and where the first run ends: killed before a step, or well.
ENDS = {
    "between validations": (3, 5, {"killed": 12}),
    "at the step that is validated": (3, 6, {"killed": 13}),
    "well, within an epoch": (3, 100, {"max_steps": 11}),
    "well, within an epoch, behind a validation": (3, 100, {"max_steps": 12}),
    "well, with an epoch": (8, 100, {"max_epochs": 2}),
    "at an epoch that a save of a step ended": (8, 8, {"killed": 18}),
    "at an epoch": (8, EveryEpochs(1), {"killed": 18}),
}
LENGTHS = [{"max_epochs": 4}, {"max_steps": 4 * BATCHES}]


@pytest.mark.parametrize("length", LENGTHS, ids=["epochs", "steps"])
@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS)
def test_a_resumed_run_has_the_batches_validations_and_epochs_of_one_that_never_ended(tmp_path, case, length):
    validated, interval, end = case
    options = {"val_check_interval": validated, "num_sanity_val_steps": 0, **length}
    whole, _ = fit(tmp_path, **options)
    fit(tmp_path, ours(tmp_path / "ours", interval), **{**options, **end})
    resumed, trainer = fit(tmp_path, callback := ours(tmp_path / "ours", interval), **options)
    events = [[event[:4] for event in module.events] for module in (whole, resumed)]  # a loader may shuffle anew
    assert events[1] == events[0][-len(events[1]) :]
    assert trainer.current_epoch == callback.checkpoints.epochs == 4
    if resumed.events[0][2] == "batch":
        assert resumed.events == whole.events[-len(resumed.events) :]


def best_of(path, name):
    return find_checkpoint(str(path), "best", metric=name, mode="min")


@pytest.mark.parametrize(("name", "step"), [("val", 8), ("late", 16)])
@pytest.mark.parametrize("interval", [EveryEpochs(1), BATCHES])
def test_the_best_checkpoint_is_that_of_model_checkpoint(tmp_path, name, step, interval):
    theirs = ModelCheckpoint(tmp_path / "theirs", monitor=name, save_top_k=1)
    callback = ours(tmp_path / "ours", interval, max_keep=Best(1, name, "min"))
    fit(tmp_path, callback, theirs, max_epochs=4)
    found = best_of(tmp_path / "ours", name)
    assert (found.step, found.state[name]) == (step, theirs.best_model_score.item())
    assert torch.load(theirs.best_model_path, weights_only=False)["global_step"] == step


def test_a_step_that_is_validated_has_the_metrics_of_its_validation(tmp_path):
    fit(tmp_path, ours(tmp_path / "ours", 4, max_keep=None), max_epochs=2, val_check_interval=4)
    steps = list_checkpoints(str(tmp_path / "ours"))
    assert [(one.step, one.state["val"]) for one in steps] == [(4, 2.0), (8, 1.0), (12, 3.0), (16, 5.0)]


@pytest.mark.parametrize("validated", [4, 1.0])
def test_early_stopping_has_no_more_patience_than_in_a_run_that_never_ended(tmp_path, validated):
    def run(*others, **options):
        stop = EarlyStopping("val", patience=3)
        module, _ = fit(tmp_path, *others, stop, max_epochs=10, val_check_interval=validated, **options)
        return module.events[-1][0], stop.state_dict()

    run(ours(tmp_path / "ours", 16), killed=17)
    assert run(ours(tmp_path / "ours", 16)) == run()


def test_the_model_that_is_loaded_is_the_one_that_was_trained(tmp_path):
    module, trainer = fit(tmp_path, ours(tmp_path / "ours", 5), max_steps=12)
    loaded = Clicks()
    load_into(loaded, str(tmp_path / "ours"))
    assert all(map(torch.equal, loaded.parameters(), module.parameters()))
    newest = list_checkpoints(str(tmp_path / "ours"))[-1]
    assert (newest.step, newest.state["loss_step"]) == (12, trainer.callback_metrics["loss_step"].item())


def test_a_fast_dev_run_restores_and_saves_nothing(tmp_path):
    fit(tmp_path, ours(tmp_path / "ours", 1), fast_dev_run=True)
    assert not (tmp_path / "ours").exists()
    fit(tmp_path, ours(tmp_path / "ours", 2), max_steps=4)
    module, _ = fit(tmp_path, ours(tmp_path / "ours", 1), fast_dev_run=True)
    assert module.events[0][0] == 0
    assert list_checkpoints(str(tmp_path / "ours"))[-1].step == 4


def test_a_trainer_has_its_own_callbacks_again_once_it_has_trained(tmp_path):
    module, trainer = fit(tmp_path, callback := ours(tmp_path / "ours", 2), max_steps=4)
    assert trainer.checkpoint_callback is None
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module, datamodule=Data())
    assert callback.checkpoints.global_step == 6
    assert trainer.checkpoint_callback is None


class OnPlateaus(Clicks):
    """Lowers its learning rate by what it has logged, each epoch or each few steps."""

    scheduled = None

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.scheduled}}


# How the scheduler is updated, steps between validations and between saves.
SCHEDULED = {
    "by epochs": ({"interval": "epoch", "monitor": "val"}, BATCHES, BATCHES),
    "by epochs, from within one": ({"interval": "epoch", "monitor": "val"}, BATCHES, 5),
    "by steps that are validated": ({"interval": "step", "frequency": 4, "monitor": "val"}, 4, 4),
    "by steps": ({"interval": "step", "frequency": 2, "monitor": "loss_step"}, BATCHES, 6),
}


@pytest.mark.parametrize("case", SCHEDULED.values(), ids=SCHEDULED)
def test_a_scheduler_that_waits_for_a_metric_goes_on_where_it_was(tmp_path, case, monkeypatch):
    scheduled, validated, interval = case
    monkeypatch.setattr(OnPlateaus, "scheduled", scheduled)
    options = {"kind": OnPlateaus, "val_check_interval": validated, "max_epochs": 4, "num_sanity_val_steps": 0}

    def schedule_of(trainer):
        [config] = trainer.lr_scheduler_configs
        return config.scheduler.state_dict()

    _, whole = fit(tmp_path, **options)
    for killed in (14, 22):
        fit(tmp_path, ours(tmp_path / "ours", interval, async_save=False), killed=killed, **options)
    _, resumed = fit(tmp_path, ours(tmp_path / "ours", interval), **options)
    assert schedule_of(resumed) == schedule_of(whole)


class Averages(Clicks):
    """Does at the end of each batch what a checkpoint of its step must have."""

    def __init__(self, killed=None):
        super().__init__(killed)
        self.register_buffer("average", torch.zeros_like(self.embedding.weight))

    def on_train_batch_end(self, *_):
        self.average.lerp_(self.embedding.weight.detach(), 0.1)


class Frozen(Averages):
    """Has an optimizer that gets the embedding when it is thawed."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.top.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Thaws(BaseFinetuning):
    """Trains the embedding from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.embedding)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.embedding, optimizer)


def accumulates_later():
    return GradientAccumulationScheduler({0: 1, 1: 3})


CALLBACKS = {"alone": (Averages, []), "thaws": (Frozen, [Thaws]), "accumulates": (Averages, [accumulates_later])}


@pytest.mark.parametrize(("kind", "callbacks"), CALLBACKS.values(), ids=CALLBACKS)
def test_a_run_that_was_killed_within_its_second_epoch_ends_as_one_that_was_not(tmp_path, kind, callbacks):
    def run(*saves, **options):
        options |= {"kind": kind, "max_epochs": 3, "num_sanity_val_steps": 0}
        return fit(tmp_path, *saves, *(make() for make in callbacks), **options)

    whole, of_whole = run()
    run(ours(tmp_path / "ours", 1, async_save=False), killed=10)
    resumed, of_resumed = run(ours(tmp_path / "ours", 1))
    assert of_resumed.global_step == of_whole.global_step
    assert all(map(torch.equal, resumed.state_dict().values(), whole.state_dict().values()))


def test_metrics_that_callbacks_look_for_are_those_of_a_run_that_never_ended(tmp_path):
    def run(name, **options):
        saves = ours(tmp_path / name, 3, async_save=False, max_keep=None)
        fit(tmp_path, saves, EarlyStopping("val", patience=9), max_steps=BATCHES + 6, **options)
        steps = list_checkpoints(str(tmp_path / name))
        return [(one.step, one.state.get("val")) for one in steps]

    run("ours", killed=BATCHES + 2)
    assert run("ours") == run("whole") == [(3, None), (6, None), (9, 1.0), (12, 1.0), (14, 1.0)]


def test_an_epoch_of_which_a_batch_has_failed_ends_with_its_validation_and_schedulers(tmp_path):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    saves = ours(tmp_path / "ours", 3, save_on_exception=True)
    fit(tmp_path, saves, killed=5, **options)
    module, trainer = fit(tmp_path, saves, **options)
    ends = [(step, what) for step, _, what, *_ in module.events if what in ("validated", "epoch ends")]
    assert ends == [(7, "validated"), (7, "epoch ends"), (15, "validated"), (15, "epoch ends")]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)


def test_batches_of_another_size_within_an_epoch_are_warned_of(tmp_path, caplog):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    fit(tmp_path, ours(tmp_path / "ours", 3, async_save=False), killed=4, **options)
    fit(tmp_path, ours(tmp_path / "ours", 3), batch_size=8, **options)
    [warning] = [record.getMessage() for record in caplog.records if "batch size" in record.getMessage()]
    assert warning.startswith(f"resumed within an epoch that had {BATCHES} batches when it was saved, and has 4 now")


@pytest.mark.slow
def test_two_ranks_that_were_killed_resume_as_if_they_had_not_been(tmp_path):
    run_script(Path(__file__).with_name("trainer_ranks.py"), tmp_path, "lightning")
