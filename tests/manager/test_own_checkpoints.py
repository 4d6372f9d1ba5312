"""What a manager knows of its own checkpoints, and which of them it deletes."""

import shutil
import signal

import pytest
import torch
from support.builders import checkpoints, flip_bit
from support.near_runs import NearRun
from support.sweeps import mostly_slow
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Deltas, Saver, find_checkpoint
from recckpt.errors import CheckpointInUseError, CheckpointNotFoundError, CorruptCheckpointError, RecckptError
from recckpt.inspect.verify import verify
from recckpt.manager import run_state
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage

ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)


class Rows:
    """A run of one table, of which each step changes a row."""

    def __init__(self, url, save_interval=1, *, rank=None, deltas=False, max_keep=None, **options):
        self.table = HashTable(2, name="t", slice=None if rank is None else gen_slice(rank, 2))
        self.saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(url), max_keep=max_keep, deltas=deltas)
        self.manager = CheckpointManager(self.saver, save_interval, **options)

    def train(self, n_steps):
        for _ in range(n_steps):
            self.manager.save(step=self.change())
        return self

    def change(self):
        step = self.manager.global_step + 1
        ids = torch.arange(20) if step == 1 else torch.tensor([step])
        own = ids if self.table.slice is None else ids[self.table.slice.owns(ids)]
        self.table.insert(own, torch.full((len(own), 2), float(step)))
        return step

    @property
    def values(self):
        return dict(zip(self.table.ids().tolist(), self.table.embeddings()[:, 0].tolist(), strict=True))


@pytest.fixture
def run(tmp_path):
    return Rows(tmp_path / "run")


# which there are


def test_the_steps_are_those_that_can_be_restored_in_order_of_commit(run):
    assert (run.manager.all_steps(), run.manager.latest_step()) == ([], None)
    run.train(3)
    run.saver.save("by hand")
    assert (run.manager.all_steps(), run.manager.latest_step()) == ([1, 2, 3], 3)
    run.manager.restore(1)
    run.train(1)
    assert (run.manager.all_steps(), run.manager.latest_step()) == ([1, 3, 2], 2)
    assert [run.manager.restore(step) for step in (1, 3, 2)] == [1, 3, 2]


def test_damaged_checkpoints_are_no_steps_and_where_there_are_only_those_it_is_an_error(run, tmp_path, caplog):
    run.train(2)
    flip_bit(tmp_path / "run/ckpt_2/manifest.json")
    assert run.manager.latest_step() == 1
    assert "ckpt_2 is damaged and skipped" in caplog.text
    flip_bit(tmp_path / "run/ckpt_1/manifest.json")
    with pytest.raises(CorruptCheckpointError):
        run.manager.latest_step()


# another prefix


def test_steps_have_the_prefix_that_was_asked_for_and_are_found_by_their_numbers(tmp_path):
    run = Rows(tmp_path / "run", 2, max_keep=1, step_prefix="model/v1")
    for _ in range(4):
        run.change()
        run.manager.step()
    run.saver.save("best")
    assert {c.ckpt_id for c in list_checkpoints(run.saver.storage).committed} == {"model/v1_4", "best"}
    run.manager.pin(4)
    again = Rows(tmp_path / "run", 2, step_prefix="model/v1")
    assert (again.manager.latest_step(), again.manager.restore(4), again.values) == (4, 4, run.values)
    assert find_checkpoint(str(tmp_path / "run"), 4).ckpt_id == "model/v1_4"
    assert Rows(tmp_path / "run").manager.all_steps() == []


def test_a_prefix_that_no_directory_can_have_is_refused_and_what_two_named_alike_is_found_by_its_id(tmp_path):
    for prefix in ("", 3, "x" * 200, "\ud800"):
        with pytest.raises(ValueError, match=r"step_prefix|a checkpoint id"):
            Rows(tmp_path, step_prefix=prefix)
    for prefix in ("a", "b"):
        run = Rows(tmp_path / "run", step_prefix=prefix)
        run.manager.save(step=7)
    with pytest.raises(CheckpointNotFoundError, match=r"step 7 belongs to 'a_7' and 'b_7'.*by its id"):
        find_checkpoint(str(tmp_path / "run"), 7)


# steps of the caller's own count


def test_a_loop_that_counts_by_itself_saves_where_the_manager_says_so(tmp_path):
    run = Rows(tmp_path / "run", 3)
    asked = []
    for step in range(1, 8):
        if run.manager.should_save(step):
            asked.append(step)
            assert run.manager.save(step=step).step == step
        assert not run.manager.should_save(step)
    assert (asked, run.manager.all_steps(), run.manager.global_step) == ([3, 6], [3, 6], 6)
    assert run.manager.save(step=6) is None
    assert not run.manager.should_save(3)


def test_asking_changes_nothing_of_what_is_due(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_state, "monotonic", lambda: now[0])
    from recckpt.policies.when import EveryEventTime, EverySeconds

    run = Rows(tmp_path / "run", EverySeconds(10) | EveryEventTime(3600))
    run.manager.step(event_time=100.0)
    now[0] = 11.0
    assert [run.manager.should_save() for _ in range(3)] == [True] * 3
    run.manager.step()
    assert (run.manager.all_steps(), run.manager.should_save()) == ([2], False)


@mostly_slow()
@pytest.mark.parametrize(("step", "error"), [(1, ValueError), (-1, ValueError), (10**18, ValueError), ("3", TypeError)])
def test_a_step_that_the_run_is_past_or_that_is_none_is_refused(run, step, error):
    run.train(2)
    with pytest.raises(error, match="step must be an int"):
        run.manager.save(step=step)
    assert (run.manager.global_step, run.manager.all_steps()) == (2, [1, 2])


def test_ranks_that_name_other_steps_save_nothing_and_one_that_is_to_end_is_enough_for_all_to_know(tmp_path):
    def work(rank, connect):
        run = Rows(tmp_path / "run", 100, rank=rank, shard_id=rank, shard_num=2)
        connect(run.saver)
        if rank == 1:
            run.manager._autosave._signals._has_ended = True
        known = run.manager.reached_preemption(), run.manager.should_save(step=3)
        with pytest.raises(RecckptError, match="all ranks must save the same checkpoint"):
            run.manager.save(step=5 + rank)
        return known

    assert on_ranks(2, work) == [(True, True)] * 2
    assert checkpoints(tmp_path / "run") == []


# deleting


def test_a_checkpoint_that_nothing_needs_goes_and_with_it_what_it_superseded(run, tmp_path):
    run.train(3)
    run.manager.restore(1)
    run.train(1)  # step 2 of another branch
    run.manager.delete(2)
    assert run.manager.all_steps() == [1, 3]
    assert not [*(tmp_path / "run").glob("ckpt_2*")]
    assert (tmp_path / "run/checkpoint").read_text().split() == ["ckpt_1", "ckpt_3"]
    assert verify(str(tmp_path / "run"), threads=1) == []
    assert run.manager.save().step == 2  # the run is there still, and no checkpoint holds it now


def test_what_is_not_there_cannot_be_deleted_and_deleting_again_ends_a_removal_that_failed(run, monkeypatch):
    run.train(2)
    with pytest.raises(CheckpointNotFoundError, match="'ckpt_9'; there are 'ckpt_1'"):
        run.manager.delete(9)
    with pytest.raises(TypeError, match="step must be an int"):
        run.manager.delete("1")
    remove = LocalStorage.remove

    def fail(self, name):
        if name.startswith("ckpt_1/manifest"):
            raise PermissionError(13, "Permission denied", name)
        remove(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "remove", fail)
        with pytest.raises(RecckptError, match="delete it again"):
            run.manager.delete(1)
    assert run.manager.all_steps() == [1, 2]
    run.manager.delete(1)
    assert run.manager.all_steps() == [2]


@pytest.mark.parametrize("why", ["pinned", "only", "moved"])
def test_rotations_rules_hold_and_the_error_says_what_to_do(run, tmp_path, why):
    run.train(1 if why == "only" else 2)
    if why == "pinned":
        run.manager.pin(1)
    if why == "moved":
        shutil.move(tmp_path / "run/ckpt_1", tmp_path / "run/keep")
    messages = {"pinned": "unpin", "only": "save another one first", "moved": "keep/.*by hand"}
    with pytest.raises(CheckpointInUseError, match=f"'ckpt_1' is not deleted: .*{messages[why]}"):
        run.manager.delete(1)
    assert run.manager.all_steps() == ([1] if why == "only" else [1, 2])
    if why == "pinned":
        run.manager.unpin(1)
        run.manager.delete(1)
        assert run.manager.all_steps() == [2]


def test_what_deltas_are_read_from_stays_and_a_chain_goes_from_its_newest(tmp_path):
    run = Rows(tmp_path / "run", deltas=ALWAYS).train(4)
    for step, named in ((1, "'ckpt_4' and 2 more are deltas"), (3, "'ckpt_4' is a delta")):
        with pytest.raises(CheckpointInUseError, match=named):
            run.manager.delete(step)
    run.manager.delete(4)
    run.manager.delete(3)
    assert run.manager.all_steps() == [1, 2]
    run.manager.save(step=run.change())
    kinds = {c.ckpt_id: c.manifest.kind for c in list_checkpoints(run.saver.storage).current}
    assert kinds == {"ckpt_1": "full", "ckpt_2": "delta", "ckpt_5": "full"}
    assert Rows(tmp_path / "run").manager.restore() == 5
    assert verify(str(tmp_path / "run"), threads=1) == []


def test_what_near_saves_stand_on_stays_until_the_next_checkpoint(tmp_path):
    others = {f"_{id_}": 0.5 for id_ in range(100, 110)}
    run = NearRun(tmp_path, max_keep=None, deltas=Deltas(full_every=1)).put(_1=1.0, **others).step()
    run.put(_1=2.0).step().save().put(_1=3.0).step()
    assert run.manager.all_steps() == [1, 2]
    with pytest.raises(CheckpointInUseError, match="near saves are based on it; save once more"):
        run.manager.delete(2)
    run.save().manager.delete(2)
    assert run.manager.all_steps() == [1, 3]


def test_ranks_delete_together_and_refuse_together(tmp_path):
    def work(rank, connect):
        run = Rows(tmp_path / "run", rank=rank, deltas=ALWAYS, shard_id=rank, shard_num=2)
        connect(run.saver)
        run.train(3)
        errors = []
        for step in (1, 2 + rank):
            with pytest.raises(RecckptError) as error:
                run.manager.delete(step)
            errors.append(str(error.value))
        run.manager.delete(3)
        kind = run.manager.save(step=run.change()).kind
        return errors, run.manager.all_steps(), kind

    (of_first, *rest), (of_second, *others) = on_ranks(2, work)
    assert rest == others == [[1, 2, 4], "full"]
    assert "is not deleted" in of_first[0]
    assert "is not deleted" in of_second[0]
    assert all("pass the same step on all ranks" in errors[1] for errors in (of_first, of_second))


# the end of a run that is to end


@pytest.fixture
def ended():
    """Handle SIGTERM by noting it, in this process; afterwards it does what it did before."""
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_a_loop_can_ask_whether_it_is_to_end_and_ends_with_its_step_saved(tmp_path, ended):
    run = Rows(tmp_path / "run", 100, save_on_signal=("SIGTERM", "SIGUSR1"))
    with run.manager as manager:
        signal.raise_signal(signal.SIGUSR1)
        run.change()
        manager.step()
        assert (manager.reached_preemption(), manager.should_save(), manager.all_steps()) == (False, False, [1])
        run.change()
        manager.step()
        signal.raise_signal(signal.SIGTERM)
        assert (manager.reached_preemption(), manager.should_save(), ended) == (True, True, [])
    assert (run.manager.all_steps(), ended) == ([1, 2], [signal.SIGTERM])
    assert run.manager.reached_preemption()


def test_waiting_ends_with_the_checkpoint_and_training_may_go_on(tmp_path, gate):
    run = Rows(tmp_path / "run", async_save=True)
    writing = gate(LocalStorage, "create")
    run.change()
    run.manager.step()
    writing.open()
    run.manager.wait_until_finished()
    assert (run.saver.is_saving, run.manager.all_steps()) == (False, [1])
    run.manager.wait_until_finished()
    run.change()
    run.manager.step()
    run.manager.close()
    assert run.manager.all_steps() == [1, 2]
