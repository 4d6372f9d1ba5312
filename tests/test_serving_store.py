"""A key-value store that is kept at the newest checkpoint, by the example, against a real server."""

import shutil
import signal
import socket
import subprocess
import sys

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
def server(tmp_path_factory):
    """Yield the URL of a server on the loopback interface, which keeps nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("server"), stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def store(server, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry
    from serve_store import RowStore

    patient = redis.Redis.from_url(
        server, retry=Retry(ConstantBackoff(0.05), 100), retry_on_error=[redis.ConnectionError]
    )
    patient.flushall()  # waits for the server
    return RowStore(server)


class Training:
    def __init__(self, root):
        self.table = HashTable(4, name="item")
        self.table.insert(torch.arange(100), torch.rand(100, 4))
        deltas = Deltas(full_every=4, max_chain_bytes=1e9, max_dirty=1.0)
        self.saver = Saver(nn.ModuleDict({"item": self.table}), output_dir=root, max_keep=None, deltas=deltas)
        self.step = 0

    def save(self):
        self.step += 1
        first = 10 * self.step
        self.table.insert(torch.arange(first, first + 20) + 90, torch.rand(20, 4))
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

    monkeypatch.setattr(store._server, "hset", stop)  # once the deletes are gone
    with pytest.raises(KeyboardInterrupt):
        store.apply(skipped)
    monkeypatch.undo()
    assert not is_at(store, skipped)
    store.apply(newest)
    assert is_at(store, newest)


def test_the_example_follows_a_run_and_another_process_reads_its_rows(server, store, tmp_path):
    training = Training(tmp_path)
    training.save()
    command = [sys.executable, ROOT / "examples/serve_store.py", tmp_path, "--store", server]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)})
    try:
        assert follower.stdout.readline().startswith("step 1: ")
        newest = training.save()
        assert follower.stdout.readline().startswith("step 2: 20 rows in ")
        assert is_at(store, newest)
    finally:
        follower.send_signal(signal.SIGINT)
        follower.wait()
    answer = subprocess.run(
        [*command, "--get", "item", "105"], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert "True" in answer.stdout
