"""A table as a dataset that pyarrow, polars, duckdb and pandas query."""

import gc
import json
import subprocess
import sys
import weakref

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from support.builders import Run
from support.delta_runs import rows_of, run_with_chain
from support.forge import Forge, filled, save_tables
from support.paths import ROOT
from support.sweeps import mostly_slow

import recckpt
from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, RecckptError
from recckpt.format.buckets import gen_slice
from recckpt.sparse.files.chain_table import ChainTable
from recckpt.sparse.files.part_reader import PartReader


def different_tables(slice=None):
    """Tables of other widths, slots and dtypes, two of them alike, and one without rows."""

    def own(ids):
        ids = np.array(ids, np.int64)
        return ids if slice is None else ids[slice.owns(ids)]

    return [
        filled("user", own(range(-50, 50)), shape=16, slots={"sparse_adam_exp_avg": (16,), "sparse_step": ()}),
        filled("item", own(range(300)), shape=8),
        filled("shop", own(range(40)), shape=8),
        filled("word", own(range(20)), shape=(2, 3), dtype=torch.float64),
        filled("new", [], shape=4),
    ]


def three_shards(url):
    save_tables(url, *(different_tables(gen_slice(number, 3)) for number in range(3)), batch_bytes=1000)


ROWS = {"user": range(-50, 50), "item": range(300), "shop": range(40), "word": range(20), "new": []}


def ids_and_firsts(ids, vectors):
    """Return id -> first value of its embedding."""
    return {id_: np.ravel(vector)[0] for id_, vector in zip(ids, vectors, strict=True)}


@mostly_slow()
@pytest.mark.parametrize("table", ROWS)
def test_pyarrow_polars_duckdb_and_pandas_read_exactly_the_rows_of_a_table_among_tables_that_differ(tmp_path, table):
    three_shards(tmp_path)
    rows = recckpt.inspect.dataset(tmp_path, table)
    expected = {n: float(n) for n in ROWS[table]}

    found = rows.to_table()
    found.validate(full=True)
    assert found.num_rows == rows.count_rows() == len(expected)
    assert ids_and_firsts(found["id"].to_pylist(), vectors(found)) == expected

    frame = pl.scan_pyarrow_dataset(rows).select("id", "embedding").collect()
    assert ids_and_firsts(frame["id"], frame["embedding"].to_list()) == expected

    queried = duckdb.sql("select id, embedding from rows").fetchall()
    assert {id_: vector[0] for id_, vector in queried} == expected

    pandas = found.drop_columns(["table"]).to_pandas()
    assert ids_and_firsts(pandas["id"], pandas["embedding"]) == expected


def vectors(found):
    column = found["embedding"].combine_chunks()
    return (column.storage if isinstance(column, pa.ExtensionArray) else column).to_pylist()


def test_queries_reach_into_the_rows_lazily(tmp_path):
    three_shards(tmp_path)
    items = recckpt.inspect.dataset(tmp_path / "ckpt_1", "item")
    assert pl.scan_pyarrow_dataset(items).filter(pl.col("id") > 297).collect()["id"].sort().to_list() == [298, 299]
    assert duckdb.sql("select max(embedding[8]) from items where id < 100").fetchall() == [(99.0,)]
    assert items.to_table(columns=["id"], filter=pc.field("id") == 7).to_pydict() == {"id": [7]}
    assert items.head(3).num_rows == 3
    assert set(items.to_table()["table"].to_pylist()) == {"item"}


def test_a_dataset_is_read_to_its_end_though_the_checkpoint_is_removed_meanwhile(tmp_path):
    three_shards(tmp_path)
    rows = recckpt.inspect.dataset(tmp_path, "shop")
    for path in sorted((tmp_path / "ckpt_1").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert rows.count_rows() == 40


def test_bfloat16_comes_as_bit_patterns_that_are_marked(tmp_path):
    save_tables(tmp_path, [filled("item", range(10), dtype=torch.bfloat16)])
    rows = recckpt.inspect.dataset(tmp_path, "item")
    assert rows.schema.field("embedding").metadata == {b"recckpt.dtype": b"bfloat16"}
    frame = pl.from_arrow(rows.to_table()).sort("id")
    bits = frame["embedding"].to_numpy().astype(np.uint32) << 16
    assert (bits.view(np.float32)[:, 0] == np.arange(10)).all()


@mostly_slow()
@pytest.mark.parametrize("table", ROWS)
def test_without_checks_the_fragments_of_a_table_have_its_rows_though_others_share_its_files(url, table):
    three_shards(url)
    rows = recckpt.inspect.dataset(url, table, checked=False)
    assert rows.schema == recckpt.inspect.dataset(url, table).schema
    found = pa.concat_tables([rows.schema.empty_table(), *(part.to_table() for part in rows.get_fragments())])
    found.validate(full=True)
    assert set(found["table"].to_pylist()) <= {table}
    expected = {n: float(n) for n in ROWS[table]}
    assert found.num_rows == len(expected)
    assert ids_and_firsts(found["id"].to_pylist(), vectors(found)) == expected
    assert ids_and_firsts(*pl.scan_pyarrow_dataset(rows).select("id", "embedding").collect()) == expected
    assert dict(duckdb.sql("select id, embedding[1] from rows").fetchall() if table != "word" else expected) == expected


def test_what_is_not_there_is_named(tmp_path):
    save_tables(tmp_path, different_tables())
    with pytest.raises(KeyError, match="did you mean 'item'"):
        recckpt.inspect.dataset(tmp_path, "itme")
    with pytest.raises(KeyError, match="did you mean 'item'"):
        recckpt.inspect.scan(tmp_path, "itme")
    for look in (lambda path: recckpt.inspect.dataset(path, "item"), recckpt.inspect.connect):
        with pytest.raises(CheckpointNotFoundError, match="does not exist"):
            look(tmp_path / "nowhere")
    with pytest.raises(TypeError):
        recckpt.inspect.connect(3)


def test_a_part_of_another_schema_and_one_that_is_cut_are_refused_at_once(tmp_path):
    save_tables(tmp_path, [filled("item", range(20))], concurrency=1)
    forge = Forge(tmp_path / "ckpt_1")
    forge.edit_part(lambda batch: batch.drop_columns(["embedding"]))
    with pytest.raises(CorruptCheckpointError, match="columns"):
        recckpt.inspect.dataset(tmp_path, "item")
    forge.path(forge.parts[0]).write_bytes(b"ARROW1")
    with pytest.raises(CorruptCheckpointError, match="6 bytes"):
        recckpt.inspect.dataset(tmp_path, "item")


def damaged(path, **options):
    """Save 300 rows whose values are their ids in several parts, and make 8 of the first 7."""
    save_tables(path, [filled("item", range(300), slots={"sparse_s": ()})], batch_bytes=500, **options)
    forge = Forge(path / "ckpt_1")
    seven, eight = (np.array([first, 7], np.float32).tobytes() for first in (7, 8))
    [part] = [part for part in forge.parts if seven in forge.path(part).read_bytes()]
    forge.path(part).write_bytes(forge.path(part).read_bytes().replace(seven, eight, 1))
    return recckpt.inspect.dataset(path, "item")


def test_every_value_that_a_query_reads_is_checked_and_no_other(tmp_path):
    rows = damaged(tmp_path)
    for query in (
        rows.to_table,
        lambda: rows.to_table(columns=["embedding"]),
        lambda: rows.to_table(columns=["id"], filter=pc.list_element(pc.field("embedding"), 0) > 3),
        lambda: rows.to_table(columns={"first": pc.list_element(pc.field("embedding"), 0)}),
        lambda: rows.filter(pc.is_valid(pc.field("embedding"))).count_rows(),
        lambda: list(rows.to_batches(columns=["embedding"])),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"column 'embedding': found checksum"):
            query()
    assert rows.count_rows() == 300
    assert rows.count_rows(filter=pc.field("sparse_s") < 10) == 10
    assert rows.to_table(columns=["id", "sparse_s"], filter=pc.field("id") == 7).to_pydict() == {
        "id": [7],
        "sparse_s": [7.0],
    }


@pytest.mark.slow
def test_rows_are_given_out_before_those_behind_them_are_read(tmp_path, monkeypatch):
    save_tables(tmp_path, [filled("item", range(30_000))], batch_bytes=100, concurrency=1)
    rows, checked = recckpt.inspect.dataset(tmp_path, "item"), []
    real = PartReader.column_problem
    monkeypatch.setattr(
        PartReader, "column_problem", lambda self, number, *rest: checked.append(number) or real(self, number, *rest)
    )
    assert rows.head(3, batch_readahead=0).num_rows == 3
    assert 0 < len(checked) < 2000  # of 10,000 and more: a thread of Arrow goes on until it sees that it is enough


def test_columns_of_a_map_are_checked_once(tmp_path, monkeypatch):
    save_tables(tmp_path, [filled("item", range(300), slots={"sparse_s": ()})], batch_bytes=500)
    rows, checked = recckpt.inspect.dataset(tmp_path, "item"), []
    real = PartReader.column_problem
    monkeypatch.setattr(
        PartReader, "column_problem", lambda self, number, *rest: checked.append(rest[-1]) or real(self, number, *rest)
    )
    for _ in range(2):
        assert rows.to_table(columns=["sparse_s"]).num_rows == 300
    assert {*checked} == {"sparse_s"}
    n_batches = len(checked)
    rows.to_table(columns=["id", "sparse_s"])
    assert sorted(checked) == ["id"] * n_batches + ["sparse_s"] * n_batches


def test_arrow_reads_the_files_by_itself_only_where_that_is_asked_for(tmp_path):
    rows = damaged(tmp_path)
    with pytest.raises(NotImplementedError, match="checked=False"):
        rows.sort_by("id").to_table()
    alone = recckpt.inspect.dataset(tmp_path, "item", checked=False)
    first = pc.list_element(pc.field("embedding"), 0)
    assert alone.to_table(columns={"first": first})["first"].to_pylist().count(8) == 2
    assert alone.schema == rows.schema
    assert alone.sort_by("id").to_table()["id"].to_pylist() == list(range(300))


def saved(path, *tables, **options):
    save_tables(path, list(tables), **options)
    return path


def test_each_table_is_a_view_of_its_id_and_slots(url):
    saved(url, filled('a"b;', range(9), slots={"sparse_s": ()}), filled("shop", range(4)), filled("none", []))
    with recckpt.inspect.connect(url) as connection:
        names = {name for (name,) in connection.sql("show tables").fetchall()}
        assert names == {'a"b;', "shop", "none", "checkpoints", "timeline"}
        assert connection.sql('from "a""b;"').columns == ["id", "embedding", "sparse_s"]
        assert connection.sql('select sum(sparse_s), count(*) from "a""b;"').fetchall() == [(36.0, 9)]
        assert connection.sql("select count(*) from none").fetchall() == [(0,)]
        joined = 'select count(*) from shop join "a""b;" using (id)'
        assert connection.sql(joined).fetchall() == [(4,)]
    assert recckpt.inspect.scan(url, "shop").select(pl.len()).collect().item() == 4
    rows = recckpt.inspect.dataset(url, "shop")
    for _ in range(2):  # once more, from the files that are open
        assert sorted(rows.to_table()["id"].to_pylist()) == list(range(4))


def test_chains_are_merged_for_both_and_let_go_of(tmp_path):
    storage = run_with_chain(tmp_path)
    expected = rows_of(storage, "ckpt_3")
    with recckpt.inspect.connect(tmp_path) as connection:
        found = {row[0] for row in connection.sql("select id from item").fetchall()}
        assert found == set(expected)
        assert connection.sql("select embedding[1] from item where id = 9").fetchall() == [(5.0,)]
        kinds = connection.sql("select id, kind from checkpoints").fetchall()
        assert kinds == [("ckpt_1", "full"), ("ckpt_2", "delta"), ("ckpt_3", "delta")]
    frame = recckpt.inspect.scan(tmp_path, "item")
    assert set(frame.select("id").collect()["id"]) == set(expected)
    assert frame.filter(pl.col("id") == 9).collect()["embedding"].to_list() == [[5.0, 6.0]]
    found = recckpt.inspect.dataset(tmp_path, "item")
    assert found.count_rows() > 0
    kept = weakref.ref(found._read)
    del found
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_come_as_float32(tmp_path, dtype):
    saved(tmp_path, filled("item", range(10), dtype=dtype, slots={"sparse_m": (2, 2)}))
    with recckpt.inspect.connect(tmp_path) as connection:
        assert connection.sql("select embedding[1] from item where id > 7 order by id").fetchall() == [(8.0,), (9.0,)]
        assert connection.sql("select sum(sparse_m[1]) from item").fetchall() == [(45.0,)]
    frame = recckpt.inspect.scan(tmp_path, "item").filter(pl.col("id") < 2).sort("id").collect()
    assert frame.columns == ["id", "embedding", "sparse_m"]
    assert frame["embedding"].to_list() == [[0.0, 0.0], [1.0, 1.0]]


def test_columns_and_filters_reach_arrow(tmp_path, monkeypatch):
    saved(tmp_path, filled("item", range(100), slots={"sparse_m": (8,)}))
    with recckpt.inspect.connect(tmp_path) as connection:
        [(_, plan)] = connection.sql("explain select id from item where id < 5").fetchall()
    assert "Filters" in plan
    assert "sparse_m" not in plan
    read = []
    real = ChainTable.all_rows
    monkeypatch.setattr(ChainTable, "all_rows", lambda self, slots: read.append(list(slots)) or real(self, slots))
    run_with_chain(tmp_path / "chain")
    with recckpt.inspect.connect(tmp_path / "chain") as connection:
        assert connection.sql("select count(id) from item where id < 5").fetchall() == [(5,)]
    assert read == [[]]


def test_names_that_sql_does_not_tell_apart_get_a_number_and_a_warning(tmp_path, caplog):
    saved(tmp_path, filled("Item", range(3)), filled("item", range(5)), filled("timeline", range(7)))
    with recckpt.inspect.connect(tmp_path) as connection:
        counts = "select (select count(*) from Item), (select count(*) from item_2), (select count(*) from timeline_2)"
        assert connection.sql(counts).fetchall() == [(3, 5, 7)]
    assert "table 'item' is the view 'item_2'" in caplog.text


def test_slots_that_sql_does_not_tell_apart_are_columns_of_their_own(tmp_path, caplog):
    table = filled("item", [7], slots=dict.fromkeys(["s", "S", "s_2", "ID", "Table"], ()))
    values = {name: torch.tensor([float(number)]) for number, name in enumerate(table.slots)}
    table.insert(torch.tensor([7]), torch.zeros(1, 2), values)
    saved(tmp_path, table)
    with recckpt.inspect.connect(tmp_path) as connection:
        shown = connection.sql("select * exclude (embedding) from item")
        found = dict(zip(shown.columns, *shown.fetchall(), strict=True))
        filtered = connection.sql('select "S_2" from item where "S_2" > -1').fetchall()
    of = {name: column.item() for name, column in values.items()}
    # in the order of the files, which is that of the names: ID, S, Table, s, s_2
    assert found == {"id": 7, "ID_2": of["ID"], "S": of["S"], "Table": of["Table"], "s_2": of["s"], "s_2_2": of["s_2"]}
    assert filtered == [(of["s"],)]
    assert "slot 's_2' of table 'item' is the column 's_2_2'" in caplog.text


def test_metrics_and_labels_of_checkpoints_are_columns_of_what_they_are(tmp_path, caplog):
    saver = recckpt.Saver(torch.nn.Linear(2, 2), output_dir=str(tmp_path), max_keep=None)
    states = (
        {"loss": 0.5, "step": 3},
        {"loss": float("nan"), "run": {"by": "ann", "tags": ["a"]}},
        {"loss": 0.25, "Loss": "x"},
    )
    for number, state in enumerate(states, 1):
        saver.save(f"c{number}", step=number, state=state)
    with recckpt.inspect.connect(tmp_path) as connection:
        assert connection.sql("select step, loss from checkpoints order by loss limit 1").fetchall() == [(3, 0.25)]
        assert connection.sql("select isnan(loss) from checkpoints").fetchall() == [(False,), (True,), (False,)]
        assert connection.sql("select step_2, loss_2, run.by, run.tags from checkpoints order by step").fetchall() == [
            (3, None, None, None),
            (None, None, "ann", ["a"]),
            (None, "x", None, None),
        ]
    for name, column in (("step", "step_2"), ("Loss", "Loss_2")):
        said = f"{tmp_path!s}: {name!r} of their states is the column {column!r} of 'checkpoints': its name is taken"
        assert caplog.text.count(said) == 1


def test_checkpoints_and_timeline_are_tables(tmp_path):
    Run(tmp_path, max_keep=None).train(20)
    with (tmp_path / "timeline.jsonl").open("a") as timeline:
        timeline.write('not json\n[1]\n{"step": "x", "other": {"a": 1}, "error": "disk \\ud800"}\n')
    with recckpt.inspect.connect(tmp_path / "ckpt_10") as connection:
        assert connection.sql("select id, step from checkpoints").fetchall() == [("ckpt_10", 10), ("ckpt_20", 20)]
        [(state,)] = connection.sql("select state from checkpoints where step = 10").fetchall()
        assert json.loads(state) == {"sparse_lr_0": 0.01}
        assert connection.sql("select count(*), sum(n_bytes) > 0 from timeline").fetchall() == [(3, True)]
        assert connection.sql("select count(*) from timeline where error is null").fetchall() == [(2,)]
        empty = connection.sql("select distinct largest_errors from timeline where n_bytes > 0").fetchall()
        assert empty == [("{}",)], "objects without a field are text: duckdb before 2 has no type for them"
    (tmp_path / "timeline.jsonl").unlink()
    with recckpt.inspect.connect(tmp_path) as connection:
        assert connection.sql("select count(step) from timeline").fetchall() == [(0,)]


@pytest.mark.parametrize(("library", "call"), [("duckdb", "connect"), ("polars", "scan")])
def test_a_library_that_is_missing_is_named_with_what_to_install(tmp_path, monkeypatch, library, call):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RecckptError, match=rf"needs {library}.*recckpt\[sql\]"):
        getattr(recckpt.inspect, call)(tmp_path, *(["item"] if call == "scan" else []))


def with_damage(path, dtype=torch.float32):
    """Save rows whose embeddings are their ids, and make 8 of a 7."""
    saved(path, filled("item", range(20), dtype=dtype, slots={"sparse_s": ()}), concurrency=1)
    flip_value(Forge(path / "ckpt_1"), torch.tensor([7, 7], dtype=dtype), torch.tensor([8, 7], dtype=dtype))
    return path


def flip_value(forge, before, after):
    before, after = (value.view(torch.uint8).numpy().tobytes() for value in (before, after))
    data = forge.path(forge.parts[0]).read_bytes()
    assert data.count(before) >= 1
    forge.path(forge.parts[0]).write_bytes(data.replace(before, after, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_damage_that_a_query_meets_is_an_error_with_its_place_unless_values_are_asked_for_as_they_are(tmp_path, dtype):
    with_damage(tmp_path, dtype)
    with recckpt.inspect.connect(tmp_path) as connection:
        with pytest.raises(duckdb.Error, match="column 'embedding': found checksum"):
            connection.sql("select sum(embedding[1]) from item").fetchall()
        assert connection.sql("select count(*), sum(id), max(sparse_s) from item").fetchall() == [(20, 190, 19.0)]
    frame = recckpt.inspect.scan(tmp_path, "item")
    with pytest.raises(CorruptCheckpointError, match="column 'embedding'"):
        frame.select(pl.col("embedding")).collect()
    assert frame.filter(pl.col("id") < 3).select("sparse_s").collect().height == 3
    if dtype == torch.float32:
        with recckpt.inspect.connect(tmp_path, checked=False) as connection:
            assert connection.sql("select sum(embedding[1]) from item").fetchall() == [(191.0,)]
        frame = recckpt.inspect.scan(tmp_path, "item", checked=False).select(pl.col("embedding").arr.first().sum())
        assert frame.collect()["embedding"].to_list() == [191.0]


@pytest.mark.slow
def test_it_needs_no_torch(tmp_path):
    saved(tmp_path, filled("item", range(50)))
    code = "from recckpt.inspect import connect, scan; import sys; path = sys.argv[1]"
    code += "; connect(path); scan(path, 'item'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert "duckdb" in done.stdout, done.stderr
    assert not {"torch", "numba"} & set(done.stdout.split())
