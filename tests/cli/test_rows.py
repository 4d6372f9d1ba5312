"""``head``, ``get``, ``history`` and ``sql``."""

from __future__ import annotations

import csv
import io
import sys

import pytest
import torch
from support.builders import Run, flip_bit
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.sparse import HashTable
from recckpt.storage import open_storage

IDS = [-(2**63), -5, 0, 7, 2**63 - 1]


@pytest.fixture
def runs(tmp_path):
    """An output dir with one checkpoint of a few tables."""
    storage = open_storage(str(tmp_path))
    odd = HashTable(3, name="line\nbreak")
    odd.insert(torch.tensor([1]), torch.tensor([[float("nan"), float("inf"), -float("inf")]]))
    tables = [
        filled("item", IDS[1:-1], slots={"sparse_s": (), "sparse_m": (2, 2)}),
        filled("half", [1, 2], dtype=torch.bfloat16),
        filled("long", range(100), shape=64),
        filled("ids", IDS, dtype=torch.int64, shape=1),
        odd,
    ]
    save_tables(storage, tables, batch_bytes=1000)
    return tmp_path


def test_head_prints_the_first_rows_and_the_columns_in_the_order_asked_for(recckpt, runs):
    answer = recckpt("head", runs, "long", "-n", 3)
    assert answer.code == 0
    assert answer.lines[0] == ["id", "embedding"]
    assert len(answer.lines) == 4
    assert answer.lines[1][-2:] == ["...", "(64)]"]
    assert len(recckpt("head", runs, "long").lines) == 11
    assert len(recckpt("head", runs, "long", "-n", 1000).lines) == 101
    assert recckpt("head", runs, "long", "-n", 0).lines == [["id", "embedding"]]
    answer = recckpt("head", runs, "item", "--columns", "sparse_s,id,embedding", "-n", 1)
    assert answer.lines[0] == ["id", "sparse_s", "embedding"]
    row = recckpt("head", runs, "item", "--columns", "sparse_s", "-n", 1, "--json").json["rows"][0]
    assert list(row) == ["id", "sparse_s"]


def test_json_has_every_value_as_a_number_nested_as_the_slot_or_as_a_string(recckpt, runs):
    row = recckpt("get", runs, "item", 7, "--json").json["rows"]
    assert row == [{"id": 7, "embedding": [7.0, 7.0], "sparse_m": [[7.0, 7.0], [7.0, 7.0]], "sparse_s": 7.0}]
    assert len(recckpt("head", runs, "long", "--json", "-n", 1).json["rows"][0]["embedding"]) == 64
    assert recckpt("get", runs, "half", 2, "--json").json["rows"] == [{"id": 2, "embedding": [2.0, 2.0]}]  # bfloat16
    rows = recckpt("head", runs, "line\nbreak", "--json").json["rows"]
    assert rows == [{"id": 1, "embedding": ["NaN", "Infinity", "-Infinity"]}]
    assert "[nan, inf, -inf]" in recckpt("head", runs, "line\nbreak").out


def test_every_int64_is_an_id(recckpt, runs):
    answer = recckpt("get", runs, "ids", *IDS, "--json")
    assert answer.code == 0
    assert answer.json["rows"] == [{"id": number, "embedding": [number]} for number in IDS]
    assert recckpt("get", runs, "item", -5, "--columns", "sparse_s").lines == [["id", "sparse_s"], ["-5", "-5"]]
    assert recckpt("get", "--json", runs, "ids", "--columns", "embedding", -5, 7).json["missing"] == []


def test_rows_come_in_the_order_asked_for_and_once_and_missing_ids_are_a_problem(recckpt, runs):
    rows = recckpt("get", runs, "item", 7, -5, 7, 0, "--json").json["rows"]
    assert [row["id"] for row in rows] == [7, -5, 0]
    answer = recckpt("get", runs, "item", 8, 7, -9)
    assert answer.code == 1
    assert answer.lines[1][0] == "7"
    assert answer.err == "recckpt: table 'item' has no row of id 8, -9\n"
    assert recckpt("get", runs, "item", 8, 7, -9, "--json").json["missing"] == [8, -9]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("head", "itm"),
            "no table 'itm' in 'ckpt_1'; there are 'item', 'half', 'long', 'ids', 'line\\nbreak'; did you mean 'item'?",
        ),
        (("get", "a\nb", 1), r"no table 'a\nb' in 'ckpt_1'"),
        (("head", "item", "--columns", "embeding"), "table 'item' has no slot 'embeding'"),
    ],
)
def test_an_unknown_table_or_slot_is_a_problem(recckpt, runs, args, message):
    answer = recckpt(args[0], runs, *args[1:])
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"recckpt: {message}")
    assert answer.err.count("\n") == 1


def test_damaged_rows_are_a_problem_and_are_not_printed(recckpt, runs):
    forge = Forge(runs / "ckpt_1")
    for name in forge.parts:
        data = forge.path(name).read_bytes()
        forge.path(name).write_bytes(data.replace(b"\0\0\xe0\x40", b"\0\0\xe1\x40"))  # 7.0
    answer = recckpt("get", runs, "item", 7)
    assert (answer.code, answer.out) == (1, "")
    assert "checksum" in answer.err
    assert answer.err.count("\n") == 1


@pytest.fixture
def run(tmp_path):
    """An output dir with a full checkpoint and a delta, in which the row of -5 has changed and that of 7 is gone."""
    table = filled("item", [-5, 7, 9])
    save_tables(open_storage(str(tmp_path)), [table], ckpt_id="ckpt_10", step=10)
    write_delta(counting(tmp_path)[0], "ckpt_20", 2, [({-5: (3, 4)}, [7])], step=20)
    return tmp_path


def test_a_row_is_shown_in_each_checkpoint(recckpt, run):
    answer = recckpt("history", run, "item", -5, 7)
    assert (answer.code, answer.err) == (0, "")
    assert [" ".join(line) for line in answer.lines] == [
        "item -5",
        "CHECKPOINT STEP ROW SINCE STEP NORM MOVED",
        "ckpt_10 10 there 10 7.07107 -",
        "ckpt_20 20 changed 20 5 12.0416",
        "",
        "item 7",
        "CHECKPOINT STEP ROW SINCE STEP NORM MOVED",
        "ckpt_10 10 there 10 9.89949 -",
        "ckpt_20 20 gone - - -",
    ]


def test_json_has_all_of_a_history_and_what_no_checkpoint_has_or_is_damaged_is_a_problem(recckpt, run):
    answer = recckpt("history", run, "item", 9, "--json").json
    assert (answer["table"], answer["rows"][0]["id"], answer["damage"]) == ("item", 9, {})
    told = [(state["ckpt_id"], state["change"], state["since"]) for state in answer["rows"][0]["states"]]
    assert told == [("ckpt_10", "there", "ckpt_10"), ("ckpt_20", "same", "ckpt_10")]
    answer = recckpt("history", run, "item", 8, 9)
    assert answer.code == 1
    assert answer.err == f"recckpt: {run}: no checkpoint has a row for id 8 in table item\n"
    assert "in none of 2 checkpoints" in answer.out
    assert "did you mean 'item'?" in recckpt("history", run, "itme", 9).err
    flip_bit(run / "ckpt_20" / "manifest.json")
    answer = recckpt("history", run, "item", 9)
    assert (answer.code, "found damage in 1 place" in answer.err) == (1, True)
    assert "ckpt_20: " in answer.out


pytest.importorskip("duckdb", reason="DUCKDB IS NOT INSTALLED: pip install '.[sql]'")


@pytest.fixture
def sql_runs(tmp_path):
    Run(tmp_path, max_keep=None).train(20)
    return tmp_path


def test_a_query_prints_an_aligned_table(recckpt, sql_runs):
    answer = recckpt("sql", sql_runs, "select id, rows, kind from checkpoints")
    assert (answer.code, answer.err) == (0, "")
    assert answer.lines[0] == ["id", "rows", "kind"]
    assert [line[0] for line in answer.lines[1:]] == ["ckpt_10", "ckpt_20"]
    assert len({len(line.rstrip()) for line in answer.out.splitlines()[1:]}) == 1
    assert recckpt("sql", sql_runs, "select null as x").lines == [["x"], ["NULL"]]
    assert recckpt("sql", sql_runs, "select id from item where false").lines == [["id"]]
    assert recckpt("sql", sql_runs, "select e'a\\x1b\\n' as \"b\\n\"").out.count("\n") == 2


def test_json_and_csv_have_every_value(recckpt, sql_runs):
    query = "select 1 as n, 'a,\"b' as s, null as x, 'nan'::double as y, date '2020-01-02' as d, [1, 2] as l, 1.5 as e"
    found = recckpt("sql", sql_runs, query, "--json").json
    assert found["columns"] == ["n", "s", "x", "y", "d", "l", "e"]
    assert found["rows"] == [[1, 'a,"b', None, "NaN", "2020-01-02", [1, 2], "1.5"]]
    [head, row] = csv.reader(io.StringIO(recckpt("sql", sql_runs, query, "--csv").out))
    assert (head[:3], row[:3]) == (["n", "s", "x"], ["1", 'a,"b', ""])


def test_what_is_wrong_with_a_query_is_one_line(recckpt, sql_runs):
    for query in ("selec 1", "select * from itme", "select nothing from item"):
        answer = recckpt("sql", sql_runs, query)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
    for empty in ("", " ; ", "-- only a comment"):
        answer = recckpt("sql", sql_runs, empty)
        assert (answer.code, answer.out, answer.err.splitlines()[-1]) == (2, "", "recckpt: found no query")
    assert recckpt("sql", sql_runs, "select 1", "--json", "--csv").code == 2
    assert recckpt("sql", sql_runs / "nowhere", "select 1") == (
        1,
        "",
        f"recckpt: {sql_runs / 'nowhere'}: does not exist\n",
    )


def test_damage_that_a_query_meets_is_one_line_with_its_place(recckpt, sql_runs):
    with next(sql_runs.glob("ckpt_20/sparse/*.g0.00.arrow")).open("r+b") as part:
        data = part.read()
        at = data.rindex(next(iter(recckpt_values(sql_runs))))
        part.seek(at)
        part.write(b"\xff")
    query = "select sum(embedding[1]) from item"
    answer = recckpt("sql", sql_runs, query)
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1), answer.err
    assert answer.err.startswith("recckpt: ckpt_20/sparse/")
    assert "column 'embedding': found checksum" in answer.err
    assert recckpt("sql", sql_runs, "select count(*) from item").code == 0
    assert recckpt("sql", sql_runs, query, "--unchecked").code == 0


def recckpt_values(sql_runs):
    """Yield the embeddings of the newest checkpoint as bytes."""
    from recckpt import CheckpointReader

    for batch in CheckpointReader(sql_runs).table("item", ["embedding"]):
        yield batch["embedding"].flatten().to_numpy().tobytes()


def test_times_with_a_zone_come_as_text(recckpt, sql_runs):
    query = "set timezone = 'UTC'; select to_timestamp(0) as t, [to_timestamp(1.5)], {'s': to_timestamp(2)}, 3 as t"
    found = recckpt("sql", sql_runs, query, "--json").json
    times = ["1970-01-01 00:00:00+00", ["1970-01-01 00:00:01.5+00"], {"s": "1970-01-01 00:00:02+00"}]
    assert (found["columns"][0], found["columns"][-1], found["rows"]) == ("t", "t", [[*times, 3]])
    ordered = "select to_timestamp(step) as saved from checkpoints order by step desc; -- the newest first"
    assert [row[0][14:19] for row in recckpt("sql", sql_runs, ordered, "--json").json["rows"]] == ["00:20", "00:10"]


def test_without_duckdb_it_says_what_to_install(recckpt, sql_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    answer = recckpt("sql", sql_runs, "select 1")
    assert answer.code == 1
    assert "pip install 'recckpt[sql]'" in answer.err
