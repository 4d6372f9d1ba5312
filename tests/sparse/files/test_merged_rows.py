"""The rows of a table merged from the links of a chain, held against a dict."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise, zip_longest

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sweeps import mostly_slow

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Catalog, Part
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.sparse.files.arrow_format import column_values
from recckpt.sparse.files.merged_rows import in_arrow, merged_range, merged_rows
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import ColumnBytes, PartWriter, RowBatch
from recckpt.sparse.files.table_reader import TableReader
from recckpt.storage import Storage, open_storage
from recckpt.types import SlotSpec

SLOTS = (SlotSpec("embedding", "float32", (2,)), SlotSpec("sparse_m", "bfloat16", (2, 2)), SlotSpec("step", "int8", ()))
UNIVERSE = [0, -1, 2**63 - 1, -(2**63), *range(1, 20), *(np.arange(1 << 20)[bucket_of(np.arange(1 << 20)) == 7][:9])]
IDS = st.sampled_from([int(id_) for id_ in UNIVERSE])


def values_of(spec: SlotSpec, versions: np.ndarray) -> np.ndarray:
    """Give each row bytes that tell which version of it they are."""
    return np.repeat(versions.astype(np.uint8)[:, None], spec.row_bytes, axis=1).reshape(-1)


class Writer:
    """Writes links by hand: what the saver does not do yet."""

    _numbers = count()  # of files

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def link(
        self, n_rows, upserts, deletes=(), *, is_whole=False, slots=SLOTS, batch_rows=3, part_batches=2, columns=None
    ) -> TableReader:
        """Write shards of rows, id -> version, and of deletes, all in bucket order; one shard may be of both."""
        sizes = batch_rows, part_batches
        shards = []
        for rows, gone in zip_longest(upserts, map(dict.fromkeys, deletes), fillvalue={}):
            parts = *self._parts(rows, slots, "rows", *sizes), *self._parts(gone, (), "deletes", *sizes)
            shards.append(Catalog("save", 0, 1, parts))
        counts = [sum(map(len, held)) for held in (upserts, deletes)]
        delta = None if is_whole else DeltaRows(*counts, replaced=False)
        names = [slot.name for slot in slots] if columns is None else columns
        return TableReader(self._storage, "link", shards, TableEntry("t", n_rows, slots, delta), names)

    def _parts(self, rows, slots, held, batch_rows, part_batches) -> list[Part]:
        ids = np.array(list(rows), np.int64)
        ids = ids[np.argsort(bucket_of(ids), kind="stable")] if len(ids) else ids
        batches = [ids[at : at + batch_rows] for at in range(0, len(ids), batch_rows)]
        cut = [batches[at : at + part_batches] for at in range(0, len(batches), part_batches)]
        return [self._part(part, rows, slots).but(holds=held) for part in cut]

    def _part(self, batches, rows, slots):
        name = str(next(self._numbers))
        with self._storage.create(f"link/{name}") as sink:
            writer = PartWriter(sink, name, ["other", "t"], slots)
            for ids in batches:
                versions = np.array([rows[int(id_)] for id_ in ids])
                columns = [ColumnBytes(spec, len(ids), [values_of(spec, versions)]) for spec in slots]
                writer.write(RowBatch("t", ids, columns))
            return writer.finish()


@pytest.fixture
def writer(memory_url) -> Writer:
    return Writer(opened(memory_url))


def opened(url) -> Storage:
    storage = open_storage(url)
    storage.prepare()
    return storage


def rows_in(batches) -> dict[int, int]:
    """Return id -> version; checks the order, that no id is twice, and that all bytes of a row are of one version."""
    found = pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else []
    rows: dict[int, int] = {}
    for batch in found:
        ids = batch.column("id").to_numpy()
        assert (np.diff(bucket_of(ids)) >= 0).all()
        steps = column_values(batch.column("step"), SLOTS[2])
        for spec in SLOTS:
            expected = values_of(spec, steps.view(np.uint8))
            bits = column_values(batch.column(spec.name), spec)
            bits = (bits.view(np.uint32) >> 16).astype(np.uint16) if spec.dtype == "bfloat16" else bits
            assert np.array_equal(np.ascontiguousarray(bits).view(np.uint8).reshape(-1), expected)
        assert len({*ids.tolist()}) == len(ids)
        rows |= zip(ids.tolist(), steps.tolist(), strict=True)
    return rows


SHARDS = st.lists(st.sets(IDS, max_size=25), min_size=1, max_size=3)
LINKS = st.lists(st.tuples(SHARDS, SHARDS, st.integers(0, 9), st.integers(1, 9), st.integers(1, 3)), max_size=6)


@pytest.fixture(scope="module", params=["read", "mapped"])
def merging_url(request, tmp_path_factory):
    """A storage of which batches are read, again and again, and one where they lie in memory and stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)  # of thousands of files
        yield "memory://merged-rows" if request.param == "read" else str(tmp_path_factory.mktemp("merged"))


@mostly_slow()
@settings(deadline=None, max_examples=15)
@given(LINKS, st.sampled_from([2000, 6000, 1 << 20]), st.sets(st.sampled_from([0, 7, 8, 20_000, N_BUCKETS])))
def test_the_rows_of_a_chain_are_those_of_a_dict_in_one_go_and_range_by_range(
    merging_url, links, budget_bytes, borders
):
    writer, model, chain = Writer(opened(merging_url)), {}, []
    for number, (upserts, deletes, chance, batch_rows, part_batches) in enumerate(links):
        is_whole = number == 0 or chance == 0  # full, or replaced
        seen: set[int] = set()
        shards = [{id_: number for id_ in shard if not (id_ in seen or seen.add(id_))} for shard in upserts]
        model = {} if is_whole else {id_: row for id_, row in model.items() if id_ not in set().union(*deletes)}
        for shard in shards:
            model |= shard
        sizes = {"batch_rows": batch_rows, "part_batches": part_batches}
        apart = [*([()] * len(shards)), *deletes]  # ids may be in both, so in other shards
        chain.insert(0, writer.link(len(model), shards, apart, is_whole=is_whole, **sizes))
    if chain:
        assert rows_in(list(merged_rows(chain, budget_bytes))) == model
        reused = merged_range(chain, (0, N_BUCKETS), budget_bytes, lambda piece, rows: None, is_reused=True)
        copies = [pa.ipc.read_record_batch(batch.serialize(), batch.schema) for batch in map(in_arrow, reused)]
        assert rows_in(copies) == model
        ranges = pairwise(sorted({0, *borders, N_BUCKETS}))
        found = [map(in_arrow, merged_range(chain, buckets, budget_bytes)) for buckets in ranges]
        assert rows_in([batch for batches in found for batch in batches]) == model


def test_what_is_older_than_a_replaced_table_is_not_even_read(writer):
    gone = writer.link(2, [{1: 0, 2: 0}], is_whole=True)
    for part in gone.catalogs[0].parts:
        gone.storage.remove(f"link/{part.file}")
    replaced = writer.link(1, [{5: 1}], is_whole=True)
    delta = writer.link(2, [{6: 2}], [[1]])
    assert rows_in(list(merged_rows([delta, replaced, gone], 1 << 20))) == {5: 1, 6: 2}


def refusal(*chain) -> CorruptCheckpointError:
    with pytest.raises(CorruptCheckpointError) as caught:
        list(merged_rows(chain, 1 << 20))
    return caught.value


def test_links_that_contradict_themselves_or_each_other_are_damage(writer):
    full = writer.link(2, [{1: 0, 2: 0}], is_whole=True)
    for chain, where, found in (
        ([writer.link(3, [{1: 0, 2: 0}, {2: 0}], is_whole=True)], "table 't', between shards", "id 2 twice"),
        ([writer.link(2, [{1: 1}, {2: 1}], [[2], [2]]), full], "table 't', in one shard", "id 2 twice"),
        ([writer.link(3, [{2: 1}]), full], "table 't'", "2 rows in the chain"),
        ([writer.link(2, [{2: 1}])], "table 't'", "1 rows in the chain"),  # its base is missing
    ):
        error = refusal(*chain)
        assert (error.where, error.found) == (where, found)
    other = writer.link(1, [{1: 0}], is_whole=True, slots=SLOTS[::2])
    assert refusal(writer.link(2, [{2: 1}]), other).where == "table 't', its slots"
    assert rows_in(list(merged_rows([writer.link(1, [{2: 1}], is_whole=True), other], 1 << 20))) == {2: 1}
    link = writer.link(9, [dict.fromkeys(range(9), 0)], is_whole=True, part_batches=1)
    (catalog,) = link.catalogs
    backwards = Catalog("save", 0, 1, catalog.parts[::-1])
    assert "behind one of" in refusal(replace(link, catalogs=[backwards])).found


def test_slots_that_nobody_asks_for_are_not_read(writer, monkeypatch):
    columns, init = [], PartReader.__init__
    monkeypatch.setattr(PartReader, "__init__", lambda self, *args: (columns.append(args[4]), init(self, *args))[1])
    full = writer.link(2, [{1: 0, 2: 0}], is_whole=True, columns=["step"])
    batches = list(merged_rows([writer.link(1, [{2: 1}], [[1]], columns=["step"]), full], 1 << 20))
    assert pa.Table.from_batches(batches).to_pydict() == {"id": [2], "step": [1]}
    assert columns == [["step"], [], ["step"]]


def test_a_flipped_bit_in_any_part_is_damage(writer):
    first, second, third = (10**17 + n for n in range(3))
    full = writer.link(3, [{first: 0, second: 0, third: 0}], is_whole=True)
    delta = writer.link(2, [{third: 1}], [[second]])
    assert rows_in(list(merged_rows([delta, full], 1 << 20))) == {first: 0, third: 1}
    parts = full.catalogs[0].parts[0], *delta.catalogs[0].parts
    for part, id_ in zip(parts, (first, third, second), strict=True):
        name = f"link/{part.file}"
        data = full.storage.read(name, 1 << 20)
        at = data.index(np.int64(id_).tobytes())
        for change in (4, 0):
            full.storage.remove(name)
            with full.storage.create(name) as sink:
                sink.write(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])
            if change:
                assert "checksum" in refusal(delta, full).found


def long_chain(writer, n_rows=20_000, n_links=30, slots=SLOTS) -> tuple[list[TableReader], dict[int, int]]:
    """A full link and deltas of one in fifty rows each, in two shards."""
    model = {int(id_): 0 for id_ in np.random.default_rng(0).permutation(1 << 40 >> 20)[:n_rows]}
    sizes = {"slots": slots, "batch_rows": 500, "part_batches": 100}
    chain = [writer.link(n_rows, [model], is_whole=True, **sizes)]
    for number in range(1, n_links):
        changed = np.random.default_rng(number).choice(list(model), n_rows // 50, replace=False).tolist()
        upserts, gone = dict.fromkeys(changed[:-9], number), changed[-9:]
        model = {id_: upserts.get(id_, row) for id_, row in model.items() if id_ not in gone}
        shards = [{id_: number for id_ in upserts if id_ % 2 == odd} for odd in (0, 1)]
        chain.insert(0, writer.link(len(model), shards, [gone, []], **sizes))
    return chain, model


def test_every_batch_is_read_once_and_again_only_where_a_border_cuts_it_that_is_not_mapped(writer, local, monkeypatch):
    chain, model = long_chain(writer)
    n_reads, read = Counter(), PartReader.read
    monkeypatch.setattr(PartReader, "read", lambda self, *n: (n_reads.update([(self.path, n[0])]), read(self, *n))[1])
    assert rows_in(list(merged_rows(chain, 1 << 30))) == model
    assert {*n_reads.values()} == {1}
    n_batches = len(n_reads)
    n_reads.clear()
    for _ in merged_rows(chain, 1 << 20):
        pass
    n_cursors, n_ranges = sum(2 * len(link.catalogs) for link in chain), 4
    assert len(n_reads) == n_batches < n_reads.total() <= n_batches + n_cursors * n_ranges
    chain, model = long_chain(Writer(local))
    n_reads.clear()
    assert rows_in(list(merged_rows(chain, 1 << 18))) == model
    assert {*n_reads.values()} == {1}


@pytest.fixture(scope="module")
def wide():
    """A chain of rows of a kilobyte: 8 MB in the full link, and half as many in the others."""
    slots = (SlotSpec("embedding", "float32", (256,)),)
    return long_chain(Writer(opened("memory://merged-rows-wide")), n_rows=8000, n_links=25, slots=slots)[0]


def peak_of(chain, budget_bytes) -> int:
    """Return the most bytes that numpy, Arrow and Python held during a merge."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert sum(batch.num_rows for batch in merged_rows(chain, budget_bytes)) == chain[0].entry.rows
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.slow
@pytest.mark.parametrize("budget_bytes", [2 << 20, 5 << 20])
def test_memory_stays_within_the_budget_and_one_batch(wide, budget_bytes):
    batch_bytes, books_bytes = 500 * 1032, 3 * 8 * N_BUCKETS
    assert peak_of(wide, budget_bytes) < budget_bytes + 2 * batch_bytes + books_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_links(wide):
    assert peak_of(wide, 2 << 20) < peak_of(wide[-1:], 2 << 20) + (1 << 20)


def test_a_range_is_a_bucket_where_there_is_no_memory_for_more(writer):
    full = writer.link(9, [dict.fromkeys(map(int, UNIVERSE[-9:]), 0)], is_whole=True)
    assert [batch.num_rows for batch in merged_rows([full], 1)] == [1] * 9
