"""The first checkpoint in which a condition holds, by reading of deltas what they changed."""

import numpy as np
import pytest
import torch
from support.builders import flip_bit
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta, write_form
from torch import nn

import recckpt
from recckpt import Saver
from recckpt.errors import CheckpointNotFoundError
from recckpt.sparse import HashTable
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage

NAN = float("nan")


@pytest.fixture
def chain(tmp_path):
    """A full checkpoint of 0 to 5, deltas with a row of norm 50 and one that is not finite, which a third mends."""
    save_tables(open_storage(str(tmp_path)), [filled("t", range(6))], ckpt_id="ckpt_1", step=1)
    [base] = counting(tmp_path)
    second = write_delta(base, "ckpt_2", 6, [({1: (30, 40)}, [])], step=2)
    third = write_delta(second, "ckpt_3", 6, [({2: (NAN, 1), 3: (1, 1)}, [])], step=3)
    return [base, second, third, write_delta(third, "ckpt_4", 6, [({2: (2, 2)}, [])], step=4)]


def found_in(path, where):
    match = recckpt.first(path, where)
    return match.ckpt_id, match.before, dict(match.rows)


def test_the_first_checkpoint_with_a_row_that_meets_it_is_found(tmp_path, chain):
    assert found_in(tmp_path, "not finite") == ("ckpt_3", "ckpt_2", {"t": 1})
    assert found_in(tmp_path, "norm=50") == ("ckpt_2", "ckpt_1", {"t": 1})
    assert found_in(tmp_path, "norm<0.5") == ("ckpt_1", None, {"t": 1})
    assert found_in(tmp_path, "id=3 norm<2") == ("ckpt_3", "ckpt_2", {"t": 1})
    assert found_in(tmp_path, "norm>50") == (None, "ckpt_4", {})
    match = recckpt.first(tmp_path)
    assert (match.step, match.n_searched, match.examples[0].id) == (3, 3, 2)
    assert dict(match.examples[0].values) == {"not finite": 1}
    assert recckpt.first(tmp_path, "max>=40").examples[0].values == {"max": 40.0}


def test_of_a_delta_nothing_is_read_but_what_it_changed(tmp_path, chain, monkeypatch):
    read, checked = [], PartReader.checked
    monkeypatch.setattr(PartReader, "checked", lambda self, n, names: read.append(self.path) or checked(self, n, names))
    assert not recckpt.first(tmp_path, "norm>1e9").is_found
    assert [path.partition("/")[0] for path in read] == ["ckpt_1", "ckpt_2", "ckpt_3", "ckpt_4"]


def test_a_row_that_newer_links_have_replaced_does_not_count(tmp_path, chain):
    """Where the older links are no checkpoints of their own any more, which are looked at first."""
    save_tables(open_storage(str(tmp_path)), [filled("t", [1])], ckpt_id="ckpt_3", step=3, overwrite=True)
    assert found_in(tmp_path, "not finite") == (None, "ckpt_3", {})
    write_form(chain[1], {0: (0, 0), 1: (30, 40), **{id_: (id_, id_) for id_ in (2, 3, 4, 5)}})
    assert found_in(tmp_path, "norm=50") == ("ckpt_2", "ckpt_1", {"t": 1})


def test_dense_tensors_are_looked_at_too(tmp_path):
    model = nn.ModuleDict({"t": HashTable(2, name="t"), "top": nn.Linear(4, 2)})
    model["t"](torch.arange(3))
    saver = Saver(model, None, str(tmp_path), None)
    saver.save("ckpt_1", step=1)
    with torch.no_grad():
        model["top"].weight[1, 2] = NAN
        model["top"].bias[0] = 3e4
    saver.save("ckpt_2", step=2)
    match = recckpt.first(tmp_path)
    assert (match.ckpt_id, match.tensors, dict(match.rows)) == ("ckpt_2", ("top.weight",), {})
    assert recckpt.first(tmp_path, "max>1e4").tensors == ("top.bias",)
    assert recckpt.first(tmp_path, "tensor=*.bias norm>1e4").examples[0].values["norm"] == pytest.approx(3e4)
    assert not recckpt.first(tmp_path, "table=t max>1e4").is_found
    with pytest.raises(ValueError, match=r"found no tensor 'top.wight' in any checkpoint; did you mean 'top.weight'"):
        recckpt.first(tmp_path, "tensor=top.wight finite")


def test_slots_are_compared_by_their_values_and_vectors_by_their_norms(tmp_path):
    table = filled("t", [3, 4], slots={"count": (), "sparse_m": (2, 2)})
    save_tables(open_storage(str(tmp_path)), [table, filled("plain", [9])], step=1)
    assert found_in(tmp_path, "count>=4")[2] == {"t": 1}
    assert found_in(tmp_path, "slot=sparse_* norm>7")[2] == {"t": 1}
    assert found_in(tmp_path, "count>3 norm>6")[2] == {}
    assert found_in(tmp_path, "norm>4")[2] == {"t": 2, "plain": 1}
    with pytest.raises(ValueError, match="no slot 'cuont' of one number, expected one of norm, max, count; did you"):
        recckpt.first(tmp_path, "cuont>1")
    with pytest.raises(ValueError, match="no slot 'sparse_m' of one number"):
        recckpt.first(tmp_path, "sparse_m>1")
    with pytest.raises(ValueError, match="no table 'tt' in any"):
        recckpt.first(tmp_path, "table=tt norm>1")


def test_a_moment_that_is_not_finite_is_found_beside_a_finite_embedding(tmp_path):
    table = filled("t", [3], slots={"sparse_m": (2,)})
    table.insert(torch.tensor([4]), torch.ones(1, 2), {"sparse_m": torch.tensor([[1.0, float("inf")]])})
    save_tables(open_storage(str(tmp_path)), [table], step=1)
    assert recckpt.first(tmp_path).examples[0].id == 4
    assert not recckpt.first(tmp_path, "slot=embedding not finite").is_found
    assert recckpt.first(tmp_path, "slot=sparse_m max>1e30").is_found


def test_damage_is_passed_over_and_reported(tmp_path, chain):
    part = next(chain[1].directory.glob("sparse/*.arrow"))
    part.write_bytes(part.read_bytes().replace(np.float32(30).tobytes(), np.float32(31).tobytes()))
    match = recckpt.first(tmp_path, "norm>=50")
    assert (match.ckpt_id, list(match.damage)) == (None, ["ckpt_2", "ckpt_3", "ckpt_4"])
    flip_bit(chain[3].directory / "manifest.json")
    assert set(recckpt.first(tmp_path, "norm>=50").damage) == {"ckpt_2", "ckpt_3", "ckpt_4"}


def test_where_there_is_no_run_that_is_an_error(tmp_path, chain):
    for place in ("nowhere", "ckpt_1"):
        with pytest.raises(CheckpointNotFoundError):
            recckpt.first(tmp_path / place)


def test_a_bfloat16_embedding_is_compared_as_numbers(tmp_path):
    table = HashTable(2, name="t", dtype=torch.bfloat16)
    table.insert(torch.tensor([1]), torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16))
    save_tables(open_storage(str(tmp_path)), [table], step=1)
    assert found_in(tmp_path, "norm=5")[2] == {"t": 1}
    assert np.isclose(recckpt.history(tmp_path, "t", [1]).rows[0].states[0].norm, 5.0)


def test_float16_is_squared_in_more_digits(tmp_path):
    table = HashTable(2, name="t", dtype=torch.float16)
    table.insert(torch.tensor([1]), torch.tensor([[300.0, 400.0]], dtype=torch.float16))
    save_tables(open_storage(str(tmp_path)), [table], step=1)
    assert recckpt.first(tmp_path, "norm>400").examples[0].values["norm"] == 500.0
    assert recckpt.history(tmp_path, "t", [1]).rows[0].states[0].norm == 500.0


def test_a_run_on_an_object_store_is_searched_too(memory_url):
    storage = open_storage(memory_url)
    for step in (1, 2):
        save_tables(storage, [filled("t", range(10 * step))], ckpt_id=f"ckpt_{step}", step=step)
    assert found_in(memory_url, "id=15") == ("ckpt_2", "ckpt_1", {"t": 1})
    [row] = recckpt.history(memory_url, "t", [15]).rows
    assert [state.change for state in row.states] == ["absent", "new"]
