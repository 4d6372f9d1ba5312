"""A checkpoint opened for reading: which of its files are open, until when, and what of it is read."""

import numpy as np
import pytest
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.checkpoint.chain import OpenChain, OpenLink
from recckpt.format import layout
from recckpt.format.buckets import Slice, bucket_of
from recckpt.output_dir.listing import locate
from recckpt.sparse.files.chain_table import RowIndex
from recckpt.sparse.files.table_reader import DELETED
from recckpt.storage import open_storage


@pytest.fixture
def storage(tmp_path):
    """An output dir with rows 0 to 5 in ckpt_1, and a delta ckpt_2 of two shards, of which one has id 9."""
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled("t", range(6))], concurrency=1)
    write_delta(counting(tmp_path)[0], "ckpt_2", 6, [({9: (9, 9)}, [2]), ({4: (8, 8)}, [])])
    return storage


def open_files(link):
    return {path.partition("/")[2] for path in link.files._maps}


def ids_in(chain):
    return {id_ for batch in chain.table("t", []).all_rows() for id_ in batch.column("id").to_pylist()}


def test_all_files_are_open_until_they_are_closed(storage):
    chain = OpenChain.open(storage, locate(storage, "ckpt_2"))
    for link in chain.links:
        assert open_files(link) == {file.name for file in link.manifest.files if layout.has_rows(file.name)}
    assert open_files(chain) == {file.name for file in chain.manifest.files if not layout.has_rows(file.name)}
    for name in storage.list_files("ckpt_1"):
        storage.remove(f"ckpt_1/{name}")
    assert ids_in(chain) == {0, 1, 3, 4, 5, 9}
    chain.close()
    assert not any(open_files(each) for each in (chain, *chain.links))


def test_a_chain_opens_no_file_by_itself_and_opens_all_anew(storage):
    chain = OpenChain.of(storage, locate(storage, "ckpt_2"))
    assert ids_in(chain) == {0, 1, 3, 4, 5, 9}
    assert not any(open_files(each) for each in (chain, *chain.links))
    assert all(map(open_files, chain.open_all().links))


def test_a_chain_takes_links_over_that_another_has_open(storage):
    before = OpenChain.open(storage, locate(storage, "ckpt_1"))
    chain = OpenChain.open(storage, locate(storage, "ckpt_2"), before)
    assert chain.links[1] is before.links[0]
    assert chain.links[0] is not before.links[0]


def test_the_newest_links_alone_are_what_they_hold(storage):
    newest = OpenChain.of(storage, locate(storage, "ckpt_2")).newest(1)
    [link] = newest.table("t", []).links
    assert RowIndex(link).find(np.array([2])).tolist() == [DELETED]
    assert not newest.newest(0).table("t", []).links


def test_only_files_with_something_in_some_buckets_are_mapped(storage):
    chain = OpenChain.of(storage, locate(storage, "ckpt_2"))
    bucket = int(bucket_of(np.array([9]))[0])
    with chain.mapped({"t": [(bucket, bucket + 1)]}) as mapped:
        delta, full = mapped.links
        assert [*map(id, delta.catalogs)] == [*map(id, chain.links[0].catalogs)]
        parts = [part for catalog in delta.catalogs for part in catalog.parts]
        spans = {part.file: [batch.buckets for batch in part.batches] for part in parts}
        met = {file for file, buckets in spans.items() if any(begin <= bucket < end for begin, end in buckets)}
        assert open_files(delta) == met < spans.keys()
    assert not open_files(delta)
    assert not open_files(full)


def test_a_link_reads_the_catalogs_that_it_was_not_given(storage):
    checkpoint = locate(storage, "ckpt_1")
    link = OpenLink.of(storage, checkpoint)
    [catalog] = link.catalogs
    assert OpenLink(checkpoint, link.files, [catalog]).catalogs == [catalog]


def test_a_load_reads_of_each_link_what_its_slices_meet_down_to_the_link_that_it_knows(storage):
    newest, full = OpenChain.of(storage, locate(storage, "ckpt_2")).links
    batches, known = OpenChain.of(storage, locate(storage, "ckpt_2")).batches([None])
    assert [each.directory for each in batches] == [newest.directory, full.directory]
    assert not known
    batches, known = OpenChain.of(storage, locate(storage, "ckpt_2")).batches([None], known=full.manifest.name)
    assert [each.directory for each in batches] == [newest.directory]
    assert known == {"t"}
    chain = OpenChain.of(storage, locate(storage, "ckpt_2"))
    bucket = int(bucket_of(np.array([9]))[0])
    delta, _ = chain.batches([Slice(bucket, bucket + 1)])[0]
    [part] = [part for parts in delta.parts.values() for part in parts if part.holds == "rows"]
    [(number, columns)] = delta.reader(part, delta_slots(chain), frozenset(["embedding"])).batches([0])
    assert number == 0
    assert np.frombuffer(columns["id"], np.int64).tolist() == [9]
    assert part.file in open_files(chain.links[0])


def delta_slots(chain):
    return chain.manifest.named_table("t").slots
