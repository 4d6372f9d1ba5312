"""Servers of files beyond the contract: runs, exports and imports, connections that are lost, who makes directories."""

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from support.builders import Run, state_of
from support.conversions import table_bytes

from recckpt.convert import export_checkpoint, import_checkpoint
from recckpt.errors import WriterFencedError
from recckpt.storage import open_storage
from recckpt.storage.file_server import FileServer


@pytest.fixture(params=["served", "sftp"])
def url(request):
    """An empty directory on a server, and on that of OpenSSH where there is one."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def ssh(sftp_url):
    storage = open_storage(sftp_url)
    storage.prepare()
    return storage


def root_of(storage):
    return Path(storage._root)


def lose(storage):
    storage._fs.client.get_transport().close()


def test_a_run_is_saved_rotated_and_restored_with_one_warning(url, caplog):
    with caplog.at_level(logging.WARNING, "recckpt"):
        run = Run(url, interval=3, max_keep=2).train(10)
        run.manager.save()
    assert [record.getMessage() for record in caplog.records] == [
        f"{url}: this store has no conditional put, so that a second writer may go unnoticed: "
        "let one process at a time save here"
    ]
    storage = open_storage(url)
    assert [name for name in storage.list_dirs() if name.startswith("ckpt")] == ["ckpt_10", "ckpt_9"]
    assert not [name for name in storage.list_files("") if name.endswith(".tmp")]
    again = Run(url, interval=3, max_keep=2, seed=1)
    assert again.manager.restore() == 10
    assert state_of(again) == state_of(run)


def test_a_writer_that_was_replaced_is_fenced_unless_both_claim_at_one_moment(url):
    first = Run(url, interval=3).train(3)
    Run(url, interval=3).train(3)
    with pytest.raises(WriterFencedError):
        first.train(3)


def test_tables_are_exported_to_a_server_and_imported_from_it(url, tmp_path):
    run = Run(str(tmp_path / "run"), interval=3).train(3)
    export_checkpoint(tmp_path / "run", f"{url}/out/item", to="parquet", tables=["item"], slots=["embedding"])
    there = import_checkpoint(f"{url}/out/item/item", f"{url}/back", format="parquet")
    here = import_checkpoint(f"{url}/out/item/item", tmp_path / "back", format="parquet")
    assert here.rows == there.rows == {"item": len(run.model.items)}
    assert table_bytes(f"{url}/back", "item") == table_bytes(tmp_path / "back", "item")


def test_a_second_try_at_a_put_whose_answer_was_lost_finds_it_there(url, monkeypatch):
    storage = open_storage(url)
    storage.prepare()
    move, errors = storage._fs.mv, [ConnectionResetError("reset")]

    def lose_the_answer(*paths):
        move(*paths)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(storage._fs, "mv", lose_the_answer)
    storage.put_if_absent("x", b"ours")
    with pytest.raises(FileExistsError):
        storage.put_if_absent("x", b"theirs")
    assert storage.list_files("") == ["x"]


def test_a_file_that_has_not_the_size_that_was_written_never_gets_its_name(url, monkeypatch):
    storage = open_storage(url)
    storage.prepare()
    open_ = storage._fs.open

    def open_short(path, mode, **options):
        file = open_(path, mode, **options)
        write = file.write
        file.write = lambda data: write(data[:-1])
        return file

    def write():
        with storage.create("x") as sink:
            sink.write(b"data")

    monkeypatch.setattr(storage._fs, "open", open_short)
    with pytest.raises(OSError, match=f"{url}/x: found 3 bytes after writing 4"):
        write()
    assert list(root_of(storage).iterdir()) == []


def test_a_listing_that_fails_further_down_is_no_shorter_listing(url, monkeypatch):
    storage = open_storage(url)
    for name in ("d/x", "d/below/y"):
        with storage.create(name):
            pass
    listed = storage._fs.ls

    def refuse(path, **options):
        if path.endswith("below"):
            raise PermissionError(13, "Forbidden")
        return listed(path, **options)

    monkeypatch.setattr(storage._fs, "ls", refuse)
    for look in (storage.list_files, storage.listed, storage.remove_empty_dirs):
        with pytest.raises(PermissionError, match="listing failed: Forbidden"):
            look("d")


def test_directories_that_many_make_at_once_are_made(url):
    storages, start = [open_storage(url) for _ in range(4)], threading.Barrier(4)

    def write(number):
        start.wait(60)
        with storages[number].create(f"a/b/c/{number}"):
            pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert storages[0].list_files("a/b/c") == ["0", "1", "2", "3"]


def test_many_threads_share_one_connection(ssh):
    with ssh.create("d/x") as sink:
        sink.write(bytes(range(256)) * 1000)

    def look(number):
        with ssh.open("d/x") as file:
            file.seek(number)
            return file.read(1), ssh.size("d/x"), ssh.list_files("d")

    with ThreadPoolExecutor(8) as pool:
        looks = list(pool.map(look, range(64)))
    assert looks == [(bytes([number]), 256_000, ["x"]) for number in range(64)]
    assert ssh.threads(8) == 1


def test_a_connection_that_was_lost_is_made_again(ssh):
    ssh.put_if_absent("x", b"data")
    lose(ssh)
    assert ssh.read("x", 10) == b"data"
    lose(ssh)
    with ssh.create("d/y") as sink:
        sink.write(b"more")
    lose(ssh)
    assert ssh.list_files("") == ["d/y", "x"]


def test_reads_of_several_files_go_on_over_one_new_connection(ssh, monkeypatch):
    ssh.put_if_absent("x", bytes(range(200)))
    with ssh.open("x") as one, ssh.open("x") as other:
        of_the_lost = [one._file, other._file]
        lose(ssh)
        assert one.read(50) == other.read(50) == bytes(range(50))
        assert [file.closed for file in of_the_lost] == [True, True]
        connected = ssh._fs
        assert one.read() == other.read() == bytes(range(50, 200))
        assert ssh._fs is connected


def test_a_server_that_is_away_is_tried_again_until_it_is_back(ssh, monkeypatch):
    ssh.put_if_absent("x", b"data")
    reach = dict(fsspec.config.conf["sftp"])
    monkeypatch.setitem(fsspec.config.conf, "sftp", {**reach, "port": 1})
    lose(ssh)
    retry = ssh.count_retry

    def come_back():
        retry()
        if ssh.n_retries == 3:
            fsspec.config.conf["sftp"] = reach

    monkeypatch.setattr(ssh, "count_retry", come_back)
    assert ssh.read("x", 10) == b"data"
    assert ssh.n_retries == 4


def test_a_connection_that_is_lost_while_a_file_is_written_fails_it_with_its_url(ssh):
    def write():
        with ssh.create("d/x") as sink:
            sink.write(b"part")
            lose(ssh)
            sink.write(b"rest")

    with pytest.raises(OSError, match=rf"writing failed: .*{ssh.url}/d/x"):
        write()
    assert ssh.list_files("") == []


def test_a_connection_ends_with_its_storage(sftp_url):
    before = threading.active_count()
    storage = open_storage(sftp_url)
    transport = storage._fs.client.get_transport()
    del storage
    gc.collect()  # paramiko keeps a traceback of connecting
    transport.join(60)
    assert not transport.is_active()
    assert threading.active_count() <= before


def test_links_are_read_as_what_they_lead_to_and_listed_as_links(ssh):
    outside = root_of(ssh).parent / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"data")
    (root_of(ssh) / "link").symlink_to(outside)
    assert ssh.read("link/x", 10) == b"data"
    assert (ssh.list_dirs(), ssh.list_files(""), ssh.listed("")) == ([], ["link"], {})


def test_a_listing_gives_no_stamp_by_which_a_manifest_would_be_taken_for_unchanged(ssh):
    ssh.put_if_absent("x", b"data")
    assert ssh.listed("")["x"] == (4, "")


def test_a_host_that_nobody_can_log_in_to_is_an_os_error(sftp_url, monkeypatch):
    import paramiko

    def refuse(*args, **kwargs):
        raise paramiko.AuthenticationException("no")

    monkeypatch.setattr(paramiko.SSHClient, "connect", refuse)
    with pytest.raises(OSError, match=f"connecting failed: AuthenticationException: no.*{sftp_url}"):
        open_storage(sftp_url)


def test_a_backend_without_a_put_of_its_own_is_a_server_of_files_and_any_other_a_store(served_url, memory_url):
    assert isinstance(open_storage(served_url), FileServer)
    assert not isinstance(open_storage(memory_url), FileServer)
