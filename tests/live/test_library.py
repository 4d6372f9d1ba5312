"""Hash tables of other libraries: whatever comes and goes, a chain of deltas gives the rows of each moment."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support import spec_reader
from support.documents import blocks
from support.fake_libraries import FakeDynamicemb, FakeHkv
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Deltas, Saver
from recckpt.errors import LiveTableError
from recckpt.inspect.verify import verify
from recckpt.live import LibraryExport, LibraryTable, live_tables
from recckpt.live.library_rows import LibraryRows
from recckpt.sparse import HashTable
from recckpt.sparse.table.marks import DeltaSource
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import SlotSpec

ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1)


@cache
def of_the_page():
    """Return the names that the page defines where it adapts libraries."""
    names = {"torch": torch, "LibraryExport": LibraryExport, "SlotSpec": SlotSpec}
    for block in blocks("your-tables.md"):
        if block.text.lstrip().startswith(("class HkvTable", "from recckpt.live import LibraryExport")):
            exec(block.text.split("\n\n\nmodel = ")[0], names)
    return names


class Dynamicemb:
    """A table of dynamicemb, as the page adapts it."""

    def __init__(self, capacity=40):
        self.theirs = FakeDynamicemb("t", dim=2, capacity=capacity)
        self.table = of_the_page()["DynamicembTable"]("t", self.theirs, dim=2)

    def train(self, keys):
        self.theirs.train(keys)

    def erase(self, keys):
        self.theirs.erase(keys)


class Hkv:
    """A table of HierarchicalKV, as the page adapts it."""

    def __init__(self, capacity=40):
        self.theirs = FakeHkv(dim=2, capacity=capacity)
        self.table = of_the_page()["HkvTable"]("t", self.theirs, dim=2)

    def train(self, keys):
        self.table.train(keys)

    def erase(self, keys):
        self.table.erase(torch.tensor(keys))


LIBRARIES = [Dynamicemb, Hkv]
every_library = pytest.mark.parametrize("library", LIBRARIES)


def truth_of(one):
    """Return key -> the bytes of its slots, as the library has them."""
    return {
        key: {
            "embedding": values[:2].numpy().tobytes(),
            "sparse_sum": values[2:].numpy().tobytes(),
            "score": np.int64(score).tobytes(),
        }
        for key, (values, score) in one.theirs.rows.items()
    }


def change(one, draw):
    """Train keys, some of them new, so that others are evicted and come again; sometimes erase some."""
    one.train(draw.choice(90, size=int(draw.integers(1, 9)), replace=False).tolist())
    if draw.random() < 0.3 and one.theirs.rows:
        one.erase(draw.permutation(list(one.theirs.rows))[:2].tolist())


def saver_of(output_dir, one, **options):
    model = nn.ModuleDict({"top": nn.Linear(2, 1)})
    tables = live_tables(model, adapters=[one.table])
    return Saver(model, output_dir=str(output_dir), tables=tables, max_keep=99, progress=False, **options)


def read(source):
    """Read a source as the saver does."""
    rows = np.arange(source.n_rows)
    targets = {slot.name: np.zeros((len(rows), slot.row_bytes), np.uint8) for slot in source.slots}
    for number, target in enumerate(targets.values(), 1):
        source.read(number, rows, target.reshape(-1), is_last=number == len(targets))
    ids = source.ids.to_tensor(source.n_rows).tolist()
    return {key: {name: target[i].tobytes() for name, target in targets.items()} for i, key in enumerate(ids)}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("seed", range(40))
@mostly_slow("library")
def test_replaying_deltas_gives_the_rows_of_each_moment_for_each_of_two_savers(library, seed):
    """Saves of two savers by turns, some of which fail at the end, beside training."""
    draw, one = np.random.default_rng(seed), library()
    table, n_deltas, n_again, gone = LibraryRows(one.table), 0, 0, set()
    savers = [{"tracker": Tracker(), "base": "", "rows": {}} for _ in range(2)]
    for number in range(60):
        saver = savers[int(draw.integers(2))]
        before = truth_of(one).keys()
        for _ in range(int(draw.integers(0, 4))):
            change(one, draw)
        truth = truth_of(one)
        n_again += len(gone & truth.keys())
        gone = (gone | before) - truth.keys()
        frozen = saver["tracker"].freeze(table)
        is_whole = frozen.is_replaced(saver["base"])
        if is_whole or draw.random() < 0.1:  # or the policy asks for a full one
            frozen.snapshot.export()
            source, under = frozen.snapshot, {}
        else:
            source, under = (frozen.delta, frozen.changes)[int(draw.integers(2))](saver["base"]), saver["rows"]
            n_deltas += 1
        change(one, draw)  # beside the save
        deletes = set(source.deletes().tolist())
        rows = {key: row for key, row in under.items() if key not in deletes}
        rows |= read_changed(source)
        assert rows == truth
        if draw.random() < 0.3:
            frozen.failed()
        else:
            saver["base"], saver["rows"] = f"c{number}", rows
            frozen.committed(saver["base"])
        source.close()
    assert n_deltas > 20
    assert n_again > 0


def read_changed(source):
    """Read a source; one whose other rows could be read too is narrowed first, as for a save with conditions."""
    if isinstance(source, DeltaSource):
        source.narrow()
    return read(source)


@every_library
def test_saves_in_the_background_are_deltas_with_deletes_and_come_back(library, tmp_path):
    draw, one = np.random.default_rng(1), library()
    saver, kinds, deletes = saver_of(tmp_path, one, deltas=ALWAYS), [], 0
    for number in range(8):
        for _ in range(3):
            change(one, draw)
        truth = truth_of(one)
        handle = saver.save_async(f"c{number}", step=number)
        change(one, draw)
        info = handle.wait()
        [entry] = info.tables
        kinds.append(info.kind)
        deletes += entry.delta.deletes if entry.delta else 0
        assert spec_reader.read(tmp_path, f"c{number}", "t") == truth
    assert kinds == ["full", *["delta"] * 7]
    assert deletes > 10
    assert verify(str(tmp_path)) == []
    other = library()
    other.train([1000])
    other_saver = saver_of(tmp_path, other, deltas=ALWAYS)
    other_saver.load()
    assert truth_of(other) == truth
    other.train([3, 1001])
    info = other_saver.save("after")
    assert info.kind == "delta"
    assert info.tables[0].delta.upserts < 20
    assert spec_reader.read(tmp_path, "after", "t") == truth_of(other)


@every_library
def test_what_went_before_a_save_that_failed_is_deleted_by_the_next(library, tmp_path, monkeypatch):
    one = library()
    saver = saver_of(tmp_path, one, deltas=ALWAYS)
    one.train(list(range(20)))
    saver.save("a")
    one.erase([3, 4])
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.save.sparse_saver.SparseSaver.save", _full_disk)
        with pytest.raises(Exception, match="no room"):
            saver.save("b")
    one.train([4])
    info = saver.save("c")
    assert (info.kind, info.tables[0].delta.upserts, info.tables[0].delta.deletes) == ("delta", 1, 1)
    assert spec_reader.read(tmp_path, "c", "t") == truth_of(one)


def _full_disk(*args):
    raise OSError("no room")


def test_an_export_that_fails_after_it_has_read_what_went_makes_the_next_save_whole(tmp_path, monkeypatch, caplog):
    one = Hkv()
    saver = saver_of(tmp_path, one, deltas=ALWAYS)
    one.train(torch.arange(20).tolist())
    saver.save("a")
    one.erase([3])
    monkeypatch.setattr(one.table, "begin_epoch", _full_disk)
    with pytest.raises(Exception, match="no room"):
        saver.save("b")
    monkeypatch.undo()
    [entry] = saver.save("c").tables
    assert entry.rows == 19
    assert "come and gone" not in caplog.text  # it was known before rows were counted
    assert entry.delta is None or entry.delta.replaced
    assert spec_reader.read(tmp_path, "c", "t") == truth_of(one)


def test_an_eviction_that_is_not_named_is_noticed_and_all_rows_are_saved(tmp_path, caplog):
    one = Hkv()
    saver = saver_of(tmp_path, one, deltas=ALWAYS)
    one.train(list(range(40)))
    saver.save("a")
    one.theirs.train_and_evict([50, 51])  # past the adapter
    [entry] = saver.save("b").tables
    assert entry.delta.replaced
    assert "table 't': found 40 rows, expected 42 by what its library says" in caplog.text
    assert spec_reader.read(tmp_path, "b", "t") == truth_of(one)


@every_library
def test_a_table_that_had_no_room_for_all_rows_is_saved_whole_next(library, tmp_path):
    one, small = library(), library(capacity=10)
    one.train(list(range(30)))
    saver_of(tmp_path, one).save("a")
    saver = saver_of(tmp_path, small, deltas=ALWAYS)
    saver.load()
    assert len(small.table) == 10
    info = saver.save("b")
    assert info.kind == "full" or info.tables[0].delta.replaced
    assert spec_reader.read(tmp_path, "b", "t") == truth_of(small)


@every_library
def test_rows_of_a_table_of_recckpt_begin_with_what_it_lacks_and_are_merged_with_others(library, tmp_path):
    ours, one = nn.ModuleDict({"t": HashTable(2, name="t")}), library()
    ours["t"](torch.tensor([7, 1 << 40]))
    Saver(ours, output_dir=str(tmp_path / "ours")).save("a")
    one.train([3, 7])
    saver = saver_of(tmp_path / "theirs", one, deltas=ALWAYS)
    saver.save("b")
    report = saver.load_by_config({"path": str(tmp_path / "ours"), "load": ["t@*"], "hashtable_clear": False})
    assert report.rows_taken["t"] == 2
    assert one.theirs.rows.keys() == {3, 7, 1 << 40}
    assert one.theirs.rows[7][0].tolist() == [*ours["t"](torch.tensor([7]))[0].tolist(), 0, 0]
    saver.save("c")
    assert spec_reader.read(tmp_path / "theirs", "c", "t") == truth_of(one)


@pytest.mark.slow
def test_ranks_that_have_their_ids_by_the_hash_of_recckpt_save_and_restore_on_others(tmp_path):
    run_script(Path(__file__).with_name("library_ranks.py"), tmp_path, 2, 1, 3)
    for size in (2, 1, 3):
        ranks = results(tmp_path, size)
        truth = {key: row for of_rank in ranks for key, row in of_rank.items()}
        assert len(truth) == sum(map(len, ranks)) > 80
        assert spec_reader.read(tmp_path / "runs", f"delta-{size}", "t") == truth


def test_options_of_what_is_saved_apply_to_deltas_too(tmp_path):
    one = Hkv()
    saver = saver_of(
        tmp_path, one, deltas=ALWAYS, save_slots=["!t@sparse_sum"], save_where={"t": {"score": {"min": 0}}}
    )
    one.train(list(range(20)))
    saver.save("a")
    one.train([3, 4, 30])
    one.erase([5])
    info = saver.save("b")
    assert (info.tables[0].delta.upserts, info.tables[0].delta.deletes) == (3, 1)
    found = spec_reader.read(tmp_path, "b", "t")
    assert found == {k: {n: v for n, v in row.items() if n != "sparse_sum"} for k, row in truth_of(one).items()}


def test_what_is_printed_names_the_table_and_a_second_call_gives_the_same_tables():
    model, one = nn.Module(), Hkv()
    assert isinstance(one.table, LibraryTable)
    tables = live_tables(model, adapters=[one.table])
    assert "t      0 x 2       HkvTable  score, sparse_sum  own" in str(tables)
    assert live_tables(model, adapters=[one.table]) is tables
    with pytest.raises(LiveTableError, match="others are asked for"):
        live_tables(model, adapters=[Hkv().table])
    with pytest.raises(LiveTableError, match="two tables are named 't'"):
        live_tables(nn.Module(), adapters=[one.table, Hkv().table])


def test_the_rows_of_now_are_what_any_table_has():
    one = Dynamicemb()
    one.train([5, 9])
    table = LibraryRows(one.table)
    assert sorted(table.ids().tolist()) == [5, 9]
    assert table.embeddings().shape == (2, 2)
    assert {name: tuple(values.shape) for name, values in table.slots.items()} == {"score": (2,), "sparse_sum": (2, 2)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(torch.tensor([1, 1]), {"embedding": torch.zeros(2, 2)})], "found the id 1 twice"),
        (
            [(torch.tensor([1]), {"embedding": torch.zeros(1, 3)})],
            r"found a batch of .*\(1, 3\), expected .*float32\[2\]",
        ),
        ([(torch.tensor([1]), {})], "found a batch of id torch.int64"),
        ([(torch.tensor([1, 2]), {"embedding": torch.zeros(2, 2)})], "found 2 ids in its export, expected 1"),
    ],
)
def test_an_export_that_is_not_rows_of_the_table_is_refused(rows, message, tmp_path):
    class Wrong(Hkv):
        name = "t"

        def __init__(self):
            self.table = self

        def __len__(self):
            return 1

        def slots(self):
            return [SlotSpec("embedding", "float32", (2,))]

        def export(self, since):
            return LibraryExport(rows, torch.empty(0, dtype=torch.int64), 1)

        def insert(self, ids, slots):
            pass

        def clear(self):
            pass

    with pytest.raises(LiveTableError, match=message):
        saver_of(tmp_path, Wrong(), deltas=True).save("a")


@pytest.mark.parametrize(
    "slots", [[], [SlotSpec("embedding", "complex64", (2,))], [SlotSpec("embedding", "int8", (0,))]]
)
def test_slots_that_cannot_be_saved_are_refused(slots):
    one = Hkv()
    one.table.slots = lambda: slots
    with pytest.raises(LiveTableError, match=r"found the slots .*, expected 'embedding' among them"):
        live_tables(nn.Module(), adapters=[one.table])
