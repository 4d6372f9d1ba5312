"""Rows in the order in which they are asked for."""

import threading

import numpy as np
import pytest
import torch
from support.builders import flip_bit
from support.forge import Forge, filled, save_tables
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointReader, Saver
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.sparse import HashTable
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage

ASKED = [3, 77, 1, 3, -(2**63), 2**63 - 1, 0, 77]


def reader_of(place, *tables, **options):
    save_tables(place, list(tables), **options)
    return CheckpointReader(place)


def numbered(dtype=torch.float32, shape=(3,)):
    """A table whose rows are their numbers, and whose ids are some, the greatest and the smallest among them."""
    ids = torch.tensor([*range(60), -(2**63), 2**63 - 1])
    table = HashTable(shape, name="item", dtype=dtype)
    table.add_slot("sparse_count", (), torch.int64)
    rows = torch.arange(len(ids)).view(-1, *[1] * len(shape)).expand(-1, *shape).to(dtype)
    table.insert(ids, rows.contiguous(), {"sparse_count": 2 * torch.arange(len(ids))})
    return table


@mostly_slow()
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8", "int64"])
def test_rows_come_in_the_order_of_the_ids_with_a_default_for_those_that_are_missing(url, dtype):
    with reader_of(url, numbered(getattr(torch, dtype)), filled("other", range(9)), batch_bytes=200) as reader:
        for _ in range(2):
            values, found = reader.lookup("item", ASKED, default=7)
            assert values.tolist() == [[n] * 3 for n in (3, 7, 1, 3, 60, 61, 0, 7)]
            assert found.tolist() == [True, False, True, True, True, True, True, False]
        assert values.dtype == np.dtype("float32" if dtype == "bfloat16" else dtype)


def test_any_slot_is_looked_up_and_a_default_may_be_a_row(tmp_path):
    with reader_of(tmp_path, numbered(shape=(2, 2))) as reader:
        assert reader.lookup("item", [5, 99, 6], "sparse_count").values.tolist() == [10, 0, 12]
        found = reader.lookup("item", np.array([99, 1]), default=[[1, 2], [3, 4]]).values
        assert found.tolist() == [[[1, 2], [3, 4]], [[1, 1], [1, 1]]]
        assert reader.lookup("item", []).values.shape == (0, 2, 2)


def test_an_empty_table_gives_defaults(tmp_path):
    with reader_of(tmp_path, HashTable(2, name="item"), filled("other", [1])) as reader:
        values, found = reader.lookup("item", [1, 2], default=np.nan)
        assert np.isnan(values).all()
        assert not found.any()


def test_wrong_arguments_are_refused_by_name(tmp_path):
    with reader_of(tmp_path, numbered(torch.int64)) as reader:
        with pytest.raises(KeyError, match=r"no table 'itm'.*did you mean 'item'"):
            reader.lookup("itm", [1])
        with pytest.raises(KeyError, match=r"no slot 'embeding'.*did you mean 'embedding'"):
            reader.lookup("item", [1], "embeding")
        with pytest.raises(TypeError, match=r"slot must be the name of one slot, found \['embedding'\]"):
            reader.lookup("item", [1], ["embedding"])
        for default in ("x", [1, 2], float("nan"), None, 0.5, 2**63, -(2**64), [[0] * 3] * 2):
            with pytest.raises(ValueError, match="expected a number or a row of int64"):
                reader.lookup("item", [1], default=default)
        bools = [True, 2], (False,), torch.tensor([True]), np.array([True])
        for ids in (5, [1.0], ["1"], [2**63], [None], np.array([0.5]), np.array([[1]]), *bools):
            with pytest.raises(TypeError, match="ids must be a sequence of int64"):
                reader.lookup("item", ids)


def test_a_default_beyond_the_dtype_is_refused_and_infinity_is_taken(tmp_path):
    with reader_of(tmp_path, numbered(torch.float32)) as reader:
        for default in (1e300, -1e39, [0.0, 1e300]):
            with pytest.raises(ValueError, match=r"expected a number or a row of float32 .*: beyond float32"):
                reader.lookup("item", [1], default=default)
        assert np.isinf(reader.lookup("item", [10**9], default=np.inf).values).all()


def test_values_are_checked_when_they_are_first_read_and_only_those_that_are_asked_for(tmp_path, monkeypatch):
    reader_of(tmp_path, filled("item", range(500)), concurrency=1, batch_bytes=500).close()
    forge = Forge(tmp_path / "ckpt_1")
    with CheckpointReader(tmp_path) as reader:
        first, *_, last = list(reader.table("item"))
        first_ids, last_ids = first["id"].to_pylist(), last["id"].to_pylist()
        bits = last["embedding"].values.buffers()[1].to_pybytes()
    path = forge.path(forge.parts[0])
    flip_bit(path, path.read_bytes().index(bits))
    with CheckpointReader(tmp_path) as reader:
        assert reader.lookup("item", first_ids).found.all()
        assert sum(batch.num_rows for batch in reader.table("item", ids=first_ids)) == len(first_ids)
        for read in (lambda: reader.lookup("item", last_ids), lambda: list(reader.table("item"))):
            with pytest.raises(CorruptCheckpointError, match=r"column 'embedding'.*checksum"):
                read()
        monkeypatch.setattr(PartReader, "read", None)
        assert reader.lookup("item", first_ids).found.all(), "what has been checked is not read again"


def test_a_storage_without_maps_says_that_the_checkpoint_was_removed(memory_url):
    reader = reader_of(memory_url, filled("item", range(5)))
    storage = open_storage(memory_url)
    for name in ("manifest.json", *(file.name for file in reader.manifest.files)):
        storage.remove(f"ckpt_1/{name}")
    with pytest.raises(CheckpointRemovedError):
        reader.lookup("item", [1])


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = HashTable(2, name="a"), HashTable(2, name="b")

    def fill(self, value):
        """Give all rows one value; as deltas see it, only some are new each time."""
        for table in (self.a, self.b):
            table.insert(torch.arange(40), torch.full((40, 2), float(value)))


@mostly_slow()
@pytest.mark.parametrize("deltas", [False, True])
def test_a_look_up_beside_saves_and_refreshes_is_all_of_one_checkpoint(tmp_path, deltas):
    model = TwoTables()
    saver = Saver(model, output_dir=tmp_path, max_keep=2, deltas=deltas)
    model.fill(1)
    saver.save("ckpt_1")
    reader, over, seen, wrong = CheckpointReader(tmp_path), threading.Event(), set(), []

    def serve():
        while not over.is_set():
            at = reader.at_this_checkpoint()
            found = {float(v) for name in "ab" for v in at.lookup(name, range(40)).values.ravel()}
            seen.update(found)
            if found != {float(at.manifest.ckpt_id.removeprefix("ckpt_"))}:
                wrong.append((at.manifest.ckpt_id, found))
            if len({*reader.lookup("a", range(40)).values.ravel().tolist()}) != 1:
                wrong.append("a mix")

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(2, 5):
            model.fill(n)
            saver.save(f"ckpt_{n}")
            assert reader.refresh()
            assert reader.manifest.ckpt_id == f"ckpt_{n}"
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert seen
    assert seen <= {float(n) for n in range(1, 5)}


def test_a_refresh_makes_tables_ready_in_which_there_were_look_ups(tmp_path, monkeypatch):
    model = TwoTables()
    saver = Saver(model, output_dir=tmp_path, max_keep=2, deltas=True)
    model.fill(1)
    saver.save("ckpt_1")
    with CheckpointReader(tmp_path) as reader:
        reader.lookup("a", [1])
        staying = reader.at_this_checkpoint()
        model.a.insert(torch.tensor([1]), torch.full((1, 2), 2.0))
        saver.save("ckpt_2")
        assert reader.refresh()
        monkeypatch.setattr("recckpt.sparse.files.chain_table.RowIndex", None)
        assert reader.lookup("a", [0, 1]).values.tolist() == [[1, 1], [2, 2]]
        assert staying.lookup("a", [0, 1]).values.tolist() == [[1, 1], [1, 1]]
        assert not staying.refresh()
        assert staying.manifest.ckpt_id == "ckpt_1"
