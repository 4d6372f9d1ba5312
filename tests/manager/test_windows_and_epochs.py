"""Saves and reloads at the ends of windows and epochs: counted, saved with the step, and resumed where they were."""

import pytest
import torch
from support.builders import checkpoints
from support.sweeps import SWEEP_STRIDE, mostly_slow
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import SaveFailedError
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies.when import EveryEpochs, EverySteps, EveryWindows
from recckpt.storage.local import LocalStorage

NEVER = 10**9
EVENTS = "ssw ssw e sw ssw e sssw sw e".replace(" ", "")  # steps, windows and epochs of a run, in their order
N_EVENTS = len(EVENTS)


class Loop:
    """A run of one weight, which is the number of events so far, through EVENTS."""

    def __init__(self, url, save_interval=NEVER, max_keep=None, **options):
        self.model = nn.Linear(1, 1, bias=False)
        self.saver = Saver(self.model, output_dir=str(url), max_keep=max_keep)
        self.manager = CheckpointManager(self.saver, save_interval, **options)

    @property
    def n_events(self):
        return self.manager.global_step + self.manager.windows + self.manager.epochs

    def run(self, until=N_EVENTS):
        end = {"s": self.manager.step, "w": self.manager.window, "e": self.manager.epoch}
        while self.n_events < until:
            self.model.weight.data.fill_(self.n_events + 1)
            end[EVENTS[self.n_events]]()
        return self

    @property
    def saved(self):
        """What the checkpoints are of, oldest first: step, windows, epochs, weight."""
        other = Loop(self.saver.output_dir)
        return [other.at(found.ckpt_id) for found in list_checkpoints(self.saver.storage).current]

    def at(self, ckpt_id):
        manager = self.manager
        manager.restore(int(ckpt_id.removeprefix("ckpt_")))
        return manager.global_step, manager.windows, manager.epochs, self.model.weight.item()


def test_a_save_is_made_at_the_end_of_every_nth_window_and_epoch(memory_url):
    windows = Loop(f"{memory_url}/w", EveryWindows(2)).run().saved
    assert windows == [(4, 2, 0, 6.0), (7, 4, 1, 12.0), (11, 6, 2, 19.0)]
    assert Loop(f"{memory_url}/e", EveryEpochs(2)).run().saved == [(7, 4, 2, 13.0)]
    both = Loop(f"{memory_url}/both", EverySteps(5) | EveryEpochs(3)).run().saved
    assert both == [(5, 2, 1, 8.0), (10, 4, 2, 16.0), (11, 6, 3, 20.0)]


OPTIONS = [{}, {"async_save": True}, {"ephemeral": EveryWindows(1)}, {"ephemeral": 1}]
POLICIES = [EveryWindows(2) | EveryEpochs(1), EverySteps(2) | EveryEpochs(1)]


def check_taken_up(url, crash_at, policy, options):
    """Break a run off, and take it up: it ends with the checkpoints of a run that went straight on."""
    straight = Loop(f"{url}/straight", policy, **options)
    with straight.manager:
        straight.run()
    first = Loop(f"{url}/broken", policy, **options).run(crash_at)
    first.manager.close()
    again = Loop(f"{url}/broken", policy, **options)
    again.manager.restore()
    assert again.model.weight.item() == again.n_events or again.n_events == 0
    with again.manager:
        again.run()
    assert again.saved == straight.saved


@mostly_slow()
@pytest.mark.parametrize(("crash_at", "options"), [(6, OPTIONS[1]), (13, OPTIONS[2])])
def test_a_run_that_is_taken_up_saves_what_it_would_have_saved(memory_url, crash_at, options):
    check_taken_up(memory_url, crash_at, POLICIES[1], options)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_does_from_any_point(memory_url, policy, options):
    for crash_at in range(1, N_EVENTS, min(SWEEP_STRIDE, 9)):
        check_taken_up(f"{memory_url}/{crash_at}", crash_at, policy, options)


def test_what_a_step_saved_is_superseded_by_the_end_of_its_window_unless_that_is_ephemeral(tmp_path):
    run = Loop(tmp_path / "windows", EverySteps(2) | EveryWindows(1), max_keep=1).run(2)
    assert run.saved == [(2, 0, 0, 2.0)]
    run.run(3)
    assert run.saved == [(2, 1, 0, 3.0)]
    assert run.manager.save() is None
    assert run.manager.counts.begun == 2
    run = Loop(tmp_path / "block", EverySteps(2))
    with run.manager:
        run.run(7)
    assert run.saved == [(2, 0, 0, 2.0), (4, 2, 1, 7.0)]  # at the end of the block, of an epoch that none has
    run = Loop(tmp_path / "ephemeral", EverySteps(2), ephemeral=EveryWindows(1)).run(3)
    assert [c.manifest.ephemeral for c in list_checkpoints(run.saver.storage).current] == [False]
    assert run.saved == [(2, 1, 0, 3.0)]


def test_an_end_that_falls_into_a_save_in_the_background_is_put_off_as_a_step_is(tmp_path, gate):
    run = Loop(tmp_path, EveryWindows(1), async_save="latest")
    writing = gate(LocalStorage, "create")
    run.run(3)
    writing.wait()
    run.run(6)
    writing.open()
    run.saver.settle()
    run.run(7)
    run.manager.close()
    assert run.saved == [(2, 1, 0, 3.0), (4, 2, 1, 7.0)]


def test_a_save_by_hand_has_what_the_manager_counts(tmp_path):
    run = Loop(tmp_path).run(7)
    run.saver.save("best", state={"note": "x"})
    run.saver.save("of another step", step=3)
    found = {c.ckpt_id: c.manifest.state for c in list_checkpoints(run.saver.storage).current}
    assert found == {"best": {"note": "x", "windows": 2, "epochs": 1}, "of another step": {}}
    again = Loop(tmp_path / "other")
    again.manager.load_model_bank([{"path": str(tmp_path / "best"), "load": ["*", "global_step"]}])
    assert (again.manager.global_step, again.manager.windows) == (4, 0), "of another run the step alone is taken"
    with pytest.raises(ValueError, match=r"state\['epochs'\]: found 5, but the manager counts 1: use another name"):
        run.saver.save("c", state={"epochs": 5})


def test_counts_come_with_the_step_and_stay_without_it_and_metrics_of_an_epoch_are_kept_with_it(tmp_path):
    run = Loop(tmp_path, EveryEpochs(1)).run(6)
    run.manager.epoch(metrics={"auc": 0.75}, state={"note": "validated"})
    [found] = list_checkpoints(run.saver.storage).current
    assert found.manifest.state == {"windows": 2, "epochs": 1, "auc": 0.75, "note": "validated"}
    run = Loop(tmp_path)
    run.manager.restore(load_conf={"exclude": ["global_step"]})
    assert (run.manager.global_step, run.manager.windows, run.manager.epochs) == (0, 0, 0)
    run.manager.restore()
    assert (run.manager.global_step, run.manager.windows, run.manager.epochs) == (4, 2, 1)


@pytest.mark.parametrize("name", ["windows", "epochs", "event_time"])
@pytest.mark.parametrize("what", ["state", "metrics"])
def test_what_the_manager_counts_is_refused_as_a_name(tmp_path, what, name):
    run = Loop(tmp_path, 1)
    for call in (run.manager.step, run.manager.window, run.manager.epoch, run.manager.save):
        with pytest.raises(ValueError, match=rf"{what}\['{name}'\]: .* use another name"):
            call(**{what: {name: 3}})
    assert (run.n_events, checkpoints(tmp_path)) == (0, [])


# what is loaded again


def looked_at(tmp_path, save_interval=NEVER, reload_interval=None):
    """Return after which events of a run the bank was looked into."""
    run, looked = Loop(tmp_path, save_interval), []
    run.manager.load_model_bank([], reload_interval=reload_interval)
    run.manager._autosave._reload = lambda: looked.append(run.n_events)
    run.run()
    return looked


@pytest.mark.parametrize(
    ("reload_interval", "expected"),
    [(None, [7, 13, 20]), (5, [8, 16]), (EveryWindows(3), [9, 19]), (EveryEpochs(2) | EverySteps(10), [13, 16])],
)
def test_a_bank_is_looked_into_after_saves_or_when_one_says(tmp_path, reload_interval, expected):
    assert looked_at(tmp_path, EveryEpochs(1), reload_interval) == expected


def test_what_is_new_in_a_bank_is_loaded_at_the_end_of_a_window(tmp_path):
    source = Loop(tmp_path / "source", 1).run(1)
    run = Loop(tmp_path / "run")
    bank = [{"path": str(tmp_path / "source"), "load": ["weight"], "is_dynamic": True}]
    run.manager.load_model_bank(bank, reload_interval=EveryWindows(1))
    source.run(4)
    run.run(2)
    assert run.model.weight.item() == 2.0
    run.manager.window()
    assert run.model.weight.item() == 4.0
    assert checkpoints(tmp_path / "run") == []


# several ranks


def ranks_that_end(tmp_path, *ends):
    """Let each of several ranks do a step, and end something else; return what it raised."""

    def work(rank, connect):
        torch.manual_seed(0)
        saver = connect(Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "run")))
        policy = EveryWindows(1) | EveryEpochs(1)
        manager = CheckpointManager(saver, policy, shard_id=rank, shard_num=len(ends))
        manager.step()
        try:
            getattr(manager, ends[rank])()
        except SaveFailedError as error:
            return str(error)
        return manager.windows, manager.epochs

    return on_ranks(len(ends), work)


def test_ranks_that_end_the_same_save_together(tmp_path):
    assert ranks_that_end(tmp_path, "window", "window") == [(1, 0)] * 2
    assert checkpoints(tmp_path / "run") == ["ckpt_1"]


def test_ranks_that_end_different_things_save_nothing(tmp_path):
    first, second = ranks_that_end(tmp_path, "window", "epoch")
    assert first == second
    assert (
        "failed on rank 1: it has counted 0 windows and 1 epoch, rank 0 1 window and 0 epochs: all ranks must" in first
    )
    assert checkpoints(tmp_path / "run") == []
