"""What every storage promises, held against each of them."""

import errno
import gc
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from support.sweeps import mostly_slow

from recckpt.storage import NOT_READABLE, HashingSink, Storage, open_parent, open_storage

KINDS = ["local", "memory", "s3", "served", "sftp", "azure"]


@pytest.fixture(params=[*KINDS, pytest.param("radosgw", marks=pytest.mark.slow)])
def url(request, tmp_path):
    return str(tmp_path / "runs") if request.param == "local" else request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def storage(url) -> Storage:
    storage = open_storage(url)
    storage.prepare()
    return storage


def write(storage: Storage, name: str, data: bytes = b"data") -> None:
    with storage.create(name) as sink:
        sink.write(data)


class Interrupted(BaseException):
    """Neither an Exception nor an OSError, as KeyboardInterrupt."""


def test_preparing_makes_the_root_and_leaves_nothing_in_it(url):
    storage = open_storage(f"{url}/deeper/still")
    assert storage.list_dirs() == []
    storage.prepare()
    storage.prepare()
    assert (storage.list_files(""), storage.list_dirs()) == ([], [])


@mostly_slow()
def test_a_file_comes_back_as_it_was_written_though_empty_and_a_hashing_sink_sees_every_byte(storage):
    with storage.create("ckpt_1/sparse/x") as sink:
        assert sink.write(b"ab") == 2
        assert sink.write(b"") == 0
        assert sink.write(memoryview(np.arange(3, dtype=np.int64))) == 24
        assert sink.write(pa.py_buffer(b"cd")) == 2
        hashing = HashingSink(sink)
        hashing.write(b"abc")
        hashing.flush()
        hashing.write(memoryview(b"def"))
        assert sink.n_bytes == 34
    assert hashing.xxh3 == xxhash.xxh3_64_intdigest(b"abcdef")
    expected = b"ab" + np.arange(3, dtype=np.int64).tobytes() + b"cdabcdef"
    assert storage.read("ckpt_1/sparse/x", 100) == expected
    assert storage.size("ckpt_1/sparse/x") == 34
    write(storage, "d/empty", b"")
    assert (storage.size("d/empty"), storage.read("d/empty", 10)) == (0, b"")
    assert storage.list_files("d") == ["empty"]


@mostly_slow("url")
@pytest.mark.parametrize("name", ["d/täglich…", "d/a b", "d/" + "x" * 200, "d/100%25", "d/~#?&*[x]"])
def test_names_are_taken_as_they_are(storage, name):
    write(storage, name)
    assert storage.read(name, 10) == b"data"
    assert storage.list_files("d") == [name.removeprefix("d/")]
    storage.remove(name)
    assert storage.list_files("d") == []


def test_a_file_is_created_or_put_once(storage):
    storage.make_dir("d")
    write(storage, "d/x", b"first")
    storage.put_if_absent("d/y", b"first")
    for name in ("d/x", "d/y"):
        with pytest.raises(FileExistsError):
            write(storage, name, b"second")
        with pytest.raises(FileExistsError):
            storage.put_if_absent(name, b"second")
        assert storage.read(name, 10) == b"first"
    assert storage.list_files("d") == ["x", "y"]


@mostly_slow("url")
@pytest.mark.parametrize(
    ("error", "size"),
    [
        (OSError(errno.ENOSPC, "full"), 0),
        (OSError(errno.ENOSPC, "full"), 1_000_000),
        (KeyError("x"), 1_000_000),
        (KeyboardInterrupt(), 0),
        (Interrupted(), 1_000_000),
    ],
)
def test_an_error_while_a_file_is_written_leaves_none(storage, error, size):
    with pytest.raises(type(error)), storage.create("d/x") as sink:  # noqa: PT012  # the write is the point
        sink.write(b"x" * size)
        raise error
    gc.collect()
    assert storage.list_files("d") == []
    with pytest.raises(FileNotFoundError):
        storage.size("d/x")
    write(storage, "d/x")


def test_a_file_that_nobody_closes_or_discards_is_never_taken_for_a_whole_one(storage):
    sink = storage.create("d/x")
    sink.write(b"part")
    sink.discard()
    sink.discard()
    assert storage.list_files("d") == []


def test_one_of_many_wins_a_name(storage):
    start, won = threading.Barrier(8), []

    def put(n):
        start.wait(60)
        try:
            storage.put_if_absent("x", f"{n}".encode())
            won.append(n)
        except FileExistsError:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(8)))
    assert len(won) >= 1
    assert storage.read("x", 10) in [f"{n}".encode() for n in won]
    assert storage.list_files("") == ["x"]


def test_replacing_is_seen_whole_or_not_at_all(storage):
    contents = [f"{n}".encode() * 1000 for n in range(10)]
    storage.replace("index", contents[0])
    seen, done = set(), threading.Event()

    def look():
        while not done.is_set():
            seen.add(storage.read("index", 100_000))

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for _ in range(5):
            for content in contents:
                storage.replace("index", content)
        done.set()
        looking.result(60)
    assert seen <= set(contents)
    assert storage.read("index", 100_000) == contents[-1]
    assert storage.list_files("") == ["index"]


def test_a_file_is_read_in_ranges_and_its_readers_do_not_disturb_each_other(storage):
    write(storage, "d/x", bytes(range(100)))
    with storage.open("d/x") as one, storage.open("d/x") as other:
        one.seek(-5, 2)
        assert one.read() == bytes(range(95, 100))
        one.seek(50)
        other.seek(10)
        assert (one.read(1), other.read(3)) == (bytes([50]), bytes([10, 11, 12]))
        assert other.tell() == 13
        one.close()
        assert other.read(1) == bytes([13])
    assert storage.read("d/x", 7) == bytes(range(7))


@mostly_slow("url", "method")
@pytest.mark.parametrize("method", ["open", "size"])
@pytest.mark.parametrize("name", ["nothing", "d/nothing", "no/dir/x", "d"])
def test_what_is_not_there_is_not_found(storage, method, name):
    write(storage, "d/x")
    with pytest.raises(NOT_READABLE):
        getattr(storage, method)(name)


def test_a_directory_is_made_once_and_can_be_synced(storage):
    storage.make_dir("d")
    storage.put_if_absent("d/INTENT", b"{}")
    with pytest.raises(FileExistsError):
        storage.make_dir("d")
    write(storage, "file")
    with pytest.raises(FileExistsError):
        storage.make_dir("file")
    storage.sync_dir("d")
    storage.sync_dir("")


@mostly_slow()
def test_directories_and_files_are_listed_with_their_sizes(storage):
    contents = {"x": b"abc", "sub/y": b"", "sub/deeper/z": b"z" * 10_000}
    for name, data in contents.items():
        write(storage, f"a/{name}", data)
    for name in ("b/z", "top", "ab/q"):
        write(storage, name)
    assert sorted(storage.list_dirs()) == ["a", "ab", "b"]
    assert storage.list_files("a") == ["sub/deeper/z", "sub/y", "x"]
    assert storage.list_files("") == ["a/sub/deeper/z", "a/sub/y", "a/x", "ab/q", "b/z", "top"]
    assert {name: file.n_bytes for name, file in storage.listed("a").items()} == {
        name: len(data) for name, data in contents.items()
    }
    assert (storage.list_files("nothing"), storage.listed("nothing")) == ([], {})
    storage.remove("a/x")
    assert "x" not in open_storage(storage.url).listed("a")


def test_files_tell_by_one_clock_when_they_were_written_and_a_file_system_its_free_bytes(storage):
    write(storage, "d/first")
    storage.put_if_absent("second", b"")
    assert 0 < storage.modified("d/first") <= storage.modified("second")
    with pytest.raises(FileNotFoundError):
        storage.modified("d/third")
    free = storage.free_bytes()
    if "://" in storage.url:
        assert free is None
    else:
        assert 0 < free <= shutil.disk_usage(storage.url).total


def test_a_listing_is_never_stale(storage):
    assert storage.list_dirs() == []
    write(storage, "a/x")
    other = open_storage(storage.url)
    assert (storage.list_dirs(), other.list_dirs()) == (["a"], ["a"])
    other.remove("a/x")
    assert storage.list_files("a") == []
    write(other, "a/y")
    assert storage.size("a/y") == 4


def test_directories_go_when_they_are_empty_and_removing_twice_is_no_error(storage):
    for name in ("d/x", "d/sub/y"):
        write(storage, name)
    with pytest.raises(OSError, match="d"):
        storage.remove_empty_dirs("d")
    assert storage.list_files("d") == ["sub/y", "x"]
    for name in ("d/x", "d/x", "d/sub/y", "nowhere/x"):
        storage.remove(name)
    assert storage.list_files("d") == []
    storage.remove_empty_dirs("d")
    assert storage.list_dirs() == []
    storage.remove_empty_dirs("d")


def test_a_map_is_the_whole_file_or_there_is_none_and_the_parent_of_a_directory_is_found(storage):
    write(storage, "d/x", b"hello")
    write(storage, "d/empty", b"")
    mapped = storage.map("d/x")
    assert mapped is None or (bytes(mapped), mapped.readonly) == (b"hello", True)
    assert storage.map("d/empty") in (None, b"")
    for path in (f"{storage.url}/d", f"{storage.url}/d/"):
        parent, name = open_parent(path)
        assert (parent.url, name) == (storage.url, "d")
        assert parent.read("d/x", 10) == b"hello"


@pytest.mark.parametrize(
    ("place", "match"),
    [
        *(("", "path or URL"), (None, "path or URL"), (5, "path or URL")),
        ("nosuch://bucket/x", r"nosuch://bucket/x: .*expected a path, or a URL"),
    ],
)
def test_an_output_dir_is_a_path_or_url_of_a_known_protocol(place, match):
    with pytest.raises(ValueError, match=match):
        open_storage(place)
