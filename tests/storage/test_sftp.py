"""SFTP beyond the contract: connections that are lost, links, what a server may not do."""

import gc
import threading
from pathlib import Path

import pytest

from recckpt.storage import open_storage

paramiko = pytest.importorskip("paramiko", reason="SFTP WAS NOT TESTED: paramiko is not installed (recckpt[sftp])")


@pytest.fixture
def storage(sftp_url):
    storage = open_storage(sftp_url)
    storage.prepare()
    return storage


@pytest.fixture
def root(storage):
    return Path(storage.url.removeprefix("sftp://127.0.0.1"))


def lose(storage):
    storage._fs.client.get_transport().close()


def test_a_connection_that_was_lost_is_made_again(storage):
    storage.put_if_absent("x", b"data")
    lose(storage)
    assert storage.read("x", 10) == b"data"
    lose(storage)
    with storage.create("d/y") as sink:
        sink.write(b"more")
    lose(storage)
    assert storage.list_files("") == ["d/y", "x"]


def test_a_read_goes_on_over_a_new_connection(storage):
    storage.put_if_absent("x", bytes(range(200)))
    with storage.open("x") as file:
        assert file.read(50) == bytes(range(50))
        lose(storage)
        assert file.read() == bytes(range(50, 200))


def test_a_connection_that_is_lost_while_a_file_is_written_fails_it_with_its_url(storage, root):
    def write():
        with storage.create("d/x") as sink:
            sink.write(b"part")
            lose(storage)
            sink.write(b"rest")

    with pytest.raises(OSError, match=rf"writing failed: .*{storage.url}/d/x"):
        write()
    assert storage.list_dirs() == ["d"]


def test_a_connection_ends_with_its_storage(sftp_url):
    before = threading.active_count()
    storage = open_storage(sftp_url)
    transport = storage._fs.client.get_transport()
    del storage
    gc.collect()  # paramiko keeps a traceback of connecting
    transport.join(30)
    assert not transport.is_active()
    assert threading.active_count() <= before


def test_links_are_listed_and_never_followed(storage, root):
    outside = root.parent / "secret"
    outside.write_text("secret")
    storage.make_dir("d")
    (root / "d" / "link").symlink_to(outside)
    (root / "away").symlink_to(root.parent)
    for method in ("open", "size"):
        with pytest.raises(FileNotFoundError, match="not a plain file"):
            getattr(storage, method)("d/link")
    assert storage.list_files("d") == ["link"]
    assert storage.list_dirs() == ["d"]
    storage.remove("d/link")
    assert outside.read_text() == "secret"


def test_a_server_whose_rename_overwrites_is_refused(storage, monkeypatch):
    overwrite = paramiko.SFTPClient.posix_rename
    monkeypatch.setattr(paramiko.SFTPClient, "rename", overwrite)
    with pytest.raises(OSError, match="this server's rename overwrites"):
        storage.prepare()
    assert storage.list_files("") == []


def test_a_host_that_nobody_can_log_in_to_is_an_os_error(sftp_url, monkeypatch):
    def refuse(*args, **kwargs):
        raise paramiko.AuthenticationException("no")

    monkeypatch.setattr(paramiko.SSHClient, "connect", refuse)
    with pytest.raises(OSError, match=f"connecting failed: AuthenticationException: no.*{sftp_url}"):
        open_storage(sftp_url)
