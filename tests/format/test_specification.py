"""docs/format.md is enough: a reader made of that page alone reads what recckpt saves, and deltas made by that page."""

import json
import re

import numpy as np
import pytest
import torch
from support.paths import ROOT
from support.spec_reader import DamagedError, buckets_of, counting, read
from support.spec_writer import write_compacted, write_delta
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.sparse import HashTable

FULL = {1: (1, 1), 2: (2, 2), 3: (3, 3)}
CHANGED = {1: (1, 1), 2: (5, 5), 4: (4, 4)}


def as_bytes(vectors):
    return {i: {"embedding": np.array(vector, np.float32).tobytes()} for i, vector in vectors.items()}


@pytest.fixture
def full(tmp_path):
    """A full checkpoint that recckpt saved."""
    table = HashTable((2,), name="item")
    table.insert(torch.tensor(list(FULL)), torch.tensor(list(FULL.values()), dtype=torch.float32))
    Saver(nn.ModuleDict({"item": table}), output_dir=str(tmp_path), max_keep=None).save("ckpt_100")
    [found] = counting(tmp_path)
    return found


@pytest.fixture
def delta(full):
    """Of which the row of 2 has changed, 3 was deleted, and 4 is new."""
    return write_delta(full, "ckpt_110", 3, [({2: (5, 5), 4: (4, 4)}, [3])])


@mostly_slow()
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_the_page_is_enough_to_read_what_recckpt_saves(tmp_path, dtype):
    table = HashTable((2, 3), name="item", dtype=getattr(torch, dtype))
    table.add_slot("sparse_scalar", (), table.embeddings().dtype)
    other = HashTable((4,), name="user")
    ids = torch.randint(-(2**62), 2**62, (5000,)).unique()
    for each in (table, other):
        each.insert(ids, (torch.randn(len(ids), *each.embeddings().shape[1:]) * 9).to(each.embeddings().dtype))
    Saver(nn.ModuleDict({"item": table, "user": other}), output_dir=str(tmp_path)).save("a b")
    for each in (table, other):
        names = {"embedding": each.embeddings(), **each.slots}
        raw = {n: t.reshape(len(ids), -1).view(torch.uint8).numpy() for n, t in names.items()}
        expected = {int(i): {n: raw[n][row].tobytes() for n in raw} for row, i in enumerate(each.ids())}
        assert read(tmp_path, "a b", each.name) == expected


def test_a_delta_gives_the_rows_of_its_chain(tmp_path, delta):
    assert read(tmp_path, "ckpt_100", "item") == as_bytes(FULL)
    assert read(tmp_path, "ckpt_110", "item") == as_bytes(CHANGED)


def test_a_row_in_one_shard_beats_a_delete_of_it_in_another(tmp_path, delta):
    write_delta(delta, "ckpt_120", 2, [({}, [1, 4]), ({4: (6, 6)}, [])])
    assert read(tmp_path, "ckpt_120", "item") == as_bytes({2: (5, 5), 4: (6, 6)})


def test_of_a_replaced_table_nothing_older_counts(tmp_path, delta):
    write_delta(delta, "ckpt_120", 1, [({9: (9, 9)}, [])], replaced=True)
    assert read(tmp_path, "ckpt_120", "item") == as_bytes({9: (9, 9)})


def test_a_form_stands_for_its_delta_and_for_the_chain_below(tmp_path, full, delta):
    write_compacted(delta, CHANGED)
    top = write_delta(delta, "ckpt_120", 2, [({}, [4])])
    for gone in (full, delta):
        (gone.directory / "manifest.json").unlink()
    assert read(tmp_path, "ckpt_110", "item") == as_bytes(CHANGED)
    assert read(tmp_path, "ckpt_120", "item") == as_bytes({1: (1, 1), 2: (5, 5)})
    assert max(counting(tmp_path), key=lambda found: found.place).directory == top.directory


def test_a_form_that_lacks_a_file_is_passed_over_for_the_delta(tmp_path, delta):
    form = write_compacted(delta, CHANGED)
    next(form.directory.glob("sparse/*.arrow")).unlink()
    assert read(tmp_path, "ckpt_110", "item") == as_bytes(CHANGED)


@pytest.mark.parametrize(
    ("shards", "rows", "changes"),
    [
        pytest.param([({4: (4, 4)}, [])], 3, {}, id="rows that the chain does not give"),
        pytest.param([({4: (4, 4)}, []), ({4: (5, 5)}, [])], 4, {}, id="an id in two shards"),
        pytest.param([({4: (4, 4)}, [4])], 4, {}, id="an id as row and delete of one shard"),
        pytest.param([({4: (4, 4)}, [])], 4, {"seq": 1}, id="a parent that is not older"),
    ],
)
def test_what_the_page_calls_damage_is_refused(tmp_path, full, shards, rows, changes):
    write_delta(full, "ckpt_110", rows, shards, **changes)
    with pytest.raises(DamagedError):
        read(tmp_path, "ckpt_110", "item")


def test_a_delta_of_another_manifest_is_refused(tmp_path, full, delta):
    parent = {**delta.manifest["parent"], "manifest": "0" * 16}
    write_delta(full, "ckpt_120", 2, [({}, [3])], parent=parent)
    with pytest.raises(DamagedError, match="ckpt_120 has no whole chain"):
        read(tmp_path, "ckpt_120", "item")


def test_the_buckets_of_the_examples_are_those_of_their_ids():
    page = (ROOT / "docs/format.md").read_text()
    for ids in ([1, 2, 3], [2, 4], [3]):
        buckets = buckets_of(np.array(ids))
        assert f'"buckets": [{buckets.min()}, {buckets.max() + 1}]' in page
    examples = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert [json.loads(example).get("kind") for example in examples] == ["full", "delta", None, "full"]
