"""SFTP beyond the contract: connections that are lost, links, what a server may not do."""

import gc
import os
import threading
from pathlib import Path

import pytest

from recckpt.storage import NotPlainError, open_storage

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
    transport.join(60)
    assert not transport.is_active()
    assert threading.active_count() <= before


def test_links_are_listed_and_never_followed(storage, root):
    outside = root.parent / "secret"
    outside.write_text("secret")
    storage.make_dir("d")
    (root / "d" / "link").symlink_to(outside)
    (root / "away").symlink_to(root.parent)
    for method in ("open", "size"):
        with pytest.raises(NotPlainError, match=r"found a symbolic link.*move it back"):
            getattr(storage, method)("d/link")
    assert storage.list_files("d") == ["link"]
    assert storage.list_dirs() == ["d"]
    storage.remove("d/link")
    assert outside.read_text() == "secret"


def test_a_directory_that_is_a_link_is_neither_read_nor_written(storage, root):
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text("{}")
    (root / "moved").symlink_to(elsewhere)
    (root / "gone").symlink_to(root.parent / "nowhere")
    assert storage.list_dirs() == ["gone", "moved"]  # as checkpoints that were moved away, of which is to be told
    calls = [(method, "moved") for method in ("list_files", "listed", "remove_empty_dirs")]
    calls += [(method, "moved/manifest.json") for method in ("open", "size", "remove", "create", "draft")]
    calls += [("make_dir", "moved/d"), ("read", "moved/manifest.json", 9)]
    calls += [(method, "moved/x", b"data") for method in ("put_if_absent", "replace")]
    for method, *args in calls:
        with pytest.raises(NotPlainError, match=r"found a symbolic link.*move it back"):
            getattr(storage, method)(*args)
    assert [path.name for path in elsewhere.iterdir()] == ["manifest.json"]


def test_links_that_lead_nowhere_are_listed_as_those_of_a_local_file_system(storage, root):
    outside = root.parent
    (outside / "alias").symlink_to(root)
    (outside / "round").symlink_to("round")
    (outside / "moved_again").symlink_to(outside / "gone" / "deep" / "ckpt_1")
    links = {"deep": f"{outside}/gone/deep/ckpt_1", "relative": "../gone/deep/ckpt_1", "twice": "../moved_again"}
    links |= {"below_a_file": "/dev/null/x/y", "long": f"{outside}/{'x' * 300}"}
    inside = {"rotated": "ckpt_1/deep/x", "by_alias": f"{outside}/alias/gone/x", "up": "../runs/gone/x"}
    inside |= {"loop": "loop", "round": f"{root}/trip", "trip": "round", "longer": "longer/x", "loop_out": "../round"}
    for name, target in (links | inside).items():
        (root / name).symlink_to(target)
    storage.make_dir("d")
    assert storage.list_dirs() == sorted(["d", *links])
    assert open_storage(str(root)).list_dirs() == storage.list_dirs()
    lose(storage)
    assert storage.list_dirs() == sorted(["d", *links])


def test_a_file_that_is_replaced_within_a_second_never_looks_unchanged(storage, root):
    storage.make_dir("d")
    storage.replace("d/x", b"one")
    before = storage.listed("d")
    storage.replace("d/x", b"two")
    assert not before["x"].stamp or before != storage.listed("d")
    os.utime(root / "d" / "x", (10**9, 10**9))
    assert storage.listed("d")["x"].stamp == str(10**9)
    assert open_storage(storage.url).listed("d")["x"].stamp == ""  # it has not asked for the server's time


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
