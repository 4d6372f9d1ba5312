"""Drafts: files that take the place of older ones, whole or not at all, on each kind of storage."""

import os
from pathlib import Path

import pytest

from recckpt.storage import open_storage


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
