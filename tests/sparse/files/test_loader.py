import logging
import tracemalloc
from itertools import product, starmap

import numpy as np
import pytest
import torch
from support.foreign import ForeignTable
from support.forge import Forge, empty, filled, load, parts_of, rows_of, save_tables
from support.sweeps import mostly_slow

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, PartlyLoadedError, StateMismatchError
from recckpt.output_dir import open_files
from recckpt.output_dir.listing import locate
from recckpt.output_dir.rotation import remove
from recckpt.sparse import gen_slice
from recckpt.sparse.files import link_pass, part_reader
from recckpt.sparse.files.link_pass import LinkLoad
from recckpt.text import Progress


def test_the_rows_of_the_checkpoint_replace_those_of_the_table_which_goes_on_as_any_other(storage):
    save_tables(storage, [filled("t", range(100))])
    table = filled("t", [3, 400, 500])
    table.insert(torch.tensor([3]), torch.full((1, 2), -1.0))
    assert load(storage, [table]) == 100
    assert rows_of(table) == rows_of(filled("t", range(100)))
    table.insert(torch.tensor([5, 1000]), torch.full((2, 2), 7.0))
    assert len(table) == 101
    assert table.lookup(torch.tensor([5, 6, 1000]))[0][:, 0].tolist() == [7, 6, 7]
    assert table.erase(torch.arange(50)) == 50
    assert len(table) == 51


def some(saved, loaded):
    """Return the pair, of which every second is in the default suite: each number, and more, as many and fewer."""
    return pytest.param(saved, loaded, marks=() if (saved + loaded) % 2 or saved == loaded == 2 else pytest.mark.slow)


@mostly_slow("saved", "loaded")
@pytest.mark.parametrize(("saved", "loaded"), list(starmap(some, product([1, 2, 3], range(1, 6)))))
def test_any_number_of_ranks_loads_what_any_other_saved_each_row_once(storage, saved, loaded):
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 500))

    def part_of(shard, shards):
        slice_ = gen_slice(shard, shards)
        return filled("t", ids[slice_.owns(ids)], slice=slice_)

    save_tables(storage, *([part_of(n, saved)] for n in range(saved)), batch_bytes=200)
    shards = [empty("t", slice=gen_slice(n, loaded)) for n in range(loaded)]
    assert sum(load(storage, [shard]) for shard in shards) == len(ids)
    for n, shard in enumerate(shards):
        assert rows_of(shard) == rows_of(part_of(n, loaded))


def test_a_rank_reads_only_the_batches_that_may_hold_its_rows(storage, monkeypatch):
    ids = np.arange(5000)
    save_tables(storage, [filled("t", ids)], batch_bytes=1000)
    batches = [batch for part in parts_of(storage) for batch in part.batches]
    read, seen = part_reader.PartReader.read, []
    monkeypatch.setattr(
        part_reader.PartReader, "read", lambda self, *args: (seen.append(args[0]), read(self, *args))[1]
    )
    shard = empty("t", slice=gen_slice(1, 10))
    load(storage, [shard])
    assert len(batches) > 50
    assert len(seen) <= len(batches) / 10 + 2


def test_only_wanted_columns_are_read_and_the_optimizer_alone_goes_to_the_rows_that_are_there(storage):
    slots = {"sparse_m": (4,), "kept": ()}
    save_tables(storage, [filled("t", range(10), slots=slots)])
    table = filled("t", [99], slots=slots)
    assert load(storage, [table], exclude=["sparse_opt"]) == 10
    assert table.slots["kept"].sum() == 45
    assert table.slots["sparse_m"].abs().sum() == 0
    assert torch.equal(table.embeddings()[:, 0], table.ids().float())
    table = filled("t", [3, 99, 5], slots=slots)
    table.insert(table.ids(), torch.full((3, 2), -1.0), {"sparse_m": torch.full((3, 4), -1.0)})
    before = table.slots["kept"].clone()
    assert load(storage, [table], load=["sparse_opt"]) == 2
    assert table.ids().tolist() == [3, 99, 5]
    assert table.slots["sparse_m"][:, 0].tolist() == [3, -1, 5]
    assert table.embeddings()[:, 0].tolist() == [-1, -1, -1]
    assert torch.equal(table.slots["kept"], before)


def test_what_does_not_fit_is_named_all_at_once_before_anything_changes(storage):
    saved = [filled("a", range(3), slots={"sparse_m": (4,)}), filled("b", range(3)), filled("other", [1])]
    save_tables(storage, saved)
    tables = [
        filled("a", [9], shape=3, slots={"sparse_m": (5,)}),
        filled("b", [9], dtype=torch.float64),
        filled("missing", [9]),
    ]
    before = [rows_of(table) for table in tables]
    with pytest.raises(StateMismatchError) as caught:
        load(storage, tables)
    assert caught.value.missing == ["missing"]
    assert caught.value.unexpected == ["other"]
    assert caught.value.mismatched == {
        "a@embedding": ("float32 (2,)", "float32 (3,)"),
        "a@sparse_m": ("float32 (4,)", "float32 (5,)"),
        "b@embedding": ("float32 (2,)", "float64 (2,)"),
    }
    assert [rows_of(table) for table in tables] == before


def test_without_strict_what_has_no_partner_is_left_alone_and_said_as_are_slots_of_one_side(storage, caplog):
    save_tables(storage, [filled("a", range(3), slots={"sparse_old": ()}), filled("other", [1])])
    tables = [empty("a"), filled("missing", [9])]
    tables[0].add_slot("sparse_new", (), initial=0.5)
    with caplog.at_level(logging.WARNING, "recckpt"):
        assert load(storage, tables, strict=False) == 3
    assert len(tables[1]) == 1
    assert tables[0].slots["sparse_new"].tolist() == [0.5] * 3
    for said in (
        "'missing'",
        "'other'",
        "from scratch: 'a@sparse_new'",
        "has names that are not in the model: 'other', 'a@sparse_old'",
    ):
        assert said in caplog.text


@pytest.mark.parametrize("rows", [[], [1, 99]])
@pytest.mark.parametrize("across", [False, True])
def test_an_id_that_is_there_twice_is_corrupt_and_the_table_as_it_was(local, rows, across):
    if across:  # one shard has it as well as the other
        save_tables(local, [filled("t", [1, 2, 3])], [filled("t", [3, 4])])
    else:
        save_tables(local, [filled("t", range(5))], concurrency=1)
        Forge(f"{local.url}/ckpt_1").edit_part(lambda batch: batch.take([0, *range(batch.num_rows)]))
    for table in (filled("t", rows), ForeignTable("t", torch.tensor(rows).long(), torch.ones(len(rows), 2))):
        before = rows_of(table)
        with pytest.raises(CorruptCheckpointError, match=r"table 't'.*twice"):
            load(local, [table])
        assert rows_of(table) == before


@pytest.mark.parametrize("rows", [[], [1, 99]])
def test_damage_in_the_last_batch_leaves_every_table_as_it_was(local, rows):
    save_tables(local, [filled("a", range(500)), filled("b", range(500))], batch_bytes=500)
    part = parts_of(local)[-1]
    path = Forge(f"{local.url}/ckpt_1").path(part.file)
    data = bytearray(path.read_bytes())
    at = data.rindex(np.float32(490).tobytes() * 2)
    data[at] ^= 1
    path.write_bytes(data)
    tables = [filled("a", rows), filled("b", rows)]
    before = [rows_of(table) for table in tables]
    with pytest.raises(CorruptCheckpointError, match="column 'embedding'"):
        load(local, tables)
    assert [rows_of(table) for table in tables] == before


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_load_that_breaks_off_leaves_no_half_of_a_table(local, error, monkeypatch):
    save_tables(local, [filled("t", range(500))], batch_bytes=500)
    table, n_batches = empty("t"), []

    def fails(n_bytes):
        n_batches.append(n_bytes)
        if len(n_batches) == 3:
            raise error

    monkeypatch.setattr(Progress, "advance", lambda progress, n_bytes: fails(n_bytes))
    with pytest.raises(type(error)):
        load(local, [table], concurrency=1)
    assert len(n_batches) >= 3
    assert len(table) == 0


class Line:
    """The connection to a storage, which breaks after so many reads of parts."""

    def __init__(self, storage, monkeypatch, breaks=None, after=10**9):
        self.n_reads, self._read, self._breaks, self._after = 0, storage.read, breaks, after
        monkeypatch.setattr(storage, "read", self.read)
        monkeypatch.setattr(storage, "map", lambda name: None)

    def read(self, name, max_bytes, begin=0):
        if name.endswith(".arrow"):
            self.n_reads += 1
            if self.n_reads > self._after:
                self._breaks()
        return self._read(name, max_bytes, begin)


def reset():
    raise ConnectionResetError(104, "Connection reset by peer")


def two(rows, others=None):
    """Return two tables with an optimizer slot."""
    return [
        filled("a", rows, slots={"sparse_m": ()}),
        filled("b", rows if others is None else others, slots={"sparse_m": ()}),
    ]


@pytest.fixture
def many_runs(storage, monkeypatch):
    """A checkpoint of two tables, each of more batches than one thread reads in a row."""
    monkeypatch.setattr(link_pass, "READ_BYTES", 16_000)
    save_tables(storage, two(range(2000)), concurrency=1, batch_bytes=1000)
    return storage


def n_reads(storage, tables):
    with pytest.MonkeyPatch.context() as patch:
        line = Line(storage, patch)
        load(storage, tables, concurrency=1)
    assert line.n_reads > 4
    return line.n_reads


@mostly_slow()
@pytest.mark.parametrize("rows", [[], [1, 99]])
def test_a_line_that_breaks_in_the_middle_is_said_and_the_next_load_mends_it(many_runs, rows):
    tables = two(rows)
    last = n_reads(many_runs, two(rows)) - 1
    with pytest.MonkeyPatch.context() as patch:
        Line(many_runs, patch, reset, after=last)
        with pytest.raises(PartlyLoadedError if rows else ConnectionResetError) as caught:
            load(many_runs, tables, concurrency=1)
    assert [len(table) for table in tables] == [0, 0]
    if rows:
        assert (caught.value.emptied, caught.value.mixed) == (("a", "b"), ())
        assert "Connection reset by peer; tables 'a', 'b' are empty now, everything else" in str(caught.value)
    load(many_runs, tables)
    assert [rows_of(table) for table in tables] == [rows_of(table) for table in two(range(2000))]


def test_before_the_first_row_is_changed_an_error_is_all_there_is_and_an_interrupt_later_says_what_it_left(
    many_runs, caplog
):
    tables = two([1, 99], [])
    before, last = [rows_of(table) for table in tables], n_reads(many_runs, two([1, 99], [])) - 1
    with pytest.MonkeyPatch.context() as patch:
        Line(many_runs, patch, reset, after=3)
        with pytest.raises(ConnectionResetError):
            load(many_runs, tables, concurrency=1)
    assert [rows_of(table) for table in tables] == before

    def interrupt():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        Line(many_runs, patch, interrupt, after=last)
        with pytest.raises(KeyboardInterrupt):
            load(many_runs, tables, concurrency=1)
    assert "tables 'a' are empty now" in caplog.text
    assert [len(table) for table in tables] == [0, 0]


@mostly_slow()
@pytest.mark.parametrize("conf", [{"hashtable_clear": False}, {"load": ["sparse_opt"]}])
def test_rows_that_a_broken_load_has_merged_are_said_to_be_mixed(many_runs, conf):
    with pytest.MonkeyPatch.context() as patch:
        line = Line(many_runs, patch)
        load(many_runs, two([1, 5000], []), concurrency=1, **conf)
    with pytest.MonkeyPatch.context() as patch:
        Line(many_runs, patch, reset, after=line.n_reads - 1)
        merged = two([1, 5000], [])
        with pytest.raises(PartlyLoadedError, match="tables 'a' hold only some") as caught:
            load(many_runs, merged, concurrency=1, **conf)
    assert (caught.value.emptied, caught.value.mixed) == ((), ("a",))
    assert len(merged[1]) == 0


@mostly_slow()
@pytest.mark.parametrize("rows", [[], [1, 99]])
def test_a_checkpoint_that_goes_in_the_middle_is_said_to_be_removed(many_runs, rows, monkeypatch):
    monkeypatch.setattr(open_files, "_MOST_MAPS", 0)
    last = n_reads(many_runs, two(rows)) - 1
    Line(many_runs, monkeypatch, lambda: remove(many_runs, locate(many_runs, "ckpt_1"), 1), after=last)
    with pytest.raises(CheckpointRemovedError) as caught:
        load(many_runs, two(rows), concurrency=1)
    assert caught.value.emptied == (("a", "b") if rows else ())


@pytest.mark.parametrize("rows", [[], [1, 99]])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda forge: forge.edit_catalog(narrow),
            r"batch 3 \(table 't'\): found id -?\d+ of bucket \d+, expected ids of",
        ),
        (
            lambda forge: forge.edit_manifest(lambda values: values["tables"][0].update(rows=501)),
            r"table 't': found 501 rows, expected 500",
        ),
    ],
    ids=["a bucket of the catalog", "rows of the manifest"],
)
def test_rows_that_are_not_those_of_catalog_and_manifest_are_corrupt(local, rows, damage, message):
    save_tables(local, [filled("t", range(500))], batch_bytes=1000)
    damage(Forge(f"{local.url}/ckpt_1"))
    table = filled("t", rows)
    before = rows_of(table)
    with pytest.raises(CorruptCheckpointError, match=message):
        load(local, [table])
    assert rows_of(table) == before


def narrow(values):
    """Let a batch begin a bucket later than it does."""
    buckets = values["parts"][0]["batches"][3]["buckets"]
    buckets[0] += 1


@pytest.mark.slow
def test_loading_needs_little_memory_beyond_the_table(local):
    saved = empty("t", shape=64)
    saved.insert(torch.arange(100_000), torch.ones(100_000, 64))
    save_tables(local, [saved], batch_bytes=1 << 20)
    table = empty("t", shape=64)
    load(local, [table])
    tracemalloc.start()
    load(local, [empty("t", shape=64)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.35 * table.nbytes, "one table, some batches, and never a second table"
    assert rows_of(table) == rows_of(saved)


def test_several_threads_read_one_part(storage):
    """On stores without a memory map as well, where readers could share one position."""
    table = filled("t", range(20_000))
    save_tables(storage, [table], concurrency=1, batch_bytes=2000)
    for _ in range(3):
        twin = empty("t")
        load(storage, [twin], concurrency=8)
        assert rows_of(twin) == rows_of(table)


class Passes(list):
    """Tables, and how often somebody went through all of them."""

    n = 0

    def __iter__(self):
        self.n += 1
        return super().__iter__()


@mostly_slow()
@pytest.mark.parametrize("n_tables", [5, 40])
def test_tables_are_gone_through_and_parts_opened_as_often_however_many_there_are(storage, monkeypatch, n_tables):
    save_tables(storage, [filled(f"t{n}", range(40)) for n in range(n_tables)], concurrency=1)
    monkeypatch.setattr(link_pass, "READ_BYTES", 1000)  # several runs, of a few tables each
    opened, init, links, link_init = [], part_reader.PartReader.__init__, [], LinkLoad.__init__

    def opening(reader, *args, **options):
        opened.append(args[2])
        init(reader, *args, **options)

    monkeypatch.setattr(part_reader.PartReader, "__init__", opening)

    def noted(link, number, tables, *args):
        links.append(Passes(tables))
        link_init(link, number, links[-1], *args)

    monkeypatch.setattr(LinkLoad, "__init__", noted)
    assert load(storage, [empty(f"t{n}") for n in range(n_tables)]) == 40 * n_tables
    assert len(opened) - len(parts_of(storage)) <= 1, "each part once, and once more for its frame"
    assert sum(link.n for link in links) <= 8
