"""Saves that go up from a directory on this host: the same files, the same errors, and nothing left on the way."""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from faults.http_proxy import Proxy
from faults.store_scene import as_json, options_of
from support.builders import Run, state_of

from recckpt import Saver
from recckpt.errors import SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies import Transfers
from recckpt.sparse import HashTable
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.objects import ObjectStorage
from recckpt.storage.transfers import Outbox, Transport, WorkDir


@pytest.fixture
def work_dir(tmp_path):
    return tmp_path / "work"


def run_of(url, work_dir, **options):
    """Return a run that saves and restores by way of a work dir."""
    return Run(url, **options, transfers=Transfers(work_dir=work_dir, pre_download=True))


def table_saver(url, **options):
    """Return a table of 1000 rows and a saver of it."""
    table = HashTable(2, name="t")
    table.insert(torch.arange(1000), torch.zeros(1000, 2))
    return table, Saver(torch.nn.ModuleDict({"t": table}), output_dir=url, max_keep=None, **options)


def copies_in(work_dir, pid="self"):
    """Return the files of a work dir that a process holds; they have no names."""
    assert list(work_dir.iterdir()) == []
    links = [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return [link for link in links if str(link).startswith(f"{work_dir}/")]


@pytest.mark.parametrize("kind", ["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_run_is_saved_rotated_and_restored_by_way_of_a_work_dir(kind, request, tmp_path, work_dir):
    url = str(tmp_path / "runs") if kind == "local" else request.getfixturevalue(f"{kind}_url")
    run = run_of(url, work_dir, interval=3, max_keep=2).train(10)
    storage = open_storage(url)
    assert [name for name in storage.list_dirs() if name.startswith("ckpt")] == ["ckpt_6", "ckpt_9"]
    assert verify(url, threads=1) == []
    assert copies_in(work_dir) == []
    run.manager.save()
    again = run_of(url, work_dir, interval=3, max_keep=2, seed=1)
    assert again.manager.restore() == 10
    assert state_of(again) == state_of(run)


def test_the_files_are_those_of_a_save_without_a_work_dir(tmp_path, work_dir):
    sizes = []
    for url, options in ((tmp_path / "plain", {}), (tmp_path / "staged", {"transfers": Transfers(work_dir=work_dir)})):
        _, saver = table_saver(str(url), **options)
        sizes.append({file.name: (file.n_bytes, file.xxh3) for file in saver.save("c").files if "rng" not in file.name})
    assert sizes[0].keys() == sizes[1].keys()
    plain, staged = (
        (tmp_path / url / "c/sparse/00000-of-00001.g0.00.arrow").read_bytes() for url in ("plain", "staged")
    )
    assert plain == staged
    one, other = WorkDir(str(work_dir)), WorkDir(str(tmp_path / "other"))
    for found in (one, other):
        found.prepare()
    assert one.device == other.device is not None  # which tells who shares its room


def test_nothing_is_in_the_storage_before_all_copies_are_there(memory_url, work_dir):
    storage = open_storage(memory_url)
    copies = WorkDir(str(work_dir))
    copies.prepare()
    with Outbox(storage, Transport(work_dir=copies)) as outbox:
        for name in ("d/x", "d/y"):
            with outbox.create(name) as sink:
                assert sink.write(memoryview(bytes(3 << 20)).cast("I")) == 3 << 20
        assert storage.list_files("") == []
        assert len(copies_in(work_dir)) == 2
        outbox.publish(2)
        assert copies_in(work_dir) == []
    assert {name: file.n_bytes for name, file in storage.listed("d").items()} == {"x": 3 << 20, "y": 3 << 20}


@pytest.mark.parametrize("staged", [True, False])
def test_training_copies_nothing_aside_while_files_go_up_from_a_work_dir(memory_url, work_dir, gate, staged):
    table, saver = table_saver(memory_url, **({"transfers": Transfers(work_dir=work_dir)} if staged else {}))
    held = gate(ObjectStorage, "create")
    handle = saver.save_async("c")
    held.wait()
    if staged:
        assert len(copies_in(work_dir)) > 1
        [snapshot] = [reference() for reference in table.store._observers._snapshots]
        with pytest.raises(RuntimeError, match="closed"):
            snapshot.ids.gather(np.arange(1))
    table.insert(torch.arange(1000), torch.ones(1000, 2))
    held.open()
    handle.wait()
    assert handle.info.kept_rows == (0 if staged else 1000)
    other, loader = table_saver(memory_url)
    loader.load()
    assert torch.equal(other.embeddings(), torch.zeros(1000, 2))


@pytest.mark.parametrize("blocking", [True, False])
def test_an_upload_that_fails_fails_the_save_and_leaves_nothing_on_the_way(memory_url, work_dir, monkeypatch, blocking):
    _, saver = table_saver(memory_url, transfers=Transfers(work_dir=work_dir))
    create, names = ObjectStorage.create, []

    def fail_the_third(storage, name):
        names.append(name)
        if len(names) == 3:
            raise OSError(5, "the store is on fire", name)
        return create(storage, name)

    monkeypatch.setattr(ObjectStorage, "create", fail_the_third)
    with pytest.raises(SaveFailedError, match=r"rank 0: OSError: .*the store is on fire"):
        saver.save("c") if blocking else saver.save_async("c").wait()
    assert copies_in(work_dir) == []
    assert [name for name in saver.storage.list_files("") if name.startswith("c/")] == ["c/INTENT"]
    saver.save("c")
    assert [found.ckpt_id for found in list_checkpoints(saver.storage).committed] == ["c"]


def test_a_copy_that_changes_on_its_way_is_not_committed(memory_url, work_dir, gate):
    _, saver = table_saver(memory_url, transfers=Transfers(work_dir=work_dir))
    held = gate(ObjectStorage, "create")
    handle = saver.save_async("c")
    held.wait()
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and str(path.readlink()).startswith(f"{work_dir}/"):
            os.pwrite(int(path.name), b"?", 0)
    held.open()
    with pytest.raises(
        SaveFailedError, match=r"the copy in the work dir has changed: found \d+ bytes with checksum .*check that disk"
    ):
        handle.wait()
    assert list_checkpoints(saver.storage).committed == ()


@contextmanager
def file_limit(n_bytes):
    """Let no file of this process grow beyond a size, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_work_dir_that_is_full_fails_the_save_and_says_which(memory_url, work_dir):
    _, saver = table_saver(memory_url, transfers=Transfers(work_dir=work_dir))
    with file_limit(10_000), pytest.raises(SaveFailedError, match=f"work dir failed: File too large: '{work_dir}'"):
        saver.save("c")
    assert copies_in(work_dir) == []
    saver.save("c")


def test_a_work_dir_without_room_for_the_ranks_of_this_host_refuses_the_save(memory_url, work_dir, monkeypatch):
    _, saver = table_saver(memory_url, transfers=Transfers(work_dir=work_dir))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 15_999)
    with pytest.raises(SaveFailedError, match=r"found 16\.0 kB free in the work dir, expected 16\.0 kB; make room"):
        saver.save("c")
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 16_000)
    saver.save("c")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("work_dir", 5),
        ("work_dir", ""),
        ("work_dir", "s3://bucket/work"),
        ("max_uploads", 0),
        ("max_uploads", True),
        ("pre_download", "yes"),
        ("visible_sec", -1),
        ("visible_sec", float("nan")),
    ],
)
def test_an_option_that_is_none_is_refused_before_anything_is_made(tmp_path, option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        Saver(torch.nn.Linear(1, 1), output_dir=str(tmp_path / "runs"), transfers=Transfers(**{option: value}))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):  # a work dir that cannot be written is known at once
        Saver(torch.nn.Linear(1, 1), output_dir=tmp_path / "runs", transfers=Transfers(work_dir=tmp_path / "file/work"))


SAVE = """
import json, sys
import torch
from fsspec.config import conf
from recckpt import Saver
from recckpt.policies import Transfers
from recckpt.sparse import HashTable
url, work_dir, conf["s3"] = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
table = HashTable(2, name="t")
table.insert(torch.arange(1000), torch.zeros(1000, 2))
Saver(torch.nn.ModuleDict({"t": table}), output_dir=url, transfers=Transfers(work_dir=work_dir)).save("c")
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_sends_leaves_nothing_behind(s3_url, s3_options, work_dir):
    proxy = Proxy(int(s3_options["endpoint_url"].rpartition(":")[2]))
    held = []

    def kill(exchange):
        held.extend(copies_in(work_dir, process.pid))
        os.kill(process.pid, signal.SIGKILL)

    proxy.arm(kill, at=2, about=rb"PUT .*/c/(?!INTENT)")
    options = as_json(options_of(s3_options, proxy.port))
    process = subprocess.Popen([sys.executable, "-c", SAVE, s3_url, str(work_dir), options])
    assert process.wait(300) == -signal.SIGKILL
    proxy.stop()
    assert held
    assert list(work_dir.iterdir()) == []
    assert "manifest.json" not in json.dumps(open_storage(s3_url).list_files("c"))
    _, saver = table_saver(s3_url, transfers=Transfers(work_dir=work_dir))
    saver.save("c")
    assert verify(s3_url, threads=1) == []
