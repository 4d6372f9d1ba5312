"""An output dir of RecIS is told from ours, and its file ``checkpoint`` is left alone."""

import shutil

import pytest
from support.bank_runs import run, table

from recckpt import CheckpointManager
from recckpt.errors import CheckpointNotFoundError


@pytest.fixture
def recis(tmp_path):
    return saved_by_recis(tmp_path / "recis")


def saved_by_recis(output_dir):
    directory = output_dir / "ckpt_100"
    directory.mkdir(parents=True)
    for name in ("index", "tensorkey.json"):
        (directory / name).write_text("{}")
    (output_dir / "checkpoint").write_text("ckpt_50\nckpt_100\n")
    return output_dir


def test_a_load_from_it_says_what_it_is(tmp_path, recis):
    saver = run(tmp_path / "own", table("t"))
    for path in (recis, recis / "ckpt_100"):
        with pytest.raises(CheckpointNotFoundError, match="an output dir of RecIS"):
            saver.load_by_config(str(path))
    with pytest.raises(CheckpointNotFoundError) as caught:
        saver.load_by_config(str(tmp_path / "own"))
    assert "RecIS" not in str(caught.value)


def test_saves_there_leave_its_index_alone_and_are_found(recis, caplog):
    before = (recis / "checkpoint").read_bytes()
    manager = CheckpointManager(run(recis, table("t", [1])), 1)
    assert manager.restore() == 0
    assert "an output dir of RecIS" in caplog.text
    manager.step()
    assert (recis / "checkpoint").read_bytes() == before
    assert sorted(path.name for path in (recis / "ckpt_100").iterdir()) == ["index", "tensorkey.json"]
    again = table("t")
    assert CheckpointManager(run(recis, again), 1).restore() == 1
    assert len(again) == 1


def test_the_index_of_a_run_that_begins_there_later_is_left_alone_until_its_checkpoints_are_gone(tmp_path, caplog):
    saver = run(tmp_path, table("t", [1]))
    saver.save("a")
    before = (saved_by_recis(tmp_path) / "checkpoint").read_bytes()
    for ckpt_id in ("b", "c"):
        saver.save(ckpt_id)
        assert (tmp_path / "checkpoint").read_bytes() == before
    assert caplog.text.count("an output dir of RecIS") == 1
    shutil.rmtree(tmp_path / "ckpt_100")
    saver.save("d")
    assert (tmp_path / "checkpoint").read_text() == "d\n"


def test_a_dir_that_was_its_when_it_was_taken_over_gets_our_index_once_its_checkpoints_are_gone(recis):
    saver = run(recis, table("t", [1]))
    saver.save("a")
    shutil.rmtree(recis / "ckpt_100")
    saver.save("b")
    assert (recis / "checkpoint").read_text() == "b\n"


def test_a_writer_does_not_look_again_whether_it_is_one_while_all_directories_are_its_own(tmp_path, monkeypatch):
    saver = run(tmp_path, table("t", [1]))
    saver.save("a")
    asked, read, size = [], saver.storage.read, saver.storage.size
    monkeypatch.setattr(saver.storage, "read", lambda *args: (asked.append(args[0]), read(*args))[1])
    monkeypatch.setattr(saver.storage, "size", lambda *args: (asked.append(args[0]), size(*args))[1])
    saver.save("b")
    assert not {"checkpoint", "tensorkey.json", "index"} & set(asked)
    assert (tmp_path / "checkpoint").read_text() == "b\n"
