"""A save of a table that has an id twice, by whatever cause, is refused before the commit."""

import numpy as np
import pytest
import torch
from support.forge import written_parts
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import RecckptError
from recckpt.format.buckets import bucket_of
from recckpt.output_dir.listing import list_checkpoints
from recckpt.save.sparse_saver import SparseSaver
from recckpt.sparse import HashTable
from recckpt.sparse.files.ordered_rows import RepeatFinder
from recckpt.sparse.files.table_rows import source_of
from recckpt.storage import open_storage


def crowded(n_ids: int) -> np.ndarray:
    """Ids of few buckets, in bucket order."""
    ids = np.arange(n_ids << 13)
    return ids[bucket_of(ids) < 8][:n_ids]


def table_of(ids) -> HashTable:
    table = HashTable(2, name="t")
    table.insert(torch.as_tensor(ids), torch.ones(len(ids), 2))
    return table


def save(table, url, **sizes):
    storage = open_storage(url)
    storage.prepare()
    saver = SparseSaver(2, **sizes)
    return written_parts(saver, [source_of(table)], storage, "a")


@mostly_slow()
@pytest.mark.parametrize("sizes", [{}, {"batch_bytes": 64}, {"batch_bytes": 64, "order_bytes": 400}], ids=str)
@pytest.mark.parametrize("at", [0, 1, 57, 198])
def test_an_id_twice_is_found_whatever_batches_and_parts_it_lies_in(memory_url, sizes, at):
    ids = crowded(200)
    table = table_of(ids)
    save(table, memory_url + "/whole", **sizes)
    table.store.ids.write(199, torch.as_tensor(ids[at : at + 1]))  # as no door allows
    with pytest.raises(RecckptError, match=rf"(?s)'t'.*{ids[at]} more than once"):
        save(table, memory_url + "/broken", **sizes)


def test_a_saver_commits_nothing_of_a_table_with_an_id_twice(memory_url):
    table = table_of(range(100))
    with Saver(nn.ModuleList([table]), output_dir=memory_url) as saver:
        saver.save("a")
        table.store.ids.write(50, torch.tensor([7]))
        with pytest.raises(RecckptError, match=r"(?s)table 't'.*7 more than once"):
            saver.save("b")
    assert [c.ckpt_id for c in list_checkpoints(open_storage(memory_url)).current] == ["a"]


@pytest.mark.parametrize("n_pieces", [1, 2, 7, 100])
def test_the_finder_says_which_id_comes_twice(n_pieces):
    ids = np.random.default_rng(0).permutation(100_000)[:5000]
    ids = ids[np.argsort(bucket_of(ids), kind="stable")]
    finder = RepeatFinder()
    assert [finder.find(piece) for piece in np.array_split(ids, n_pieces)] == [None] * n_pieces
    twice = np.insert(ids, 2001, ids[2000])
    finder = RepeatFinder()
    found = {finder.find(piece) for piece in np.array_split(twice, n_pieces)} - {None}
    assert found == {int(ids[2000])}
