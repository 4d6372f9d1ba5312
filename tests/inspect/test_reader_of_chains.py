"""Readers of deltas and forms, without torch: held against a dict, against each other, and beside a run that saves."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import numpy as np
import polars as pl
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import Run
from support.forge import filled, save_tables, sealed
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta
from support.sweeps import mostly_slow
from test_world import rows_in as bytes_in
from torch import nn

import recckpt
from recckpt import CheckpointReader, Deltas, Saver
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format.buckets import bucket_of
from recckpt.inspect.verify import verify
from recckpt.output_dir import open_files
from recckpt.output_dir.listing import list_checkpoints
from recckpt.output_dir.open_files import OpenFiles
from recckpt.sparse import HashTable
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage

START = {id_: (float(id_),) * 2 for id_ in range(6)}


def full(path):
    """Save a full checkpoint, ckpt_1, of rows whose values are their ids."""
    save_tables(path, [filled("t", list(START))], concurrency=1)
    return counting(Path(path))[0]


@pytest.fixture
def base(tmp_path):
    return full(tmp_path / "runs")


@pytest.fixture
def delta(base):
    """Since the base 1 has changed, 2 and 3 were deleted, 9 is new; a shard deletes 4, which is in the other now."""
    return write_delta(base, "ckpt_2", 5, [({1: (7, 7), 9: (9, 9)}, [2, 4]), ({4: (8, 8)}, [3])])


CHANGED = {0: (0, 0), 1: (7, 7), 4: (8, 8), 5: (5, 5), 9: (9, 9)}


def rows_in(batches):
    """Return id -> vector, having seen no id twice."""
    rows = [(row["id"], tuple(row["embedding"])) for batch in batches for row in batch.to_pylist()]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def rows_of(path, ids=None):
    with CheckpointReader(path) as reader:
        return rows_in(reader.table("t", ids=ids))


def test_a_delta_gives_the_rows_of_its_chain_in_bucket_order(tmp_path, delta):
    assert rows_of(tmp_path / "runs") == rows_of(delta.directory) == CHANGED
    assert rows_of(tmp_path / "runs" / "ckpt_1") == START
    with CheckpointReader(delta.directory) as reader:
        ids = np.concatenate([batch.column("id").to_numpy() for batch in reader.table("t")])
        assert reader.manifest.rows == len(ids)
    assert (np.diff(bucket_of(ids)) >= 0).all()
    reader = CheckpointReader(tmp_path / "runs")
    reader.close()
    assert not reader.refresh()
    reader.close()
    assert rows_in(reader.table("t")) == CHANGED, "closed, it opens all again"


def test_a_lookup_takes_the_newest_row_and_stops_at_deletes(delta):
    with CheckpointReader(delta.directory) as reader:
        found = rows_in(reader.table("t", ids=[0, 1, 2, 3, 4, 9, 77]))
        assert found == {id_: CHANGED[id_] for id_ in (0, 1, 4, 9)}
        assert rows_in(reader.table("t", ids=[2, 3])) == {}
        assert [batch.to_pydict() for batch in reader.table("t", [], [5])] == [{"id": [5]}]
        values, is_there = reader.lookup("t", [0, 1, 2, 3, 4, 9, 77, 1], default=-1)
        assert is_there.tolist() == [True, True, False, False, True, True, False, True]
        assert values.tolist() == [[0, 0], [7, 7], [-1, -1], [-1, -1], [8, 8], [9, 9], [-1, -1], [7, 7]]


def test_a_lookup_of_what_the_newest_link_knows_reads_no_other(base, delta):
    for path in base.directory.glob("sparse/*.arrow"):
        path.write_bytes(bytes(path.stat().st_size))
    assert rows_of(delta.directory, [9, 2]) == {9: (9, 9)}
    with pytest.raises(CorruptCheckpointError, match="ckpt_1/sparse"):
        rows_of(delta.directory, [0])
    with CheckpointReader(delta.directory) as reader:
        assert reader.lookup("t", [9, 2]).values.tolist() == [[9, 9], [0, 0]]
        with pytest.raises(CorruptCheckpointError, match="ckpt_1/sparse"):
            reader.lookup("t", [0])


def test_of_a_replaced_table_nothing_older_is_read(base, delta):
    for path in base.directory.glob("sparse/*.arrow"):
        path.write_bytes(bytes(path.stat().st_size))
    replaced = write_delta(delta, "ckpt_3", 1, [({3: (1, 1)}, [])], replaced=True)
    assert rows_of(replaced.directory) == {3: (1, 1)}
    newer = write_delta(replaced, "ckpt_4", 2, [({1: (2, 2)}, [])])
    assert rows_of(newer.directory) == {3: (1, 1), 1: (2, 2)}
    assert recckpt.inspect.dataset(newer.directory, "t").count_rows() == 2


def test_a_form_gives_what_its_delta_gives(tmp_path, delta):
    before = rows_of(delta.directory)
    table = recckpt.inspect.dataset(delta.directory, "t").to_table().sort_by("id")
    form = write_compacted(delta, CHANGED)
    for path in (form.directory, delta.directory, tmp_path / "runs"):
        assert rows_of(path) == before
        assert recckpt.inspect.dataset(path, "t").to_table().sort_by("id").equals(table)
    assert rows_of(form.directory, [1, 2, 4]) == {1: (7, 7), 4: (8, 8)}


IDS = st.integers(-4, 9)
SHARD = st.tuples(st.sets(IDS), st.sets(IDS))
LINKS = st.lists(st.tuples(st.lists(SHARD, min_size=1, max_size=3), st.integers(0, 7)), max_size=6)


@settings(deadline=None, max_examples=20)
@given(LINKS, st.sets(IDS))
def test_what_a_reader_gives_of_a_chain_is_what_a_dict_gives(links, asked):
    with TemporaryDirectory() as path:
        model, newest = START, full(path)
        for number, (shards, chance) in enumerate(links, 2):
            model, newest = next_link(newest, f"ckpt_{number}", model, shards, replaced=chance == 0, number=number)
            if chance == 1:
                write_compacted(newest, model)
        with CheckpointReader(path) as reader:
            assert rows_in(reader.table("t")) == model
            assert rows_in(reader.table("t", ids=asked)) == {id_: model[id_] for id_ in asked if id_ in model}
            assert rows_in(reader.dataset("t").to_batches(columns=["id", "embedding"])) == model


def next_link(below, ckpt_id, model, shards, *, replaced, number):
    """Write a delta with rows of this number, and return the rows that there are then, and it."""
    taken, written, deleted = set(), [], set()
    for upserts, deletes in shards:
        upserts, deletes = upserts - taken, deletes - upserts if not replaced else set()
        taken |= upserts
        deleted |= deletes
        written.append(({id_: (number, id_) for id_ in upserts}, sorted(deletes)))
    kept = {} if replaced else {id_: row for id_, row in model.items() if id_ not in deleted}
    model = kept | {id_: (number, id_) for id_ in taken}
    return model, write_delta(below, ckpt_id, len(model), written, replaced=replaced)


def test_arrow_polars_and_duckdb_query_a_delta_lazily(delta):
    rows = recckpt.inspect.dataset(delta.directory, "t")
    assert rows_in(rows.to_batches(columns=["id", "embedding"])) == CHANGED
    assert set(rows.to_table()["table"].to_pylist()) == {"t"}
    assert (
        rows.schema == rows.to_table().schema == recckpt.inspect.dataset(delta.directory.parent / "ckpt_1", "t").schema
    )
    assert (rows.count_rows(), rows.head(3).num_rows) == (5, 3)
    assert rows.to_table(columns=["id"], filter=pc.field("id") > 4).sort_by("id").to_pydict() == {"id": [5, 9]}
    assert rows.filter(pc.field("id") > 4).filter(pc.field("id") < 9).to_table(columns=["id"]).to_pydict() == {
        "id": [5]
    }
    doubled = rows.to_table(columns={"twice": pc.field("id") * 2}, filter=pc.field("id") == 9)
    assert doubled.to_pydict() == {"twice": [18]}
    frame = pl.scan_pyarrow_dataset(rows).filter(pl.col("id") > 4).select("id").collect()
    assert sorted(frame["id"]) == [5, 9]
    assert duckdb.sql("select sum(id), max(embedding[1]) from rows where id < 9").fetchall() == [(10, 8.0)]


def test_a_dataset_of_a_delta_is_read_to_its_end_though_links_are_removed(tmp_path, delta):
    rows = recckpt.inspect.dataset(delta.directory, "t")
    for path in sorted((tmp_path / "runs").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert rows.count_rows() == 5


def test_a_dataset_reads_no_slots_that_a_query_does_not_name(delta, monkeypatch):
    columns, init = set(), PartReader.__init__

    def seen(self, storage, directory, part, slots, names=None, **options):
        columns.update(names)
        init(self, storage, directory, part, slots, names, **options)

    rows = recckpt.inspect.dataset(delta.directory, "t")
    monkeypatch.setattr(PartReader, "__init__", seen)
    assert rows.to_table(columns=["id"], filter=pc.field("id") == 9).num_rows == 1
    assert columns == set()
    assert rows.to_table(columns=["id"], filter=pc.list_element(pc.field("embedding"), 0) == 8).num_rows == 1
    assert columns == {"embedding"}


def test_damage_reaches_who_queries(base, delta):
    path = next(base.directory.glob("sparse/*.arrow"))
    rows = recckpt.inspect.dataset(delta.directory, "t")
    data = path.read_bytes()
    path.write_bytes(data.replace(np.array([5.0, 5.0], np.float32).tobytes(), bytes(8)))
    with pytest.raises(CorruptCheckpointError, match="ckpt_1/sparse"):
        rows.to_table()


def test_what_cannot_be_asked_of_merged_rows_says_what_can(tmp_path, delta):
    rows = recckpt.inspect.dataset(delta.directory, "t")
    for ask in (lambda: rows.sort_by("id"), lambda: ds.Scanner.from_dataset(rows).to_table()):
        with pytest.raises(NotImplementedError, match=r"query to_table\(\)"):
            ask()
    with pytest.raises(TypeError, match="open one in each process"):
        rows.__reduce__()
    ds.write_dataset(rows, tmp_path / "out", format="ipc")
    assert ds.dataset(tmp_path / "out", format="ipc").sort_by("id").to_table()["id"].to_pylist() == sorted(CHANGED)


def held(monkeypatch):
    """Note which directories are opened."""
    opened, init = [], OpenFiles.__init__

    def seen(self, storage, directory, *args, **options):
        opened.append(directory)
        init(self, storage, directory, *args, **options)

    monkeypatch.setattr(OpenFiles, "__init__", seen)
    return opened


def test_a_reader_moves_to_the_newest_checkpoint_and_opens_only_new_links(tmp_path, base, monkeypatch):
    opened = held(monkeypatch)
    with CheckpointReader(tmp_path / "runs") as reader:
        assert rows_in(reader.table("t")) == START
        assert set(opened) == {"ckpt_1"}
        assert not reader.refresh()
        opened.clear()
        second = write_delta(base, "ckpt_2", 7, [({8: (8, 8)}, [])])
        write_delta(second, "ckpt_3", 6, [({9: (9, 9)}, [1, 8])])
        before = reader.table("t")
        assert reader.refresh()
        assert set(opened) == {"ckpt_2", "ckpt_3"}
        assert reader.manifest.ckpt_id == "ckpt_3"
        assert rows_in(before) == START
        assert rows_in(reader.table("t")) == {**{id_: row for id_, row in START.items() if id_ != 1}, 9: (9, 9)}
        assert not reader.refresh()


def test_a_reader_stays_in_the_output_dir_that_it_was_made_for_wherever_the_process_goes(tmp_path, base, monkeypatch):
    shutil.copytree(tmp_path / "runs", tmp_path / "elsewhere" / "runs")
    monkeypatch.chdir(tmp_path)
    with CheckpointReader("runs") as reader:
        write_delta(base, "ckpt_2", 7, [({8: (8, 8)}, [])])
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert reader.refresh()
        assert reader.manifest.ckpt_id == "ckpt_2"


def test_a_reader_takes_the_form_of_what_it_reads_and_lets_go_of_the_links(tmp_path, delta, monkeypatch):
    with CheckpointReader(tmp_path / "runs") as reader:
        form = write_compacted(delta, CHANGED)
        opened = held(monkeypatch)
        assert not reader.refresh(), "it is the same checkpoint"
        assert set(opened) == {form.directory.name}
        assert rows_in(reader.table("t")) == CHANGED


def test_a_reader_that_cannot_move_stays_where_it_is(tmp_path, base, delta):
    with CheckpointReader(delta.directory) as reader:
        for path in (*delta.directory.rglob("*"), *base.directory.rglob("*")):
            if path.is_file():
                path.unlink()
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError)):
            reader.refresh()
        assert rows_in(reader.table("t")) == CHANGED


@pytest.mark.parametrize(
    ("rows", "shards", "found", "twice"),
    [
        (7, [({9: (9, 9)}, []), ({9: (1, 1)}, [])], "id 9 twice", 9),
        (7, [({9: (9, 9), 1: (1, 1)}, [1])], "id 1 twice", 1),
        (9, [({9: (9, 9)}, [])], "7 rows in the chain", None),
        (5, [({}, [77])], "6 rows in the chain", None),
    ],
)
def test_what_contradicts_itself_is_refused_by_the_name_of_the_link(base, rows, shards, found, twice):
    delta = write_delta(base, "ckpt_2", rows, shards)
    with pytest.raises(CorruptCheckpointError) as caught:
        rows_of(delta.directory)
    assert (caught.value.path, caught.value.found) == ("ckpt_2/sparse", found)
    if twice is not None:
        with pytest.raises(CorruptCheckpointError, match=f"ckpt_2/.*id {twice} twice"):
            rows_of(delta.directory, [twice])
        assert rows_of(delta.directory, [0]) == {0: (0, 0)}
        with (
            CheckpointReader(delta.directory) as reader,
            pytest.raises(CorruptCheckpointError, match=f"id {twice} twi"),
        ):
            reader.lookup("t", [0])


def test_the_files_of_a_chain_share_the_maps_that_a_process_has(delta, monkeypatch):
    monkeypatch.setattr(open_files, "_MOST_MAPS", 2)
    monkeypatch.setattr(open_files, "_CHAIN_MAPS", 1)
    with CheckpointReader(delta.directory) as reader:
        links = reader._now.links
        assert [len(link.files._maps) for link in links] == [1, 1]  # of two, at most
        assert rows_in(reader.table("t")) == CHANGED


@pytest.mark.parametrize("rows", [4, 6, 10**15])
def test_a_whole_slot_of_a_delta_that_says_other_rows_than_it_has_is_damaged(delta, rows):
    """Before a slot of so many rows takes its memory, or is too small for those that come."""
    path = delta.directory / "manifest.json"
    text = path.read_text()
    body = text[: text.rindex(',\n  "manifest_xxh3"')].replace('"rows": 5', f'"rows": {rows}')
    path.write_bytes(sealed((body + "\n}\n").encode()))
    with (
        CheckpointReader(delta.directory) as reader,
        pytest.raises(CorruptCheckpointError, match=rf"expected {rows}, by the"),
    ):
        reader.read_tensor("t@embedding")


def live_rows(table):
    """Return id -> slot -> bytes."""
    if not len(table):
        return {}
    columns = {"embedding": table.embeddings(), **table.slots}
    raw = {n: t.detach().contiguous().view(len(table), -1).view(torch.uint8).numpy() for n, t in columns.items()}
    return {int(id_): {n: raw[n][row].tobytes() for n in raw} for row, id_ in enumerate(table.ids())}


@mostly_slow()
def test_a_run_with_deltas_is_read_at_each_of_its_saves_and_all_of_it_is_good(url):
    run = Run(url, interval=3, max_keep=4, deltas=True)
    kinds = set()
    reader = None
    for _ in range(8):
        run.train(3)
        reader = reader or CheckpointReader(url)
        reader.refresh()
        kinds.add(reader.manifest.kind)
        for table in run.model.tables:
            assert bytes_in(reader.table(table.name)) == live_rows(table)
    assert kinds == {"full", "delta"}
    assert verify(url) == []
    reader.close()


@mostly_slow()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_dtypes_and_shapes_of_any_kind_come_back(tmp_path, dtype):
    table = HashTable((2, 3), name="t", dtype=dtype)
    table.add_slot("scalar", (), dtype)
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), max_keep=None, deltas=Deltas(max_dirty=1.0))
    for number in range(4):
        ids = torch.randperm(50)[:30]
        table.insert(ids, (torch.randn(30, 2, 3) * 9).to(dtype), {"scalar": (torch.randn(30) * 9).to(dtype)})
        table.erase(torch.randperm(50)[:3])
        saver.save(f"c{number}")
        with CheckpointReader(tmp_path) as reader:
            expected = live_rows(table)
            assert bytes_in(reader.table("t")) == expected
            assert bytes_in(reader.dataset("t").to_batches()) == expected
    assert reader.manifest.kind == "delta"


def test_an_adopted_form_gives_what_its_delta_gave_and_is_good(tmp_path):
    run = Run(tmp_path, interval=3, max_keep=3, deltas=Deltas(max_dirty=1.0, max_chain_bytes=100.0)).train(6)
    rows = {table.name: live_rows(table) for table in run.model.tables}
    offer = recckpt.rewrite.compact(tmp_path)
    assert verify(str(tmp_path)) == []
    run.train(3)
    adopted = list_checkpoints(open_storage(str(tmp_path))).find("ckpt_6")
    assert (adopted.manifest.kind, adopted.directory) == ("full", offer.directory)
    assert verify(str(tmp_path)) == verify(str(tmp_path / adopted.directory)) == []
    with CheckpointReader(tmp_path / "ckpt_6") as reader, CheckpointReader(tmp_path) as newest:
        for table in run.model.tables:
            assert bytes_in(reader.table(table.name)) == rows[table.name]
            assert bytes_in(newest.table(table.name)) == live_rows(table)
