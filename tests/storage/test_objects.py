import logging
import socket

import pytest

from recckpt.storage import open_storage
from recckpt.storage.objects import ObjectStorage
from recckpt.storage.retry import RetryPolicy


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.waits = []

    def sleep(self, seconds):
        self.now += seconds
        self.waits.append(seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def storage(memory_url, clock) -> ObjectStorage:
    storage = open_storage(memory_url)
    storage.policy = RetryPolicy(sleep=clock.sleep, clock=lambda: clock.now)
    return storage


class Answers:
    """A backend whose first answers to a call are errors; the call is made before or not at all."""

    def __init__(self, call, errors, *, arrives):
        self.call, self.errors, self.arrives, self.n_calls = call, list(errors), arrives, 0

    def __call__(self, *args, **kwargs):
        self.n_calls += 1
        if not self.errors:
            return self.call(*args, **kwargs)
        if self.arrives:
            self.call(*args, **kwargs)
        raise self.errors.pop(0)


def spoil(monkeypatch, storage, method, *errors, arrives=False):
    answers = Answers(getattr(storage._fs, method), errors, arrives=arrives)
    monkeypatch.setattr(storage._fs, method, answers)
    return answers


@pytest.mark.parametrize("error", [FileExistsError("no answer"), TimeoutError("no answer"), OSError(22, "invalid")])
def test_a_put_whose_answer_got_lost_is_decided_by_reading_it_back(storage, monkeypatch, error):
    spoil(monkeypatch, storage, "pipe_file", error, arrives=True)
    storage.put_if_absent("x", b"ours")
    assert storage.read("x", 10) == b"ours"


def test_a_put_that_another_writer_was_faster_with_fails(storage, monkeypatch):
    storage.put_if_absent("x", b"theirs")
    spoil(monkeypatch, storage, "pipe_file", OSError(22, "Invalid argument"))  # what s3fs makes of a 412 of radosgw
    with pytest.raises(FileExistsError, match=f"putting failed.*{storage.url}/x"):
        storage.put_if_absent("x", b"ours")
    assert storage.read("x", 10) == b"theirs"


@pytest.mark.parametrize(
    "error", [FileExistsError("conflict"), TimeoutError("no answer"), ConnectionResetError("reset")]
)
def test_a_put_that_never_arrived_is_made_again(storage, monkeypatch, clock, error):
    answers = spoil(monkeypatch, storage, "pipe_file", error, error)
    storage.put_if_absent("x", b"ours")
    assert (storage.read("x", 10), answers.n_calls, len(clock.waits)) == (b"ours", 3, 2)


def test_a_put_that_is_refused_raises_at_once_with_its_reason(storage, monkeypatch, clock):
    answers = spoil(monkeypatch, storage, "pipe_file", PermissionError(13, "Forbidden"))
    with pytest.raises(PermissionError, match=f"putting failed: Forbidden.*{storage.url}/x"):
        storage.put_if_absent("x", b"ours")
    assert clock.waits == []
    assert storage.list_files("") == []
    answers.errors.append(PermissionError("the token has expired"))
    spoil(monkeypatch, storage, "cat_file", OSError(22, "Bad Request"))  # a look-up gives no reason
    with pytest.raises(PermissionError, match="the token has expired"):
        storage.put_if_absent("a", b"x")


def test_what_never_gets_an_answer_ends_with_the_deadline(storage, monkeypatch, clock):
    with monkeypatch.context() as patch:
        spoil(patch, storage, "pipe_file", *[TimeoutError("no answer")] * 1000)
        with pytest.raises(TimeoutError, match=r"putting failed.*no answer"):
            storage.put_if_absent("x", b"ours")
    assert 560 < clock.now <= 600
    assert storage.list_files("") == []
    clock.now, policy = 0, storage.policy
    spoil(monkeypatch, storage, "pipe_file", *[ConnectionRefusedError(111, "Connection refused")] * 1000)
    with pytest.raises(ConnectionRefusedError, match="Connection refused"):
        storage.prepare()  # which does not wait long for a wrong address
    assert 30 < clock.now <= 60
    assert storage.policy.deadline_sec == 600
    clock.now = 0
    spoil(monkeypatch, storage, "cat_file", *[TimeoutError("no answer")] * 1000)
    storage.give_up_after(5)  # as who looks again anyway
    assert storage.policy.sleep is policy.sleep
    with pytest.raises(TimeoutError, match="no answer"):
        storage.read("x", 10)
    assert clock.now <= 5


def test_of_several_puts_in_doubt_one_alone_is_ours(storage, monkeypatch):
    spoil(monkeypatch, storage, "pipe_file", *[TimeoutError("no answer")] * 2, arrives=True)
    storage.put_if_absent("x", b"one")
    with pytest.raises(FileExistsError):
        storage.put_if_absent("x", b"other")
    assert storage.read("x", 10) == b"one"


def test_a_store_that_keeps_conditions_is_ready_without_a_word(storage, caplog):
    storage.prepare()
    assert caplog.records == []
    assert storage.list_files("") == []


@pytest.mark.parametrize("answer", [None, OSError(38, "A header you provided implies functionality ...")])
def test_a_store_without_conditions_is_told_of_once_and_checked_as_well_as_can_be(storage, monkeypatch, caplog, answer):
    put = storage._fs.pipe_file

    def without_conditions(path, data, mode="overwrite"):
        if mode == "create" and answer:
            raise answer
        put(path, data)

    monkeypatch.setattr(storage._fs, "pipe_file", without_conditions)
    with caplog.at_level(logging.WARNING, "recckpt"):
        storage.prepare()
        storage.put_if_absent("x", b"first")
        with pytest.raises(FileExistsError):
            storage.put_if_absent("x", b"second")
    assert [record.getMessage() for record in caplog.records if storage.url in record.getMessage()] == [
        f"{storage.url}: this store has no conditional put, so that a second writer may go unnoticed: "
        "let one process at a time save here"
    ]
    assert storage.read("x", 10) == b"first"
    assert storage.list_files("") == ["x"]


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_an_address_at_which_nobody_has_ever_answered_is_given_up_at_once(host):
    storage = open_storage(f"http://{host}/runs")
    storage.policy = RetryPolicy(sleep=lambda seconds: pytest.fail("it is tried again"))
    with pytest.raises(OSError, match=rf"reading failed: .*nobody answers .*http://{host}/runs/x"):
        storage.read("x", 10)
    with pytest.raises(OSError, match="nobody answers"):
        storage.open("x")


@pytest.mark.parametrize(
    "answer", [None, FileNotFoundError(2, "Not Found"), FileExistsError("conflict"), PermissionError(13, "Forbidden")]
)
def test_a_server_that_has_answered_before_though_with_a_refusal_is_waited_for(storage, monkeypatch, answer):
    storage._fs.pipe_file(storage._path("x"), b"data")
    failure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")  # this needs no answer before
    if answer:
        failure = ConnectionRefusedError(111, "Connection refused")
        spoil(monkeypatch, storage, "info", answer)
        with pytest.raises(type(answer)):
            storage.size("x")
    spoil(monkeypatch, storage, "cat_file", failure)
    assert storage.read("x", 10) == b"data"


def test_an_answer_counts_while_a_refused_connection_is_being_handled(storage):
    try:
        raise ConnectionRefusedError(111, "of another storage")
    except ConnectionRefusedError:
        with pytest.raises(FileNotFoundError):
            storage.size("x")
    assert storage.is_reached


def test_a_write_that_the_network_spoils_is_made_again_and_of_another_size_it_is_an_error(storage, monkeypatch):
    spoil(monkeypatch, storage, "pipe_file", ConnectionResetError("reset"))

    def write():
        with storage.create("d/x") as sink:
            sink.write(b"data")

    write()
    assert storage.read("d/x", 10) == b"data"
    storage.remove("d/x")
    put = storage._fs.pipe_file
    monkeypatch.setattr(storage._fs, "pipe_file", lambda path, data, mode: put(path, data[:-1], mode=mode))
    with pytest.raises(OSError, match=f"{storage.url}/d/x: found 3 bytes after writing 4"):
        write()
    assert storage.list_files("") == []


@pytest.mark.parametrize("error", [KeyError("bug"), RuntimeError("no loop"), OSError("odd")])
def test_every_error_is_an_os_error_with_url_and_operation(storage, monkeypatch, error):
    spoil(monkeypatch, storage, "info", error)
    with pytest.raises(OSError, match=f"looking up failed: {type(error).__name__}.*{storage.url}/x") as caught:
        storage.size("x")
    assert caught.value.filename == f"{storage.url}/x"
    assert caught.value.__cause__ is error


def test_a_listing_that_fails_is_no_empty_listing(storage, monkeypatch):
    spoil(monkeypatch, storage, "find", *[PermissionError(13, "Forbidden")] * 2)
    with pytest.raises(PermissionError, match="listing failed"):
        storage.list_files("d")
    with pytest.raises(PermissionError, match="listing failed"):
        storage.make_dir("d")
    spoil(monkeypatch, storage, "ls", PermissionError(13, "Forbidden"))
    with pytest.raises(PermissionError, match="listing failed"):
        storage.list_dirs()


@pytest.mark.parametrize("error", [RuntimeError("dictionary changed size during iteration"), KeyError("/b/x")])
def test_a_listing_of_memory_to_which_another_thread_writes_is_made_again(storage, monkeypatch, error):
    storage.replace("d/x", b"")
    spoil(monkeypatch, storage, "find", error)
    assert storage.list_files("d") == ["x"]
    spoil(monkeypatch, storage, "ls", error)
    assert storage.list_dirs() == ["d"]


def test_a_read_that_the_network_spoils_goes_on_where_it_was(storage, monkeypatch):
    with storage.create("d/x") as sink:
        sink.write(bytes(range(200)))
    with storage.open("d/x") as file:
        assert file.read(50) == bytes(range(50))
        read = file._file.read
        file._file.read = Answers(read, [ConnectionResetError("reset")], arrives=True)
        assert file.read(50) == bytes(range(50, 100))
        assert file.read() == bytes(range(100, 200))
        assert file.read(5) == b""


def test_a_read_of_a_file_that_has_changed_is_an_error(storage):
    with storage.create("d/x") as sink:
        sink.write(bytes(100))
    file = storage.open("d/x")
    file._file.truncate(10)
    with pytest.raises(OSError, match=r"reading failed.*found 10 of 100 bytes at 0"):
        file.read()


def test_a_backend_that_cannot_connect_is_an_os_error(monkeypatch):
    assert open_storage("memory://").url == "memory://"  # the root of a store

    def fails(*args, **kwargs):
        raise EOFError

    monkeypatch.setattr("fsspec.core.url_to_fs", fails)
    with pytest.raises(OSError, match=r"connecting failed: EOFError.*s3://bucket/x"):
        open_storage("s3://bucket/x")


@pytest.mark.parametrize(
    ("url", "extra"),
    [("gs://b/runs", "gcs"), ("az://b/runs", "azure"), ("s3://b/runs", "s3"), ("hdfs://b/runs", None)],
)
def test_a_missing_backend_is_told_with_the_extra_that_has_it(monkeypatch, url, extra):
    def missing(*args, **kwargs):
        raise ImportError("Install it")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(ValueError, match=rf"^{url}: no backend for \w+:// here: Install it") as caught:
        open_storage(url)
    assert str(caught.value).partition("Install it")[2] == (f"; install recckpt[{extra}]" if extra else "")
