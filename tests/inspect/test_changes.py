"""What has changed since an older checkpoint, applied to what was there, gives what is there now."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import recckpt
from recckpt import CheckpointReader, Deltas, Saver
from recckpt.rewrite import compact, forget
from recckpt.sparse import HashTable

DELTAS = Deltas(full_every=4, max_chain_bytes=1e9, max_dirty=1.0)
EDITS = st.lists(st.tuples(st.sampled_from(["insert", "erase", "clear"]), st.integers(0, 8)), max_size=3)


class Model:
    """Two tables, and two dense tensors of which one is trained."""

    def __init__(self, root, deltas=DELTAS):
        self.tables = {name: HashTable(2, name=name) for name in ("item", "user")}
        for table in self.tables.values():
            table.insert(torch.arange(5), torch.rand(5, 2))
        self.module = nn.ModuleDict({**self.tables, "top": nn.Linear(2, 1)})
        self.saver, self.n_saves = Saver(self.module, output_dir=root, max_keep=None, deltas=deltas), 0

    def save(self):
        self.n_saves += 1
        with torch.no_grad():
            self.module["top"].bias += 1
        self.saver.save(f"c{self.n_saves}", step=self.n_saves)
        return CheckpointReader(f"{self.saver.output_dir}/c{self.n_saves}")

    def edit(self, kind, number):
        table = self.tables["item"]
        if kind == "insert":
            table.insert(torch.tensor([number, number + 3]), torch.rand(2, 2))
        elif kind == "erase":
            table.erase(torch.tensor([number]))
        else:
            table.clear()


def rows(reader, table):
    batches = reader.table(table, ["embedding"])
    return {id_: row for batch in batches for id_, row in pairs(batch)}


def pairs(batch):
    return zip(batch.column("id").to_pylist(), batch.column("embedding").to_pylist(), strict=True)


def applied(before, changes, table):
    """Return rows with the changes of a table applied, as a store beside the run does."""
    if table not in changes.tables:
        return before
    change, found = changes.tables[table], dict(before)
    if change.replaced:
        found.clear()
    n_rows = n_deleted = 0
    for ids in change.deletes():
        n_deleted += len(ids)
        for id_ in ids.tolist():
            found.pop(id_, None)
    for batch in change.upserts(["embedding"]):
        n_rows += batch.num_rows
        found.update(pairs(batch))
    assert (n_rows <= change.rows, n_deleted <= change.deleted) == (True, True)
    return found


@settings(max_examples=12)
@given(st.lists(EDITS, min_size=1, max_size=6), st.data())
def test_the_changes_since_any_older_checkpoint_lead_from_it_to_the_new_one(tmp_path_factory, edits, data):
    model = Model(tmp_path_factory.mktemp("run"))
    readers = [model.save()]
    for of_save in edits:
        for kind, number in of_save:
            model.edit(kind, number)
        readers.append(model.save())
    older = readers[data.draw(st.integers(0, len(readers) - 1))]
    now = readers[-1]
    for before in (older, older.manifest.name, None):
        changes = now.changes_since(before)
        names = {link.manifest.name for link in now.chain.links}
        assert changes.is_whole == (before is None or older.manifest.name not in names)
        there = {} if before is None else rows(older, "item")
        assert applied(there, changes, "item") == rows(now, "item")
        if older is now and before is not None:
            assert changes.tables == {}


def test_a_follower_is_told_which_tables_and_dense_tensors_have_changed(tmp_path):
    model = Model(tmp_path)
    model.save()
    model.save()
    model.edit("insert", 7)
    model.edit("erase", 0)
    model.save()
    found, before = [], None
    for checkpoint in recckpt.follow(tmp_path, timeout_sec=0):
        changes = checkpoint.changes_since(before)
        found.append(
            {name: (one.replaced, one.rows, one.deleted) for name, one in changes.tables.items()}
            | {"dense": changes.dense}
        )
        before = checkpoint
    every = ("top.weight", "top.bias")
    assert found == [
        {"item": (True, 5, 0), "user": (True, 5, 0), "dense": every},
        {"dense": ("top.bias",)},
        {"item": (False, 2, 1), "dense": ("top.bias",)},
    ]


def test_of_a_save_that_is_known_by_its_name_alone_all_dense_tensors_are_new(tmp_path):
    model = Model(tmp_path)
    first, second = model.save(), model.save()
    changes = second.changes_since(first.manifest.name)
    assert (changes.tables, changes.dense) == ({}, ("top.weight", "top.bias"))
    assert set(second.changes_since("a save that is gone").tables) == {"item", "user"}


def test_a_compacted_checkpoint_has_not_changed_and_one_with_fewer_rows_has(tmp_path):
    model = Model(tmp_path)
    model.save()
    model.edit("insert", 7)
    before = model.save()
    model.saver.close()
    compact(tmp_path, adopt=True)
    now = CheckpointReader(tmp_path)
    assert (now.manifest.is_compacted, now.changes_since(before).tables) == (True, {})
    forget(tmp_path, "item", [7])
    now = CheckpointReader(tmp_path)
    changes = now.changes_since(before)
    assert changes.tables["item"].replaced
    assert 7 not in applied(rows(before, "item"), changes, "item")


def test_tables_and_tensors_that_are_gone_are_named(tmp_path):
    model = Model(tmp_path, deltas=False)
    before = model.save()
    model.saver.close()
    model.module = nn.ModuleDict({"item": model.tables["item"]})
    with Saver(model.module, output_dir=tmp_path, max_keep=None) as saver:
        saver.save("last", step=9)
    changes = CheckpointReader(tmp_path / "last").changes_since(before)
    assert (changes.dropped_tables, changes.dropped_dense) == (("user",), ("top.weight", "top.bias"))


def test_a_slot_that_is_not_there_is_refused(tmp_path):
    changes = Model(tmp_path).save().changes_since(None)
    nearest = r"table 'item' has no slot 'embeding'; it has \['embedding'\]; did you mean 'embedding'"
    with pytest.raises(KeyError, match=nearest):
        changes.tables["item"].upserts(["embeding"])
    assert np.concatenate([np.empty(0), *changes.tables["item"].deletes()]).size == 0


def test_values_come_with_their_ids_as_numbers_in_the_shape_of_the_slot(tmp_path):
    table = HashTable((2, 3), name="t", dtype=torch.bfloat16)
    table.insert(torch.tensor([4, 2]), torch.arange(12.0).view(2, 2, 3).to(torch.bfloat16))
    with Saver(nn.ModuleDict({"t": table}), output_dir=tmp_path) as saver:
        saver.save("c", step=1)
    [(ids, values)] = CheckpointReader(tmp_path).changes_since(None).tables["t"].values()
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {
        4: [[0, 1, 2], [3, 4, 5]],
        2: [[6, 7, 8], [9, 10, 11]],
    }


def test_what_is_no_checkpoint_and_one_column_by_its_name_are_refused(tmp_path):
    reader = Model(tmp_path).save()
    with pytest.raises(TypeError, match=r"before must be a CheckpointReader, its manifest\.name or None, found 3"):
        reader.changes_since(3)
    with pytest.raises(TypeError, match=r"columns must be a list of slots, found 'embedding'; pass \['embedding'\]"):
        reader.changes_since(None).tables["item"].upserts("embedding")
