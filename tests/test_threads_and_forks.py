"""A saver among threads, forks, copies, and other savers of its output dir."""

import copy
import inspect
import multiprocessing
import pickle
import threading

import pytest
import torch
from support.builders import Run, checkpoints, table_state
from support.crowd import crowd
from support.forked import in_fork
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.errors import ForkedError, WriterFencedError
from recckpt.inspect.verify import verify
from recckpt.save import stage
from recckpt.sparse import HashTable, SparseAdagrad
from recckpt.storage.local import LocalStorage

REMEDY = "make a new one in the child, or start the child by multiprocessing's 'spawn'"


def build(url, **options):
    table = HashTable(2, name="t")
    model = nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)})
    table(torch.arange(100))
    return table, Saver(model, SparseAdagrad([table]), str(url), max_keep=None, **options)


# threads


def test_saves_of_several_threads_follow_each_other_in_the_background_too(tmp_path):
    _, saver = build(tmp_path)
    manifests = crowd(8, lambda number: saver.save(f"c{number}"))
    assert sorted(manifest.seq for manifest in manifests) == list(range(1, 9))
    handles = crowd(4, lambda number: saver.save_async(f"d{number}"))
    assert sorted(handle.wait().seq for handle in handles) == [9, 10, 11, 12]
    assert verify(str(tmp_path)) == []
    saver.save("after")


def test_a_save_waits_for_the_load_of_another_thread(tmp_path, gate, monkeypatch):
    table, saver = build(tmp_path)
    saver.save("first")
    expected = table_state(table)
    table(torch.arange(100, 200))
    clearing, staging = gate(HashTable, "clear"), threading.Event()
    real = stage.stage
    monkeypatch.setattr("recckpt.save.propose.stage", lambda *args, **kwargs: staging.set() or real(*args, **kwargs))
    loading = threading.Thread(target=saver.load, kwargs={"ckpt_id": "first"})
    loading.start()
    clearing.wait()
    saving = threading.Thread(target=saver.save, args=("second",))
    saving.start()
    assert not staging.wait(0.2)
    clearing.open()
    loading.join()
    saving.join()
    other, again = build(tmp_path)
    again.load(ckpt_id="second")
    assert table_state(other) == expected


def test_steps_of_several_threads_count_and_save_one_after_another(tmp_path):
    _, saver = build(tmp_path)
    manager = CheckpointManager(saver, 1)
    assert manager._turn() is saver._turn()  # one lock, so that no two threads hold one each
    outcomes = crowd(4, lambda number: [manager.step() for _ in range(3)])
    assert outcomes == [[None] * 3] * 4
    assert manager.global_step == 12
    assert checkpoints(tmp_path) == sorted(f"ckpt_{step}" for step in range(1, 13))
    assert verify(str(tmp_path)) == []


def test_what_on_save_asks_of_the_saver_in_the_thread_of_the_save_is_refused_and_does_not_hang(tmp_path, caplog):
    _, saver = build(tmp_path, on_save=lambda info: manager.save() if info.step else saver.load())
    manager = CheckpointManager(saver, 1, async_save=True)
    saver.save_async("a").wait()
    manager.step()
    manager.close()
    assert caplog.text.count("on_save runs as part of a save") == 2
    assert checkpoints(tmp_path) == ["a", "ckpt_1"]


def test_a_save_in_the_middle_of_a_save_of_the_same_thread_is_refused(tmp_path, monkeypatch):
    _, saver = build(tmp_path, concurrency=1)  # which writes in the thread of the save
    create = LocalStorage.create

    def interrupted(storage, name):
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "create", create)
            with pytest.raises(RuntimeError, match=r"in the middle of another save of this thread.*save_on_signal"):
                saver.save("inner")  # as a signal handler would
        return create(storage, name)

    monkeypatch.setattr(LocalStorage, "create", interrupted)
    saver.save("outer")
    monkeypatch.undo()
    saver.save("next")
    assert checkpoints(tmp_path) == ["next", "outer"]


@pytest.mark.parametrize(
    "call",
    [
        lambda saver, manager: saver.load(),
        lambda saver, manager: manager.step(),
        lambda saver, manager: manager.restore(),
        lambda saver, manager: manager.close(),
    ],
)
def test_no_call_saves_or_waits_for_another_thread_in_the_middle_of_a_change_of_a_table(tmp_path, gate, call):
    table, saver = build(tmp_path)
    manager, refusal = CheckpointManager(saver, 10**9), r"in the middle of a change of table 't'"
    with table.store.lock, pytest.raises(RuntimeError, match=f"{refusal}.*save_on_signal"):
        saver.save("inner")  # as a signal handler would
    staging = gate(stage, "dump_rng")
    saving = threading.Thread(target=saver.save, args=("a",))
    saving.start()
    staging.wait()
    try:
        with table.store.lock, pytest.raises(RuntimeError, match=refusal):
            call(saver, manager)  # as a signal handler would: the save needs the table next
    finally:
        staging.open()
        saving.join()
    assert checkpoints(tmp_path) == ["a"]


# forks


@mostly_slow()
@pytest.mark.parametrize(
    "use",
    [
        lambda saver, manager: saver.save("b"),
        lambda saver, manager: saver.load(),
        lambda saver, manager: saver.load_by_config({"path": saver.output_dir}),
        lambda saver, manager: saver.settle(),
        lambda saver, manager: saver.close(),
        lambda saver, manager: saver.is_saving,
        lambda saver, manager: saver.register_for_checkpointing("n", 1),
        lambda saver, manager: manager.step(),
        lambda saver, manager: manager.save(),
        lambda saver, manager: manager.restore(),
        lambda saver, manager: manager.load_model_bank([]),
        lambda saver, manager: manager.pin(1),
        lambda saver, manager: manager.close(),
        lambda saver, manager: manager.__enter__(),
        lambda saver, manager: manager.__exit__(None, None, None),
    ],
    ids=lambda use: inspect.getsource(use).partition(": ")[2].strip().rstrip(","),
)
def test_a_saver_or_manager_used_in_a_forked_child_is_refused(tmp_path, use, gate):
    _, saver = build(tmp_path)
    manager = CheckpointManager(saver, 1)
    saver.save("a")
    writing = gate(LocalStorage, "create")
    handle = saver.save_async("under_way")  # whose thread is not in the child
    writing.wait()
    said = in_fork(lambda: use(saver, manager))
    writing.open()
    assert said.startswith("ForkedError: this ")
    assert f"made at {__file__}:" in said
    assert REMEDY in said
    assert handle.wait().ckpt_id == "under_way"
    assert saver.save("c").epoch == 1
    assert issubclass(ForkedError, RuntimeError)


def test_a_child_that_waits_for_a_save_of_its_parent_is_refused_and_its_end_leaves_that_alone(tmp_path, gate):
    _, saver = build(tmp_path)
    writing = gate(LocalStorage, "create")
    handle = saver.save_async("a")
    writing.wait()
    for wait in (handle.wait, handle.done, handle.committed.result, handle.committed.exception):
        assert in_fork(wait).startswith("ForkedError: this ")
    child = multiprocessing.get_context("fork").Process(target=len, args=((),))
    child.start()
    child.join()
    writing.open()
    assert (child.exitcode, handle.wait().ckpt_id) == (0, "a")


def test_a_child_reads_and_saves_for_itself_while_its_parent_saves(tmp_path, gate):
    _, saver = build(tmp_path)
    saver.save("a")
    reader = CheckpointReader(str(tmp_path / "a"))
    writing = gate(LocalStorage, "create")
    handle = saver.save_async("b")
    writing.wait()

    def read():
        torch.set_num_threads(1)
        own, own_saver = build(tmp_path / "of_the_child")
        writing.open()
        own_saver.save("mine")
        own_saver.load(str(tmp_path), "a")
        own_reader = CheckpointReader(str(tmp_path / "a"))
        return [len(own), *(sum(batch.num_rows for batch in read.table("t")) for read in (reader, own_reader))]

    assert in_fork(read) == "[100, 100, 100]"
    writing.open()
    handle.wait()
    assert checkpoints(tmp_path / "of_the_child") == ["mine"]


def test_workers_that_fork_while_a_saver_is_there_and_leave_it_alone_are_fine(tmp_path):
    run = Run(tmp_path, interval=2)
    data = torch.utils.data.TensorDataset(torch.arange(12))
    loader = torch.utils.data.DataLoader(data, 2, num_workers=2, multiprocessing_context="fork")
    for _ in loader:
        run.train(1)
    assert run.manager.global_step == 6
    assert checkpoints(tmp_path) == ["ckpt_6"]


# copies


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_saver_or_manager_cannot_be_copied(tmp_path, how):
    _, saver = build(tmp_path)
    manager = CheckpointManager(saver, 1)
    for one in (saver, manager):
        with pytest.raises(TypeError, match=f"a {type(one).__name__} cannot be copied or pickled.*: make a new one"):
            how(one)


# other savers


def test_a_saver_that_another_of_its_process_has_taken_over_is_told_where_that_was_made(tmp_path):
    _, first = build(tmp_path)
    first.save("a")
    second = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    line = inspect.currentframe().f_lineno - 1
    second.save("b")
    place = f"{__file__}:{line}"
    with pytest.raises(WriterFencedError, match=f"by another Saver of this process, made at {place}") as caught:
        first.save("c")
    assert place in caught.value.by
    assert "use one Saver per output dir" in str(caught.value)
