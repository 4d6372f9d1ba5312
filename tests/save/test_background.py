"""Saves and compactions in the background: training goes on, and no error is lost."""

import sys
import threading

import pytest
import torch
from support import warm_python
from support.builders import Run, checkpoints, state_of, table_state
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Deltas, Saver
from recckpt.errors import RankLostError, SaveFailedError
from recckpt.format import layout
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints
from recckpt.parallel.ranks import Connection, Ranks
from recckpt.policies import Transfers
from recckpt.rewrite import whole
from recckpt.save import save as hallway
from recckpt.save.background import SaveHandle, settle_on_all
from recckpt.save.save_info import SaveInfo
from recckpt.sparse import HashTable, SparseAdagrad
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import LocalSink


def build(url):
    table = HashTable(2, name="t")
    model = nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)})
    return table, Saver(model, SparseAdagrad([table]), str(url), max_keep=None)


def test_a_save_in_the_background_holds_the_state_of_its_step(tmp_path, gate):
    run = Run(tmp_path, interval=10**9).train(5)
    expected = state_of(run)
    writing = gate(LocalStorage, "create")
    handle = run.saver.save_async("c", step=5)
    writing.wait()
    assert (handle.done(), run.saver.is_saving) == (False, True)
    run.train(5)
    run.model.items.clear()
    with torch.no_grad():
        run.model.top.weight.zero_()
    writing.open()
    manifest = handle.wait(60)
    assert (manifest.step, handle.done(), handle.info.n_rows) == (5, True, sum(t.rows for t in manifest.tables))
    assert handle.info.kept_rows > 0

    other = Run(tmp_path, seed=1)
    other.saver.load()
    again = state_of(other)
    for part in ("user/1", "item", "dense", "dense optimizer", "sparse optimizer", "position"):
        assert again[part] == expected[part], part


def test_training_goes_on_before_the_thread_of_a_save_does_anything(tmp_path, monkeypatch):
    _, saver = build(tmp_path)
    order, write, interval = [], hallway.write, sys.getswitchinterval()
    monkeypatch.setattr(hallway, "write", lambda *args: order.append("write") or write(*args))
    sys.setswitchinterval(60)  # who runs is not interrupted
    try:
        handle = saver.save_async("c")
        order.append("training")
    finally:
        sys.setswitchinterval(interval)
    handle.wait()
    assert order == ["training", "write"]


def test_the_buffers_of_one_save_do_not_change_the_one_before(tmp_path):
    table, saver = build(tmp_path)
    weight = saver.model["top"].weight
    handles = []
    for step in range(3):
        table.insert(torch.arange(5), torch.full((5, 2), float(step)))
        with torch.no_grad():
            weight.fill_(step)
        handles.append(saver.save_async(f"c{step}"))
    saver.close()
    for step, handle in enumerate(handles):
        assert handle.wait().ckpt_id == f"c{step}"
        saver.load(ckpt_id=f"c{step}")
        assert (weight == step).all()
        assert (table.embeddings() == step).all()


def test_wait_has_a_limit_or_is_interrupted_and_the_save_goes_on(tmp_path, gate, interrupted):
    _, saver = build(tmp_path)
    writing = gate(LocalStorage, "create")
    handle = saver.save_async("c")
    assert (handle.committed.cancel(), handle.done(), saver.is_saving) == (False, False, True)
    for timeout_sec in ("x", True, [1]):
        for wait in (handle.wait, saver.settle):
            with pytest.raises(TypeError, match="timeout_sec must be a number of seconds, or None"):
                wait(timeout_sec)
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    assert saver.settle(0.01) is False
    with interrupted():
        saver.settle()
    assert (saver.is_saving, saver.settle(0)) == (True, False)
    writing.open()
    assert handle.wait().ckpt_id == "c"
    assert saver.settle() is True
    assert checkpoints(tmp_path) == ["c"]


ROOMS = {
    "begin": (LocalStorage, "make_dir"),
    "write": (LocalSink, "write"),
    "fsync": (LocalSink, "close"),
    "commit": (LocalStorage, "put_if_absent"),
}


@mostly_slow("room")
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
        handle = saver.save_async("new")
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
    saver.save_async("later").wait()
    loader.load()
    assert table_state(other) == table_state(table)


def test_an_error_that_the_handle_has_told_is_not_told_again_nor_hides_what_a_block_raised(
    tmp_path, monkeypatch, caplog
):
    _, saver = build(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", lambda *args: (_ for _ in ()).throw(OSError(5, "broken")))
        handle = saver.save_async("c")
        with pytest.raises(SaveFailedError):
            handle.wait()
    assert isinstance(saver.save_async("d"), SaveHandle)
    saver.close()
    monkeypatch.setattr(LocalStorage, "create", lambda *args: (_ for _ in ()).throw(OSError(5, "broken")))
    saver.save_async("e")
    with pytest.raises(KeyError), saver:
        raise KeyError
    assert "saving 'e' failed on rank 0" in caplog.text


AT_EXIT = """
import os, sys, torch
from torch import nn
from recckpt import Saver
from recckpt.sparse import HashTable
from recckpt.storage.local import LocalStorage

table = HashTable(8, name="t")
table.insert(torch.arange(200_000), torch.ones(200_000, 8))

def train(ckpt_id):
    saver = Saver(nn.ModuleDict({"t": table}), None, sys.argv[1])
    saver.save_async(ckpt_id)  # and the saver is forgotten

def create(self, name):
    raise OSError(5, "broken")

child = os.fork()  # spares the start of another interpreter
if child == 0:
    train("a")
else:
    assert os.waitpid(child, 0)[1] == 0
    print("the first has ended", file=sys.stderr)
    LocalStorage.create = create
    train("b")
"""


@pytest.mark.slow
def test_an_interpreter_waits_for_the_save_that_is_under_way_and_says_if_it_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    done = warm_python.run(script, tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    first, _, second = done.stderr.partition("the first has ended\n")
    assert first == ""
    assert checkpoints(tmp_path / "runs") == ["a"]
    assert second.count("SaveFailedError: saving 'b' failed on rank 0: OSError: [Errno 5] broken") == 1


def test_whatever_fails_in_the_background_is_a_failed_save(tmp_path, monkeypatch):
    _, saver = build(tmp_path)
    with monkeypatch.context() as patch:
        lost = RuntimeError("connection closed by peer")  # as gloo says when another rank has died
        patch.setattr(hallway, "write", lambda *args: (_ for _ in ()).throw(lost))
        saver.save_async("c")
        with pytest.raises(SaveFailedError, match="'c' failed on rank 0: RuntimeError: connection closed") as raised:
            saver.close()
    assert raised.value.__cause__ is lost
    saver.save("c")


def test_an_error_that_came_after_the_limit_of_a_wait_is_still_told(tmp_path, gate):
    _, saver = build(tmp_path)
    writing = gate(LocalStorage, "create", OSError(5, "broken"))
    handle = saver.save_async("c")
    with pytest.raises(TimeoutError, match=r"saving 'c' has not ended after 0\.01 s; the save continues"):
        handle.wait(0.01)
    writing.open()
    with pytest.raises(SaveFailedError):
        saver.settle()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_where_no_thread_can_be_started_or_that_is_interrupted_the_save_is_called_off(tmp_path, monkeypatch, error):
    table, saver = build(tmp_path)
    table(torch.arange(10))
    start = threading.Thread.start

    def failing(thread):
        if error is KeyboardInterrupt:
            start(thread)
        raise error("no new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(error, match="no new thread"):
            saver.save_async("c")
    assert saver.is_saving is False
    assert checkpoints(tmp_path) == []
    if error is RuntimeError:  # else the thread may hold it still
        assert not any(reference() for reference in table.store._observers._snapshots), "nothing is copied aside"
    assert saver.save_async("c").wait().ckpt_id == "c"
    assert saver.settle()


def test_a_load_waits_for_nobody_and_changes_no_save_that_is_under_way(tmp_path, gate):
    table, saver = build(tmp_path)
    table(torch.arange(10))
    saver.save("old")
    table.insert(torch.arange(5, 30), torch.ones(25, 2))
    with torch.no_grad():
        saver.model["top"].weight.fill_(3)
    expected = table_state(table)
    writing = gate(LocalStorage, "create")
    handle = saver.save_async("new")
    writing.wait()
    saver.load(ckpt_id="old")
    assert len(table) == 10
    writing.open()
    handle.wait()
    saver.load(ckpt_id="new")
    assert table_state(table) == expected
    assert (saver.model["top"].weight == 3).all()


@pytest.mark.parametrize("blocking", [True, False])
def test_whoever_wants_to_know_is_told_of_each_save_when_all_of_it_is_over(tmp_path, blocking):
    told = []

    def on_save(info):
        told.append((info.ckpt_id, info.n_rows, checkpoints(tmp_path), threading.current_thread().name))

    table = HashTable(2, name="t")
    table(torch.arange(7))
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), on_save=on_save)
    for ckpt_id in ("a", "b"):
        manifest = saver.save(ckpt_id) if blocking else saver.save_async(ckpt_id).wait()
        assert manifest.ckpt_id == ckpt_id
        assert checkpoints(tmp_path) == [ckpt_id]
    thread = threading.current_thread().name if blocking else "recckpt-save"
    assert told == [("a", 7, ["a"], thread), ("b", 7, ["b"], thread)]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_save_ends_after_its_callback_and_counts_though_that_fails(tmp_path, monkeypatch, caplog, blocking):
    seen = []

    def on_save(info):
        seen.append(saver.is_saving)
        return {}[info.ckpt_id]

    def save(ckpt_id):
        saver.save(ckpt_id) if blocking else saver.save_async(ckpt_id).wait()

    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path), on_save=on_save)
    save("a")
    assert checkpoints(tmp_path) == ["a"]
    assert "a is saved, but on_save=" in caplog.text
    assert "KeyError: 'a'" in caplog.text
    monkeypatch.setattr(LocalStorage, "create", lambda *args: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(SaveFailedError):
        save("b")
    assert seen == [not blocking] * 2


def test_a_save_that_would_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    table, saver = build(tmp_path)
    table(torch.arange(1000))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 20_000)
    with pytest.raises(SaveFailedError, match=r"found 20.0 kB free, expected .* for the save; make room"):
        saver.save("c")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 30_000)
    saver.save("c")
    small = Saver(saver.model, saver.sparse_optim, str(tmp_path), transfers=Transfers(min_free_bytes=20_000))
    with pytest.raises(SaveFailedError, match=r"and leave 20\.0 kB"):
        small.save("d")
    with pytest.raises(ValueError, match="min_free_bytes"):
        Saver(saver.model, None, str(tmp_path), transfers=Transfers(min_free_bytes=-1))


class _Losing:
    """Two ranks, of which the other is lost at some time."""

    rank, size, is_lost = 0, 2, False

    def twin(self):
        return self

    def all_gather(self, value):
        if self.is_lost:
            raise RankLostError([1], "its storage hangs")
        return [value, value]


@pytest.fixture
def losing():
    """A group, and the ranks of the save that is to follow."""
    group = _Losing()
    ranks = Ranks(0, 2, Connection(lambda: group))
    ranks.gather(None)
    return group, ranks


def test_the_save_that_failed_is_named_where_a_rank_is_lost_meanwhile_and_not_the_one_to_follow(losing):
    group, ranks = losing

    def settle():
        group.is_lost = True
        raise SaveFailedError("first", 1, "the rank is lost")

    with pytest.raises(SaveFailedError, match="saving 'first' failed on rank 1"):
        settle_on_all(settle, SaveInfo("second").raising(ranks))


@pytest.mark.parametrize("before", [None, SaveFailedError("first", 1, "the rank is lost")])
def test_what_the_ranks_do_together_raises_the_error_of_the_save_that_failed_before(losing, before):
    group, ranks = losing
    group.is_lost = True
    with pytest.raises(SaveFailedError, match=f"saving '{'first' if before else 'second'}' failed on rank 1"):
        SaveInfo("second").raising(ranks, lambda: before).gather(0)


def deltas(**options) -> Deltas:
    return Deltas(full_every=2, max_chain_bytes=1e9, max_dirty=1.0, compact=True, **options)


def compaction() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "recckpt-compact"]


def join() -> None:
    for thread in compaction():
        thread.join()


def offers(root) -> list[str]:
    return [name for name in attempt_dirs(open_storage(str(root))) if layout.is_offer_dir(name)]


def restored(root) -> dict:
    run = Run(root, seed=9)
    assert run.manager.restore()
    return state_of(run)


@pytest.mark.slow
def test_a_chain_that_is_compacted_needs_no_further_full_save(tmp_path):
    run = Run(tmp_path, deltas=deltas(), max_keep=2)
    for _ in range(9):
        run.train(10)
        join()
        assert restored(tmp_path) == state_of(run)
    committed = list_checkpoints(open_storage(str(tmp_path))).committed
    saved = [c.manifest for c in committed if not c.manifest.supersedes]
    assert {record.kind for record in saved} == {"delta"}  # the first one, which was full, is gone
    assert any(c.manifest.supersedes for c in committed)
    assert len(committed) < 9


def test_where_no_offer_is_adopted_a_save_is_full_in_the_end_and_without_the_option_nothing_is_compacted(
    tmp_path, monkeypatch
):
    Run(tmp_path / "without", deltas=Deltas(full_every=2, max_chain_bytes=1e9, max_dirty=1.0), max_keep=None).train(60)
    assert (offers(tmp_path / "without"), compaction()) == ([], [])
    monkeypatch.setattr("recckpt.save.commit.adopt_offers", lambda *args: [])
    run = Run(tmp_path / "with", deltas=deltas(), max_keep=None)
    for _ in range(6):
        run.train(10)
        join()
    kinds = [c.manifest.kind for c in list_checkpoints(open_storage(str(tmp_path / "with"))).committed]
    assert kinds == ["full", "delta", "delta", "delta", "delta", "full"]
    assert len(offers(tmp_path / "with")) == 1  # one that waits is enough


def test_a_failed_compaction_is_logged_and_fails_no_save(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole, "tasks_of", fail)
    run = Run(tmp_path, deltas=deltas(), max_keep=None).train(30)
    join()
    run.train(10)
    join()
    assert "'ckpt_30' could not be compacted: [Errno 28] No space left on device" in caplog.text
    assert offers(tmp_path) == []
    assert restored(tmp_path) == state_of(run)


def test_closing_the_saver_ends_a_compaction_which_leaves_nothing(tmp_path, gate):
    at_work = gate(whole, "tasks_of")
    run = Run(tmp_path, deltas=deltas(), max_keep=None).train(30)
    at_work.wait()
    closing = threading.Thread(target=run.saver.close)
    closing.start()
    assert run.saver._to.compactors[0]._worker.task.wait(60)
    at_work.open()
    closing.join()
    assert (compaction(), offers(tmp_path)) == ([], [])
    assert restored(tmp_path) == state_of(run)
    run.train(10)  # it may go on being used
    run.saver.close()
