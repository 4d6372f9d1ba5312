"""A manager forgets ids while it trains, and takes up what others have begun to forget."""

import logging
import shutil
import threading

import numpy as np
import pytest
import torch
from support.builders import tree
from support.forgetting import LONG, ForgettingRun, files_with, fill, ids_at
from support.spec_reader import read
from support.sweeps import mostly_slow
from support.thread_ranks import on_ranks

import recckpt
from recckpt import CheckpointManager, Deltas, Saver, Standby, load_into
from recckpt.averages import RowAverage
from recckpt.errors import CorruptCheckpointError, RecckptError, WriterFencedError
from recckpt.format import layout
from recckpt.inspect.absent import look_for
from recckpt.inspect.repair import repair
from recckpt.inspect.verify import verify
from recckpt.output_dir.fence import Fence
from recckpt.policies.admit import MinCount
from recckpt.rewrite import compaction
from recckpt.rewrite.compaction import make_offer
from recckpt.rewrite.forgetting import forget
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage

GONE = ids_at(5, 50, 200)
REMOVE = LocalStorage.remove


class Managed(ForgettingRun):
    """A run with a manager that saves every step."""

    def __init__(self, url, **options):
        super().__init__(url, **options)
        self.manager = CheckpointManager(self.saver, 1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A run that is made once: the tests change copies of it."""
    path = tmp_path_factory.mktemp("chain") / "runs"
    ForgettingRun(path).save_chain()
    return path


@pytest.fixture
def root(tmp_path, chain):
    return shutil.copytree(chain, tmp_path / "runs", symlinks=True)


def die(*args):
    raise KeyboardInterrupt


def begin_to_forget(root, monkeypatch):
    """Leave a request that has committed its revisions, and has not removed anything."""
    with monkeypatch.context() as patched:
        patched.setattr(Fence, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            forget(str(root), "user", GONE)


def is_absent(root) -> bool:
    found = look_for(str(root), np.array(GONE), "user")
    return not (found.holding or found.unread or found.pending)


def test_a_manager_forgets_in_its_tables_and_checkpoints_and_trains_on(root):
    run = Managed(root)
    run.manager.restore()
    run.manager.step()
    [done] = run.manager.forget("user", torch.tensor(GONE))
    assert done.n_rows["ckpt_5"] == 3
    assert not set(GONE) & set(run.user.ids().tolist())
    assert set(GONE) <= set(run.item.ids().tolist())
    assert is_absent(root)
    fill(run.user, ids_at(300), 1.0)
    run.manager.step()
    assert run.manager.saver is run.saver
    assert set(read(root, "ckpt_6", "user")) == set(run.user.ids().tolist())
    assert is_absent(root)
    fill(run.user, ids_at(301), 1.0)
    run.manager.step()
    assert verify(str(root)) == []
    run.manager.forget("item", GONE)
    run.manager.forget("user", GONE)
    assert files_with(root, GONE) == {}


def run_with_form(root):
    """Save three checkpoints, and adopt a form of the second one, whose delta is there too."""
    run = Managed(root)
    for ids, value in ((ids_at(*range(100)), 1.0), (ids_at(5, 200), 2.0), (ids_at(50), 3.0)):
        fill(run.user, ids, value)
        run.manager.step()
        if value == 2.0:
            recckpt.rewrite.compact(str(root))  # what the next save adopts
    assert len(list(root.glob("ckpt_2*"))) == 2
    return run


def test_a_form_beside_its_delta_is_revised_under_a_name_that_nothing_has_had(tmp_path):
    run = run_with_form(tmp_path)
    before = {path.name for path in tmp_path.glob("ckpt_*")}
    [done] = run.manager.forget("user", GONE)
    assert not before & set(done.rewritten.values())
    assert is_absent(tmp_path)
    fill(run.user, ids_at(301), 1.0)
    run.manager.step()
    assert (Managed(tmp_path).manager.restore(), verify(str(tmp_path))) == (4, [])


def test_what_was_removed_is_judged_by_the_rows_that_are_there_and_not_by_the_name(tmp_path, monkeypatch):
    def reused(fence, ckpt_id):
        return (name for name in layout.attempt_dirs(ckpt_id, fence.epoch) if name not in fence.listing.directories)

    run = run_with_form(tmp_path)
    monkeypatch.setattr(Fence, "free_dirs", reused)
    [done] = run.manager.forget("user", GONE)
    assert set(done.removed) & set(done.rewritten.values())
    assert is_absent(tmp_path)


def test_the_next_save_is_full_and_those_after_it_are_deltas_and_a_restore_has_the_same_rows(root):
    infos = []
    run = Managed(root, on_save=infos.append)
    run.manager.restore()
    run.manager.step()
    run.manager.forget("user", GONE)
    other = Managed(root)
    assert other.manager.restore() == 5
    assert set(other.user.ids().tolist()) == set(run.user.ids().tolist())
    run.manager.step()
    fill(run.user, ids_at(301), 1.0)
    run.manager.step()
    assert [info.kind for info in infos] == ["delta", "full", "delta"]


def test_a_restore_ends_what_was_begun_which_a_load_of_one_rank_refuses(root, monkeypatch):
    begin_to_forget(root, monkeypatch)
    run = Managed(root)
    with pytest.raises(RecckptError, match=r"an unfinished request to forget ids.*manager\.restore"):
        run.saver.load()
    assert len(run.user) == 0
    assert run.manager.restore() == 4
    run.saver.load()
    assert is_absent(root)
    assert not set(GONE) & set(run.user.ids().tolist())
    run.manager.step()
    assert is_absent(root)


def test_the_first_save_of_a_run_that_restored_nothing_ends_what_was_begun(root, monkeypatch):
    begin_to_forget(root, monkeypatch)
    run = Managed(root)
    fill(run.user, ids_at(1), 1.0)
    run.saver.save("ckpt_9", step=9)
    assert is_absent(root)
    assert verify(str(root)) == []


def test_what_was_restored_before_others_forgot_is_not_saved_any_more(root):
    run = Managed(root)
    run.manager.restore()  # claims nothing yet
    forget(str(root), "user", GONE)
    for _ in range(2):
        with pytest.raises(WriterFencedError, match="was called since this process restored from here"):
            run.saver.save("ckpt_9", step=9)
    assert is_absent(root)
    again = Managed(root)
    again.manager.restore()
    again.manager.step()
    assert is_absent(root)


@pytest.mark.parametrize("path", ["", "ckpt_4"])
def test_what_was_loaded_by_the_path_of_the_own_output_dir_before_others_forgot_is_not_saved(root, path):
    run = Managed(root)
    run.saver.load_by_config([{"path": str(root / path), "load": ["*"]}])
    forget(str(root), "user", GONE)
    with pytest.raises(WriterFencedError, match="may contain the ids"):
        run.saver.save("ckpt_9", step=9)


def load_in_part_again(model, root):
    load_into(model, root)
    yield
    load_into(model, root, load_conf={"load": ["dense"]})


def load_again(model, root):
    load_into(model, root)
    yield
    load_into(model, root)


READS = {
    "load_into": lambda model, root: [load_into(model, root)],
    "a checkpoint": lambda model, root: [load_into(model, root / "ckpt_4")],
    "inside of another": lambda model, root: [load_into(Around(model), root)],
    "standby": lambda model, root: [Standby(model).load(root)],
    "in part again": load_in_part_again,
    "again": load_again,
}


class Around(torch.nn.Module):
    """A model with another one inside, under its names."""

    def __init__(self, inner):
        super().__init__()
        self.user, self.item, self.top = inner["user"], inner["item"], inner["top"]


@mostly_slow()
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_saver_first", [True, False])
def test_what_was_read_into_a_model_before_others_forgot_is_not_saved_by_a_saver_of_it(root, read, is_saver_first):
    run = ForgettingRun(root.parent / "other")  # with the same tables
    saver = Saver(run.model, output_dir=root) if is_saver_first else None
    reading = iter(READS[read](run.model, root))
    next(reading)
    forget(str(root), "user", GONE)
    next(reading, None)
    saver = saver or Saver(run.model, output_dir=root)
    for _ in range(2):
        if read == "again":
            saver.save("ckpt_9", step=9, overwrite=True)
        else:
            with pytest.raises(WriterFencedError, match="may contain the ids"):
                saver.save("ckpt_9", step=9)
    assert is_absent(root)


def test_where_damage_is_in_the_way_restores_and_saves_go_on_without_the_ids(root, monkeypatch, caplog):
    begin_to_forget(root, monkeypatch)
    part = next((root / "ckpt_1" / "sparse").glob("*.arrow"))
    part.write_bytes(part.read_bytes()[:-20])
    run = Managed(root)
    with caplog.at_level(logging.ERROR):
        assert run.manager.restore() == 4
    assert "ids may still be there although forgetting them was requested" in caplog.text
    assert not set(GONE) & set(run.user.ids().tolist())
    run.manager.step()
    assert not set(GONE) & set(read(root, "ckpt_5", "user"))
    assert not is_absent(root)  # which says that the request is not ended


def test_what_failed_half_way_is_ended_by_the_next_save(root, monkeypatch):
    run = Managed(root)
    run.manager.restore()
    run.manager.step()
    with monkeypatch.context() as patched:
        patched.setattr(Fence, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            run.manager.forget("user", GONE)
    assert not is_absent(root)
    run.manager.step()
    assert is_absent(root)
    assert verify(str(root)) == []


def test_a_table_that_no_checkpoint_has_yet_and_counts_alone_are_forgotten_from(tmp_path):
    run = Managed(tmp_path / "runs")
    fill(run.user, GONE, 1.0)
    [done] = run.manager.forget("user", GONE)
    assert (len(run.user), done.rewritten) == (0, {})
    run.manager.step()
    assert is_absent(tmp_path / "runs")
    user = HashTable(2, name="user", admit=MinCount(3))
    manager = CheckpointManager(Saver(torch.nn.ModuleDict({"user": user}), output_dir=str(tmp_path / "counts")), 1)
    user(torch.tensor(ids_at(2, 3)))
    manager.step()
    manager.forget("user.candidates", ids_at(2))
    manager.step()
    assert set(read(tmp_path / "counts", "ckpt_2", "user.candidates")) == set(ids_at(3))


def test_averages_of_the_rows_are_forgotten_from_before_they_are_updated(tmp_path):
    model = torch.nn.ModuleDict({"user": HashTable(2, name="user")})
    average = RowAverage(model, decay=0.5)
    manager = CheckpointManager(Saver(model, output_dir=str(tmp_path / "runs")), 1)
    fill(model["user"], ids_at(2, 3), 1.0)
    average.update()
    manager.step()
    manager.forget("user", ids_at(2))
    assert average.tables["user"].ids().tolist() == ids_at(3)
    manager.step()
    assert files_with(tmp_path / "runs", ids_at(2)) == {}


def test_wrong_input_is_refused_before_anything_changes(root):
    run = Managed(root)
    run.manager.restore()
    run.manager.step()
    before = tree(root)
    for kind, said, table, ids in [
        (ValueError, "no table 'users'", "users", GONE),
        (ValueError, "at least one id", "user", torch.empty(0, dtype=torch.int64)),
        (TypeError, "float32", "user", torch.ones(2)),
    ]:
        with pytest.raises(kind, match=said):
            run.manager.forget(table, ids)
    assert set(GONE) <= set(run.user.ids().tolist())
    assert tree(root) == before
    part = next((root / "ckpt_1" / "sparse").glob("*.arrow"))
    part.write_bytes(part.read_bytes()[:-20])
    before = tree(root)
    with pytest.raises(CorruptCheckpointError, match="it is unknown whether"):
        run.manager.forget("user", GONE)
    assert set(GONE) <= set(run.user.ids().tolist())
    assert tree(root) == before


def test_a_compaction_in_the_background_is_ended_first(tmp_path, monkeypatch):
    begun = threading.Event()

    def until_stopped(storage, checkpoint, means):
        """Write nothing before it is stopped: it holds what it reads open, and would make its directory anew."""
        begun.set()
        while not means.is_stopped():
            threading.Event().wait(0.001)
        return make_offer(storage, checkpoint, means)

    monkeypatch.setattr(compaction, "make_offer", until_stopped)
    run = Managed(tmp_path / "runs", deltas=Deltas(full_every=1, max_chain_bytes=100.0, max_dirty=1.0, compact=True))
    for value in (1.0, 2.0, 3.0):
        fill(run.user, ids_at(*range(100)[: None if value == 1.0 else 9]), value)
        run.manager.step()
    assert begun.wait(60)
    run.manager.forget("user", GONE)
    assert not any(thread.name == "recckpt-compact" for thread in threading.enumerate())
    assert is_absent(tmp_path / "runs")


class OnRank:
    """A run of one of two ranks, each with its slice of a table."""

    def __init__(self, rank, connect, root):
        self.slice = gen_slice(rank, 2)
        self.user = HashTable(2, name="user", slice=self.slice)
        model = torch.nn.ModuleDict({"user": self.user})
        saver = connect(Saver(model, output_dir=str(root), max_keep=None, deltas=LONG))
        self.manager = CheckpointManager(saver, 1, shard_id=rank, shard_num=2)

    def fill(self, numbers, value):
        ids = torch.tensor(ids_at(*numbers))
        fill(self.user, ids[self.slice.owns(ids)].tolist(), value)


def test_ranks_forget_together_and_refuse_together(tmp_path):
    def work(rank, connect):
        run = OnRank(rank, connect, tmp_path / "runs")
        run.fill(range(100), 1.0)
        run.manager.step()
        run.fill([5, 200], 2.0)
        run.manager.step()
        with pytest.raises(RecckptError, match="rank 1: rank 0 has other ids"):
            run.manager.forget("user", ids_at(rank))
        n_rows = len(run.user)
        done = run.manager.forget("user", GONE)
        run.manager.step()
        again = OnRank(rank, connect, tmp_path / "runs")
        again.manager.restore()
        return n_rows, len(run.user), [each.n_rows for each in done], again.user.ids().tolist()

    first, second = on_ranks(2, work)
    assert first[2] == second[2] == [{"ckpt_1": 2, "ckpt_2": 3}]
    assert first[0] + second[0] - 3 == first[1] + second[1] == 98
    assert set(first[3]) | set(second[3]) == set(ids_at(*range(100))) - set(GONE)
    assert is_absent(tmp_path / "runs")
    assert verify(str(tmp_path / "runs")) == []


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data.replace(b"user", b"uses")])
def test_a_damaged_request_is_told_and_stops_no_training(root, monkeypatch, caplog, damage):
    begin_to_forget(root, monkeypatch)
    [path] = (root / ".recckpt" / "forget").glob("*.json")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptCheckpointError, match="remove this file, and repeat the request"):
        forget(str(root), "user", GONE)
    assert any("a damaged request" in left.what for left in repair(str(root), clean=True).leftovers)
    run = Managed(root)
    with caplog.at_level(logging.ERROR):
        assert run.manager.restore() == 4
    assert "remove this file, and repeat the request" in caplog.text
    run.manager.step()
    path.unlink()
    forget(str(root), "user", GONE)
    assert is_absent(root)


def test_a_request_that_is_noted_as_done_and_still_there_is_ended_by_a_restore(root, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "remove", lambda self, name: die() if "/forget/" in name else REMOVE(self, name))
        with pytest.raises(KeyboardInterrupt):
            forget(str(root), "user", GONE)
    assert not is_absent(root)
    Managed(root).manager.restore()
    assert is_absent(root)
    assert len((root / "forgotten.jsonl").read_text().splitlines()) == 1
