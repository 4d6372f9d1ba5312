import csv
import io
import sys

import pytest
from support.builders import Run

pytest.importorskip("duckdb", reason="DUCKDB IS NOT INSTALLED: pip install '.[sql]'")


@pytest.fixture
def runs(tmp_path):
    Run(tmp_path, max_keep=None).train(20)
    return tmp_path


def test_a_query_prints_an_aligned_table(recckpt, runs):
    answer = recckpt("sql", runs, "select id, rows, kind from checkpoints")
    assert (answer.code, answer.err) == (0, "")
    assert answer.lines[0] == ["id", "rows", "kind"]
    assert [line[0] for line in answer.lines[1:]] == ["ckpt_10", "ckpt_20"]
    assert len({len(line.rstrip()) for line in answer.out.splitlines()[1:]}) == 1
    assert recckpt("sql", runs, "select null as x").lines == [["x"], ["NULL"]]
    assert recckpt("sql", runs, "select id from item where false").lines == [["id"]]
    assert recckpt("sql", runs, "select e'a\\x1b\\n' as \"b\\n\"").out.count("\n") == 2


def test_json_and_csv_have_every_value(recckpt, runs):
    query = "select 1 as n, 'a,\"b' as s, null as x, 'nan'::double as y, date '2020-01-02' as d, [1, 2] as l, 1.5 as e"
    found = recckpt("sql", runs, query, "--json").json
    assert found["columns"] == ["n", "s", "x", "y", "d", "l", "e"]
    assert found["rows"] == [[1, 'a,"b', None, "NaN", "2020-01-02", [1, 2], "1.5"]]
    [head, row] = csv.reader(io.StringIO(recckpt("sql", runs, query, "--csv").out))
    assert (head[:3], row[:3]) == (["n", "s", "x"], ["1", 'a,"b', ""])


def test_what_is_wrong_with_a_query_is_one_line(recckpt, runs):
    for query in ("selec 1", "select * from itme", "select nothing from item"):
        answer = recckpt("sql", runs, query)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
    for empty in ("", " ; ", "-- only a comment"):
        answer = recckpt("sql", runs, empty)
        assert (answer.code, answer.out, answer.err.splitlines()[-1]) == (2, "", "recckpt: found no query")
    assert recckpt("sql", runs, "select 1", "--json", "--csv").code == 2
    assert recckpt("sql", runs / "nowhere", "select 1") == (1, "", f"recckpt: {runs / 'nowhere'}: does not exist\n")


def test_damage_that_a_query_meets_is_one_line_with_its_place(recckpt, runs):
    with next(runs.glob("ckpt_20/sparse/*.g0.00.arrow")).open("r+b") as part:
        data = part.read()
        at = data.rindex(next(iter(recckpt_values(runs))))
        part.seek(at)
        part.write(b"\xff")
    query = "select sum(embedding[1]) from item"
    answer = recckpt("sql", runs, query)
    assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1), answer.err
    assert answer.err.startswith("recckpt: ckpt_20/sparse/")
    assert "column 'embedding': found checksum" in answer.err
    assert recckpt("sql", runs, "select count(*) from item").code == 0
    assert recckpt("sql", runs, query, "--unchecked").code == 0


def recckpt_values(runs):
    """Yield the embeddings of the newest checkpoint as bytes."""
    from recckpt import CheckpointReader

    for batch in CheckpointReader(runs).table("item", ["embedding"]):
        yield batch["embedding"].flatten().to_numpy().tobytes()


def test_times_with_a_zone_come_as_text(recckpt, runs):
    query = "set timezone = 'UTC'; select to_timestamp(0) as t, [to_timestamp(1.5)], {'s': to_timestamp(2)}, 3 as t"
    found = recckpt("sql", runs, query, "--json").json
    times = ["1970-01-01 00:00:00+00", ["1970-01-01 00:00:01.5+00"], {"s": "1970-01-01 00:00:02+00"}]
    assert (found["columns"][0], found["columns"][-1], found["rows"]) == ("t", "t", [[*times, 3]])
    ordered = "select to_timestamp(step) as saved from checkpoints order by step desc; -- the newest first"
    assert [row[0][14:19] for row in recckpt("sql", runs, ordered, "--json").json["rows"]] == ["00:20", "00:10"]


def test_without_duckdb_it_says_what_to_install(recckpt, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    answer = recckpt("sql", runs, "select 1")
    assert answer.code == 1
    assert "pip install 'recckpt[sql]'" in answer.err
