"""What prompts, debuggers and notebooks show of objects: whatever state they are in, and whatever their names are."""

import re
import shutil

import pytest
import torch
from support.forge import filled
from support.pages import HOSTILE, harmless_text
from torch import nn

import recckpt
from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.save.background import SaveHandle
from recckpt.save.save_info import SaveInfo
from recckpt.sparse import HashTable, ShardedHashTable
from recckpt.storage.local import LocalStorage


def saver_of(tmp_path, *tables, **options):
    return Saver(nn.ModuleDict({str(n): table for n, table in enumerate(tables)}), output_dir=str(tmp_path), **options)


def failed(tmp_path):
    handle = SaveHandle(SaveInfo("a"))
    handle.committed.set_exception(OSError("the disk\nis full"))
    return handle


def resumed(tmp_path):
    saver_of(tmp_path, filled("item", [1])).save("ckpt_20", step=20)
    manager = CheckpointManager(saver_of(tmp_path, filled("item", [])), 10)
    manager.restore()
    return manager


def removed(tmp_path):
    saver_of(tmp_path, filled("item", range(1000))).save("ckpt_1", step=1)
    reader = CheckpointReader(tmp_path)
    reader.close()
    shutil.rmtree(tmp_path)
    return reader


def loaded(tmp_path):
    saver = saver_of(tmp_path, filled("item", range(1000)))
    saver.save("ckpt_1")
    return saver.load()


def planned(tmp_path):
    saver = saver_of(tmp_path, filled("item", range(1000)))
    saver.save("ckpt_1")
    return saver.plan([{"path": str(tmp_path)}])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: saver_of(path), r"<Saver of ModuleDict with 0 tables, output_dir='PATH', max_keep=1, idle>"),
        (lambda path: saver_of(path, filled("t", []), deltas=True), r"<.* with 1 table, .*, deltas, idle>"),
        (resumed, r"<CheckpointManager at step 20, save_interval=10, 0 saves begun, saver=<Saver .*>>"),
        (lambda path: saver_of(path, filled("t", [1, 2])).save_async("a"), r"<SaveHandle of 'a', .*>"),
        (failed, r"<SaveHandle of 'a', failed: OSError: the disk; is full>"),
        (removed, r"<CheckpointReader PATH/ckpt_1: full, step 1, .*, 1,000 rows in 1 table, [\d.]+ kB>"),
        (planned, r"<LoadPlan 2 of 3 names from PATH/ckpt_1>"),
        (loaded, r"<LoadReport 2 of 3 names from PATH/ckpt_1: 1,000 rows taken, 0 filtered, .* read in .* s>"),
        (lambda path: filled("t", range(9)), r"HashTable\('t', rows=9, shape=\(2,\), dtype=float32, slots=0, .* kB\)"),
        (lambda path: HashTable(2, name="t\n" + "x" * 1000), r"HashTable\('t\\nx{58}\.\.\.', rows=0, .*\)"),
        (lambda path: ShardedHashTable(2, name="t"), r"ShardedHashTable\('t', rows=0, .*, rank 0 of 1\)"),
    ],
)
def test_an_object_says_what_it_is_in_a_line(tmp_path, make, expected):
    found = repr(make(tmp_path))
    assert re.fullmatch(expected.replace("PATH", re.escape(str(tmp_path))), found), found


@pytest.mark.parametrize(
    "kind", [Saver, CheckpointManager, CheckpointReader, SaveHandle, LoadPlan, LoadReport, HashTable, ShardedHashTable]
)
def test_what_is_half_made_is_shown_too(kind):
    assert kind.__name__ in repr(object.__new__(kind))


def test_a_save_that_runs_is_shown_and_what_it_has_written(tmp_path, gate, monkeypatch):
    saver = saver_of(tmp_path, table := filled("item", range(10)), deltas=True)
    manager, held = CheckpointManager(saver, 10), gate(LocalStorage, "create")
    handle = saver.save_async("a")
    held.wait()
    assert repr(handle) == "<SaveHandle of 'a', under way>"
    assert "saving 'a'" in repr(saver)
    assert "saving 'a'" in repr(manager)
    assert "rows=10" in repr(table)
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        assert "forked" in repr(handle)
        assert "forked" in repr(saver)
    held.open()
    handle.wait()
    assert re.fullmatch(r"<SaveHandle of 'a', committed: full of 10 rows, [\d.]+ kB>", repr(handle))
    table.insert(torch.tensor([3]), torch.ones(1, 2))
    saver.save_async("b").wait()
    saver.settle()
    delta = saver.save_async("c")
    delta.wait()
    assert "committed: delta of 0 rows" in repr(delta)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A plan, a report, a reader and a diff of tables whose names would break out of a page."""
    path = tmp_path_factory.mktemp("hostile")
    saver = saver_of(path, *(filled(name, range(1000)) for name in HOSTILE), max_keep=None)
    saver.save("a", state={name: name for name in HOSTILE})
    other = saver_of(path, *(filled(name, range(9)) for name in HOSTILE), max_keep=None)
    bank = [{"path": str(path / "a")}]
    found = {"plan": other.plan(bank), "report": other.load_by_config(bank)}
    other.save("b")
    return {**found, "reader": CheckpointReader(path / "a"), "diff": recckpt.diff(path / "a", path / "b")}


@pytest.mark.parametrize("what", ["plan", "report", "reader", "diff"])
def test_a_notebook_shows_names_harmlessly_and_numbers_on_the_right(hostile, what):
    page = hostile[what]._repr_html_()
    assert "1,000" in harmless_text(page)
    assert re.search(r'<td class="n">1,000</td>', page)
    assert not re.search("color-scheme|CanvasText", page)  # a notebook may be light where the system is dark
    assert max(map(len, repr(hostile[what]).splitlines())) < 500
