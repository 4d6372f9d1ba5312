"""What is wrong with the index file is said, and the next save makes it anew; a stale one is no news to readers."""

import logging
import shutil

import pytest
from faults.watched_storage import watch
from support.builders import Run
from support.sweeps import mostly_slow

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


def test_a_sound_index_file_is_nothing_to_speak_of(runs, said):
    Run(runs, interval=5, max_keep=2).train(10)
    assert said() == []


def test_one_that_another_process_has_made_anew_meanwhile_is_nothing_to_speak_of(runs, said):
    writer = Run(runs, interval=5, max_keep=2)
    writer.manager.restore()
    reader = Run(runs, interval=5, max_keep=2)

    def before(operation):
        if operation == "read checkpoint" and writer.manager.global_step < 15:
            writer.train(5)

    watch(reader.saver.storage, before)
    assert reader.manager.restore() == 10
    assert (runs / "checkpoint").read_text() == "ckpt_10\nckpt_15\n"
    assert said() == []


def test_the_index_file_of_nothing_is_none(tmp_path):
    storage = open_storage(str(tmp_path))
    assert (layout.encode_index([]), index_problem(storage, []), index_problem(storage, ["a b"])) == (
        b"",
        "",
        "missing",
    )
    assert layout.encode_index(["a b", "c"]) == b"a%20b\nc\n"
