"""An output dir of RecIS is told from ours, and its file ``checkpoint`` is left alone."""

import pytest
from bank_runs import run, table

from recckpt import CheckpointManager
from recckpt.errors import CheckpointNotFoundError


@pytest.fixture
def recis(tmp_path):
    directory = tmp_path / "recis" / "ckpt_100"
    directory.mkdir(parents=True)
    for name in ("index", "tensorkey.json"):
        (directory / name).write_text("{}")
    (tmp_path / "recis" / "checkpoint").write_text("ckpt_50\nckpt_100\n")
    return tmp_path / "recis"


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


def test_a_writer_looks_once_in_its_life_whether_it_is_one(tmp_path, monkeypatch):
    saver = run(tmp_path, table("t", [1]))
    saver.save("a")
    asked, read, size = [], saver.storage.read, saver.storage.size
    monkeypatch.setattr(saver.storage, "read", lambda *args: (asked.append(args[0]), read(*args))[1])
    monkeypatch.setattr(saver.storage, "size", lambda *args: (asked.append(args[0]), size(*args))[1])
    saver.save("b")
    assert not {"checkpoint", "tensorkey.json", "index"} & set(asked)
    assert (tmp_path / "checkpoint").read_text() == "b\n"
