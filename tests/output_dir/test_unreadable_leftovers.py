"""What only names garbage, and cannot be read, stands in the way of nothing: no save, no restore, no repair."""

import errno
import os

import pytest
from support.builders import Run, checkpoints
from support.delta_runs import run_with_chain

from recckpt.cli.app import main
from recckpt.compaction.compact import make_offer
from recckpt.compaction.whole import Means
from recckpt.errors import WriterFencedError
from recckpt.inspect import repair as repairing
from recckpt.inspect.repair import repair
from recckpt.inspect.verify import verify
from recckpt.inspect.watch.look import Watcher
from recckpt.output_dir.checkpoint_dir import Intent, write_intent
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import locate
from recckpt.output_dir.offers import look_at, may_go
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(repairing, "_LOOKS_APART", 0)


@pytest.fixture
def broken(monkeypatch):
    """Make the disk give EIO for the content of files, by the ends of their names."""
    read, ends = LocalStorage.read, []

    def reading(storage, name, max_bytes):
        if name.endswith(tuple(ends)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{storage.url}/{name}")
        return read(storage, name, max_bytes)

    monkeypatch.setattr(LocalStorage, "read", reading)
    return ends.append


def leave(root, directory, epoch=1):
    """Leave what a save of a dead writer leaves."""
    storage = open_storage(str(root))
    storage.make_dir(directory)
    write_intent(storage, Intent(directory, epoch, "0" * 32, 7))
    with storage.create(f"{directory}/model.pt") as sink:
        sink.write(b"half")


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


def test_verify_names_it_apart_from_checkpoints(tmp_path, broken, capsys):
    Run(tmp_path, interval=5).train(5)
    leave(tmp_path, "ckpt_7")
    broken("ckpt_7/INTENT")
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "found 1 problem in 0 of 1 checkpoint and in ckpt_7" in said.err
    assert "ckpt_7/INTENT: found an error: [Errno 5]" in said.out


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


def test_an_offer_that_cannot_be_read_goes_once_it_is_old(tmp_path, broken):
    run = run_with_chain(tmp_path)
    directory = make_offer(run, locate(run, "ckpt_3"), Means(None, 1, 1 << 20)).directory
    broken("/OFFER")
    found = look_at(open_storage(str(tmp_path)), directory, None)
    assert (found.is_begun, found.offer, "Input/output" in found.problem) == (True, None, True)
    assert not may_go(found)
    old = (tmp_path / directory / "OFFER").stat().st_mtime - 3 * 86_400
    os.utime(tmp_path / directory / "OFFER", (old, old))
    assert repair(str(tmp_path), clean=True).removed == (directory,)


def test_the_index_file_is_made_anew_where_it_cannot_be_read(tmp_path, broken):
    Run(tmp_path, interval=5).train(5)
    broken("checkpoint")
    assert repair(str(tmp_path)).index_problem.startswith("not readable")


def test_an_overtaken_writer_is_fenced_though_the_claim_of_the_later_one_cannot_be_read(tmp_path, broken):
    storage = open_storage(str(tmp_path))
    storage.prepare()
    first = Fence(storage)
    first.hold()
    Fence(storage).hold()
    broken("owner/2.json")
    with pytest.raises(WriterFencedError, match="taken over by the writer of epoch 2"):
        first.check()


def test_a_look_at_a_run_says_what_is_known_of_it(tmp_path, broken):
    Run(tmp_path, interval=5).train(5)
    leave(tmp_path, "ckpt_7")
    broken("INTENT")
    broken("owner/1.json")
    status = Watcher(open_storage(str(tmp_path))).look()
    assert status.to_dict()["last_save"]
