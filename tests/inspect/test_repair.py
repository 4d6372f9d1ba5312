"""Repair makes the index file anew, tells leftovers apart, and removes what is dead and nothing else."""

import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import Run, checkpoints, flip_bit, tree
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta

from recckpt.errors import CheckpointNotFoundError, FormatVersionError
from recckpt.format import layout
from recckpt.inspect import repair as repairing
from recckpt.inspect.repair import repair
from recckpt.inspect.verify import verify
from recckpt.output_dir.checkpoint_dir import Intent, write_intent
from recckpt.output_dir.claims import Claim, encode_takeover, last_takeover
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(repairing, "_LOOKS_APART", 0)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """An output dir of two writers, made once for all tests, which change copies of it."""
    runs = tmp_path_factory.mktemp("two") / "runs"
    Run(runs, max_keep=9, interval=5).train(10)
    second = Run(runs, max_keep=9, interval=5, seed=3)
    second.manager.restore()
    second.train(5)
    assert checkpoints(runs) == ["ckpt_10", "ckpt_15", "ckpt_5"]
    return runs


@pytest.fixture
def runs(tmp_path, two_runs):
    """An output dir of two writers: that of epoch 1 is dead, that of epoch 2 may be alive."""
    return shutil.copytree(two_runs, tmp_path / "runs", symlinks=True)


def begin(root, directory, epoch, *files):
    """Leave what a save leaves that dies."""
    storage = open_storage(str(root))
    storage.make_dir(directory)
    write_intent(storage, Intent(directory, epoch, "0" * 32, 20))
    for name in files:
        with storage.create(f"{directory}/{name}") as sink:
            sink.write(b"half")


def commit_late(root, directory):
    """Commit a checkpoint as a writer of epoch 1 that has not noticed that it lost the output dir."""
    shutil.copytree(root / "ckpt_10", root / directory)
    Forge(root / directory).edit_manifest(lambda values: values.update(save_id="f" * 32, ckpt_id="late", seq=99))
    assert directory in list_checkpoints(open_storage(str(root))).fenced


def what(done):
    return {left.path: (left.is_dead, left.what) for left in done.leftovers}


def test_an_output_dir_that_is_right_stays_as_it_is(runs):
    before = tree(runs)
    for options in ({}, {"clean": True}, {"dry_run": True}):
        done = repair(str(runs), **options)
        assert (done.index_problem, done.leftovers, done.removed, done.damaged) == ("", (), (), {})
        assert done.checkpoints == ("ckpt_5", "ckpt_10", "ckpt_15")
    assert tree(runs) == before


@pytest.mark.parametrize("index", [None, b"", b"ckpt_5\nckpt_1", b"ckpt_99\n", b"\xff\0\n", b"../x\n" * 1000])
def test_the_index_file_is_made_anew_from_the_manifests(runs, index):
    path = runs / "checkpoint"
    path.unlink()
    if index is not None:
        path.write_bytes(index)
    before = tree(runs)
    assert repair(str(runs), dry_run=True).index_problem
    assert tree(runs) == before
    assert repair(str(runs)).index_problem
    assert path.read_text() == "ckpt_5\nckpt_10\nckpt_15\n"
    assert repair(str(runs)).index_problem == ""


def test_the_index_file_is_not_written_through_a_link_and_is_made_anew_in_a_store(runs, tmp_path, memory_url):
    (tmp_path / "mine").write_text("mine")
    (runs / "checkpoint").unlink()
    (runs / "checkpoint").symlink_to(tmp_path / "mine")
    assert repair(str(runs)).index_problem
    assert (tmp_path / "mine").read_text() == "mine"
    assert (runs / "checkpoint").read_text() == "ckpt_5\nckpt_10\nckpt_15\n"
    assert not (runs / "checkpoint").is_symlink()
    storage = open_storage(memory_url)
    storage.prepare()
    for number in (1, 2):
        save_tables(storage, [filled("t", range(5))], ckpt_id=f"ckpt_{number}")
    storage.remove("checkpoint")
    done = repair(memory_url, clean=True)
    assert (done.index_problem, done.checkpoints) == ("missing", ("ckpt_1", "ckpt_2"))
    assert storage.read("checkpoint", 100) == b"ckpt_1\nckpt_2\n"


def test_saves_of_a_dead_writer_go_and_those_of_the_last_stay_and_are_named(runs):
    begin(runs, "ckpt_20", 1, "model.pt", "sparse/00000-of-00001.g0.00.arrow")
    begin(runs, "ckpt_20.2", 2, "model.pt")
    before = tree(runs)
    for options in ({}, {"dry_run": True}, {"dry_run": True, "clean": True}):
        done = repair(str(runs), **options)
        assert what(done)["ckpt_20"][0] is True
        alive, whose = what(done)["ckpt_20.2"]
        assert alive is False
        assert f"epoch 2: process {os.getpid()} on {socket.gethostname()} since 20" in whose
        assert done.removed == (("ckpt_20",) if "clean" in options else ())
        assert tree(runs) == before
    done = repair(str(runs), clean=True)
    assert (done.removed, done.failed) == (("ckpt_20",), ())
    assert tree(runs) == {name: data for name, data in before.items() if name.split("/")[0] != "ckpt_20"}


def test_a_save_that_died_before_it_had_its_mark_goes_with_its_writer(runs):
    for directory, epoch in (("ckpt_8", 1), ("ckpt_9", 2)):
        begin(runs, directory, epoch)
        (runs / directory / "INTENT").rename(runs / directory / "INTENT.0123456789abcdef.tmp")
    done = repair(str(runs), clean=True)
    assert done.removed == ("ckpt_8",)
    assert [left.is_dead for left in done.leftovers] == [True, False]
    assert not (runs / "ckpt_8").exists()
    assert (runs / "ckpt_9").exists()


def test_with_a_claim_without_a_list_or_a_damaged_list_nobody_is_known_to_be_dead(runs):
    begin(runs, "ckpt_20", 2, "model.pt")
    owner = runs / ".recckpt/owner"
    shutil.copy(owner / "2.json", owner / "3.json")  # whoever made it died before it had listed what is committed
    assert what(repair(str(runs), clean=True))["ckpt_20"][0] is False
    (owner / "3.json").unlink()
    begin(runs, "ckpt_21", 1, "model.pt")
    flip_bit(owner / "2.list.json")
    done = repair(str(runs), clean=True)
    assert what(done)["ckpt_21"][0] is False
    assert ".recckpt/owner/2.list.json" in done.damaged
    assert (runs / "ckpt_20/model.pt").exists()
    assert (runs / "ckpt_21/model.pt").exists()


def test_late_commits_of_a_writer_that_lost_the_output_dir_go_manifest_first(runs, monkeypatch):
    commit_late(runs, "late")
    done = repair(str(runs))
    dead, reason = what(done)["late"]
    assert dead
    assert "epoch 1" in reason
    assert "late" not in done.checkpoints
    assert (runs / "late/manifest.json").exists()
    removed, kind = [], type(open_storage(str(runs)))
    real = kind.remove
    monkeypatch.setattr(kind, "remove", lambda self, name: (removed.append(name), real(self, name))[1])
    assert repair(str(runs), clean=True).removed == ("late",)
    assert removed[0] == "late/manifest.json"
    assert "late/model.pt" in removed
    assert not (runs / "late").exists()
    assert checkpoints(runs) == ["ckpt_10", "ckpt_15", "ckpt_5"]


def test_stray_temporary_files_go(runs):
    digits = "0123456789abcdef"
    strays = [
        f"checkpoint.{digits}.tmp",
        f".probe-{digits}.tmp",
        f".probe-{digits}.tmp.{digits}.tmp",
        f".recckpt/owner/3.json.{digits}.tmp",
    ]
    others = ["checkpoint.tmp", "checkpoint.bak", "mine.tmp", f"x.{digits}.tmp", f"ckpt_5/notes.{digits}.tmp"]
    before = tree(runs)
    for name in (*strays, *others):
        (runs / name).write_text("x")
    done = repair(str(runs))
    assert sorted(what(done)) == sorted(strays)
    assert sorted(repair(str(runs), clean=True).removed) == sorted(strays)
    assert tree(runs) == {**before, **dict.fromkeys(others, b"x")}


def test_a_temporary_file_that_a_save_is_using_is_left_to_it(runs, monkeypatch):
    stray, used = f"checkpoint.{'0' * 16}.tmp", f"checkpoint.{'1' * 16}.tmp"
    for name in (stray, used):
        (runs / name).write_text("x")
    monkeypatch.setattr(repairing.time, "sleep", lambda _: (runs / used).rename(runs / "renamed"))
    assert sorted(repair(str(runs), clean=True).removed) == [stray, used]
    assert (runs / "renamed").exists()


def test_what_nobody_can_tell_whose_it_is_stays(runs):
    (runs / "ckpt_25").mkdir()
    (runs / "ckpt_30/sparse").mkdir(parents=True)
    (runs / "ckpt_35").mkdir()
    (runs / "ckpt_35/model.pt").write_text("x")
    begin(runs, "ckpt_40", 1, "model.pt")
    (runs / "ckpt_40/INTENT").write_text("{")
    begin(runs, "ckpt_45", 99, "model.pt")
    (runs / "mine").mkdir()
    (runs / "mine/notes").write_text("x")
    before = tree(runs)
    done = repair(str(runs), clean=True)
    assert {name: dead for name, (dead, _) in what(done).items()} == dict.fromkeys(
        ["ckpt_25", "ckpt_30", "ckpt_35", "ckpt_40", "ckpt_45"], False
    )
    assert tree(runs) == before


def test_damaged_checkpoints_stay_and_are_named(runs):
    (runs / "ckpt_5/model.pt").unlink()
    (runs / "ckpt_10/manifest.json").write_text("{")
    done = repair(str(runs), clean=True)
    assert sorted(done.damaged) == ["ckpt_10", "ckpt_5"]
    assert done.checkpoints == ("ckpt_15",)
    assert (runs / "checkpoint").read_text() == "ckpt_15\n"
    assert (runs / "ckpt_5/extra.pt").exists()
    assert (runs / "ckpt_10/model.pt").exists()


def test_links_are_never_followed(runs, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.pt").write_text("mine")
    (outside / "00000-of-00001.g0.00.arrow").write_text("mine")
    begin(runs, "ckpt_20", 1, "extra.pt")
    (runs / "ckpt_20/model.pt").symlink_to(outside / "model.pt")
    (runs / "ckpt_20/sparse").symlink_to(outside)
    shutil.copytree(runs / "ckpt_20", outside / "whole", symlinks=True)
    (runs / "ckpt_99").symlink_to(outside / "whole")
    before = tree(outside)
    done = repair(str(runs), clean=True)
    assert tree(outside) == before
    assert sorted(what(done)) == ["ckpt_20"]
    assert (runs / "ckpt_99").is_symlink()
    assert sorted(path.name for path in (runs / "ckpt_20").iterdir()) == ["sparse"]


def test_where_a_newer_recckpt_has_written_or_nothing_may_be_removed_all_stays_and_so_do_files_of_others(
    runs, monkeypatch
):
    begin(runs, "ckpt_20", 1, "model.pt", "notes.txt")

    def refuse(self, name):
        raise PermissionError(13, "Permission denied", name)

    with monkeypatch.context() as patch:
        patch.setattr(type(open_storage(str(runs))), "remove", refuse)
        done = repair(str(runs), clean=True)
    assert (done.removed, done.failed) == ((), ("ckpt_20",))
    forge, index = Forge(runs / "ckpt_5"), runs / "checkpoint"
    whole, names = forge.path("manifest.json").read_bytes(), index.read_bytes()
    forge.edit_manifest(lambda values: values.update(version=99))
    index.unlink()
    before = tree(runs)
    with pytest.raises(FormatVersionError):
        repair(str(runs), clean=True)
    assert tree(runs) == before
    forge.path("manifest.json").write_bytes(whole)
    index.write_bytes(names)
    assert repair(str(runs), clean=True).removed == ("ckpt_20",)
    assert [path.name for path in (runs / "ckpt_20").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("make", [None, "empty", "others", "checkpoint"])
def test_what_is_no_output_dir_is_refused_and_not_written_to(runs, tmp_path, make):
    path = {"checkpoint": runs / "ckpt_5"}.get(make, tmp_path / "other")
    if make in ("empty", "others"):
        path.mkdir()
    if make == "others":
        (path / "photos").mkdir()
        (path / "photos/1.jpg").write_text("x")
        (path / "letters").mkdir()
    before = tree(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="output dir"):
        repair(str(path), clean=True)
    assert tree(tmp_path) == before


def test_a_run_goes_on_after_a_repair(runs):
    begin(runs, "ckpt_20", 1, "model.pt")
    commit_late(runs, "late")
    (runs / "checkpoint").unlink()
    repair(str(runs), clean=True)
    run = Run(runs, max_keep=9, interval=5)
    assert run.manager.restore() == 15
    run.train(5)
    assert verify(str(runs)) == []
    assert repair(str(runs)).leftovers == ()


@pytest.fixture
def offered(local):
    """An output dir with a delta, and what it was compacted into, which a writer of epoch 2 has adopted."""
    save_tables(local, [filled("item", range(3))], ckpt_id="a")
    delta = write_delta(counting(Path(local.url))[0], "b", 3, [({1: (1, 1)}, [])])
    directory = write_compacted(delta, {1: (1, 1)}).directory
    write_intent(local, Intent(directory.name, 2, directory.name.rpartition(".")[2], None, is_offer=True))
    return directory


def test_an_offer_goes_once_a_later_writer_has_taken_over(local, offered):
    (offered / "manifest.json").unlink()
    before = tree(Path(local.url))
    done = repair(local.url, dry_run=True)
    is_dead, text = what(done)[offered.name]
    assert (is_dead, text.startswith("an offer that is not adopted, epoch 2")) == (False, True)
    assert tree(Path(local.url)) == before
    assert repair(local.url, clean=True).removed == ()
    put_list(local, 3)
    assert repair(local.url, clean=True).removed == (offered.name,)
    assert not offered.exists()


def test_what_a_writer_adopted_after_it_had_lost_the_output_dir_goes_as_a_late_commit(local, offered):
    manifest = offered / "manifest.json"
    manifest.rename(offered.parent / "late")
    put_list(local, 3)
    (offered.parent / "late").rename(manifest)
    assert list(list_checkpoints(local).fenced) == [offered.name]
    assert repair(local.url, clean=True).removed == (offered.name,)
    assert not offered.exists()


def put_list(local, epoch):
    """Publish the list of a takeover that sweeps nothing."""
    claim = Claim(epoch, "0" * 32, "host", 1, "now")
    takeover = replace(last_takeover(local), epoch=epoch, save_ids=list_checkpoints(local).save_ids)
    local.put_if_absent(layout.takeover(epoch), encode_takeover(claim, takeover))
