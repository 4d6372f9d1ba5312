"""A key-value store that is kept at the newest checkpoint, by the example, against a real server."""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import torch
from support.paths import ROOT
from torch import nn

from recckpt import CheckpointReader, Deltas, Saver
from recckpt.sparse import HashTable

redis = pytest.importorskip("redis", reason="redis is not installed: pip install 'recckpt[test]'")
if shutil.which("redis-server") is None:
    pytest.skip("redis-server is not installed: apt-get install redis-server", allow_module_level=True)


@pytest.fixture(scope="module")
def server():
    """Yield the URL of a server at a socket of the file system, which keeps nothing."""
    with tempfile.TemporaryDirectory() as root:  # whose path is short enough for a socket
        command = ["redis-server", "--port", "0", "--unixsocket", f"{root}/socket", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL)
        try:
            with redis.Redis(unix_socket_path=f"{root}/socket") as client:
                for _ in range(600):
                    assert process.poll() is None
                    with contextlib.suppress(redis.ConnectionError):
                        client.ping()
                        break
                    threading.Event().wait(0.1)
            yield f"unix://{root}/socket"
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def store(server, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from serve_store import RowStore

    redis.Redis.from_url(server).flushall()
    return RowStore(server)


class Training:
    def __init__(self, root, dtype=torch.float32):
        self.dtype = dtype
        self.table = HashTable(4, name="item", dtype=dtype)
        self.table.insert(torch.arange(100), torch.rand(100, 4).to(dtype))
        deltas = Deltas(full_every=4, max_chain_bytes=1e9, max_dirty=1.0)
        self.saver = Saver(nn.ModuleDict({"item": self.table}), output_dir=root, max_keep=None, deltas=deltas)
        self.step = 0

    def save(self):
        self.step += 1
        first = 10 * self.step
        self.table.insert(torch.arange(first, first + 20) + 90, torch.rand(20, 4).to(self.dtype))
        self.table.erase(torch.arange(self.step))
        self.saver.save(f"c{self.step}", step=self.step)
        return CheckpointReader(f"{self.saver.output_dir}/c{self.step}")


def is_at(store, checkpoint):
    """Say whether the store has the rows of a checkpoint, and no others."""
    ids = list(range(400))
    values, found = checkpoint.lookup("item", ids)
    served, there = store.look_up("item", ids, 4)
    return (served == values).all() and there == found.tolist() and store.applied == checkpoint.manifest.name


def test_the_store_is_at_each_checkpoint_that_was_applied_with_its_deletes(store, tmp_path):
    training = Training(tmp_path)
    n_rows = []
    for _ in range(6):  # two full ones among them
        checkpoint = training.save()
        n_rows.append(store.apply(checkpoint))
        assert is_at(store, checkpoint)
    assert n_rows[1:4] == [20, 20, 20]  # what has changed, and no more
    assert store.apply(checkpoint) == 0


def test_a_store_that_was_stopped_in_the_middle_goes_on_from_what_was_noted(store, tmp_path, monkeypatch):
    training = Training(tmp_path)
    store.apply(training.save())
    skipped, newest = training.save(), None
    for _ in range(2):
        newest = training.save()

    def stop(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(store, "_write", stop)  # once the deletes are gone
        with pytest.raises(KeyboardInterrupt):
            store.apply(skipped)
    assert not is_at(store, skipped)
    store.apply(newest)
    assert is_at(store, newest)


def test_what_was_begun_of_a_checkpoint_that_is_lost_goes_where_the_run_went_back(store, tmp_path, monkeypatch):
    training = Training(tmp_path)
    first = training.save()
    store.apply(first)
    training.table.insert(torch.tensor([300]), torch.rand(1, 4))
    second = training.save()
    with monkeypatch.context() as stopped:
        stopped.setattr(store, "_note", lambda **notes: _noted_or_stopped(store, notes))
        with pytest.raises(KeyboardInterrupt):
            store.apply(second)
    assert store.look_up("item", [300], 4)[1] == [True]
    training.saver.close()
    shutil.rmtree(tmp_path / "c2")
    again = Training(tmp_path)
    again.saver.load("c1")
    again.step = 2
    newest = again.save()
    store.apply(newest)
    assert is_at(store, newest)


def _noted_or_stopped(store, notes):
    if "applied" in notes:
        raise KeyboardInterrupt
    type(store)._note(store, **notes)


def test_a_table_that_is_gone_is_served_no_more(store, tmp_path):
    training = Training(tmp_path)
    store.apply(training.save())
    training.saver.close()
    other = HashTable(4, name="other")
    other.insert(torch.tensor([1]), torch.ones(1, 4))
    with Saver(nn.ModuleDict({"other": other}), output_dir=tmp_path, max_keep=None) as saver:
        saver.save("last", step=9)
    store.apply(CheckpointReader(tmp_path / "last"))
    assert (store.look_up("item", [100], 4)[1], store.look_up("other", [1], 4)[1]) == ([False], [True])


def test_rows_of_bfloat16_are_served_as_the_numbers_that_they_are(store, tmp_path):
    checkpoint = Training(tmp_path, torch.bfloat16).save()
    store.apply(checkpoint)
    assert is_at(store, checkpoint)


def test_the_example_follows_a_run_and_another_process_reads_its_rows(server, store, tmp_path):
    training = Training(tmp_path)
    training.save()
    command = [sys.executable, ROOT / "examples/serve_store.py", tmp_path, "--store", server, "--timeout-sec", "120"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)})
    try:
        assert follower.stdout.readline().startswith("step 1: ")
        newest = training.save()
        assert follower.stdout.readline().startswith("step 2: 20 rows in ")
        assert is_at(store, newest)
    finally:
        follower.send_signal(signal.SIGKILL)
        follower.wait()
    answer = subprocess.run(
        [*command, "--get", "item", "105"], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert "True" in answer.stdout
