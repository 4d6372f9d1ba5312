"""Drafts, which take the place of older files whole or not at all; and file objects over sinks."""

import os
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from recckpt.storage import SinkFile, open_storage


@pytest.fixture
def storage(url):
    return open_storage(url)


def publish(storage, name, data):
    with storage.draft(name) as draft:
        draft.write(data)


def test_a_draft_is_seen_when_it_closes_and_not_before(storage):
    with storage.draft("d/x") as draft:
        draft.write(b"ab")
        draft.write(memoryview(b"cd"))
        assert draft.n_bytes == 4
        draft.seal()
        with pytest.raises(FileNotFoundError):
            storage.size("d/x")
    assert storage.read("d/x", 10) == b"abcd"
    assert storage.list_files("") == ["d/x"]


def test_a_draft_takes_the_place_of_an_older_file(storage):
    publish(storage, "x", b"old and long")
    with storage.draft("x") as draft:
        draft.write(b"new")
        assert storage.read("x", 100) == b"old and long"
    assert storage.read("x", 100) == b"new"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_draft_that_fails_leaves_the_older_file_and_nothing_else(storage, sealed):
    publish(storage, "x", b"old")

    def interrupted():
        with storage.draft("x") as draft:
            draft.write(b"new")
            if sealed:
                draft.seal()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert storage.read("x", 100) == b"old"
    assert storage.list_files("") == ["x"]


def test_two_drafts_of_one_name_do_not_mix(storage):
    with storage.draft("x") as one, storage.draft("x") as other:
        one.write(b"1" * 100)
        other.write(b"2" * 10)
    assert storage.read("x", 1000) in (b"1" * 100, b"2" * 10)


def test_a_local_draft_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    storage, events = open_storage(str(tmp_path)), []
    fsync = os.fsync

    def recording(fd):
        events.append((Path(f"/proc/self/fd/{fd}").readlink().name, (tmp_path / "x").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    publish(storage, "x", b"data")
    (file, before), (directory, after) = events
    assert file.startswith("x.")
    assert file.endswith(".tmp")
    assert (before, directory, after) == (False, tmp_path.name, True)


def test_arrow_and_zipfile_write_through_a_file_object_and_leave_the_sink_open(tmp_path):
    storage = open_storage(str(tmp_path))
    with storage.create("part.arrow") as sink:
        schema = pa.schema([pa.field("id", pa.int64())])
        with pa.ipc.new_file(pa.PythonFile(SinkFile(sink), "w"), schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([1, 2])], schema=schema))
        sink.write(b"more")
    with storage.create("file.zip") as sink:
        with SinkFile(sink) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("name", "text")
        sink.write(b"")
    assert (tmp_path / "part.arrow").read_bytes().endswith(b"ARROW1more")
    assert zipfile.ZipFile(tmp_path / "file.zip").read("name") == b"text"


def test_a_file_object_over_a_sink_counts_and_cannot_go_back(tmp_path):
    with open_storage(str(tmp_path)).create("file") as sink:
        file = SinkFile(sink)
        assert file.write(b"abc") == file.tell() == 3
        assert not file.seekable()
        with pytest.raises(OSError, match="seek"):
            file.seek(0)
