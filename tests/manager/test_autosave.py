"""The saves of a manager: in the background, by policies, under back-pressure, and what becomes of their errors."""

import math

import pytest
import torch
from support.builders import OPTIMIZERS, ClickModel, Run, Stream, checkpoints, state_of, table_state
from support.gate import Gate
from support.sweeps import SWEEP_STRIDE, mostly_slow
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import SaveFailedError
from recckpt.manager import run_state
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies.keep import Best, EveryNth, Newest
from recckpt.policies.schedule import SaveCounts
from recckpt.policies.when import AtSteps, EveryEventTime, EverySeconds, WhenTrue
from recckpt.storage.local import LocalStorage


class Small:
    """A run of one weight, which is the step."""

    def __init__(self, url, save_interval=1, max_keep=None, **options):
        self.model = nn.Linear(1, 1, bias=False)
        self.saver = Saver(self.model, output_dir=str(url), max_keep=max_keep)
        self.manager = CheckpointManager(self.saver, save_interval, **options)

    def train(self, n_steps, **options):
        for _ in range(n_steps):
            self.model.weight.data.fill_(self.manager.global_step + 1)
            self.manager.step(**options)
        return self

    @property
    def committed(self):
        """Step and weight of each checkpoint, oldest first."""
        found = list_checkpoints(self.saver.storage).committed
        other = Small(self.saver.output_dir, 10**9)
        return [(c.manifest.step, other.weight_at(c.manifest.step)) for c in found]

    def weight_at(self, step):
        self.manager.restore(step)
        return self.model.weight.item()


def steps_of(run):
    return [found.manifest.step for found in list_checkpoints(run.saver.storage).committed]


def fail(*args, **kwargs):
    raise OSError(28, "No space left on device")


# in the background


def test_training_goes_on_while_a_checkpoint_is_written_in_the_background_alone(tmp_path, gate):
    run = Small(tmp_path / "blocking").train(1)
    assert (run.saver.is_saving, run.committed) == (False, [(1, 1.0)])
    run = Small(tmp_path / "async", save_interval=2, async_save=True)
    writing = gate(LocalStorage, "create")
    run.train(3)
    writing.wait()
    assert (run.manager.global_step, run.saver.is_saving) == (3, True)
    assert checkpoints(tmp_path / "async") == []
    writing.open()
    run.manager.close()
    assert run.committed == [(2, 2.0)]


def test_a_run_that_saves_in_the_background_restores_bit_for_bit(tmp_path):
    model = ClickModel()
    sparse, dense = OPTIMIZERS["adamw"](model.tables), torch.optim.Adam(model.top.parameters())
    saver = Saver(model, sparse, str(tmp_path), max_keep=None)
    saver.register_for_checkpointing("dense", dense)
    stream = Stream()
    saver.register_io_state("stream", stream)
    states = {}
    with CheckpointManager(saver, 5, async_save=True) as manager:
        for _ in range(20):
            model(*stream.next()).sum().backward()
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            manager.step()
            states[manager.global_step] = state(model, stream)
    for step in (5, 10, 15, 20):
        assert manager.restore(step) == step
        assert state(model, stream) == states[step]


def state(model, stream):
    dense = {name: value.tolist() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return [table_state(table) for table in model.tables], dense, stream.position


def under_fire(url, n_saves):
    """Save again and again while training goes on; each checkpoint is the whole state of its step, and no other."""
    run, twin = Run(url, interval=10**9).train(1), Run(url, interval=10**9)
    for number in range(n_saves):
        expected, rows = state_of(run), {table.name: len(table) for table in run.model.tables}
        handle = run.saver.save_async(f"a{number}", step=run.manager.global_step)
        while not handle.done():
            run.train(1)
        run.train(1)
        assert {table.name: table.rows for table in handle.wait().tables} == rows
        assert twin.manager.restore() == expected["step"]
        assert state_of(twin) == expected
    return run.manager.global_step


def test_what_is_saved_beside_training_is_the_whole_state_of_its_step(memory_url):
    assert under_fire(memory_url, 4) > 4


@pytest.mark.slow
def test_so_it_is_a_thousand_times(tmp_path, record_property):
    n_saves = 1000 // SWEEP_STRIDE
    n_steps = under_fire(tmp_path, n_saves)
    record_property("figures", {"whole states beside training": {"saves": n_saves, "steps": n_steps, "wrong": 0}})


def test_a_save_by_hand_waits_whatever_the_steps_do(tmp_path):
    run = Small(tmp_path / "a", save_interval=100, async_save=True).train(3)
    assert run.manager.save().step == 3
    assert (run.saver.is_saving, run.committed) == (False, [(3, 3.0)])
    assert run.manager.save() is None
    run = Small(tmp_path / "b", async_save=True).train(1)  # which is being saved
    assert run.manager.save() is None
    assert (run.saver.is_saving, run.committed) == (False, [(1, 1.0)])


def test_a_restore_waits_for_the_save_that_is_under_way(tmp_path, monkeypatch, gate):
    run = Small(tmp_path, async_save=True)
    writing, settle = gate(LocalStorage, "create"), Saver.settle
    run.train(1)

    def open_and_settle(self, timeout_sec=None):
        writing.open()
        return settle(self, timeout_sec)

    monkeypatch.setattr(Saver, "settle", open_and_settle)
    run.model.weight.data.fill_(-1)
    assert (run.manager.restore(), run.model.weight.item()) == (1, 1.0)


def test_what_is_reloaded_from_a_bank_after_a_save_is_not_in_it(tmp_path, gate):
    source = Small(tmp_path / "source").train(5)
    run = Small(tmp_path / "runs", async_save=True)
    run.manager.load_model_bank([{"path": str(tmp_path / "source"), "load": ["weight"], "is_dynamic": True}])
    source.train(2)
    writing = gate(LocalStorage, "create")
    run.train(1)
    assert (run.saver.is_saving, run.model.weight.item()) == (True, 7.0)
    writing.open()
    run.manager.close()
    assert run.committed == [(1, 1.0)]


# errors


TOLD_BY = {
    "step": lambda run: run.train(1),
    "save": lambda run: run.manager.save(),
    "close": lambda run: run.manager.close(),
    "restore": lambda run: run.manager.restore(),
    "the next that is due": lambda run: run.train(3),
}


def failed_in_background(tmp_path, **options):
    """Return a run of which step 2 is saved, and the save of step 4 has failed."""
    run = Small(tmp_path, save_interval=2, async_save=True, **options).train(2)
    run.saver.settle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "create", fail)
        run.train(2)
        run.saver._runner._worker.wait()
    return run


@mostly_slow()
@pytest.mark.parametrize("told_by", TOLD_BY)
def test_an_error_in_the_background_is_told_once_and_saves_work_again(tmp_path, told_by):
    run = failed_in_background(tmp_path)
    with pytest.raises(SaveFailedError, match=r"saving 'ckpt_4' failed on rank 0: OSError: .*No space left"):
        TOLD_BY[told_by](run)
    assert run.manager.counts == SaveCounts(begun=2, failed=1)
    assert run.committed == [(2, 2.0)]
    run.manager.close()
    run.train(6 - run.manager.global_step)
    run.manager.close()
    assert [step for step, _ in run.committed if step > 4] == [6]
    assert run.manager.counts.failed == 1


@pytest.mark.parametrize("asked", [lambda run: run.manager.save(), lambda run: run.saver.close()])
def test_a_step_whose_save_has_failed_can_be_saved_again(tmp_path, monkeypatch, asked):
    run = failed_in_background(tmp_path / "background")
    with pytest.raises(SaveFailedError):
        asked(run)
    assert run.manager.save().step == 4
    assert run.committed == [(2, 2.0), (4, 4.0)]
    assert run.manager.counts == SaveCounts(begun=3, failed=1)
    run = Small(tmp_path / "blocking")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", fail)
        with pytest.raises(SaveFailedError):
            run.train(1)
    assert run.manager.save().step == 1
    assert run.manager.counts == SaveCounts(begun=1, failed=1)


def test_a_state_that_cannot_be_saved_is_told_at_once(tmp_path):
    run = Small(tmp_path, async_save=True)
    run.saver.register_for_checkpointing("odd", nn.Linear(1, 1))
    run.saver._extra.objects["odd"] = [object()]
    with pytest.raises(ValueError, match="cannot be loaded back safely"):
        run.train(1)
    assert (run.saver.is_saving, run.manager.counts) == (False, SaveCounts(failed=1))


# a run from its beginning to its end


@pytest.mark.parametrize(("n_steps", "expected"), [(0, []), (4, [2, 4]), (5, [2, 4, 5])])
def test_the_block_of_a_manager_ends_with_the_last_step_saved_once(tmp_path, n_steps, expected):
    run = Small(tmp_path, save_interval=2, async_save=True)
    with run.manager:
        assert checkpoints(tmp_path) == []
        run.train(n_steps)
    assert (run.saver.is_saving, run.committed) == (False, [(step, float(step)) for step in expected])
    assert run.manager.counts.begun == len(expected)


def test_a_block_that_fails_saves_nothing_but_waits_for_what_is_under_way(tmp_path, gate):
    run = Small(tmp_path, save_interval=2, async_save=True)
    writing = gate(LocalStorage, "create")
    error = KeyError("loss")

    def train():
        with run.manager:
            run.train(3)
            writing.wait()
            writing.open()
            raise error

    with pytest.raises(KeyError) as raised:
        train()
    assert raised.value is error
    assert (run.saver.is_saving, run.committed) == (False, [(2, 2.0)])


def test_what_a_block_raises_is_not_hidden_by_a_save_that_failed(tmp_path, caplog):
    run = failed_in_background(tmp_path)
    with pytest.raises(KeyError), run.manager:
        raise KeyError
    assert "saving 'ckpt_4' failed" in caplog.text
    run.manager.close()


def test_the_last_step_is_saved_though_the_save_before_has_failed_and_who_fails_is_reported(tmp_path, monkeypatch):
    run = failed_in_background(tmp_path / "before")
    with pytest.raises(SaveFailedError, match="'ckpt_4'"), run.manager:
        pass
    assert run.committed == [(2, 2.0), (4, 4.0)]
    run = Small(tmp_path / "last", save_interval=100, async_save=True).train(1)
    monkeypatch.setattr(LocalStorage, "create", fail)
    with pytest.raises(SaveFailedError, match="'ckpt_1'"), run.manager:
        pass


def test_before_training_starts_a_save_is_made_where_one_is_asked_for_unless_the_run_goes_on(tmp_path):
    run = Small(tmp_path / "first", save_interval=100, save_at_start=True)
    run.model.weight.data.zero_()
    with run.manager:
        assert run.committed == [(0, 0.0)]
        run.train(2)
    assert steps_of(run) == [0, 2]
    again = Small(tmp_path / "first", save_interval=100, save_at_start=True)
    again.manager.restore()
    with again.manager:
        assert steps_of(again) == [0, 2]
    assert again.manager.counts == SaveCounts()
    of_bank = Small(tmp_path / "second", save_interval=100, save_at_start=True)
    of_bank.manager.load_model_bank([{"path": str(tmp_path / "first"), "load": ["weight"]}])
    with of_bank.manager:
        assert of_bank.committed == [(0, 2.0)]


def test_a_save_before_training_starts_takes_no_place_of_what_is_restored_only_then(tmp_path, caplog):
    Small(tmp_path, max_keep=1).train(3)
    run = Small(tmp_path, save_interval=100, max_keep=1, save_at_start=True)
    with run.manager:
        assert run.manager.restore() == 3
    assert run.committed == [(3, 3.0)]
    assert "nothing is saved before training starts: found checkpoints that were not restored" in caplog.text


@pytest.mark.parametrize("load_conf", [None, {"exclude": ["weight"]}])
def test_a_block_without_a_step_takes_no_place_of_what_was_trained_before(tmp_path, load_conf):
    Small(tmp_path, max_keep=1).train(3)
    with Small(tmp_path, max_keep=1).manager:
        pass
    with Small(tmp_path, max_keep=1).manager as manager:
        manager.restore(load_conf=load_conf)
    assert Small(tmp_path).committed == [(3, 3.0)]


# back-pressure


class Pressed:
    """A run whose first save, that of step 2, is held."""

    def __init__(self, url, gate, backpressure):
        self.run = Small(url, save_interval=2, async_save=backpressure)
        self.writing = gate(LocalStorage, "create")
        self.run.train(2)
        self.writing.wait()

    def let_go(self):
        self.writing.open()
        self.run.saver.settle()


def test_with_wait_no_save_is_left_out(tmp_path, gate, monkeypatch):
    pressed = Pressed(tmp_path, gate, "wait")
    first = pressed.run.saver._runner._worker.task.info
    save_async = Saver.save_async

    def open_and_save(self, *args, **kwargs):
        pressed.writing.open()
        return save_async(self, *args, **kwargs)

    monkeypatch.setattr(Saver, "save_async", open_and_save)
    pressed.run.train(2)
    second = pressed.run.saver._runner._worker.task.info
    assert second.blocked_sec >= first.commit_sec + first.rotate_sec, "it is training that waited"
    pressed.run.manager.close()
    assert pressed.run.committed == [(2, 2.0), (4, 4.0)]
    assert pressed.run.manager.counts == SaveCounts(begun=2, waited=1)


def test_with_skip_training_does_not_wait(tmp_path, gate):
    pressed = Pressed(tmp_path, gate, "skip")
    pressed.run.train(3)
    pressed.let_go()
    assert pressed.run.train(2).manager.counts == SaveCounts(begun=2, skipped=1)
    pressed.run.manager.close()
    assert pressed.run.committed == [(2, 2.0), (6, 6.0)]


def test_with_latest_a_save_is_made_as_soon_as_there_is_room(tmp_path, gate):
    pressed = Pressed(tmp_path, gate, "latest")
    pressed.run.train(5)
    pressed.let_go()
    pressed.run.train(1)
    pressed.run.saver.settle()
    pressed.run.train(1)
    pressed.run.manager.close()
    assert pressed.run.manager.counts == SaveCounts(begun=2, dropped=2)
    assert pressed.run.committed == [(2, 2.0), (8, 8.0)]


def test_what_was_put_off_is_not_dropped_without_a_word(tmp_path, gate, caplog):
    pressed = Pressed(tmp_path, gate, "latest")
    pressed.run.train(5)
    pressed.let_go()
    with pytest.raises(LookupError), pressed.run.manager:
        raise LookupError
    assert (pressed.run.manager.counts, steps_of(pressed.run)) == (SaveCounts(begun=1, dropped=2), [2])
    assert "a save was put off and is not made now, because the run has failed" in caplog.text


def test_a_save_of_any_kind_makes_up_for_what_was_put_off(tmp_path, gate, caplog):
    pressed = Pressed(tmp_path, gate, "latest")
    pressed.run.train(6)
    pressed.let_go()
    pressed.run.manager.save()
    pressed.run.train(1)
    pressed.run.manager.close()
    assert pressed.run.manager.counts.begun == 2
    assert "put off" not in caplog.text


# what is kept, and what is kept with it


def test_the_newest_ephemeral_checkpoint_stays_until_a_regular_one_is_there(tmp_path):
    run = Small(tmp_path, save_interval=4, max_keep=1, ephemeral=1)
    found = []
    for _ in range(6):
        run.train(1)
        found.append(steps_of(run))
    assert found == [[1], [2], [3], [4], [4, 5], [4, 6]]


def test_an_ephemeral_checkpoint_is_restored_and_its_step_is_saved_for_good_where_one_asks_for_it(tmp_path):
    Small(tmp_path, save_interval=100, max_keep=1, ephemeral=2).train(3)
    run = Small(tmp_path, save_interval=100, max_keep=1)
    assert (run.manager.restore(), run.model.weight.item()) == (2, 2.0)
    assert run.manager.save().ephemeral is False
    assert steps_of(run) == [2]
    assert run.manager.save() is None


def test_the_best_and_every_nth_stay_beside_the_newest(tmp_path):
    keep = Newest(1) | EveryNth(4) | Best(1, "auc")
    run = Small(tmp_path, max_keep=keep, async_save=True)
    with run.manager:
        for auc in (0.5, 0.6, 0.9, 0.7, 0.8, math.nan, 0.85):
            run.train(1, metrics={"auc": auc})
    assert steps_of(run) == [3, 4, 7]


def test_metrics_state_and_event_time_are_in_the_manifest(tmp_path):
    run = Small(tmp_path, save_interval=2)
    run.train(1, metrics={"auc": 0.1}, state={"phase": "cold"}, event_time=200.0)
    run.train(1, metrics={"auc": torch.tensor(0.5)}, state={"phase": "warm", "auc of": "day 2"}, event_time=150.0)
    [found] = list_checkpoints(run.saver.storage).committed
    assert found.manifest.state == {"event_time": 200.0, "auc": 0.5, "phase": "warm", "auc of": "day 2"}
    assert run.train(1).manager.save(metrics={"auc": 0.75}).state == {"event_time": 200.0, "auc": 0.75}


def test_metrics_decide_when_to_save_and_the_clock_what_is_due_by_time(tmp_path, monkeypatch):
    run = Small(tmp_path / "metrics", save_interval=WhenTrue(lambda now: now.metrics.get("loss", 0.0) > 2))
    for loss in (1.0, 3.0, 2.0):
        run.train(1, metrics={"loss": loss})
    run.train(1)
    assert steps_of(run) == [2]
    now = [0.0]
    monkeypatch.setattr(run_state, "monotonic", lambda: now[0])
    run = Small(tmp_path / "time", save_interval=EverySeconds(60) | AtSteps([1]))
    for seconds in (30, 30, 30, 59.5, 0.5):
        now[0] += seconds
        run.train(1)
    assert steps_of(run) == [1, 3, 5]


# event time


HOURS = (3500.0, 3600.0, 3700.0, 7100.0, None, 7200.0, 7300.0)


def test_event_time_goes_on_over_a_restart_without_a_save_too_many_or_too_few(tmp_path):
    straight = Small(tmp_path / "straight", save_interval=EveryEventTime(3600))
    for time in HOURS:
        straight.train(1, event_time=time)
    assert steps_of(straight) == [2, 6]
    for crash_at in range(1, len(HOURS)):
        url = tmp_path / f"crash{crash_at}"
        first = Small(url, save_interval=EveryEventTime(3600))
        for time in HOURS[:crash_at]:
            first.train(1, event_time=time)
        again = Small(url, save_interval=EveryEventTime(3600))
        for time in HOURS[again.manager.restore() :]:
            again.train(1, event_time=time)
        assert steps_of(again) == [2, 6], crash_at


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_event_time_that_is_none_is_passed_over(tmp_path, odd):
    run = Small(tmp_path, save_interval=EveryEventTime(3600))
    for time in (3500.0, odd, 3550.0, 3650.0):
        run.train(1, event_time=time)
    assert steps_of(run) == [4]
    assert run.manager.save() is None


# the whole of it


def test_a_long_run_saved_in_the_background_ends_as_one_that_was_not(tmp_path):
    class InBackground(Run):
        def __init__(self, url, seed=0):
            super().__init__(url, interval=10, max_keep=2, seed=seed)
            self.manager = CheckpointManager(self.saver, 10, async_save="latest", ephemeral=3)

    straight = Run(tmp_path / "straight", interval=10).train(45)
    run = InBackground(tmp_path / "runs").train(27)
    run.manager.close()
    crashed = InBackground(tmp_path / "runs", seed=9)
    begun_at = crashed.manager.restore()
    assert begun_at > 0
    with crashed.manager:
        crashed.train(45 - begun_at)
    assert state_of(crashed) == state_of(straight)


def test_a_save_that_was_put_off_is_made_by_close(tmp_path, gate):
    run = Small(tmp_path, save_interval=2, async_save="latest")
    writing = gate(LocalStorage, "create")
    run.train(5)  # step 4 is put off while step 2 is written
    writing.open()
    run.manager.close()
    assert run.committed == [(2, 2.0), (5, 5.0)]
    assert (run.manager.counts.begun, run.manager.counts.dropped) == (2, 0)
    run.manager.close()
    assert run.manager.counts.begun == 2


def test_a_save_that_was_put_off_is_made_by_close_though_the_one_before_has_failed(tmp_path, monkeypatch):
    run, create = Small(tmp_path, save_interval=2, async_save="latest"), LocalStorage.create
    writing = Gate(monkeypatch, LocalStorage, "create", OSError(28, "No space left on device"))
    run.train(2)
    writing.wait()
    monkeypatch.setattr(LocalStorage, "create", create)  # there is room again
    run.train(2)
    writing.open()
    with pytest.raises(SaveFailedError, match="saving 'ckpt_2'"):
        run.manager.close()
    assert run.committed == [(4, 4.0)]
