"""Tables filled from chains, held against a dict; the checkpoints are made by docs/format.md, not by recckpt."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.drawn import drawn
from support.foreign import ForeignTable
from support.forge import Tables
from support.spec_writer import Held, write_delta_of, write_full
from support.thread_ranks import ThreadGroup, Wire, alone, no_others

from recckpt.dense.registered import extra_registry, io_registry
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.load import load as loading
from recckpt.load.conf import parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import opened
from recckpt.load.problems import Problems
from recckpt.load.source import LocatedCheckpoint
from recckpt.output_dir import open_files
from recckpt.output_dir.listing import locate
from recckpt.parallel.threads import run_all
from recckpt.sparse import HashTable, gen_slice
from recckpt.sparse.files.link_pass import LinkDeletes
from recckpt.storage import open_storage
from recckpt.text import Progress

SLOTS = (("embedding", (2,)), ("sparse_m", ()))
UNIVERSE = [0, -1, 2**63 - 1, -(2**63), *range(1, 25)]
IDS = st.sets(st.sampled_from(UNIVERSE), max_size=12)


def row(id_, link):
    """Return the numbers of a row: which version of which id it is, and something to filter by."""
    return (float(id_ % 97), float(link), float((id_ + link) % 5))


class Chain:
    """A full checkpoint and deltas in a directory, and what the rows of the newest are.

    Args:
        shards: of each link: of each shard, the rows and the deleted ids of each table.
        replaced: of each link: the tables that are replaced.
    """

    def __init__(self, links, replaced=(), tables=("a", "b")):
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.rows = {table: {} for table in tables}
        self.written = []
        for number, shards in enumerate(links):
            held = {table: self._held(table, number, shards, replaced) for table in tables}
            if number:
                self.written.append(write_delta_of(self.written[-1], f"ckpt_{number}", held))
            else:
                self.written.append(write_full(self.root, "ckpt_0", held))

    def _held(self, table, number, shards, replaced):
        is_replaced = number > 0 and (number, table) in replaced
        is_whole, seen, written = is_replaced or number == 0, set(), []
        gone = [set() if is_whole else set(shard[table][1]) for shard in shards]
        for shard, deletes in zip(shards, gone, strict=True):
            mine = [id_ for id_ in shard[table][0] if not (id_ in seen or seen.add(id_))]
            written.append(({id_: row(id_, number) for id_ in mine}, sorted(deletes - {*mine})))
        before = {} if is_whole else self.rows[table]
        deleted = set().union(*(deletes for _, deletes in written))
        self.rows[table] = {id_: found for id_, found in before.items() if id_ not in deleted}
        for rows, _ in written:
            self.rows[table] |= rows
        return Held(len(self.rows[table]), written, is_replaced, SLOTS)

    def source(self, conf=None):
        """Return the newest checkpoint, with what it stands on."""
        storage = open_storage(str(self.root))
        return LocatedCheckpoint(parse_load_conf(conf), storage, locate(storage, self.written[-1].directory.name))

    def remove(self):
        shutil.rmtree(self.root)


def how(meetings=None):
    """Return how a rank loads, by itself where it has no meetings."""
    return {"concurrency": 2, "download_dir": None, "rng": False, "meetings": meetings or no_others()}


def load(source, tables, shard=0, shards=1, meetings=None):
    """Load tables of one rank."""
    live = LiveState(Tables(tables), None, extra_registry(), io_registry(), shard, shards)
    with opened([source], live.needs) as sources:
        return loading.load(live, sources, Problems(), **how(meetings))


def load_together(source, ranks_tables):
    """Load tables of several ranks, which read each batch once."""
    ranks, wire = len(ranks_tables), Wire(len(ranks_tables))

    def on_rank(rank):
        together = alone(ThreadGroup(rank, wire))
        return together.in_meetings(lambda meetings: load(source, ranks_tables[rank], rank, ranks, meetings))

    return run_all(on_rank, range(ranks), ranks)


def table_of(name, rows=(), slice=None):
    """Return a table with rows of no checkpoint."""
    table = HashTable(2, name=name, slice=slice)
    table.add_slot("sparse_m", ())
    ids = np.array(sorted(rows), np.int64)
    ids = torch.from_numpy(ids[slice.owns(ids)] if slice and len(ids) else ids)
    table.insert(ids, torch.full((len(ids), 2), -1.0), {"sparse_m": torch.full((len(ids),), -1.0)})
    return table


def rows_of(*tables):
    """Return the rows of all ranks, id -> numbers; no two have an id."""
    rows = {}
    for table in tables:
        columns = torch.cat([table.embeddings(), table.slots["sparse_m"].view(-1, 1)], 1).tolist()
        assert rows.keys().isdisjoint(table.ids().tolist())
        rows |= dict(zip(table.ids().tolist(), map(tuple, columns), strict=True))
    return rows


SHARDS = st.lists(st.fixed_dictionaries({"a": st.tuples(IDS, IDS), "b": st.tuples(IDS, IDS)}), min_size=1, max_size=3)
REPLACED = st.sets(st.tuples(st.integers(1, 4), st.sampled_from("ab")), max_size=2)
CONFS = st.fixed_dictionaries(
    {
        "hashtable_clear": st.booleans(),
        "where": st.sampled_from([{}, {"sparse_m": {"min": 2}}, {"ids": UNIVERSE[::2]}, {"sample": 0.5}]),
        "load": st.sampled_from([["*"], ["sparse"], ["sparse_opt"]]),
    }
)


def expected_rows(before, chain_rows, conf, kept):
    """Return what a load makes of the rows of a table."""
    with_rows = "sparse_opt" not in conf["load"]
    rows = dict.fromkeys(before, (-1.0, -1.0, -1.0))
    rows = {} if conf["hashtable_clear"] and with_rows else rows
    for id_, found in chain_rows.items():
        if kept(id_, found):
            if with_rows:
                old = rows.get(id_, (0.0, 0.0, 0.0))
                rows[id_] = found if conf["load"] == ["*"] else (*found[:2], old[2])
            elif id_ in rows:
                rows[id_] = (*rows[id_][:2], found[2])
    return rows


@drawn(
    st.lists(SHARDS, min_size=1, max_size=5),
    REPLACED,
    CONFS,
    IDS,
    st.integers(1, 4),
    st.booleans(),
    few=12,
    many=1000,
)
def test_a_chain_gives_the_rows_of_a_dict_however_it_is_loaded(links, replaced, conf, before, ranks, is_together):
    chain = Chain(links, replaced)
    try:
        where = parse_load_conf(conf).where
        ranks_tables = [
            [table_of(name, before, gen_slice(n, ranks) if ranks > 1 else None) for name in "ab"] for n in range(ranks)
        ]
        if is_together:
            reports = load_together(chain.source(conf), ranks_tables)
        else:
            reports = [load(chain.source(conf), tables, n, ranks) for n, tables in enumerate(ranks_tables)]
        for name, *of_ranks in zip("ab", *ranks_tables, strict=True):

            def kept(id_, found):
                return bool(where.keeps(np.array([id_]), {"sparse_m": np.array([found[2]])})[0])

            assert rows_of(*of_ranks) == expected_rows(before, chain.rows[name], conf, kept)
            if conf["load"] != ["sparse_opt"]:
                taken = sum(report.rows_taken[name] for report in reports)
                assert taken == sum(kept(*found) for found in chain.rows[name].items())
    finally:
        chain.remove()


@pytest.fixture
def make():
    """Make chains of the table "a" that go when the test ends: of each link, of each shard (ids of rows, deletes)."""
    chains = []

    def chain(*links, replaced=()):
        of_tables = [[{"a": shard} for shard in shards] for shards in links]
        chains.append(Chain(of_tables, {(number, "a") for number in replaced}, tables=("a",)))
        return chains[-1]

    yield chain
    for each in chains:
        each.remove()


THREE = [({1, 2, 3}, ())], [({2, 4}, {3})], [({3}, {1}), ({5}, ())]


def test_an_id_that_was_deleted_and_is_there_again_has_its_newest_row(make):
    chain, table = make(*THREE), table_of("mine")
    report = load(chain.source({"oname": [{"mine": "a"}]}), [table])  # by another name in all links
    assert rows_of(table) == {2: row(2, 1), 3: row(3, 2), 4: row(4, 1), 5: row(5, 2)} == chain.rows["a"]
    assert report.rows_taken == {"mine": 4}
    assert {item.thing.rows for item in report.items if item.name.is_slot} == {4}, "of three links with eight"


def test_an_id_that_has_moved_to_another_shard_has_its_row_there(make):
    chain, table = make([({1, 2}, ()), ({3}, ())], [({2}, {1}), ({1}, {2})]), table_of("a")
    load(chain.source(), [table])
    assert rows_of(table) == {1: row(1, 1), 2: row(2, 1), 3: row(3, 0)}


@pytest.mark.parametrize("rows", [(), (1, 9)])
def test_a_table_that_is_not_ours_is_filled_from_a_chain(make, rows):
    chain = make(*THREE)
    ids = torch.tensor(rows).long()
    table = ForeignTable("a", ids, torch.ones(len(rows), 2), {"sparse_m": torch.ones(len(rows))})
    load(chain.source(), [table])
    found = dict(zip(table.ids().tolist(), table.embeddings().tolist(), strict=True))
    assert found == {id_: [*numbers[:2]] for id_, numbers in chain.rows["a"].items()}


@pytest.mark.parametrize(("dim", "dtype"), [(2, torch.float64), (3, torch.float32), (1, torch.float16)])
def test_rows_of_a_chain_are_cast_and_resized(make, dim, dtype):
    chain, table = make(*THREE), HashTable(dim, name="a", dtype=dtype)
    load(chain.source({"on_mismatch": "resize"}), [table])
    found = dict(zip(table.ids().tolist(), table.embeddings()[:, :2].tolist(), strict=True))
    assert found == {id_: [*numbers[: min(dim, 2)]] for id_, numbers in chain.rows["a"].items()}


def test_what_is_older_than_a_replaced_table_is_not_even_opened(make):
    chain, table = make(*THREE, [({7}, ())], [({8}, ())], replaced=[3]), table_of("a")
    source = chain.source()
    for link in chain.written[:3]:
        shutil.rmtree(link.directory)
    load(source, [table])
    assert rows_of(table) == {7: row(7, 3), 8: row(8, 4)}


def test_links_that_are_removed_after_they_were_opened_are_read_to_the_end_and_before_said_to_be_gone(make):
    chain, table = make(*THREE), table_of("a")
    live, source = LiveState(Tables([table]), None, extra_registry(), io_registry(), 0, 1), chain.source()
    with opened([source], live.needs) as sources:
        for link in chain.written:
            shutil.rmtree(link.directory)
        loading.load(live, sources, Problems(), **how())
    assert rows_of(table) == chain.rows["a"]
    with pytest.raises(CheckpointRemovedError, match="ckpt_2"):
        load(source, [table_of("a")])


def test_a_long_chain_leaves_maps_to_the_process(make, monkeypatch):
    monkeypatch.setattr(open_files, "_MOST_MAPS", 4)
    chain, table = make(THREE[0], *([({1, number}, {2})] for number in range(4, 9))), table_of("a")
    live = LiveState(Tables([table]), None, extra_registry(), io_registry(), 0, 1)
    with opened([chain.source()], live.needs) as sources:
        assert [len(link.files._maps) for link in sources[0]._chain.links] == [2] * 6, "of three files each"
        loading.load(live, sources, Problems(), **how())
    assert rows_of(table) == chain.rows["a"]


def test_what_was_read_is_the_sum_of_the_links(make, monkeypatch):
    chain, advanced, totals = make(*THREE), [], []
    monkeypatch.setattr(Progress, "advance", lambda progress, n_bytes: advanced.append(n_bytes))
    made = Progress.__init__
    monkeypatch.setattr(
        Progress, "__init__", lambda self, what, total, **how: (totals.append(total), made(self, what, total, **how))[1]
    )
    one = load(make(THREE[0]).source(), [table_of("a")])
    report = load(chain.source(), [table_of("a")])
    assert totals == [3 * 20, 7 * 20]
    assert sum(advanced) == sum(totals)
    assert report.bytes_read > one.bytes_read + 4 * 20 + 2 * 8


@pytest.mark.parametrize("rows", [(), (1, 99)])
class TestDamage:
    """Refused with the name of the link, before the table changes."""

    def refused(self, chain, rows, match):
        for table in (table_of("a", rows), ForeignTable("a", torch.tensor(rows).long(), torch.ones(len(rows), 2))):
            before = table.ids().tolist()
            with pytest.raises(CorruptCheckpointError, match=match):
                load(chain.source(), [table])
            assert table.ids().tolist() == before

    def delta(self, chain, shards, rows, **held):
        chain.written.append(
            write_delta_of(chain.written[-1], "ckpt_9", {"a": Held(rows, shards, slots=SLOTS, **held)})
        )

    @pytest.mark.parametrize("n_rows", [3, 5])
    def test_rows_that_the_chain_does_not_give(self, make, rows, n_rows):
        chain = make(*THREE)
        self.delta(chain, [({}, (77,))], n_rows)
        self.refused(chain, rows, rf"ckpt_9/manifest.json.*table 'a': found {n_rows} rows, expected 4, as in its chain")

    @pytest.mark.parametrize("link", [0, 1])
    def test_an_id_in_two_shards_of_a_link(self, make, rows, link):
        chain = make()
        twice = [({1: row(1, 0)}, ()), ({1: row(1, 1)}, ())]
        once = [({1: row(1, 0), 2: row(2, 0)}, ())]
        full = write_full(chain.root, "full", {"a": Held(2, once if link else twice, slots=SLOTS)})
        delta = write_delta_of(full, "delta", {"a": Held(2, twice if link else once, slots=SLOTS)})
        chain.written += [full, delta]
        self.refused(chain, rows, rf"{'delta' if link else 'full'}/sparse/.*id 1 twice")

    def test_an_id_as_row_and_delete_of_a_shard(self, make, rows):
        chain = make(*THREE)
        self.delta(chain, [({4: row(4, 9)}, (4,))], 4)
        self.refused(chain, rows, "ckpt_9/sparse/.*id 4 twice")

    def test_a_delete_twice_in_a_shard(self, make, rows, monkeypatch):
        chain = make(*THREE)
        self.delta(chain, [({}, (4,))], 3)
        monkeypatch.setattr(LinkDeletes, "add", lambda self, table, shard, ids: ids)
        self.refused(chain, rows, "ckpt_9/sparse/.*id 4 twice")

    def test_a_flipped_bit_in_the_oldest_link(self, make, rows):
        chain = make(*THREE)
        [part] = chain.written[0].directory.glob("sparse/*.arrow")
        data = bytearray(part.read_bytes())
        data[data.index(np.array([1.0, 0.0], np.float32).tobytes())] ^= 1
        part.write_bytes(data)
        self.refused(chain, rows, "ckpt_0/sparse/.*checksum")

    def test_a_flipped_bit_anywhere_in_a_part_of_deletes(self, make, rows):
        chain = make(*THREE)
        [part] = chain.written[2].directory.glob("sparse/*.deletes.*.arrow")
        data = part.read_bytes()
        for at in range(0, len(data), 37):
            part.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            self.refused(chain, rows, "ckpt_2/sparse/.*deletes")
