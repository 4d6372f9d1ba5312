"""Which checkpoints go, which stay, and what a crash leaves of those that were never finished."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.builders import Run, checkpoints, flip_bit
from support.delta_runs import rows_of, run_with_chain
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.cli.app import main
from recckpt.errors import CheckpointNotFoundError, WriterFencedError
from recckpt.inspect import repair as repairing
from recckpt.inspect.repair import repair
from recckpt.inspect.verify import verify
from recckpt.inspect.watch import Watcher
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, write_intent
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints, locate
from recckpt.output_dir.offers import offers_in
from recckpt.output_dir.rotation import deletable, pinned_ids
from recckpt.rewrite.compaction import make_offer
from recckpt.rewrite.whole import Means
from recckpt.sparse import HashTable
from recckpt.storage import Storage, open_storage
from recckpt.storage.local import LocalStorage


@pytest.fixture
def storage(url) -> Storage:
    storage = open_storage(url)
    storage.prepare()
    return storage


def save(storage: Storage, *ids: str, **options) -> None:
    for ckpt_id in ids:
        save_tables(storage, [filled("item", range(3))], ckpt_id=ckpt_id, **options)


def rotate(storage: Storage, max_keep: int | None) -> None:
    for victim in rotation.expired(list_checkpoints(storage), max_keep, (), None):
        rotation.remove(storage, victim, 1)


def test_rotation_leaves_nothing_of_a_victim(storage):
    save(storage, "a", "b", "c")
    rotate(storage, 1)
    assert attempt_dirs(storage) == ["c"]
    assert [c.ckpt_id for c in list_checkpoints(storage).committed] == ["c"]
    rotate(storage, 1)
    assert attempt_dirs(storage) == ["c"]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_intent_goes_last_however_many_threads_remove(storage, monkeypatch, concurrency):
    save_tables(storage, *[[filled("item", [shard])] for shard in range(9)], ckpt_id="a")
    written = {f"a/{name}" for name in storage.list_files("a")}
    remove, removed = type(storage).remove, []
    monkeypatch.setattr(type(storage), "remove", lambda self, name: (removed.append(name), remove(self, name)))
    rotation.remove(storage, list_checkpoints(storage).committed[0], concurrency)
    assert (removed[0], removed[-1]) == ("a/manifest.json", "a/INTENT")
    assert set(removed) == written
    assert storage.list_files("a") == []


def test_files_of_others_and_their_directories_stay(tmp_path, caplog):
    storage = open_storage(str(tmp_path))
    save(storage, "a", "b")
    Path(tmp_path, "a", "notes.txt").write_text("mine")
    Path(tmp_path, "a", "sparse", "mine.arrow").write_text("mine")
    rotate(storage, 1)
    assert storage.list_files("a") == ["notes.txt", "sparse/mine.arrow"]
    assert any(record.levelno == logging.WARNING and "a" in record.message for record in caplog.records)


def test_removal_never_follows_links(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save(storage, "a", "b")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("model.pt", "00000-of-00001.json"):
        (outside / name).write_text("precious")
    runs = Path(storage.url)
    victim = list_checkpoints(storage).committed[0]
    (runs / "a" / "model.pt").symlink_to(outside / "model.pt")
    shutil.rmtree(runs / "a" / "sparse")
    (runs / "a" / "sparse").symlink_to(outside)
    rotation.remove(storage, victim, 1)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {
        "model.pt": "precious",
        "00000-of-00001.json": "precious",
    }
    assert not (runs / "a" / "model.pt").is_symlink()


def test_a_link_in_place_of_a_checkpoint_is_left_alone(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    other = open_storage(str(tmp_path / "other"))
    for place in (storage, other):
        place.prepare()
    save(other, "a")
    Path(storage.url, "a").symlink_to(Path(other.url, "a"))
    save(storage, "b", "c")
    rotate(storage, 1)
    assert [c.ckpt_id for c in list_checkpoints(other).committed] == ["a"]


@mostly_slow()
@pytest.mark.parametrize("method", ["remove", "list_files", "remove_empty_dirs", "sync_dir"])
def test_a_failed_removal_is_logged_and_done_at_the_next_time(storage, monkeypatch, caplog, method):
    save(storage, "a", "b")

    def fails(self, name):
        raise OSError(errno.EIO, "broken", name)

    [victim] = rotation.expired(list_checkpoints(storage), 1, (), None)
    with monkeypatch.context() as patch:
        patch.setattr(type(storage), method, fails)
        rotation.remove(storage, victim, 1)
    assert "broken" in caplog.text
    listing = list_checkpoints(storage)
    assert listing.current[-1].ckpt_id == "b"
    for left in [*rotation.leftovers(storage, listing, epoch=1), *rotation.expired(listing, 1, (), None)]:
        rotation.remove_leftover(storage, left.directory, 1)
    assert storage.list_files("a") == [] or method == "remove"


def test_damaged_checkpoints_neither_count_nor_go(tmp_path):
    storage = open_storage(str(tmp_path))
    save(storage, "a", "b", "c")
    Forge(tmp_path / "c").path("manifest.json").write_bytes(b"{}")
    rotate(storage, 1)
    assert attempt_dirs(storage) == ["b", "c"]


def test_a_failed_attempt_leaves_its_intent_alone_and_what_is_committed_is_never_abandoned(storage):
    save(storage, "a", "b")
    storage.remove("b/manifest.json")
    files = storage.list_files("a")
    for directory in "ab":
        rotation.abandon(storage, directory)
    assert (storage.list_files("a"), storage.list_files("b")) == (files, ["INTENT"])
    assert [c.ckpt_id for c in list_checkpoints(storage).committed] == ["a"]


def test_leftovers_are_attempts_without_a_manifest_of_writers_that_are_through(storage, monkeypatch):
    save(storage, "a", "b", "c")
    storage.remove("a/manifest.json")
    storage.remove("b/manifest.json")
    storage.remove("b/INTENT")
    storage.make_dir("mine")
    storage.put_if_absent("mine/notes.txt", b"mine")
    listing = list_checkpoints(storage)
    assert [left.directory for left in rotation.leftovers(storage, listing, epoch=1)] == ["a"]
    assert rotation.leftovers(storage, listing, epoch=0) == []
    remove, removed = type(storage).remove, []
    monkeypatch.setattr(type(storage), "remove", lambda self, name: (removed.append(name), remove(self, name)))
    rotation.remove_leftover(storage, "a", 1)
    assert removed[-1] == "a/INTENT"
    assert sorted(attempt_dirs(storage)) == ["b", "c", "mine"]


@mostly_slow()
@pytest.mark.parametrize("n_removed", range(4))
def test_a_deletion_that_is_cut_short_brings_back_nothing_that_was_overwritten(tmp_path, monkeypatch, n_removed):
    table = HashTable(2, name="item")
    saver = Saver(
        nn.ModuleDict({"item": table}), None, tmp_path, max_keep=None, deltas=Deltas(full_every=2, max_dirty=1.0)
    )
    with monkeypatch.context() as patched:
        patched.setattr(rotation, "remove", lambda *args: False)  # what was overwritten could not be removed
        for ckpt_id, value in (("a", 0.0), ("b", 1.0), ("b", 2.0), ("b", 3.0)):  # full, delta, delta, full
            table.insert(torch.arange(9), torch.full((9, 2), value))
            saver.save(ckpt_id, overwrite=True)
        Saver(saver.model, None, tmp_path, max_keep=None).save("c")
    fence = Fence(open_storage(str(tmp_path)))
    fence.hold()
    newest = fence.listing.find("b").manifest.save_id
    victims = deletable(fence.listing, "b", (), str(tmp_path))
    assert [victim.manifest.kind for victim in victims] == ["delta", "delta", "full"]
    fence.remove(victims[:n_removed], 1)
    left = list_checkpoints(open_storage(str(tmp_path))).find("b")
    assert left.manifest.save_id == newest if n_removed < 3 else left is None


def test_a_removal_that_fails_brings_back_nothing_that_was_overwritten(storage, monkeypatch):
    save(storage, "a", "b")
    save(storage, "a", overwrite=True)
    remove = type(storage).remove

    def fails(self, name):
        if name == "a/manifest.json":
            raise OSError(errno.EIO, "broken", name)
        remove(self, name)

    monkeypatch.setattr(type(storage), "remove", fails)
    fence = Fence(storage)
    fence.hold()
    newest = fence.listing.find("a").manifest.save_id
    fence.remove(deletable(fence.listing, "a", (), storage.url), 1)
    assert list_checkpoints(storage).find("a").manifest.save_id == newest


@pytest.fixture
def replaced(local):
    """An output dir with a full checkpoint a, a delta b on it, and what supersedes b, compacted."""
    save(local, "a")
    delta = write_delta(counting(Path(local.url))[0], "b", 3, [({1: (1, 1)}, [])])
    directory = write_compacted(delta, {id_: (id_, id_) for id_ in range(3)}).directory
    write_intent(local, Intent(directory.name, 2, directory.name.rpartition(".")[2], None, is_offer=True))
    return directory


def test_what_is_superseded_goes_only_after_what_supersedes_it_is_durable(local, replaced, monkeypatch):
    done, sync = [], type(local).sync_dir
    monkeypatch.setattr(type(local), "sync_dir", lambda self, name: (done.append(name), sync(self, name)))
    listing = list_checkpoints(local)
    rotation.sync_superseders(local, listing, rotation.expired(listing, 1, (), None))
    assert done == [replaced.name, ""]
    rotation.sync_superseders(local, listing, ())
    assert done == [replaced.name, ""]
    rotate(local, 1)
    assert attempt_dirs(local) == [replaced.name]
    [left] = list_checkpoints(local).current
    assert left.ckpt_id == "b"
    remove, removed = type(local).remove, []
    monkeypatch.setattr(type(local), "remove", lambda self, name: (removed.append(name), remove(self, name)))
    rotation.remove(local, left, 1)
    assert (removed[0], removed[-1]) == (f"{replaced.name}/manifest.json", f"{replaced.name}/INTENT")
    assert not replaced.exists()


def test_an_offer_is_left_to_its_compactor_by_the_saves_of_its_epoch_and_goes_at_a_takeover(local, replaced):
    (replaced / "manifest.json").unlink()
    saver = Saver(nn.ModuleDict({"item": filled("item", range(3))}), output_dir=local.url, max_keep=None)
    saver.save("c")  # as epoch 2, which is that of the offer
    assert replaced.name in attempt_dirs(local)
    Fence(local).hold()
    assert replaced.name not in attempt_dirs(local)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_save_drops_what_a_form_replaces_or_the_form_where_that_is_damaged(local, replaced, caplog, is_whole):
    if not is_whole:
        next(replaced.glob("sparse/*.arrow")).unlink()
    Saver(nn.ModuleDict({"item": filled("item", range(3))}), output_dir=local.url, max_keep=2).save("c")
    assert sorted(attempt_dirs(local)) == ([replaced.name, "c"] if is_whole else ["a", "b", "c"])
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("pattern", ["sparse/*.arrow", "sparse/*.json"])
def test_a_form_is_read_once_more_before_what_it_replaces_goes(local, replaced, caplog, pattern):
    expected = rows_of(local, "a"), rows_of(local, "b")
    flip_bit(next(replaced.glob(pattern)))
    saver = Saver(nn.ModuleDict({"item": filled("item", range(3))}), output_dir=local.url, max_keep=2)
    saver.save("c")
    assert sorted(attempt_dirs(local)) == ["a", "b", "c"]
    assert (rows_of(local, "a"), rows_of(local, "b")) == expected
    assert f"{replaced.name} is damaged and removed; the superseded checkpoint stays" in caplog.text
    saver.save("d")
    assert sorted(attempt_dirs(local)) == ["c", "d"]


def test_a_delta_that_cannot_be_removed_keeps_what_it_stands_on(local, monkeypatch, caplog):
    save(local, "a")
    [link] = counting(Path(local.url))
    for ckpt_id in "bc":
        link = write_delta(link, ckpt_id, 3, [({1: (1, 1)}, [])])
    remove = type(local).remove

    def fails(storage, name):
        if name == "b/manifest.json":
            raise OSError(errno.EIO, "broken", name)
        remove(storage, name)

    saver = Saver(nn.ModuleDict({"item": filled("item", range(3))}), output_dir=local.url, max_keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(type(local), "remove", fails)
        saver.save("d")
    assert "broken" in caplog.text
    assert [c.directory for c in list_checkpoints(local).committed] == ["a", "b", "d"]
    assert list_checkpoints(local).damaged == {}
    saver.save("e")
    assert attempt_dirs(local) == ["e"]


@mostly_slow()
@pytest.mark.parametrize(("max_keep", "at_8", "at_9"), [(1, "5 6 7 8", "9"), (2, "1 2 3 4 5 6 7 8", "5 6 7 8 9")])
def test_a_run_with_deltas_keeps_whole_chains_one_or_two_of_them(tmp_path, max_keep, at_8, at_9):
    run = Run(tmp_path, interval=1, max_keep=max_keep, deltas=Deltas(full_every=3, max_dirty=1, max_chain_bytes=1000))
    for n_steps, expected in ((8, at_8), (1, at_9)):
        run.train(n_steps)
        listing = list_checkpoints(run.saver.storage)
        assert listing.ckpt_ids == [f"ckpt_{step}" for step in expected.split()]
        fulls = [c.ckpt_id for c in listing.committed if c.manifest.kind == "full"]
        assert fulls == [f"ckpt_{step}" for step in (1, 5, 9) if str(step) in expected.split()]
        assert verify(str(tmp_path)) == []


@pytest.fixture
def manager(url) -> CheckpointManager:
    return CheckpointManager(Saver(nn.Linear(1, 1), output_dir=url), 1)


def kept(manager) -> list[str]:
    return [checkpoint.ckpt_id for checkpoint in list_checkpoints(manager.saver.storage).current]


def test_a_pinned_checkpoint_stays_until_it_is_unpinned(manager):
    manager.step()
    manager.pin(1)
    manager.pin(1)
    manager.step()
    manager.step()
    assert kept(manager) == ["ckpt_1", "ckpt_3"]
    manager.unpin(1)
    manager.unpin(1)
    assert kept(manager) == ["ckpt_1", "ckpt_3"]
    manager.step()
    assert kept(manager) == ["ckpt_4"]


def test_what_is_not_committed_cannot_be_pinned_nor_an_id_in_place_of_a_step(manager):
    manager.step()
    with pytest.raises(CheckpointNotFoundError, match="'ckpt_7'; there are 'ckpt_1'"):
        manager.pin(7)
    for pin in (manager.pin, manager.unpin):
        with pytest.raises(TypeError, match="step must be an int, found 'ckpt_1': a manager names its own checkpoints"):
            pin("ckpt_1")
    assert pinned_ids(manager.saver.storage) == set()


def test_another_process_may_pin_and_that_keeps_the_newest_of_an_id_not_what_it_superseded(manager):
    manager.step()
    reader = CheckpointManager(Saver(nn.Linear(1, 1), output_dir=manager.saver.output_dir), 1)
    reader.pin(1)
    manager.saver.save("ckpt_1", step=1, overwrite=True)
    assert [c.directory for c in list_checkpoints(manager.saver.storage).committed] == ["ckpt_1.1"]
    manager.step()
    assert kept(manager) == ["ckpt_1", "ckpt_2"]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(repairing, "_LOOKS_APART", 0)


@pytest.fixture
def broken(monkeypatch):
    """Make the disk give EIO for the content of files, by the ends of their names."""
    read, ends = LocalStorage.read, []

    def reading(storage, name, *span):
        if name.endswith(tuple(ends)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{storage.url}/{name}")
        return read(storage, name, *span)

    monkeypatch.setattr(LocalStorage, "read", reading)
    return ends.append


def leave(root, directory, epoch=1):
    """Leave what a save of a dead writer leaves."""
    storage = open_storage(str(root))
    storage.make_dir(directory)
    write_intent(storage, Intent(directory, epoch, "0" * 32, 7))
    with storage.create(f"{directory}/model.pt") as sink:
        sink.write(b"half")


@mostly_slow()
@pytest.mark.parametrize("fault", ["EIO", "torn"])
def test_a_dead_save_that_cannot_be_told_is_passed_over_named_and_removed(tmp_path, caplog, broken, fault):
    Run(tmp_path, interval=5).train(5)
    leave(tmp_path, "ckpt_7")
    leave(tmp_path, "best")
    for directory in ("ckpt_7", "best"):
        if fault == "EIO":
            broken(f"{directory}/INTENT")
        else:
            (tmp_path / directory / "INTENT").write_bytes(b'{"epoch": 1, "sa')
    later = Run(tmp_path, interval=5)
    assert later.manager.restore() == 5
    later.train(10)
    assert checkpoints(tmp_path) == ["ckpt_15"]
    said = [record.message for record in caplog.records if "ckpt_7 was never finished" in record.message]
    assert len(said) == 1, caplog.text
    assert "repair --clean" in said[0]
    assert [problem.file for problem in verify(str(tmp_path))] == ["best/INTENT", "ckpt_7/INTENT"]
    assert repair(str(tmp_path), clean=True).removed == ("best", "ckpt_7")
    assert not (tmp_path / "ckpt_7").exists()
    assert not (tmp_path / "best").exists()
    assert verify(str(tmp_path)) == []


def test_verify_names_it_apart_from_checkpoints_and_repair_and_a_look_go_on(tmp_path, broken, capsys):
    Run(tmp_path, interval=5).train(5)
    leave(tmp_path, "ckpt_7")
    broken("ckpt_7/INTENT")
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "found 1 problem in 0 of 1 checkpoint and in ckpt_7" in said.err
    assert "ckpt_7/INTENT: found an error: [Errno 5]" in said.out
    broken("checkpoint")
    assert repair(str(tmp_path)).index_problem.startswith("not readable")
    broken("INTENT")
    broken("owner/1.json")
    status = Watcher(open_storage(str(tmp_path))).look()
    assert status.to_dict()["last_save"]


@pytest.mark.parametrize("directory", ["ckpt_12", "ckpt_12.1", "ckpt_5.2", "late"])
def test_a_save_that_may_still_run_stays_though_it_cannot_be_told(tmp_path, broken, directory):
    Run(tmp_path, interval=5).train(5)
    Fence(open_storage(str(tmp_path))).hold()
    leave(tmp_path, directory, 2)
    broken(f"{directory}/INTENT")
    done = repair(str(tmp_path), clean=True)
    assert [(left.path, left.is_dead) for left in done.leftovers] == [(directory, False)]
    assert (tmp_path / directory / "model.pt").exists()


def test_no_later_writer_makes_a_directory_that_is_judged_by_its_name(tmp_path):
    storage = open_storage(str(tmp_path))
    Run(tmp_path, interval=5).train(5)
    leave(tmp_path, "ckpt_5.1")
    run = Run(tmp_path, max_keep=9)
    run.manager.restore()
    run.saver.save("ckpt_5.1")  # an id that looks like an attempt of the first writer
    assert checkpoints(tmp_path) == ["ckpt_5", "ckpt_5.1.2.1"]
    assert repair(storage.url, clean=True).removed == ()


def test_an_offer_that_cannot_be_read_is_not_adopted_and_goes_with_the_next_owner(tmp_path, broken):
    run = run_with_chain(tmp_path)
    directory = make_offer(run, locate(run, "ckpt_3"), Means(None, 1, 1 << 20)).directory
    broken("/offer.json")
    [found] = offers_in(run, list_checkpoints(run))
    assert (found.directory, found.record, "Input/output" in found.problem) == (directory, None, True)
    Fence(run).hold()
    assert directory not in attempt_dirs(run)


def test_an_overtaken_writer_is_fenced_though_the_claim_of_the_later_one_cannot_be_read(tmp_path, broken):
    storage = open_storage(str(tmp_path))
    storage.prepare()
    first = Fence(storage)
    first.hold()
    Fence(storage).hold()
    broken("owner/2.json")
    with pytest.raises(WriterFencedError, match="taken over by the writer of epoch 2"):
        first.check()
