"""A table in another width: embeddings and moments are cut or extended, counters stay, and deltas hold all of it."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support import spec_reader
from support.drawn import drawn
from support.forge import Tables

from recckpt import Deltas, Saver
from recckpt.sparse import Constant, HashTable, Normal, SparseAdam, SparseRowWiseAdagrad

AVG = "sparse_adam_exp_avg"


def trained(dim=4, n_rows=50, **options):
    """Return a table whose rows, moments and counters are not what they began with, and its optimizer."""
    table = HashTable(dim, name="t", track=("count", "step"), **options)
    optimizer = SparseAdam([table], lr=0.1)
    table.step = 7
    for ids in (torch.arange(n_rows), torch.arange(0, n_rows, 3)):
        table(ids).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return table, optimizer


def rows_of(table):
    columns = {"embedding": table.embeddings(), **table.slots}
    return {name: dict(zip(table.ids().tolist(), column.tolist(), strict=True)) for name, column in columns.items()}


def fits(before, dim, new_dim, first):
    """Return what a row is to be in the new width: ``first`` are the values of the columns that are new."""
    return before[:new_dim] if new_dim <= dim else before + first[dim:]


@pytest.mark.parametrize("new_dim", [1, 3, 5, 9])
def test_embeddings_and_slots_of_their_shape_are_cut_or_extended_and_all_others_stay(new_dim):
    table, _ = trained()
    before, fresh = rows_of(table), HashTable(new_dim, name="t")
    fresh(torch.arange(50))
    table.resize(new_dim)
    after, first = rows_of(table), rows_of(fresh)["embedding"]
    assert table.embedding_shape == (new_dim,)
    for id_ in range(50):
        assert after["embedding"][id_] == fits(before["embedding"][id_], 4, new_dim, first[id_])
        assert after[AVG][id_] == fits(before[AVG][id_], 4, new_dim, [0.0] * new_dim)
    assert {name: after[name] for name in ("count", "last_step")} == {
        name: before[name] for name in ("count", "last_step")
    }


def holds(drawn_run):
    dim, changes = drawn_run
    table, model = HashTable(dim, name="t", initializer=Constant(0.5)), {}
    table.add_slot("late", (dim,), initial=3)
    table.add_slot("count", (), torch.int64)
    for what, number, ids in changes:
        if what == "resize":
            for row in model.values():
                row["embedding"] = fits(row["embedding"], dim, number, [0.5] * number)
                row["late"] = fits(row["late"], dim, number, [3.0] * number)
            table.resize(number)
            dim = number
        elif what == "erase":
            table.erase(torch.tensor(ids))
            model = {id_: row for id_, row in model.items() if id_ not in ids}
        else:
            values = torch.full((len(ids), dim), float(number))
            table.insert(torch.tensor(ids), values, {"count": torch.full((len(ids),), number)})
            for id_ in ids:
                row = model.setdefault(id_, {"late": [3.0] * dim})
                row |= {"embedding": [float(number)] * dim, "count": number}
    found = rows_of(table)
    assert {id_: {name: found[name][id_] for name in found} for id_ in table.ids().tolist()} == model


test_any_change_between_widths_is_that_of_a_dict = drawn(
    st.tuples(
        st.integers(1, 6),
        st.lists(
            st.tuples(
                st.sampled_from(["set", "resize", "erase"]),
                st.integers(1, 9),
                st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True),
            ),
            max_size=12,
        ),
    ),
    few=20,
    many=1000,
)(holds)


def test_training_goes_on_in_the_new_width_and_forgets_gradients_of_the_old_one():
    table, optimizer = trained()
    table(torch.arange(5)).sum().backward()
    late = table(torch.arange(5)).sum()
    table.resize(6)
    assert table.grad is None
    with pytest.raises(
        ValueError, match=r"table 't': found gradients of shape \(4,\), expected \(6,\): the table was resized"
    ):
        late.backward()
    before = table.lookup(torch.arange(50))[0]
    table(torch.arange(5)).sum().backward()
    optimizer.step()
    changed = (table.lookup(torch.arange(50))[0] != before).any(1)
    assert changed.tolist() == [True] * 5 + [False] * 45
    assert table(torch.tensor([[1000, 1001]])).shape == (1, 2, 6)


def test_a_moment_that_is_one_number_a_row_stays_as_it_is():
    table = HashTable(4, name="t")
    optimizer = SparseRowWiseAdagrad([table], lr=0.1)
    table(torch.arange(9)).sum().backward()
    optimizer.step()
    [before] = [column.clone() for column in table.slots.values()]
    table.resize(2)
    assert torch.equal(next(iter(table.slots.values())), before)


@pytest.mark.parametrize("initializer", [None, Normal(std=0.3), Constant(2.0)])
def test_new_rows_start_as_in_a_table_that_was_made_in_this_width(initializer):
    table, ids = HashTable(4, name="t", initializer=initializer), torch.arange(20)
    table(ids[:10])
    table.resize(7)
    made = HashTable(7, name="t", initializer=initializer)
    assert torch.equal(table(ids)[10:], made(ids)[10:])
    assert torch.equal(table(ids)[:10, 4:], made(ids)[:10, 4:])


@pytest.mark.parametrize("dim", [0, -1, 1.5, True, "4", None, 1 << 19, 9])
def test_what_is_no_width_and_an_initializer_that_fails_change_nothing(dim):
    def fail_on_nine(values):
        if values.shape[1] == 9:
            raise ValueError("no shape")
        torch.nn.init.ones_(values)

    table, _ = trained(initializer=fail_on_nine)
    before = rows_of(table)
    with pytest.raises(ValueError, match=r"no shape" if dim == 9 else r"shape|at most"):
        table.resize(dim)
    assert (table.embedding_shape, rows_of(table)) == ((4,), before)


def test_a_delta_after_it_holds_the_table_whole_and_a_resumed_run_has_the_same(tmp_path):
    table, optimizer = trained()
    deltas = Deltas(max_chain_bytes=1000, max_dirty=1.0)
    saver = Saver(Tables([table]), optimizer, str(tmp_path), None, deltas=deltas)
    saver.save("a")
    table.resize(4)
    assert saver.save("same width").tables[0].delta.upserts == 0
    table.resize(6)
    record = saver.save("b")
    assert (record.kind, record.tables[0].delta.replaced) == ("delta", True)
    assert len(spec_reader.read(tmp_path, "b", "t")) == 50
    again = HashTable(6, name="t", track=("count", "step"))
    Saver(Tables([again]), SparseAdam([again], lr=0.1), str(tmp_path)).load()
    assert rows_of(again) == rows_of(table)


@pytest.mark.parametrize("new_dim", [2, 6])
@pytest.mark.parametrize("merged", [False, True])
def test_a_load_that_resizes_keeps_the_counters_as_resize_does(tmp_path, new_dim, merged):
    table, optimizer = trained()
    Saver(Tables([table]), optimizer, str(tmp_path)).save("a")
    other = HashTable(new_dim, name="t", track=("count", "step"))
    loaded = Saver(Tables([other]), SparseAdam([other], lr=0.1), str(tmp_path / "other"))
    conf = {"on_mismatch": "resize", "hashtable_clear": not merged}
    loaded.load(str(tmp_path), load_conf=conf)
    table.resize(new_dim)
    assert rows_of(other) == rows_of(table)


def test_a_snapshot_from_before_is_of_its_width(tmp_path):
    table, _ = trained()
    before = rows_of(table)["embedding"]
    handle = Saver(Tables([table]), output_dir=str(tmp_path)).save_async("a")
    table.resize(2)
    handle.wait()
    found = spec_reader.read(tmp_path, "a", "t")
    assert {id_: np.frombuffer(row["embedding"], np.float32).tolist() for id_, row in found.items()} == before
