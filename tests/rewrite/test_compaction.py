"""A chain is compacted: what comes out holds the same rows, on any executor, beside a trainer or without one."""

import multiprocessing
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import paths
from support.builders import Run, flip_bit, state_of
from support.delta_runs import rows_of, run_with_chain
from support.sweeps import mostly_slow

import recckpt
import recckpt.inspect.verify
from recckpt import Deltas
from recckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.inspect.verify import verify
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.index_file import read_timeline
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints, locate, newest
from recckpt.output_dir.offers import adopt_offers
from recckpt.parallel.threads import StoppedError
from recckpt.rewrite import compaction as compacting
from recckpt.rewrite import whole
from recckpt.rewrite.compaction import make_offer, write_to
from recckpt.rewrite.whole import ChainName, Means, opened, tasks_of, write_task
from recckpt.sparse.files import merged_rows
from recckpt.storage import open_storage
from recckpt.storage.transfers import VISIBLE


@pytest.fixture
def run(tmp_path):
    return run_with_chain(tmp_path / "runs")


@pytest.fixture
def owner(run):
    """Who owns the output dir while offers are made."""
    fence = Fence(run)
    fence.hold()
    return fence


@pytest.fixture
def many_parts(monkeypatch):
    """Have a part for every few rows."""
    monkeypatch.setattr(whole, "LEAST_PART_BYTES", 100)


def adopted(run, owner) -> list[str]:
    owner.look_again()
    return [done.directory for done in adopt_offers(run, owner, VISIBLE)]


def check_adopted(run, owner, directory) -> None:
    """Check that it takes the place of ``ckpt_3`` and of all that this stands on."""
    expected = rows_of(run, "ckpt_3")
    assert adopted(run, owner) == [directory]
    assert recckpt.inspect.verify.verify(f"{run.url}/{directory}") == []
    for link in ("ckpt_1", "ckpt_2", "ckpt_3"):
        shutil.rmtree(f"{run.url}/{link}")
    assert rows_of(run, "ckpt_3") == expected


class InTurn(Executor):
    """Does all work at once, in the caller's thread, after a trip through pickle; loses some of its workers."""

    def __init__(self, losses: int = 0) -> None:
        self.losses = losses

    def submit(self, work, /, *args, **kwargs):
        future: Future = Future()
        future.set_running_or_notify_cancel()
        try:
            work, args = pickle.loads(pickle.dumps((work, args)))
            result = pickle.loads(pickle.dumps(work(*args)))
            if self.losses:  # when it had done its work, and nobody heard of it
                self.losses -= 1
                raise RuntimeError("a worker was lost")
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return future


def test_the_newest_is_compacted_where_none_is_named(run, owner):
    done = recckpt.rewrite.compact(run.url)
    assert (done.ckpt_id, done.n_links, done.n_rows, done.reason) == ("ckpt_3", 3, 150, "")
    assert layout.is_offer_dir(done.directory)
    assert done.n_bytes == sum(run.size(f"{done.directory}/{n}") for n in run.list_files(done.directory) if "/" in n)
    check_adopted(run, owner, done.directory)


@mostly_slow()
@pytest.mark.parametrize("executor", [lambda: ThreadPoolExecutor(3), InTurn], ids=["threads", "in turn"])
def test_any_executor_does_the_work_in_many_parts(run, owner, many_parts, executor):
    with executor() as workers:
        done = recckpt.rewrite.compact(run.url, "ckpt_3", executor=workers)
    assert len([name for name in run.list_files(done.directory) if layout.is_part(name)]) > 5
    check_adopted(run, owner, done.directory)


@pytest.mark.slow
def test_processes_do_the_work(run, owner):
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:  # a fork would inherit locks
        done = recckpt.rewrite.compact(run.url, executor=workers)
    check_adopted(run, owner, done.directory)


@pytest.mark.slow
def test_it_imports_no_libraries_that_take_longer_than_a_small_compaction(run):
    code = f"import recckpt, sys; print(recckpt.rewrite.compact({run.url!r}).n_rows)"
    code += "; assert 'pyarrow' in sys.modules and not {'pandas', 'torch', 'numba'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=paths.ROOT, check=False)
    assert (done.stdout, done.stderr) == (f"{len(rows_of(run, 'ckpt_3'))}\n", "")


def test_with_little_memory_the_same_comes_out(run, owner, monkeypatch):
    monkeypatch.setattr(whole, "LEAST_BUDGET_BYTES", 2000)
    done = recckpt.rewrite.compact(run.url, budget_bytes=1, threads=1)
    check_adopted(run, owner, done.directory)


def test_the_work_of_a_lost_worker_is_done_again_under_another_part_number(run, owner, many_parts):
    done = recckpt.rewrite.compact(run.url, executor=InTurn(losses=2))
    names = [name for name in run.list_files(done.directory) if layout.is_part(name)]
    numbers = [int(name.split(".")[-2]) % whole.TRIES for name in names]
    assert sorted(numbers)[-3:] == [0, 1, 1]  # what the lost ones wrote is gone
    check_adopted(run, owner, done.directory)


def test_a_task_that_is_done_twice_at_once_writes_two_files_of_the_same_rows(run):
    checkpoint = locate(run, "ckpt_3")
    name = ChainName(run.url, tuple((link.directory, link.manifest.xxh3) for link in checkpoint.links))
    [task, _] = tasks_of(name, opened(name), run.url, "elsewhere", 1 << 20)
    one, two = write_task(task), write_task(task)
    assert one.file != two.file
    assert two.but(file=one.file) == one


def test_workers_that_are_lost_again_and_again_end_it_and_nothing_is_left(run):
    with pytest.raises(RuntimeError, match="a worker was lost"):
        recckpt.rewrite.compact(run.url, executor=InTurn(losses=99))
    assert attempt_dirs(run) == ["ckpt_1", "ckpt_2", "ckpt_3"]


def test_what_is_full_needs_no_compaction(run, owner):
    done = recckpt.rewrite.compact(run.url, "ckpt_1")
    assert (done.directory, done.n_bytes, done.reason) == (None, 0, "it is full already")
    check_adopted(run, owner, recckpt.rewrite.compact(run.url).directory)
    assert "compacted from the delta" in recckpt.rewrite.compact(run.url).reason


def test_an_unfinished_offer_does_not_keep_another_from_being_made(run):
    first = recckpt.rewrite.compact(run.url).directory
    again = recckpt.rewrite.compact(run.url)
    assert again.directory is None
    assert first in again.reason, "a delta that has an offer gets no second one"
    assert attempt_dirs(run) == ["ckpt_1", "ckpt_2", "ckpt_3", first]
    run.remove(f"{first}/{layout.OFFER_JSON}")
    assert recckpt.rewrite.compact(run.url).directory


def test_a_checkpoint_may_be_named_by_its_own_directory_and_what_is_not_there_is_refused(run, tmp_path):
    done = recckpt.rewrite.compact(f"{run.url}/ckpt_2")
    assert (done.ckpt_id, done.n_links, done.url) == ("ckpt_2", 2, run.url)
    with pytest.raises(CheckpointNotFoundError, match="ckpt_9"):
        recckpt.rewrite.compact(run.url, "ckpt_9")
    for name in ("budget_bytes", "threads"):
        with pytest.raises(ValueError, match=name):
            recckpt.rewrite.compact(run.url, **{name: 0})
    shutil.copytree(f"{run.url}/ckpt_3", tmp_path / "alone" / "ckpt_3")
    with pytest.raises(CorruptCheckpointError, match="ckpt_2"):
        recckpt.rewrite.compact(tmp_path / "alone", out=tmp_path / "other")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data.replace(b"\x00\x00\x80\x3f", b"\x00\x00\x80\x3e")]
)
def test_nothing_is_offered_of_a_damaged_chain(run, damage):
    part = Path(run.url, "ckpt_2", "sparse", "00000-of-00002.g0.00.arrow")
    checkpoint = locate(run, "ckpt_3")
    part.write_bytes(damage(part.read_bytes()))
    not_offered(run, r"ckpt_2/sparse/00000-of-00002.g0.00.arrow", checkpoint)


def not_offered(run, match, checkpoint=None, error=CorruptCheckpointError, is_stopped=lambda: False):
    """Check that no offer is made of the newest checkpoint, and nothing is left of one."""
    before = attempt_dirs(run)
    with pytest.raises(error, match=match):
        make_offer(run, checkpoint or locate(run, before[-1]), Means(None, 1, 1 << 20, is_stopped))
    assert attempt_dirs(run) == before


def test_rows_that_are_not_as_many_as_the_manifest_says_are_not_offered(tmp_path):
    from support.spec_reader import counting
    from support.spec_writer import write_delta

    run = run_with_chain(tmp_path / "runs")
    newest = counting(Path(run.url))[-1]
    write_delta(newest, "ckpt_4", 152, [({1000: [1, 2]}, []), ({}, [])])
    not_offered(run, "152 rows, expected 151")


def test_what_cannot_be_read_back_is_not_offered(run, monkeypatch):
    real = type(run).create

    def flipped(self, name):
        sink = real(self, name)
        if layout.is_part(name):
            write = sink.write

            def write_with_a_third_backwards(data):
                third, found = memoryview(data).nbytes // 3, bytearray(memoryview(data).cast("B"))
                found[third:-third] = found[third:-third][::-1]
                return write(found)

            sink.write = write_with_a_third_backwards
        return sink

    monkeypatch.setattr(type(run), "create", flipped)
    not_offered(run, r"ckpt_3\.")


def values_of_other_rows(columns):
    return [columns[0], *(np.roll(column, -1) for column in columns[1:])]


def a_row_less(columns):
    return [column[1:] for column in columns]


@pytest.mark.parametrize("fault", [values_of_other_rows, a_row_less])
def test_rows_that_are_not_those_of_the_chain_are_not_offered(run, monkeypatch, fault):
    real = merged_rows.RowBatch.of
    monkeypatch.setattr(merged_rows.RowBatch, "of", lambda table, slots, columns: real(table, slots, fault(columns)))
    not_offered(run, "rows that differ from the source")


def test_a_table_is_cut_into_one_range_a_part(run, many_parts):
    checkpoint = locate(run, "ckpt_3")
    name = ChainName(run.url, tuple((link.directory, link.manifest.xxh3) for link in checkpoint.links))
    parts = tasks_of(name, opened(name), run.url, "elsewhere", 1 << 20)
    assert len(parts) > 5
    assert {len(part.plan.ranges) for part in parts} == {1}


def test_another_manifest_in_the_place_of_a_link_is_noticed(run, tmp_path):
    checkpoint = locate(run, "ckpt_3")
    swapped = replace(checkpoint, manifest=replace(checkpoint.manifest, xxh3=1))
    with pytest.raises(CorruptCheckpointError, match="as when the chain was found"):
        write_to(run, swapped, str(tmp_path / "out"), Means(None, 1, 1 << 20))


def test_a_compaction_may_be_stopped_and_leaves_nothing(run):
    not_offered(run, "^$", error=StoppedError, is_stopped=lambda: True)


def test_out_makes_a_committed_checkpoint_elsewhere_of_what_is_full_as_well(run, tmp_path, many_parts):
    out = tmp_path / "other"
    done = recckpt.rewrite.compact(run.url, out=out)
    assert (done.url, done.directory, done.n_rows) == (str(out), "ckpt_3", 150)
    there = open_storage(str(out))
    assert [c.manifest.kind for c in list_checkpoints(there).committed] == ["full"]
    assert there.read(layout.INDEX_FILE, 99) == b"ckpt_3\n"
    assert rows_of(there, "ckpt_3") == rows_of(run, "ckpt_3")
    assert attempt_dirs(run) == ["ckpt_1", "ckpt_2", "ckpt_3"]
    assert recckpt.inspect.verify.verify(str(out)) == []
    with pytest.raises(CheckpointExistsError):
        recckpt.rewrite.compact(run.url, out=out)
    recckpt.rewrite.compact(run.url, "ckpt_1", out=out)
    assert rows_of(there, "ckpt_1") == rows_of(run, "ckpt_1")


def test_an_offer_whose_bytes_have_changed_is_adopted_and_replaces_nothing(run, caplog, monkeypatch):
    before = rows_of(run, "ckpt_3")

    def flipped(storage, fence, visible):
        flip_bit(next(Path(run.url).glob("ckpt_3.*/sparse/*.arrow")))
        return adopt_offers(storage, fence, visible)

    monkeypatch.setattr(compacting, "adopt_offers", flipped)
    done = recckpt.rewrite.compact(run.url, adopt=True)
    assert (done.is_committed, done.removed) == (True, ())
    assert attempt_dirs(run) == ["ckpt_1", "ckpt_2", "ckpt_3"]
    assert rows_of(run, "ckpt_3") == before
    assert "is damaged and removed" in caplog.text


def test_a_delta_that_could_not_be_removed_stands_on_what_was_compacted(run, monkeypatch):
    real = type(run).remove

    def remove(self, name):
        if name == f"ckpt_3/{layout.MANIFEST}":
            raise PermissionError(name)
        real(self, name)

    monkeypatch.setattr(type(run), "remove", remove)
    assert recckpt.rewrite.compact(run.url, "ckpt_3", adopt=True).removed == ()
    assert recckpt.rewrite.compact(run.url, "ckpt_2", adopt=True).removed == ("ckpt_2",)
    monkeypatch.undo()
    assert "ckpt_3" in attempt_dirs(run)
    assert list_checkpoints(run).damaged == {}


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path):
    return str(tmp_path / "runs") if request.param == "local" else request.getfixturevalue(f"{request.param}_url")


DELTAS = Deltas(max_chain_bytes=1e9, max_dirty=1.0)  # a small model changes nearly all of its rows


def restored(url) -> dict:
    run = Run(url, seed=9)
    assert run.manager.restore()
    return state_of(run)


def directories(url) -> set[str]:
    return {c.directory for c in list_checkpoints(open_storage(url)).committed}


@mostly_slow()
def test_a_delta_is_restored_from_what_it_was_compacted_into(url):
    run = Run(url, deltas=DELTAS, max_keep=None).train(30)
    saved, storage = state_of(run), open_storage(url)
    done = recckpt.rewrite.compact(url)
    assert (done.ckpt_id, done.n_links) == ("ckpt_30", 3)
    assert restored(url) == saved
    done = recckpt.rewrite.compact(url, adopt=True)
    assert newest(storage).directory == done.directory
    assert restored(url) == saved
    assert verify(url) == []


@mostly_slow()
def test_the_save_that_adopts_an_offer_tells_how_long_a_chain_it_leaves(url):
    run = Run(url, deltas=DELTAS, max_keep=None).train(30)
    recckpt.rewrite.compact(url)
    run.train(10)
    assert [line["n_links"] for line in read_timeline(open_storage(url))] == [1, 2, 3, 2]
    assert len(newest(open_storage(url)).links) == 2


@mostly_slow()
def test_a_trainer_adopts_an_offer_at_its_next_save_and_drops_what_that_replaces_at_the_one_after(url):
    run = Run(url, deltas=DELTAS, max_keep=1).train(30)
    done = recckpt.rewrite.compact(url)
    run.train(10)
    assert directories(url) == {"ckpt_10", "ckpt_20", "ckpt_30", done.directory, "ckpt_40"}
    assert [link.directory for link in newest(open_storage(url)).links] == ["ckpt_40", done.directory]
    assert restored(url) == state_of(run)
    run.train(10)
    assert directories(url) == {done.directory, "ckpt_40", "ckpt_50"}
    assert restored(url) == state_of(run)
    assert verify(url) == []
