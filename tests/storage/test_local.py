import errno
import os
from pathlib import Path

import pytest
from support.forge import filled, save_tables

from recckpt.storage import NotPlainError, open_parent, open_storage
from recckpt.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path) -> LocalStorage:
    storage = LocalStorage(str(tmp_path / "runs"))
    storage.prepare()
    return storage


def write(storage, name, data=b"data"):
    with storage.create(name) as sink:
        sink.write(data)


def test_names_may_hold_control_characters_and_the_directory_of_the_file_system_is_not_ours(storage):
    write(storage, "d/a\tb\n")
    storage.make_dir("lost+found")
    assert storage.list_files("d") == ["a\tb\n"]
    assert storage.read("d/a\tb\n", 10) == b"data"
    assert storage.list_dirs() == ["d"]


@pytest.fixture
def synced(monkeypatch):
    """The paths that were given to fsync."""
    paths, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (paths.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)))
    return paths


def test_a_file_is_synced_before_it_closes_and_new_directories_with_their_entry(storage, synced):
    write(storage, "a/b/x")
    assert synced == [storage.url, f"{storage.url}/a", f"{storage.url}/a/b/x"]
    synced.clear()
    storage.sync_dir("a/b")
    storage.make_dir("d")
    assert synced == [f"{storage.url}/a/b", storage.url]


@pytest.mark.parametrize("method", ["put_if_absent", "replace"])
def test_a_small_file_is_synced_before_it_has_its_name_and_its_directory_after(storage, synced, method):
    getattr(storage, method)("x", b"data")
    data, directory = synced
    assert data.startswith(f"{storage.url}/x.")
    assert directory == storage.url


def test_all_of_a_checkpoint_is_synced(storage, synced):
    save_tables(storage, [filled("item", range(10))])
    for path in Path(storage.url, "ckpt_1").rglob("*"):
        if path.name not in ("manifest.json", "INTENT"):  # these are synced under another name
            assert str(path) in synced


def test_short_writes_are_gone_on_with_and_a_file_that_is_shorter_is_an_error(storage, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: len(data))
    with pytest.raises(OSError, match="found 0 bytes after writing 4"):
        write(storage, "d/x")
    assert storage.list_files("") == []
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    write(storage, "d/x", bytes(range(100)))
    monkeypatch.undo()
    assert storage.read("d/x", 200) == bytes(range(100))


def test_a_disk_that_fills_up_leaves_no_file(storage, monkeypatch):
    real, room = os.write, [10]

    def full(fd, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = real(fd, data[: room[0]])
        room[0] -= size
        return size

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(storage, "d/x", bytes(100))
    room[0] = 10
    with pytest.raises(OSError, match="No space left"):
        storage.replace("index", bytes(100))
    room[0] = 10
    with pytest.raises(OSError, match="No space left"):
        storage.put_if_absent("claim", bytes(100))
    assert storage.list_files("") == []


def test_a_failed_sync_or_close_leaves_no_file(storage, monkeypatch):
    calls, close = [], os.close

    def fails(fd):
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    def close_fails(fd):
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    storage.make_dir("d")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output"):
            write(storage, "d/x")
    assert len(calls) == 1  # never again on the same descriptor: the kernel calls the lost pages clean
    assert storage.list_files("") == []
    sink = storage.create("d/x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_fails)
        sink.discard()
    assert storage.list_files("") == []


def test_the_root_is_a_directory_that_can_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(OSError, match="file"):
            LocalStorage(str(path)).prepare()
    assert file.read_text() == "mine"

    real = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OSError, match="Read-only"):
        LocalStorage(str(tmp_path)).prepare()


def test_a_file_system_without_hard_links_is_refused_at_once(storage, monkeypatch):
    def no_links(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(OSError, match="not permitted"):
        storage.prepare()
    assert storage.list_files("") == []


@pytest.mark.parametrize("method", ["open", "size", "map"])
def test_a_link_that_leads_out_is_not_followed(storage, tmp_path, method):
    outside = tmp_path / "secret"
    outside.write_text("secret")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "x").write_text("secret")
    storage.make_dir("d")
    write(storage, "other/x")
    root = Path(storage.url)
    (root / "d" / "link").symlink_to(outside)
    (root / "d" / "sub").symlink_to(tmp_path / "dir")
    (root / "d" / "sibling").symlink_to("../other/x")
    for name in ("d/link", "d/sub/x", "d/sibling"):
        with pytest.raises(NotPlainError, match="found a symbolic link out of its directory"):
            getattr(storage, method)(name)


@pytest.mark.parametrize("method", ["open", "size", "map"])
def test_links_that_lead_nowhere_and_other_odd_files_are_refused_by_what_they_are(storage, method):
    storage.make_dir("d")
    directory = Path(storage.url, "d")
    (directory / "loop").symlink_to("loop")
    (directory / "one").symlink_to("two")
    (directory / "two").symlink_to("one")
    (directory / "dangling").symlink_to("nothing")
    (directory / "sub").mkdir()
    os.mkfifo(directory / "fifo")
    for name, what in {"loop": "link", "one": "link", "sub": "directory", "fifo": "FIFO"}.items():
        with pytest.raises(NotPlainError, match=f"found a (symbolic )?{what}"):
            getattr(storage, method)(f"d/{name}")
    with pytest.raises(FileNotFoundError):
        getattr(storage, method)("d/dangling")


def outside_of(storage, tmp_path) -> Path:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "x").write_text("precious")
    Path(storage.url, "d").symlink_to(outside)
    Path(storage.url, "top").symlink_to(outside / "x")
    return outside


READS = {
    "open": lambda storage, name: storage.open(name),
    "read": lambda storage, name: storage.read(name, 10),
    "size": lambda storage, name: storage.size(name),
    "map": lambda storage, name: storage.map(name),
}
CHANGES = {
    "create": lambda storage: storage.create("d/new"),
    "put": lambda storage: storage.put_if_absent("d/new", b"x"),
    "replace": lambda storage: storage.replace("d/x", b"x"),
    "draft": lambda storage: storage.draft("d/x"),
    "make_dir": lambda storage: storage.make_dir("d/new"),
    "remove": lambda storage: storage.remove("d/x"),
    "remove_empty_dirs": lambda storage: storage.remove_empty_dirs("d"),
    "list_files": lambda storage: storage.list_files("d"),
    "listed": lambda storage: storage.listed("d"),
}


@pytest.mark.parametrize("name", ["d/x", "top"])
@pytest.mark.parametrize("read", READS)
def test_a_link_at_the_top_is_not_followed_by_reads(storage, tmp_path, read, name):
    outside_of(storage, tmp_path)
    with pytest.raises(NotPlainError, match=r"found a symbolic link.*recckpt does not follow links"):
        READS[read](storage, name)


@pytest.mark.parametrize("change", CHANGES)
def test_a_link_at_the_top_is_not_followed_by_writes_removals_and_listings(storage, tmp_path, change):
    outside = outside_of(storage, tmp_path)
    with pytest.raises(NotPlainError, match="found a symbolic link"):
        CHANGES[change](storage)
    assert (outside / "x").read_text() == "precious"
    assert sorted(path.name for path in outside.iterdir()) == ["sub", "x"]


def test_the_root_itself_may_be_a_link_and_one_that_stays_inside_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    storage = open_storage(str(tmp_path / "link"))
    storage.prepare()
    write(storage, "d/x", b"data")
    assert (storage.read("d/x", 10), storage.list_files("d")) == (b"data", ["x"])
    parent, name = open_parent(str(tmp_path / "link"))
    assert (parent.url, name) == (str(tmp_path), "real")
    (tmp_path / "real/d/y").symlink_to("x")
    assert storage.read("d/y", 10) == b"data"


def test_links_are_listed_and_removed_themselves(storage, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("precious")
    storage.make_dir("d")
    Path(storage.url, "d", "file").symlink_to(outside / "x")
    Path(storage.url, "d", "dir").symlink_to(outside)
    Path(storage.url, "link").symlink_to(outside)
    assert storage.list_dirs() == ["d"]
    assert storage.list_files("d") == ["dir", "file"]
    storage.remove("d/file")
    with pytest.raises(OSError, match="d"):
        storage.remove_empty_dirs("d")
    storage.remove("d/dir")
    storage.remove_empty_dirs("d")
    assert (outside / "x").read_text() == "precious"


def test_a_new_file_never_goes_through_a_link_of_its_name(storage, tmp_path):
    storage.make_dir("d")
    Path(storage.url, "d", "x").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        storage.create("d/x")
    with pytest.raises(FileExistsError):
        storage.put_if_absent("d/x", b"data")
    storage.replace("d/x", b"data")
    assert not (tmp_path / "outside").exists()


def test_the_home_directory_and_file_urls_are_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for url in ("~/runs", "runs", "./runs", f"file://{tmp_path}/runs", f"local://{tmp_path}/runs"):
        assert open_storage(url).url == str(tmp_path / "runs")


def test_no_descriptor_stays_open(storage):
    write(storage, "d/x", b"data")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for _ in range(5):
        storage.read("d/x", 10)
        bytes(storage.map("d/x"))
        storage.put_if_absent("y", b"")
        storage.remove("y")
        with pytest.raises(KeyError), storage.create("d/z"):
            raise KeyError
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


def test_a_file_where_the_directory_should_be_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("notes")
    with pytest.raises(NotADirectoryError, match="this is a file: name a directory"):
        LocalStorage(str(tmp_path / "run")).prepare()
    assert (tmp_path / "run").read_text() == "notes"
