"""Following a run that saves deltas: what is new is read, and what comes of it is what a whole load gives."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.errors import PartlyLoadedError
from recckpt.sparse import HashTable, gen_slice
from recckpt.text import Progress

ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)
EVERYTHING = {"load": ["sparse", "sparse_opt"]}


def table(slice=None):
    found = HashTable(2, name="t", slice=slice)
    found.add_slot("sparse_m", ())
    return found


def set_rows(found, ids, value):
    ids = torch.tensor(sorted(ids), dtype=torch.int64)
    found.insert(ids, torch.full((len(ids), 2), float(value)), {"sparse_m": ids % 5 + float(value % 3)})


def rows_of(found):
    columns = torch.cat([found.embeddings(), found.slots["sparse_m"].view(-1, 1)], 1).tolist()
    return dict(zip(found.ids().tolist(), columns, strict=True))


class Source:
    """A run that saves deltas of one table."""

    def __init__(self, root):
        self.root, self.table, self.n_saves = root, table(), 0
        self.saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(root), max_keep=None, deltas=ALWAYS)

    def save(self):
        self.n_saves += 1
        return self.saver.save(f"ckpt_{self.n_saves}", step=self.n_saves)

    def change(self, ids, erased=()):
        set_rows(self.table, ids, self.n_saves)
        self.table.erase(torch.tensor(sorted(erased), dtype=torch.int64))
        return self.save()


class Follower:
    """A run that follows it."""

    def __init__(self, source, root, *, before=(), slice=None, **conf):
        self.table = table(slice)
        set_rows(self.table, before, -1)
        saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(root))
        self.manager = CheckpointManager(saver, 10)
        self.manager.load_model_bank([{"path": str(source.root), "is_dynamic": True, **EVERYTHING, **conf}])

    def reload(self):
        """Return how many rows were taken."""
        return [report.rows_taken["t"] for report in self.manager.reload_dynamic()]


@pytest.fixture
def source(tmp_path):
    found = Source(tmp_path / "source")
    found.change(range(100))
    return found


@pytest.fixture
def follower(source, tmp_path):
    return Follower(source, tmp_path / "own")


def test_only_links_that_are_new_are_read(source, follower):
    source.change([1, 2, 200], [50])
    assert source.change([2, 3]).kind == "delta"
    for part in (source.root / "ckpt_1").glob("sparse/*.arrow"):
        part.write_bytes(bytes(part.stat().st_size))
    assert follower.reload() == [4]
    assert rows_of(follower.table) == rows_of(source.table)
    source.change([], range(10))
    assert follower.reload() == [0]
    assert rows_of(follower.table) == rows_of(source.table)
    assert follower.reload() == []


def test_a_source_is_the_same_one_wherever_the_process_goes(source, tmp_path, monkeypatch):
    shutil.copytree(source.root, tmp_path / "elsewhere" / "source")
    monkeypatch.chdir(tmp_path)
    follower = Follower(source, tmp_path / "own", path="source")
    source.change([1, 2])
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert follower.reload() == [2]


@mostly_slow()
@pytest.mark.parametrize("change", ["a row", "an erased row", "a new row", "all"])
def test_all_is_read_where_a_table_has_changed_here(source, follower, change):
    changes = {
        "a row": lambda: set_rows(follower.table, [7], 77),
        "an erased row": lambda: follower.table.erase(torch.tensor([7])),
        "a new row": lambda: follower.table(torch.tensor([777])),
        "all": follower.table.clear,
    }
    changes[change]()
    source.change([1])
    assert follower.reload() == [100]
    assert rows_of(follower.table) == rows_of(source.table)
    source.change([1])
    assert follower.reload() == [1]


def test_all_is_read_where_a_link_is_whole_or_the_source_has_begun_anew(source, follower):
    source.table.clear()
    source.change([1, 2])
    assert follower.reload() == [2]
    assert rows_of(follower.table) == rows_of(source.table)
    Saver(nn.ModuleDict({"t": source.table}), output_dir=str(source.root), max_keep=None).save("full")
    assert follower.reload() == [2]


def test_a_row_that_the_filter_no_longer_keeps_goes(source, tmp_path):
    follower = Follower(source, tmp_path / "own", where={"sparse_m": {"min": 2}})
    assert 1 not in rows_of(follower.table)
    for value, taken in ((2.0, 1), (3.0, 1), (1.0, 0)):
        source.change([1])
        assert source.table.slots["sparse_m"][1] == value
        assert follower.reload() == [taken]
        assert (1 in rows_of(follower.table)) == bool(taken)


def test_slots_that_are_not_taken_are_a_reason_to_read_all(source, tmp_path):
    follower = Follower(source, tmp_path / "own", load=["sparse"])
    source.change([1])
    assert follower.reload() == [100]


def test_a_load_that_breaks_off_in_new_links_is_made_up_for_by_a_whole_one(source, follower, monkeypatch):
    source.change(range(50))
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(PartlyLoadedError, match="broken"):
            follower.reload()
    set_rows(follower.table, [3], 33)
    assert follower.reload() == [100]
    assert rows_of(follower.table) == rows_of(source.table)


IDS = st.sets(st.integers(0, 15), max_size=6)
STEP = st.tuples(IDS, IDS, st.booleans(), st.booleans())  # rows, erased; whether the source and follower load then
CONFS = st.fixed_dictionaries(
    {
        "hashtable_clear": st.booleans(),
        "where": st.sampled_from([{}, {"sparse_m": {"min": 2}}, {"ids": [*range(0, 16, 2)]}]),
        "load": st.sampled_from([["sparse", "sparse_opt"], ["sparse_opt"], ["sparse"]]),
    }
)


@drawn(st.lists(STEP, max_size=6), CONFS, IDS, st.sampled_from([None, gen_slice(1, 2)]), few=10, many=400)
def test_what_comes_of_new_links_is_what_a_whole_load_gives(steps, conf, before, slice):
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        source = Source(root / "source")
        source.change(range(8))
        kept = [id_ for id_ in before if slice is None or slice.owns(torch.tensor([id_]))[0]]
        follower = Follower(source, root / "own", before=kept, slice=slice, **conf)
        for ids, erased, reloads, clears in steps:
            if clears and not erased:
                source.table.clear()
            source.change(ids, erased)
            if reloads:
                whole = table(slice)
                found = rows_of(follower.table)
                set_rows(whole, found, 0)
                ids_here = torch.tensor([*found], dtype=torch.int64)
                numbers = torch.tensor([*found.values()]).view(-1, 3)
                whole.insert(ids_here, numbers[:, :2], {"sparse_m": numbers[:, 2].contiguous()})
                Saver(nn.ModuleDict({"t": whole}), output_dir=str(root / "other")).load_by_config(
                    [{"path": str(source.root), **conf}]
                )
                follower.reload()
                assert rows_of(follower.table) == rows_of(whole)
    finally:
        shutil.rmtree(root)
