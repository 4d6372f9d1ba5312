"""Saves in the background: what they hold, how they end, and what becomes of their errors."""

import subprocess
import sys
import threading

import pytest
import torch
from builders import Run, checkpoints, state_of, table_state
from torch import nn

from recckpt import SaveFailedError, Saver
from recckpt.save_runner import SaveHandle
from recckpt.sparse import HashTable, SparseAdagrad
from recckpt.storage.local import LocalStorage, _LocalSink


class Gate:
    """Holds a method of the storage until it is opened; knows when somebody waits at it."""

    def __init__(self, monkeypatch, owner, method, error=None):
        self.reached, self.opened = threading.Event(), threading.Event()
        real = getattr(owner, method)

        def held(*args, **kwargs):
            self.reached.set()
            assert self.opened.wait(60)
            if error is not None:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, method, held)


@pytest.fixture
def gate(monkeypatch):
    gates = []

    def make(*args, **kwargs):
        gates.append(Gate(monkeypatch, *args, **kwargs))
        return gates[-1]

    yield make
    for made in gates:
        made.opened.set()


def build(url):
    table = HashTable(2, name="t")
    model = nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)})
    return table, Saver(model, SparseAdagrad([table]), str(url), max_keep=None)


def test_a_save_in_the_background_holds_the_state_of_its_step(tmp_path, gate):
    run = Run(tmp_path, interval=10**9).train(5)
    expected = state_of(run)
    writing = gate(LocalStorage, "create")
    handle = run.saver.save("c", step=5, blocking=False)
    assert writing.reached.wait(60)
    assert (handle.staged.done(), handle.done(), run.saver.is_saving) == (True, False, True)
    run.train(5)
    run.model.items.clear()
    with torch.no_grad():
        run.model.top.weight.zero_()
    writing.opened.set()
    manifest = handle.wait(60)
    assert (manifest.step, handle.done(), handle.info.n_rows) == (5, True, sum(t.rows for t in manifest.tables))
    assert handle.info.kept_rows > 0

    other = Run(tmp_path, seed=1)
    other.saver.load()
    again = state_of(other)
    for part in ("user/1", "item", "dense", "dense optimizer", "sparse optimizer", "position"):
        assert again[part] == expected[part], part


def test_the_buffers_of_one_save_do_not_change_the_one_before(tmp_path):
    table, saver = build(tmp_path)
    weight = saver.model["top"].weight
    handles = []
    for step in range(3):
        table.insert(torch.arange(5), torch.full((5, 2), float(step)))
        with torch.no_grad():
            weight.fill_(step)
        handles.append(saver.save(f"c{step}", blocking=False))
    saver.close()
    for step, handle in enumerate(handles):
        assert handle.wait().ckpt_id == f"c{step}"
        saver.load(ckpt_id=f"c{step}")
        assert (weight == step).all()
        assert (table.embeddings() == step).all()


def test_wait_has_a_limit_and_the_save_goes_on(tmp_path, gate):
    _, saver = build(tmp_path)
    writing = gate(LocalStorage, "create")
    handle = saver.save("c", blocking=False)
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    assert saver.settle(0.01) is False
    writing.opened.set()
    assert handle.wait().ckpt_id == "c"
    assert saver.settle() is True


ROOMS = {
    "begin": (LocalStorage, "make_dir"),
    "write": (_LocalSink, "write"),
    "fsync": (_LocalSink, "close"),
    "commit": (LocalStorage, "put_if_absent"),
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("told_by", ["save", "settle", "close", "with"])
def test_an_error_in_the_background_is_raised_once_and_the_next_save_lands(tmp_path, monkeypatch, room, told_by):
    table, saver = build(tmp_path)
    table(torch.arange(10))
    saver.save("old")
    old = table_state(table)
    owner, method = ROOMS[room]
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "full")))
        handle = saver.save("new", blocking=False)
        assert isinstance(handle.committed.exception(60), SaveFailedError)
        table(torch.arange(20))
        tell = {
            "save": lambda: saver.save("later"),
            "settle": saver.settle,
            "close": saver.close,
            "with": lambda: saver.__enter__().__exit__(None, None, None),
        }
        with pytest.raises(SaveFailedError, match="'new' failed on rank 0: OSError") as raised:
            tell[told_by]()
    assert isinstance(raised.value.__cause__, OSError)
    saver.settle()
    saver.close()
    assert checkpoints(tmp_path) == ["old"]
    other, loader = build(tmp_path)
    loader.load()
    assert table_state(other) == old
    saver.save("later", blocking=False).wait()
    loader.load()
    assert table_state(other) == table_state(table)


def test_an_error_that_the_handle_has_told_is_not_told_again(tmp_path, monkeypatch):
    _, saver = build(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", lambda *args: (_ for _ in ()).throw(OSError(5, "broken")))
        handle = saver.save("c", blocking=False)
        with pytest.raises(SaveFailedError):
            handle.wait()
    assert isinstance(saver.save("d", blocking=False), SaveHandle)
    saver.close()


def test_an_interpreter_waits_for_the_save_that_is_under_way_and_says_if_it_failed(tmp_path):
    code = f"""
import torch
from torch import nn
from recckpt import Saver
from recckpt.sparse import HashTable
table = HashTable(8, name="t")
table.insert(torch.arange(200_000), torch.ones(200_000, 8))
saver = Saver(nn.ModuleDict({{"t": table}}), None, {str(tmp_path)!r})
saver.save("a", overwrite=True, blocking=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert checkpoints(tmp_path) == ["a"]
    broken = f"""{code}
from recckpt.storage.local import LocalStorage
def create(self, name):
    raise OSError(5, "broken")
saver.settle()
LocalStorage.create = create
saver.save("b", blocking=False)
"""
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, check=True)
    assert "SaveFailedError: saving 'b' failed on rank 0: OSError: [Errno 5] broken" in done.stderr
    assert checkpoints(tmp_path) == ["a.2"]


def test_a_save_that_would_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    table, saver = build(tmp_path)
    table(torch.arange(1000))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 20_000)
    with pytest.raises(SaveFailedError, match=r"found 20.0 kB free, expected .* for the save; make room"):
        saver.save("c")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 30_000)
    saver.save("c")
    small = Saver(saver.model, saver.sparse_optim, str(tmp_path), min_free_bytes=20_000)
    with pytest.raises(SaveFailedError, match=r"and leave 20\.0 kB"):
        small.save("d")
    with pytest.raises(ValueError, match="min_free_bytes"):
        Saver(saver.model, None, str(tmp_path), min_free_bytes=-1)
