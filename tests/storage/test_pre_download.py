"""Loads that copy what they need first: the same rows, fewer requests, nothing left behind."""

import errno
import gc
from pathlib import Path

import pytest
import torch
from faults.http_proxy import Proxy
from faults.store_scene import options_of
from fsspec.config import conf
from support.forge import empty, filled, load, rows_of, save_tables

from recckpt import Saver
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.output_dir.listing import locate
from recckpt.output_dir.open_files import OpenFiles
from recckpt.policies import Transfers
from recckpt.save.arguments import transport_of
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.objects import ObjectStorage
from recckpt.storage.transfers import WorkDir

PART = "ckpt_1/sparse/00000-of-00001.g0.00.arrow"


@pytest.fixture
def work_dir(tmp_path):
    found = WorkDir(str(tmp_path / "work"))
    found.prepare()
    return found


@pytest.fixture
def opened(monkeypatch):
    """Names of the files that loads open in an object store, in turn."""
    names, real = [], ObjectStorage.open
    monkeypatch.setattr(ObjectStorage, "open", lambda self, name: names.append(name) or real(self, name))
    return names


def held(storage):
    manifest = locate(storage, "ckpt_1").manifest
    return OpenFiles(storage, "ckpt_1", {file.name: file.n_bytes for file in manifest.files})


def mapped_from(directory):
    """Return the copies that this process has in memory."""
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]


def test_rows_are_the_same_and_the_copies_go_with_the_load(memory_url, work_dir, opened):
    table = filled("t", range(1000), slots={"m": ()})
    save_tables(open_storage(memory_url), [table], batch_bytes=500)
    target = empty("t", slots={"m": ()})
    assert load(open_storage(memory_url), [target], download_dir=work_dir) == 1000
    assert rows_of(target) == rows_of(table)
    assert opened == [PART, PART.replace("00.arrow", "01.arrow")]
    assert list(Path(work_dir.url).iterdir()) == []
    assert mapped_from(work_dir.url) == []


def test_a_copy_is_read_where_it_lies_until_it_is_let_go(memory_url, work_dir, opened):
    save_tables(open_storage(memory_url), [filled("t", range(1000))], concurrency=1)
    files = held(open_storage(memory_url))
    files.fetch([PART], work_dir, 2)
    files.fetch([PART], work_dir, 2)
    assert opened == [PART]
    data = open_storage(memory_url).read(PART, 1 << 20)
    assert (bytes(files.map(PART)), files.read(PART, 1 << 20), files.size(PART)) == (data, data, len(data))
    assert len(mapped_from(work_dir.url)) == 1
    del files
    assert mapped_from(work_dir.url) == []


def test_a_rank_copies_the_parts_that_its_slice_meets_and_no_others(memory_url, work_dir, opened):
    tables = [filled("t", range(10_000)), filled("u", range(100), shape=3)]
    save_tables(open_storage(memory_url), tables, batch_bytes=1000, concurrency=4)
    everything = len(locate(open_storage(memory_url), "ckpt_1").manifest.files) - 1
    target = empty("t", slice=gen_slice(3, 4))
    load(open_storage(memory_url), [target, empty("u", shape=3)], download_dir=work_dir, load=["t"])
    assert 1 <= len(set(opened)) <= 2 < 4 < everything
    ids = torch.arange(10_000)
    assert torch.equal(target.ids().sort().values, ids[gen_slice(3, 4).owns(ids)])


def test_files_that_are_mapped_where_they_lie_are_not_copied(tmp_path, work_dir, monkeypatch):
    url = str(tmp_path / "runs")
    open_storage(url).prepare()
    save_tables(open_storage(url), [filled("t", range(10))])
    monkeypatch.setattr(WorkDir, "new_file", None)
    target = empty("t")
    assert load(open_storage(url), [target], download_dir=work_dir) == 10


def test_without_a_work_dir_copies_go_to_the_temporary_directory(memory_url, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    save_tables(open_storage(memory_url), [filled("t", range(10))])
    transport = transport_of(Transfers(visible_sec=0, timeout_sec=60, pre_download=True), memory_url)
    files = held(open_storage(memory_url))
    files.fetch([PART], transport.download_dir, 1)
    assert len(mapped_from(tmp_path)) == 1


def test_checkpoints_of_a_bank_are_copied_too(memory_url, work_dir, tmp_path, monkeypatch):
    copies, real = [], WorkDir.new_file
    monkeypatch.setattr(WorkDir, "new_file", lambda self: copies.append(self.url) or real(self))
    save_tables(open_storage(memory_url), [filled("t", range(10), shape=2)], concurrency=1)
    table = HashTable(2, name="t")
    model = torch.nn.ModuleDict({"t": table})
    saver = Saver(
        model, output_dir=str(tmp_path / "runs"), transfers=Transfers(work_dir=work_dir.url, pre_download=True)
    )
    saver.load_by_config({"path": memory_url, "load": ["t"]})
    assert len(table) == 10
    assert copies == [work_dir.url]


def test_a_download_dir_without_room_refuses_the_load_and_changes_nothing(memory_url, work_dir, monkeypatch):
    save_tables(open_storage(memory_url), [filled("t", range(1000))], concurrency=1)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 10_000)
    target = filled("t", [5])
    before = rows_of(target)
    with pytest.raises(OSError, match=r"found 10\.0 kB free in the work dir, expected \d\d\.\d kB") as refused:
        load(open_storage(memory_url), [target], download_dir=work_dir)
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, work_dir.url)
    assert rows_of(target) == before


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_file_of_another_size_is_damage(memory_url, work_dir, change):
    storage = open_storage(memory_url)
    save_tables(storage, [filled("t", range(1000))], concurrency=1)
    files, data = held(storage), storage.read(PART, 1 << 20)
    storage.replace(PART, data[:-1] if change == "shorter" else data + b"?")
    with pytest.raises(CorruptCheckpointError, match=rf"its size: found \d+ bytes, expected {len(data)} bytes"):
        files.fetch([PART], work_dir, 1)


def test_a_file_that_its_writer_removes_is_told_apart_from_damage(memory_url, work_dir):
    storage = open_storage(memory_url)
    save_tables(storage, [filled("t", range(1000))], concurrency=1)
    files = held(storage)
    storage.remove(PART)
    with pytest.raises(CorruptCheckpointError, match="no such file"):
        files.fetch([PART], work_dir, 1)
    storage.remove("ckpt_1/manifest.json")
    with pytest.raises(CheckpointRemovedError):
        files.fetch([PART], work_dir, 1)


@pytest.mark.slow
def test_a_load_from_s3_asks_as_seldom_as_one_that_downloads_first(s3_url, s3_options, work_dir, monkeypatch):
    table = filled("t", range(6_000), shape=16)
    save_tables(open_storage(s3_url), [table], batch_bytes=16_000, concurrency=1)
    proxy = Proxy(int(s3_options["endpoint_url"].rpartition(":")[2]))
    monkeypatch.setitem(conf, "s3", options_of(s3_options, proxy.port))
    counts = []
    for download_dir in (None, work_dir):
        target = empty("t", shape=16)
        proxy.arm(None, about=rb".*\.arrow")
        assert load(open_storage(s3_url), [target], download_dir=download_dir) == 6_000
        assert rows_of(target) == rows_of(table)
        counts.append(proxy.n_requests)
    proxy.stop()
    assert counts[0] <= counts[1], counts
