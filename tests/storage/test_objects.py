import pytest

from recckpt.storage import open_storage
from recckpt.storage.objects import ObjectStorage


@pytest.fixture
def storage(memory_url) -> ObjectStorage:
    return open_storage(memory_url)


@pytest.mark.parametrize("answer", [FileExistsError, TimeoutError, OSError])
def test_a_put_whose_answer_got_lost_is_decided_by_reading_it_back(storage, monkeypatch, answer):
    put = storage._fs.pipe_file

    def lost(path, data, mode):
        put(path, data, mode=mode)
        raise answer("no answer")

    monkeypatch.setattr(storage._fs, "pipe_file", lost)
    storage.put_if_absent("x", b"ours")
    assert storage.read("x", 10) == b"ours"


def test_a_put_that_another_writer_was_faster_with_fails(storage, monkeypatch):
    storage.put_if_absent("x", b"theirs")

    def doubtful(path, data, mode):
        raise OSError(22, "Invalid argument")  # what s3fs makes of a 412 of radosgw

    monkeypatch.setattr(storage._fs, "pipe_file", doubtful)
    with pytest.raises(FileExistsError):
        storage.put_if_absent("x", b"ours")
    assert storage.read("x", 10) == b"theirs"


def test_a_put_that_never_arrived_raises_its_own_error(storage, monkeypatch):
    def fails(path, data, mode):
        raise TimeoutError("no answer")

    monkeypatch.setattr(storage._fs, "pipe_file", fails)
    with pytest.raises(TimeoutError, match="no answer"):
        storage.put_if_absent("x", b"ours")
    assert storage.list_files("") == []


def test_a_missing_extra_is_named(monkeypatch):
    def lacks(*args, **kwargs):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", lacks)
    with pytest.raises(ValueError, match=r"Install s3fs.*recckpt\[s3\]"):
        open_storage("s3://bucket/x")


def test_the_root_of_a_store_is_an_output_dir_too():
    assert open_storage("memory://").url == "memory://"
