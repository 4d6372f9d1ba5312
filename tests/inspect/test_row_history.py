"""Rows over the checkpoints of a run: chains, forms, deletes, forgotten ids, damage; held against single reads."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.forge import filled, save_tables
from support.forgetting import ForgettingRun, ids_at
from support.pages import HOSTILE, harmless_text
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta

import recckpt
from recckpt import CheckpointReader
from recckpt.errors import CheckpointNotFoundError
from recckpt.sparse import HashTable
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage

ALL = range(6)


@pytest.fixture
def chain(tmp_path):
    """In ckpt_2 the row of 1 has changed, that of 9 is new and 2 is deleted; in ckpt_3 2 is back, and 9 deleted."""
    save_tables(open_storage(str(tmp_path)), [filled("t", ALL)], ckpt_id="ckpt_1", step=1)
    [base] = counting(tmp_path)
    second = write_delta(base, "ckpt_2", 6, [({1: (7, 1), 9: (9, 9)}, [2])], step=2)
    return [base, second, write_delta(second, "ckpt_3", 6, [({2: (3, 4)}, [9])], step=3)]


def changes(path, *ids, table="t"):
    history = recckpt.inspect.history(path, table, ids)
    return {row.id: " ".join(state.change for state in row.states) for row in history.rows}


def test_each_checkpoint_says_what_became_of_a_row(tmp_path, chain):
    history = recckpt.inspect.history(tmp_path, "t", [1, 2, 9, 0, 77])
    assert {row.id: [state.change for state in row.states] for row in history.rows} == {
        1: ["there", "changed", "same"],
        2: ["there", "gone", "back"],
        9: ["absent", "new", "gone"],
        0: ["there", "same", "same"],
        77: ["absent", "absent", "absent"],
    }
    before, now, later = history.row(1).states
    assert (now.norm, now.moved, now.since, now.since_step) == (pytest.approx(50**0.5), 6.0, "ckpt_2", 2)
    assert (later.norm, later.moved, later.since, later.since_step) == (now.norm, None, "ckpt_2", 2)
    assert (before.since_step, history.row(2).states[1].norm, history.row(2).states[2].norm) == (1, None, 5.0)
    assert [row.is_known for row in history.rows] == [True, True, True, True, False]
    assert history.damage == {}


def test_a_form_stands_for_its_delta_and_only_values_tell_what_changed(tmp_path, chain):
    write_compacted(chain[1], {0: (0, 0), 1: (7, 1), 3: (3, 3), 4: (4, 4), 5: (5, 5), 9: (9, 9)})
    assert changes(tmp_path, 1, 2, 9, 0) == {
        1: "there changed same",
        2: "there gone back",
        9: "absent new gone",
        0: "there same same",
    }


def test_a_row_that_was_written_again_with_the_same_bits_has_not_changed_and_of_a_replaced_table_nothing_counts(
    tmp_path, chain
):
    fourth = write_delta(chain[2], "ckpt_4", 6, [({1: (7, 1)}, [])], step=4)
    assert changes(tmp_path, 1)[1] == "there changed same same"
    write_delta(fourth, "ckpt_5", 1, [({3: (3, 3)}, [])], replaced=True, step=5)
    assert changes(tmp_path, 3, 1) == {3: "there same same same same", 1: "there changed same same gone"}


def test_nothing_is_read_but_the_batches_that_may_have_the_ids(tmp_path, monkeypatch):
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled("t", range(4000))], ckpt_id="ckpt_1", batch_bytes=1000)
    [base] = counting(tmp_path)
    write_delta(base, "ckpt_2", 4000, [({1: (7, 7)}, [])])
    read, values = [], PartReader.read
    monkeypatch.setattr(PartReader, "read", lambda self, n, *how: read.append(n) or values(self, n, *how))
    assert changes(tmp_path, 17) == {17: "there same"}
    assert len(read) == 1
    assert changes(tmp_path, 1) == {1: "there changed"}
    assert len(read) == 3


def test_counts_and_moments_are_shown_and_other_slots_by_their_norm_on_an_object_store_too(memory_url):
    odd = filled("t", [3, 4], slots={"count": (), "sparse_m": (2, 2)})
    narrow = {dtype: HashTable(2, name=str(dtype), dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    odd.insert(torch.tensor([5]), torch.tensor([[float("nan"), 1.0]]))
    narrow[torch.bfloat16].insert(torch.tensor([1]), torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    narrow[torch.float16].insert(torch.tensor([1]), torch.tensor([[300.0, 400.0]], dtype=torch.float16))
    save_tables(open_storage(memory_url), [odd, *narrow.values()], step=1)
    whole, not_finite = recckpt.inspect.history(memory_url, "t", np.array([3, 5])).rows
    assert whole.states[0].slots == {"count": 3.0, "sparse_m": 6.0}
    assert np.isnan(not_finite.states[0].norm)
    assert not_finite.is_known
    norms = [recckpt.inspect.history(memory_url, str(dtype), [1]).rows[0].states[0].norm for dtype in narrow]
    assert norms == [5.0, 500.0]  # squared as the numbers that they are


def test_a_forgotten_id_is_nowhere_and_the_audit_says_why(tmp_path):
    ForgettingRun(tmp_path).save_chain()
    id_, other = ids_at(5, 6)
    assert changes(tmp_path, id_, table="user")[id_].startswith("there changed")
    recckpt.rewrite.forget(tmp_path, "user", [id_])
    gone, stays = recckpt.inspect.history(tmp_path, "user", [id_, other]).rows
    assert {state.change for state in gone.states} == {"absent"}
    assert (gone.was_forgotten, stays.was_forgotten) == (True, False)
    assert stays.states[1].change == "changed"
    assert "which was asked to be forgotten" in str(recckpt.inspect.history(tmp_path, "user", [id_]))


def test_damage_hides_only_the_checkpoints_that_need_the_file(tmp_path, chain):
    for part in chain[0].directory.glob("sparse/*.arrow"):
        part.write_bytes(part.read_bytes().replace(np.float32(1).tobytes(), np.float32(2).tobytes()))
    history = recckpt.inspect.history(tmp_path, "t", [1, 2, 0])
    assert [state.change for state in history.row(1).states] == ["damaged", "there", "same"]
    assert [state.change for state in history.row(0).states] == ["damaged"] * 3
    assert list(history.damage) == ["ckpt_1"]
    next(chain[1].directory.glob("sparse/*.arrow")).unlink()
    history = recckpt.inspect.history(tmp_path, "t", [2])
    assert [state.ckpt_id for state in history.row(2).states] == ["ckpt_1"]
    assert set(history.damage) == {"ckpt_1", "ckpt_2", "ckpt_3"}


def test_what_cannot_be_asked_is_refused(tmp_path, chain):
    with pytest.raises(KeyError, match="found no table 'tt' in any checkpoint; did you mean 't'"):
        recckpt.inspect.history(tmp_path, "tt", [1])
    with pytest.raises(TypeError, match="ids must be"):
        recckpt.inspect.history(tmp_path, "t", [1.5])
    with pytest.raises(CheckpointNotFoundError, match="is a checkpoint itself, expected an output dir"):
        recckpt.inspect.history(tmp_path / "ckpt_1", "t", [1])
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        recckpt.inspect.history(tmp_path / "nowhere", "t", [1])


@drawn(st.randoms(use_true_random=False), few=3, many=100)
def test_the_history_is_what_a_reader_of_each_checkpoint_gives(draw):
    with TemporaryDirectory() as name:
        path = Path(name)
        save_tables(open_storage(name), [filled("t", ALL)], ckpt_id="ckpt_0", step=0)
        [newest], there = counting(path), set(ALL)
        for step in range(1, draw.randint(2, 6)):
            gone = set(draw.sample(sorted(there), min(2, len(there))))
            rows = {id_: (step, id_) for id_ in draw.sample(range(9), 3) if id_ not in gone}
            there = there - gone | rows.keys()
            newest = write_delta(newest, f"ckpt_{step}", len(there), [(rows, sorted(gone))], step=step)
        for row in recckpt.inspect.history(path, "t", range(9)).rows:
            assert len(row.states) == newest.manifest["step"] + 1
            for state in row.states:
                with CheckpointReader(path / state.ckpt_id) as reader:
                    values, is_there = reader.lookup("t", [row.id])
                norm = float(np.linalg.norm(values[0].astype(np.float64))) if is_there[0] else None
                assert state.norm == (None if norm is None else pytest.approx(norm))


def test_a_notebook_shows_tables_of_rows_whose_names_do_nothing(tmp_path):
    storage, table = open_storage(str(tmp_path)), HOSTILE[0]
    for step in (1, 2):
        save_tables(storage, [filled(table, range(3)), filled(HOSTILE[2], [1])], ckpt_id=f"ckpt_{step}", step=step)
    page = (
        recckpt.inspect.history(tmp_path, table, [1, 99])._repr_html_()
        + recckpt.inspect.history(tmp_path, HOSTILE[2], [1])._repr_html_()
    )
    text = harmless_text(page)
    assert page.count("<table>") == 2
    assert all(each in text for each in ("ckpt_1", "since step", "in none of 2 checkpoints"))
