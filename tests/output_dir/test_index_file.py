"""What is wrong with an index file is said, of ours and of RecIS's."""

import logging
import shutil

import pytest
from faults.storage_faults import watch
from support.bank_runs import run, table
from support.builders import Run
from support.sweeps import mostly_slow

from recckpt import CheckpointManager
from recckpt.errors import CheckpointNotFoundError
from recckpt.format import layout
from recckpt.output_dir.index_file import index_problem
from recckpt.storage import open_storage

WRONG = {
    b"": "empty",
    b"ckpt_5\nckpt_1": "torn",
    b"\xff\x00\n": "naming '\ufffd\\x00', which is not committed",
    b"ckpt_5\nckpt_999\n": "naming 'ckpt_999', which is not committed",
    b"../../etc\n": "naming '../../etc', which is not committed",
}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("two") / "runs"
    Run(root, interval=5, max_keep=2).train(10)
    return root


@pytest.fixture
def runs(two_checkpoints, tmp_path):
    """An output dir with ckpt_5 and ckpt_10."""
    return shutil.copytree(two_checkpoints, tmp_path / "runs")


@pytest.fixture
def said(caplog):
    """The warnings about an index file."""
    caplog.set_level(logging.WARNING, "recckpt")
    return lambda: [text for text in caplog.messages if "/checkpoint is " in text]


@mostly_slow()
@pytest.mark.parametrize("content", WRONG)
def test_a_wrong_index_file_is_said_at_restore_and_takeover_and_made_anew(runs, said, content):
    (runs / "checkpoint").write_bytes(content)
    run = Run(runs, interval=5, max_keep=2)
    assert run.manager.restore() == 10
    assert [f"{runs}/checkpoint is {WRONG[content]}; " in text for text in said()] == [True]
    run.train(5)
    assert len(said()) == 2
    assert (runs / "checkpoint").read_text() == "ckpt_10\nckpt_15\n"
    run.train(5)
    assert len(said()) == 2


def test_a_stale_index_file_is_said_by_the_next_writer_alone_and_a_missing_one_by_nobody(runs, said):
    (runs / "checkpoint").write_text("ckpt_5\n")
    run = Run(runs, interval=5, max_keep=2)
    run.manager.restore()
    assert said() == []
    run.train(5)
    assert ["checkpoint is stale; " in text for text in said()] == [True]
    (runs / "checkpoint").unlink()
    Run(runs, interval=5, max_keep=2).manager.restore()
    assert len(said()) == 1


def test_a_sound_one_or_one_that_another_process_has_made_anew_meanwhile_is_nothing_to_speak_of(runs, said):
    writer = Run(runs, interval=5, max_keep=2)
    writer.manager.restore()
    reader = Run(runs, interval=5, max_keep=2)

    def before(operation):
        if operation == "read checkpoint" and writer.manager.global_step < 15:
            writer.train(5)

    watch(reader.saver.storage, before)
    assert reader.manager.restore() == 10
    assert (runs / "checkpoint").read_text() == "ckpt_10\nckpt_15\n"
    Run(runs, interval=5, max_keep=2).train(10)
    assert said() == []


def test_the_index_file_of_nothing_is_none(tmp_path):
    storage = open_storage(str(tmp_path))
    assert (layout.encode_index([]), index_problem(storage, []), index_problem(storage, ["a b"])) == (
        b"",
        "",
        "missing",
    )
    assert layout.encode_index(["a b", "c"]) == b"a%20b\nc\n"


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
        with pytest.raises(CheckpointNotFoundError, match=r"an output dir of RecIS.*`recckpt import`"):
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


@pytest.mark.parametrize("begins_later", [True, False])
def test_the_index_of_its_run_is_left_alone_until_its_checkpoints_are_gone(tmp_path, caplog, begins_later):
    if not begins_later:
        saved_by_recis(tmp_path)
    saver = run(tmp_path, table("t", [1]))
    saver.save("a")
    if begins_later:
        saved_by_recis(tmp_path)
    before = (tmp_path / "checkpoint").read_bytes()
    for ckpt_id in ("b", "c"):
        saver.save(ckpt_id)
        assert (tmp_path / "checkpoint").read_bytes() == before
    assert caplog.text.count("an output dir of RecIS") == 1
    shutil.rmtree(tmp_path / "ckpt_100")
    saver.save("d")
    assert (tmp_path / "checkpoint").read_text() == "d\n"


def test_a_writer_does_not_look_again_whether_it_is_one_while_all_directories_are_its_own(tmp_path, monkeypatch):
    saver = run(tmp_path, table("t", [1]))
    saver.save("a")
    asked, read, size = [], saver.storage.read, saver.storage.size
    monkeypatch.setattr(saver.storage, "read", lambda *args: (asked.append(args[0]), read(*args))[1])
    monkeypatch.setattr(saver.storage, "size", lambda *args: (asked.append(args[0]), size(*args))[1])
    saver.save("b")
    assert not {"checkpoint", "tensorkey.json", "index"} & set(asked)
    assert (tmp_path / "checkpoint").read_text() == "b\n"
