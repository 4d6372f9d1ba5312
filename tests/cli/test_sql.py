import csv
import io
import sys

import pytest
from builders import Run

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


def test_without_duckdb_it_says_what_to_install(recckpt, runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    answer = recckpt("sql", runs, "select 1")
    assert answer.code == 1
    assert "pip install 'recckpt[sql]'" in answer.err
