import pytest
import torch
from support.forge import Forge, filled, save_tables

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


def test_head_prints_the_first_rows(recckpt, runs):
    answer = recckpt("head", runs, "long", "-n", 3)
    assert answer.code == 0
    assert answer.lines[0] == ["id", "embedding"]
    assert len(answer.lines) == 4
    assert answer.lines[1][-2:] == ["...", "(64)]"]
    assert len(recckpt("head", runs, "long").lines) == 11
    assert len(recckpt("head", runs, "long", "-n", 1000).lines) == 101
    assert recckpt("head", runs, "long", "-n", 0).lines == [["id", "embedding"]]


def test_json_has_every_value_nested_as_the_slot(recckpt, runs):
    row = recckpt("get", runs, "item", 7, "--json").json["rows"]
    assert row == [{"id": 7, "embedding": [7.0, 7.0], "sparse_m": [[7.0, 7.0], [7.0, 7.0]], "sparse_s": 7.0}]
    assert len(recckpt("head", runs, "long", "--json", "-n", 1).json["rows"][0]["embedding"]) == 64


def test_every_int64_is_an_id(recckpt, runs):
    answer = recckpt("get", runs, "ids", *IDS, "--json")
    assert answer.code == 0
    assert answer.json["rows"] == [{"id": number, "embedding": [number]} for number in IDS]
    assert recckpt("get", runs, "item", -5, "--columns", "sparse_s").lines == [["id", "sparse_s"], ["-5", "-5"]]
    assert recckpt("get", "--json", runs, "ids", "--columns", "embedding", -5, 7).json["missing"] == []


def test_rows_come_in_the_order_asked_for_and_once(recckpt, runs):
    rows = recckpt("get", runs, "item", 7, -5, 7, 0, "--json").json["rows"]
    assert [row["id"] for row in rows] == [7, -5, 0]


def test_missing_ids_are_a_problem_and_the_others_are_printed(recckpt, runs):
    answer = recckpt("get", runs, "item", 8, 7, -9)
    assert answer.code == 1
    assert answer.lines[1][0] == "7"
    assert answer.err == "recckpt: table 'item' has no row of id 8, -9\n"
    assert recckpt("get", runs, "item", 8, 7, -9, "--json").json["missing"] == [8, -9]


def test_columns_are_printed_in_the_order_asked_for(recckpt, runs):
    answer = recckpt("head", runs, "item", "--columns", "sparse_s,id,embedding", "-n", 1)
    assert answer.lines[0] == ["id", "sparse_s", "embedding"]
    row = recckpt("head", runs, "item", "--columns", "sparse_s", "-n", 1, "--json").json["rows"][0]
    assert list(row) == ["id", "sparse_s"]


def test_bfloat16_is_printed_as_numbers(recckpt, runs):
    assert recckpt("get", runs, "half", 2, "--json").json["rows"] == [{"id": 2, "embedding": [2.0, 2.0]}]


def test_what_is_no_number_in_json_is_a_string_there(recckpt, runs):
    rows = recckpt("head", runs, "line\nbreak", "--json").json["rows"]
    assert rows == [{"id": 1, "embedding": ["NaN", "Infinity", "-Infinity"]}]
    assert "[nan, inf, -inf]" in recckpt("head", runs, "line\nbreak").out


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
