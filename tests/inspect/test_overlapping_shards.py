"""Shards whose buckets overlap, as of tables that are written as they lie: their ranges of ids tell them apart.

What is read is what bucket slices give; what is opened is only what may have the ids.
"""

import itertools
import json
import re

import numpy as np
import pytest
from faults.plants import Plant
from support.forge import Forge, filled, load, rows_of, save_tables
from support.spec_reader import counting
from support.spec_writer import Held, write_delta, write_full
from support.sweeps import mostly_slow

import recckpt
from recckpt import CheckpointReader
from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import gen_slice
from recckpt.inspect.verify import verify
from recckpt.rewrite.compaction import BUDGET_BYTES
from recckpt.sparse.files import catalogs
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage

SHARDS = [range(100), range(100, 200), range(200, 300)]
MIXED = [range(n, 300, 3) for n in range(3)]  # whose ranges overlap, too


@pytest.fixture
def opened(monkeypatch):
    """The numbers of the shards of which a catalog or a part was read."""
    numbers = set()

    def noting(real, name_of):
        def read(self, *args, **options):
            numbers.add(int(re.search(r"sparse/(\d{5})-of-", name_of(*args))[1]))
            return real(self, *args, **options)

        return read

    monkeypatch.setattr(
        catalogs, "read_checked", noting(catalogs.read_checked, lambda directory, entry, *_: entry.name)
    )
    monkeypatch.setattr(
        PartReader, "__init__", noting(PartReader.__init__, lambda storage, directory, part, *_: part.file)
    )
    return numbers


@pytest.fixture
def n_read(monkeypatch):
    """How many batches were read."""
    count, real = itertools.count(), PartReader.read
    monkeypatch.setattr(PartReader, "read", lambda *args: (next(count), real(*args))[1])
    return count


def saved(storage, shards, **options):
    save_tables(storage, *([filled("item", ids, slots={"sparse_m": (2,)})] for ids in shards), **options)
    return Forge(f"{storage.url}/ckpt_1")


def rows_in(path, ids=None):
    with CheckpointReader(path) as reader:
        batches = list(reader.table("item", ids=ids))
    return {
        id_: (e, m) for b in batches for id_, e, m in zip(*(column.to_pylist() for column in b.columns), strict=True)
    }


def test_a_manifest_says_the_ids_of_such_shards_and_of_no_others(local):
    forge = saved(local, SHARDS)
    assert [shard["ids"] for shard in forge.manifest["shards"]] == [{"item": [r[0], r[-1]]} for r in SHARDS]
    slices = [[i for i in range(300) if gen_slice(n, 3).owns(np.array([i]))] for n in range(3)]
    save_tables(local, *([filled("item", ids)] for ids in slices), ckpt_id="ckpt_2")
    assert all("ids" not in shard for shard in Forge(f"{local.url}/ckpt_2").manifest["shards"])


@pytest.mark.parametrize(("shards", "times"), [(SHARDS, 1), (MIXED, 2)])
def test_all_rows_are_read_once_where_ranges_of_ids_are_disjoint(local, n_read, shards, times):
    forge = saved(local, shards, batch_bytes=700)
    n_batches = sum(len(part["batches"]) for shard in range(3) for part in catalog_of(forge, shard)["parts"])
    assert rows_in(local.url) == {i: ([i, i], [i, i]) for i in range(300)}
    assert next(n_read) == times * n_batches > 6


def catalog_of(forge, shard):
    return json.loads(forge.path(forge.manifest["shards"][shard]["catalog"]).read_text())


@pytest.mark.parametrize("shards", [SHARDS, MIXED])
def test_every_reader_gives_what_bucket_slices_give(local, tmp_path, shards):
    saved(local, shards, batch_bytes=700)
    saved_alike = tmp_path / "alike"
    storage = open_storage(str(saved_alike))
    storage.prepare()
    saved(storage, [range(300)])
    assert rows_in(local.url) == rows_in(saved_alike)
    assert verify(local.url) == []
    for slice in (None, gen_slice(0, 2), gen_slice(4, 5)):
        tables = [filled("item", [], slots={"sparse_m": (2,)}, slice=slice) for _ in range(2)]
        load(local, tables[:1])
        load(storage, tables[1:])
        assert rows_of(tables[0]) == rows_of(tables[1])
    with CheckpointReader(local.url) as reader:
        values, there = reader.lookup("item", [299, 0, 300, 150])
    assert (values[:, 0].tolist(), there.tolist()) == ([299, 0, 0, 150], [True, True, False, True])


@pytest.mark.parametrize(("ids", "numbers"), [([5], {0}), ([299, 120], {1, 2}), ([-1, 300], set())])
def test_rows_by_id_open_the_shards_alone_that_may_have_them(local, opened, ids, numbers):
    saved(local, SHARDS)
    opened.clear()
    assert rows_in(local.url, ids).keys() == {id_ for id_ in ids if 0 <= id_ < 300}
    assert opened == numbers


def test_rows_by_id_open_all_shards_that_have_their_buckets_where_the_manifest_says_no_ids(local, opened):
    forge = saved(local, SHARDS)
    forge.edit_manifest(lambda values: [shard.pop("ids") for shard in values["shards"]])
    opened.clear()
    assert rows_in(local.url, [150]) == {150: ([150, 150], [150, 150])}
    assert opened == {0, 1, 2}  # their catalogs, which say the same of each batch


@pytest.mark.parametrize("checked", [True, False])
def test_a_query_by_id_reads_the_shards_alone_that_may_have_it(local, opened, checked):
    pytest.importorskip("duckdb")
    saved(local, SHARDS)
    with recckpt.inspect.connect(local.url, checked=checked) as connection:
        opened.clear()
        for where, expected in (("id = 120", [120]), ("id IN (7, 101)", [7, 101]), ("id > 297", [298, 299])):
            rows = connection.sql(f"SELECT id FROM item WHERE {where} ORDER BY id").fetchall()
            assert [row[0] for row in rows] == expected
        assert opened == ({0, 1, 2} if checked else set())  # Arrow opens parts by itself
        opened.clear()
        assert connection.sql("SELECT sum(sparse_m[1]) FROM item WHERE id = 120").fetchall() == [(120.0,)]
        assert opened == ({1} if checked else set())
        assert connection.sql("SELECT count(*) FROM item WHERE sparse_m[1] >= 150").fetchall() == [(150,)]


@pytest.fixture
def chain(tmp_path):
    """A full checkpoint of two shards, and a delta that deletes an id in the shard that has others."""
    root = tmp_path / "chain"
    halves = [{i: (i, i) for i in ids} for ids in (range(50), range(50, 100))]
    full = write_full(root, "ckpt_1", {"item": Held(100, [(half, ()) for half in halves], live=LIVE)})
    write_delta(full, "ckpt_2", 99, [({7: (1, 1), 8: (2, 2)}, []), ({60: (3, 3)}, [5])])
    return root


LIVE = {"n_rows": 200, "columns": [[0, 1], [1, 2]]}
OF_CHAIN = {i: [i, i] for i in range(100) if i != 5} | {7: [1, 1], 8: [2, 2], 60: [3, 3]}


def of_chain(path, ids=None):
    with CheckpointReader(path) as reader:
        batches = list(reader.table("item", ids=ids))
    return {row["id"]: row["embedding"] for batch in batches for row in batch.to_pylist()}


def test_a_delete_counts_though_the_rows_of_its_shard_have_other_ids(chain):
    assert of_chain(chain, [5]) == {}
    assert of_chain(chain, [4, 7, 60]) == {4: [4, 4], 7: [1, 1], 60: [3, 3]}
    assert of_chain(chain) == OF_CHAIN
    assert verify(str(chain)) == []


def test_what_a_compactor_makes_of_a_chain_is_live_as_the_chain_is(chain, tmp_path):
    recckpt.rewrite.compact(chain, out=tmp_path / "whole", budget_bytes=BUDGET_BYTES)
    [whole] = counting(tmp_path / "whole")
    assert (whole.manifest["tables"][0]["live"], of_chain(tmp_path / "whole")) == (LIVE, OF_CHAIN)
    assert verify(str(tmp_path / "whole")) == []


def test_what_is_left_when_ids_are_forgotten_is_live_and_says_its_own_ids(chain):
    recckpt.rewrite.forget(chain, "item", [49, 60])
    full, delta = sorted(counting(chain), key=lambda each: each.place)
    assert [each.table("item").get("live") for each in (full, delta)] == [LIVE, LIVE]
    assert [shard["ids"] for shard in full.manifest["shards"]] == [{"item": [0, 48]}, {"item": [50, 99]}]
    assert of_chain(chain) == {i: row for i, row in OF_CHAIN.items() if i not in (49, 60)}
    assert verify(str(chain)) == []


@pytest.mark.parametrize("live", [None, {"n_rows": 201, "columns": LIVE["columns"]}, {"n_rows": 200}])
def test_a_delta_of_another_live_layout_is_damage_unless_it_replaces_the_table(chain, live):
    full = min(counting(chain), key=lambda each: each.place)
    write_delta(full, "ckpt_3", 1, [({1: (1, 1)}, []), ({}, [])], live=live, replaced=True, seq=3)
    assert of_chain(chain / "ckpt_3") == {1: [1, 1]}
    write_delta(full, "ckpt_4", 100, [({1: (1, 1)}, []), ({}, [])], live=live, seq=4)
    with pytest.raises(CorruptCheckpointError, match="table 'item' live, of 200 rows"):
        CheckpointReader(chain / "ckpt_4")


def ranges(number, ids):
    """Say in the catalog of a shard that its one batch has these ids, and in the manifest alike."""

    def edit(forge):
        forge.edit_catalog(lambda values: values["parts"][0]["batches"][0].update(ids=ids), number)
        forge.edit_manifest(lambda values: values["shards"][number]["ids"].update(item=ids))

    return edit


@pytest.mark.parametrize("ids", [[99, 199], [100, 200], [101, 199], [100, 198]])
def test_a_range_that_is_not_that_of_the_rows_is_damage_and_named(local, ids):
    ranges(1, ids)(saved(local, SHARDS))
    path, found = "ckpt_1/sparse/00001-of-00003.g0.00.arrow", "ids from 100 to 199"
    [problem] = verify(local.url)
    assert (problem.file, problem.where) == (path, "batch 0 (table 'item')")
    assert (problem.found, problem.expected) == (found, f"from {ids[0]} to {ids[1]}")
    for read in (rows_in, lambda url: load(local, [filled("item", [])]), lambda url: lookup(url), sums):
        with pytest.raises(CorruptCheckpointError, match=f"{path}.*{found}"):
            read(local.url)


def lookup(url):
    with CheckpointReader(url) as reader:
        reader.lookup("item", [150])


def sums(url):
    return recckpt.inspect.dataset(url, "item").to_table(columns=["id"])


@pytest.mark.parametrize(
    ("ids", "found"),
    [({"item": [1, 99]}, "ids from 0 to 99"), ({}, "ids from 0 to 99"), ({"item": [0, 99], "other": [1, 1]}, "no ids")],
)
def test_a_manifest_that_says_other_ids_than_a_catalog_is_damage(local, ids, found):
    save_tables(local, *([filled("item", each), filled("other", [])] for each in SHARDS))
    Forge(f"{local.url}/ckpt_1").edit_manifest(lambda values: values["shards"][0].update(ids=ids))
    [problem] = verify(local.url)
    assert (problem.file, problem.found) == ("ckpt_1/sparse/00000-of-00003.json", f"rows of {found}")
    with pytest.raises(CorruptCheckpointError, match=r"00000-of-00003.json.*by the manifest"):
        rows_in(local.url)


def test_an_id_in_two_shards_is_found_though_their_ranges_are_said_to_be_disjoint(local):
    ranges(1, [100, 199])(saved(local, [range(100), [50, *range(100, 200)], range(200, 300)]))
    assert "ids from 50 to 199" in [problem.found for problem in verify(local.url)]
    for read in (rows_in, lambda url: load(local, [filled("item", [])]), lambda url: lookup(url), sums):
        with pytest.raises(CorruptCheckpointError, match="ids from 50 to 199"):
            read(local.url)


@pytest.mark.parametrize("twice", [50, 99])
def test_an_id_in_two_shards_whose_ranges_overlap_is_found_as_before(local, twice):
    saved(local, [range(100), [twice, *range(100, 200)], range(200, 300)])
    [problem] = verify(local.url)
    assert (problem.where, problem.found) == ("table 'item', between shards", f"id {twice} twice")


BUGS = {
    "ranges are not held against rows": (
        Plant("recckpt.sparse.files.pieces:check_range", "if of_ids != batch.ids:", "if False:"),
        lambda local, chain: test_a_range_that_is_not_that_of_the_rows_is_damage_and_named(local, [101, 199]),
    ),
    "a manifest may say any ids": (
        Plant("recckpt.sparse.files.catalogs:shard_errors", "if own != recorded:", "if False:"),
        lambda local, chain: test_a_manifest_that_says_other_ids_than_a_catalog_is_damage(
            local, {}, "ids from 0 to 99"
        ),
    ),
    "ranges that touch are disjoint": (
        Plant("recckpt.format.manifest:are_disjoint", "before[1] < following[0]", "before[1] <= following[0]"),
        lambda local, chain: test_an_id_in_two_shards_whose_ranges_overlap_is_found_as_before(local, 99),
    ),
    "deletes lie in the ranges of rows": (
        Plant("recckpt.sparse.files.catalogs:shards_with", "None if has_deletes else shard.ids", "shard.ids"),
        lambda local, chain: test_a_delete_counts_though_the_rows_of_its_shard_have_other_ids(chain),
    ),
    "a compactor or a forgetter drops how a table was live": (
        Plant(
            "recckpt.format.manifest:record_json",
            "plain(manifest.tables)",
            "plain(tuple(table.but(live=None) for table in manifest.tables))",
        ),
        lambda local, chain: test_what_is_left_when_ids_are_forgotten_is_live_and_says_its_own_ids(chain),
    ),
    "a delta may stand on another live layout": (
        Plant("recckpt.output_dir.listing:_misfits", "elif below.live != table.live:", "elif False:"),
        lambda local, chain: test_a_delta_of_another_live_layout_is_damage_unless_it_replaces_the_table(chain, None),
    ),
}


@mostly_slow()
@pytest.mark.parametrize("name", BUGS)
def test_each_rule_of_ranges_and_live_tables_is_missed_where_it_is_not_kept(monkeypatch, local, chain, name):
    bug, by = BUGS[name]
    monkeypatch.setattr(bug.function, "__code__", bug.code)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        by(local, chain)
