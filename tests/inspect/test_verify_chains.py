"""Verify on deltas and forms: each link by itself, and what only the chain can show."""

import shutil
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import Run, flip_bit
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta
from support.sweeps import SWEEP_STRIDE, mostly_slow

from recckpt import Deltas
from recckpt.format.manifest import decode
from recckpt.inspect import verify as verifying
from recckpt.inspect.verify import find_checkpoints, verify, verify_found
from recckpt.output_dir.checkpoint_dir import intent_of
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.verifier import count_rows
from recckpt.storage import open_storage


@pytest.fixture
def base(tmp_path):
    """A full checkpoint with the ids 0 to 5."""
    save_tables(tmp_path / "runs", [filled("t", range(6))], concurrency=1)
    return counting(tmp_path / "runs")[0]


@pytest.fixture
def delta(base):
    return write_delta(base, "ckpt_2", 5, [({1: (7, 7), 9: (9, 9)}, [2, 4]), ({4: (8, 8)}, [3])])


FORM = {0: (0, 0), 1: (7, 7), 4: (8, 8), 5: (5, 5), 9: (9, 9)}


def found_in(path):
    return [(problem.directory, problem.file, problem.where, problem.found) for problem in verify(str(path))]


def test_a_chain_and_forms_that_are_whole_have_no_problems(tmp_path, delta):
    form = write_compacted(delta, FORM)
    top = write_delta(delta, "ckpt_3", 5, [({0: (3, 3)}, [])])
    write_delta(top, "ckpt_4", 1, [({0: (3, 3)}, [])], replaced=True)
    for path in (tmp_path / "runs", delta.directory, form.directory, top.directory):
        assert verify(str(path)) == []
        assert verify(str(path), deep=False) == []


def test_a_delta_is_checked_with_all_that_it_stands_on(base, delta):
    flip_bit(next(base.directory.glob("sparse/*.arrow")), 900)
    (one, other) = found_in(delta.directory)
    assert one[:2] == ("ckpt_2", "ckpt_2/manifest.json")
    assert one[2:] == ("its chain", "damage in ckpt_1/")
    assert other[0] == "ckpt_1"
    assert other[1].startswith("ckpt_1/sparse/")


def test_all_that_stand_on_a_damaged_link_say_so_and_others_do_not(tmp_path, base, delta):
    write_delta(delta, "ckpt_3", 5, [({0: (3, 3)}, [])])
    write_delta(base, "ckpt_4", 7, [({99: (3, 3)}, [])], seq=9)
    flip_bit(next(delta.directory.glob("sparse/*.arrow")), 900)
    assert {directory for directory, *_ in found_in(tmp_path / "runs")} == {"ckpt_2", "ckpt_3"}


def test_damage_to_what_only_a_link_itself_needs_is_its_own(tmp_path):
    Run(tmp_path, interval=3, max_keep=None, deltas=Deltas(max_dirty=1.0, max_chain_bytes=1000.0)).train(9)
    flip_bit(tmp_path / "ckpt_6" / "model.pt")
    assert [(problem.directory, problem.file) for problem in verify(str(tmp_path))] == [("ckpt_6", "ckpt_6/model.pt")]
    (tmp_path / "ckpt_6" / "model.pt").unlink()
    found = {(problem.directory, problem.file) for problem in verify(str(tmp_path))}
    assert found == {("ckpt_6", "ckpt_6/model.pt"), ("ckpt_9", "ckpt_6/model.pt")}


def test_each_link_is_read_once_for_all_that_stand_on_it_but_for_its_ids(tmp_path, delta, monkeypatch):
    for number in range(3, 8):
        delta = write_delta(delta, f"ckpt_{number}", 5, [({0: (number, 3)}, [])])
    reads, unchecked = Counter(), PartReader.unchecked

    def seen(self, number, span=None):
        reads[self.path, "embedding" in self._read_names] += 1
        return unchecked(self, number, span)

    monkeypatch.setattr(PartReader, "unchecked", seen)
    assert verify(str(tmp_path / "runs")) == []
    ids_alone = {path: count for (path, has_slots), count in reads.items() if not has_slots and "deletes" not in path}
    assert set(ids_alone.values()) == {1}
    before = Counter(reads)
    reads.clear()
    assert verify(str(delta.directory)) == []
    assert reads == before


def test_a_link_that_is_removed_before_its_rows_are_counted_is_no_problem(tmp_path, base, delta, monkeypatch):
    def removing(*args):
        shutil.rmtree(delta.directory)
        return count_rows(*args)

    monkeypatch.setattr(verifying, "count_rows", removing)
    reports = verify_found(find_checkpoints(str(tmp_path / "runs")))
    assert [(report.directory, report.problems) for report in reports] == [(base.directory.name, ())]


def test_deletes_of_ids_that_are_not_there_are_counted(tmp_path, base, delta):
    write_delta(base, "ckpt_3", 5, [({}, [77, 0]), ({}, [77, 78, 0])], seq=9)
    reports = verify_found(find_checkpoints(str(tmp_path / "runs")))
    assert not any(report.problems for report in reports)
    assert {report.directory: report.absent_deletes for report in reports} == {"ckpt_1": 0, "ckpt_2": 0, "ckpt_3": 2}


@pytest.mark.parametrize(
    ("rows", "shards", "problem"),
    [
        (7, [({9: (9, 9)}, []), ({9: (1, 1)}, [])], ("ckpt_2/sparse", "table 't', between shards", "id 9 twice")),
        (7, [({9: (9, 9), 1: (1, 1)}, [1])], ("ckpt_2/sparse", "table 't', in one shard", "id 1 twice")),
        (9, [({9: (9, 9)}, [])], ("ckpt_2/manifest.json", "table 't'", "9 rows")),
        (6, [({}, [5])], ("ckpt_2/manifest.json", "table 't'", "6 rows")),
    ],
)
def test_what_contradicts_itself_is_a_problem_of_the_link(tmp_path, base, rows, shards, problem):
    write_delta(base, "ckpt_2", rows, shards)
    assert found_in(tmp_path / "runs") == [("ckpt_2", *problem)]


@pytest.mark.parametrize("count", ["upserts", "deletes"])
def test_counts_that_the_catalogs_do_not_add_up_to_are_a_problem(tmp_path, delta, count):
    Forge(delta.directory).edit_manifest(lambda values: values["tables"][0]["delta"].update({count: 4}))
    assert found_in(tmp_path / "runs") == [("ckpt_2", "ckpt_2/manifest.json", "table 't'", f"4 {count}")]


def test_a_link_that_is_missing_is_a_problem_of_what_stood_on_it(tmp_path, base, delta):
    top = write_delta(delta, "ckpt_3", 5, [({0: (3, 3)}, [])])
    shutil.rmtree(delta.directory)
    for path in (tmp_path / "runs", top.directory):
        (problem,) = verify(str(path), deep=False)
        assert problem.directory == "ckpt_3"
        assert "ckpt_2/" in f"{problem.found}, {problem.expected}"
    assert len(verify(str(tmp_path / "runs"))) == 1
    assert verify(str(base.directory)) == []


@pytest.mark.parametrize("stride", [41, pytest.param(1 + SWEEP_STRIDE // 3, marks=pytest.mark.slow)])
def test_flipped_bits_in_the_deletes_are_found(tmp_path, delta, stride):
    (path, *_) = sorted(delta.directory.glob("sparse/*deletes*"))
    data = path.read_bytes()
    for at in range(0, len(data), stride):
        path.write_bytes(data[:at] + bytes([data[at] ^ 32]) + data[at + 1 :])
        assert f"ckpt_2/sparse/{path.name}" in {problem.file for problem in verify(str(tmp_path / "runs"))}, at


def test_deletes_out_of_bucket_order_and_twice_are_found(tmp_path, delta):
    forge = Forge(delta.directory)
    (name, *_) = [name for name in forge.parts if "deletes" in name]
    forge.edit_part(lambda batch: batch.take([1, 0]), name, rows=False)
    assert "rows out of bucket order" in {found for *_, found in found_in(tmp_path / "runs")}
    forge.edit_part(lambda batch: batch.take([0, 0]), name, rows=False)
    assert any("twice" in found for *_, found in found_in(tmp_path / "runs"))


def test_the_intent_of_what_was_compacted_says_that_it_was_offered(tmp_path, delta):
    compacted = write_compacted(delta, FORM)
    path, record = compacted.directory / "INTENT", decode((compacted.directory / "manifest.json").read_bytes(), "")
    path.write_bytes(intent_of(record))
    assert b'"offer": true' in path.read_bytes()
    assert verify(str(tmp_path / "runs")) == []
    path.write_bytes(intent_of(replace(record, save_id="ab" * 16)))
    ((_, file, _, found),) = found_in(tmp_path / "runs")
    assert (file, found) == (f"{compacted.directory.name}/INTENT", f"that of save {'ab' * 16}")
    path.write_bytes(b"{")
    assert found_in(compacted.directory)[0][1].endswith("/INTENT")


@mostly_slow()
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_executor_finds_what_threads_do(tmp_path, delta, kind):
    write_delta(delta, "ckpt_3", 9, [({9: (9, 9)}, [])])
    parts = sorted((tmp_path / "runs").rglob("*.arrow"))
    spawned = partial(ProcessPoolExecutor, 2, get_context("spawn"))
    with (ThreadPoolExecutor if kind == "threads" else spawned)() as executor:
        for path in (None, parts[1], parts[-1]):
            if path:
                flip_bit(path)
            expected = verify(str(tmp_path / "runs"))
            assert expected
            assert verify(str(tmp_path / "runs"), executor=executor) == expected


def test_a_part_that_a_worker_cannot_read_is_a_problem(tmp_path, delta):
    parts = sorted((tmp_path / "runs").rglob("*.arrow"))
    found = find_checkpoints(str(tmp_path / "runs"))

    class Late(ThreadPoolExecutor):
        def submit(self, *args):
            parts[0].unlink(missing_ok=True)
            return super().submit(*args)

    with Late() as executor:
        problems = [problem for report in verify_found(found, executor=executor) for problem in report.problems]
    assert {problem.directory for problem in problems} == {"ckpt_1", "ckpt_2"}
    assert f"ckpt_1/sparse/{parts[0].name}" in {problem.file for problem in problems}


IDS = st.integers(0, 9)
SHARDS = st.lists(st.tuples(st.sets(IDS), st.sets(IDS)), min_size=1, max_size=2)
LINKS = st.lists(st.tuples(SHARDS, st.integers(0, 5), st.integers(-1, 1), st.integers(0, 9)), max_size=6)


@settings(deadline=None, max_examples=15)
@given(LINKS)
def test_rows_and_absent_deletes_are_those_of_a_dict_on_trees_of_links(tmp_path_factory, links):
    root = tmp_path_factory.mktemp("chains") / "runs"
    storage = open_storage(str(root))
    storage.prepare()
    save_tables(storage, [filled("t", range(6))], concurrency=1)
    known = [(counting(Path(root))[0], set(range(6)))]
    expected, wrong = {"ckpt_1": 0}, set()
    for number, (shards, chance, more, on) in enumerate(links, 2):
        below, ids = known[on % len(known)]
        taken, written, deleted, replaced = set(), [], set(), chance == 0
        for upserts, deletes in shards:
            upserts, deletes = upserts - taken, set() if replaced else deletes - upserts
            written.append((dict.fromkeys(upserts, (1, number)), sorted(deletes)))
            taken, deleted = taken | upserts, deleted | deletes
        now = taken if replaced else ids - deleted | taken
        rows = len(now) if replaced else max(len(now) + more, len(taken))
        name = f"ckpt_{number}"
        delta = write_delta(below, name, rows, written, replaced=replaced, seq=number)
        known.append((delta, now))
        expected[name] = len(deleted - taken - ids)
        wrong |= {name} if rows != len(now) else set()
    reports = verify_found(find_checkpoints(str(root)))
    said = {r.directory for r in reports if any(p.where == "table 't'" for p in r.problems)}
    assert said == wrong
    if not wrong:
        assert {report.directory: report.absent_deletes for report in reports} == expected
