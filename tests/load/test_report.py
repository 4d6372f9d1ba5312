"""A load on paper: what people and programs read of it."""

import html.parser
import json
import logging
import pickle

import pytest
from support.bank_runs import run, table

from recckpt.format.buckets import gen_slice
from recckpt.format.names import Name, slot_name
from recckpt.load.inventory import PLAIN, Thing
from recckpt.load.report import LoadPlan, LoadReport, Planned

ROWS = 1_234_567
ITEMS = (
    Planned(slot_name("t", "id"), 0, "u@id", Thing("int64", (), ROWS, 8 * ROWS)),
    Planned(
        slot_name("t", "embedding"), 0, "u@embedding", Thing("float16", (4,), ROWS, 8 * ROWS), "cast float16 -> float32"
    ),
    Planned(slot_name("t", "sparse_m"), reason="/a/c has no 'u@sparse_m'"),
    Planned(slot_name("new", "id"), reason="/a/c has no 'new'"),
    Planned(slot_name("new", "embedding"), reason="/a/c has no 'new'"),
    Planned(Name("dense", "w"), 1, "w", Thing("float32", (2,), 0, 8)),
    Planned(Name("dense", "<b>\nx"), reason="nothing asks for it"),
    Planned(Name("io_state", "reader"), reason="nothing asks for it"),
    Planned(Name("extra", "lr"), 1, "lr", Thing(PLAIN)),
    Planned(Name("dense_opt", "w@adam"), reason="/b/<c> has no 'adam'"),
    Planned(Name("dense_opt", "<b>\nx@adam"), reason="its parameter is not loaded"),
    Planned(Name("dense_opt", "adam"), reason="the settings of this run stay"),
)
PLAN = LoadPlan(ITEMS, ("/a/c", "/b/<c>"), ("bank[0]: 'x*' matches nothing in the model",))
REPORT = LoadReport(
    *(ITEMS, PLAN.sources, PLAN.warnings),
    rows_taken={"t": 1_000_000},
    rows_filtered={"t": 234_567},
    bytes_read=20_000_000,
    seconds=1.5,
    global_step=7,
)


SOURCES = ["[0] /a/c: 1 table, 1,234,567 rows, 0 tensors, 19.8 MB", "[1] /b/<c>: 0 tables, 0 rows, 1 tensor, 8 B"]


def test_a_plan_is_a_table_of_names_and_where_they_come_from_below_the_paths():
    first, second, empty, head, *lines = str(PLAN).splitlines()
    assert [first, second, empty] == [*SOURCES, ""]
    assert head.split() == ["name", "from", "name", "there", "rows", "bytes", "note"]
    lines = [line.split() for line in lines]
    assert lines[0] == ["t@id", "[0]", "u@id", "1,234,567", "9.9", "MB"]
    assert lines[1][-4:] == ["cast", "float16", "->", "float32"]
    assert lines[2] == ["t@sparse_m", "-", "[0]", "has", "no", "'u@sparse_m'"]
    assert lines[5] == ["w", "[1]", "8", "B"]
    assert lines[6][:2] == ['"<b>\\nx"', "-"]


@pytest.mark.parametrize("shown", [str, LoadPlan._repr_html_])
def test_a_path_stands_once_whatever_is_missing_there(shown):
    paths = "runs/a", "runs/a/b"
    reasons = f"{paths[1]} has no 'x'; {paths[0]} has no 'x'", f"not in {paths[1]}"
    items = *(Planned(Name("dense", f"w{n}"), reason=reason) for n, reason in enumerate(reasons)), ITEMS[5]
    text = shown(LoadPlan(items, paths, (f"bank[1]: {paths[1]} has names that are not in the model",)))
    assert (text.count("runs/a/b"), text.count("runs/a")) == (1, 2)
    assert "not in [1]" in text


def test_below_it_stands_what_starts_from_scratch():
    footer = str(PLAN).splitlines()[len(SOURCES) + 2 + len(ITEMS) :]
    assert footer == [
        "from scratch: 't@sparse_m': [0] has no 'u@sparse_m'",
        "from scratch: 'new': [0] has no 'new'",
        "from scratch: '<b>\\nx': nothing asks for it",
        "from scratch: 'w@adam': [1] has no 'adam'",
        "warning: bank[0]: 'x*' matches nothing in the model",
    ]


class Texts(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *(value for name, value in attrs if name == "class")))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("shown", [PLAN, REPORT])
def test_a_notebook_shows_it_with_names_escaped_and_numbers_on_the_right(shown):
    found = Texts()
    found.feed(shown._repr_html_())
    tags = {"style", "div", "h1", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, *_ in found.tags} == tags, "and none that a name has brought"
    assert " /b/<c>: 0 tables, 0 rows, 1 tensor, 8 B" in found.texts
    assert '"<b>\\nx"' in found.texts
    assert found.tags.count(("tr",)) == len(ITEMS) + 1
    assert found.tags.count(("td", "n")) == 2 * len(ITEMS)


def test_a_program_gets_all_of_it_as_json():
    data = json.loads(json.dumps(PLAN.to_dict(), allow_nan=False))
    assert data["items"][1] == {
        "name": "t@embedding",
        "group": "sparse",
        "source": "/a/c",
        "source_name": "u@embedding",
        "rows": ROWS,
        "bytes": 8 * ROWS,
        "renamed": True,
        "conversion": "cast float16 -> float32",
        "reason": None,
    }
    assert data["items"][2]["source"] is None
    assert data["items"][2]["reason"] == "/a/c has no 'u@sparse_m'"
    assert [item["renamed"] for item in data["items"]] == [True, True, *[False] * 10]
    assert (data["sources"], data["warnings"]) == (["/a/c", "/b/<c>"], list(PLAN.warnings))
    report = json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))
    assert {key: report[key] for key in report.keys() - data.keys()} == {
        "rows_taken": {"t": 1_000_000},
        "rows_filtered": {"t": 234_567},
        "bytes_read": 20_000_000,
        "seconds": 1.5,
        "global_step": 7,
    }
    assert data["fresh_parameters"] == ["adam: w", "adam: <b>\nx"]


def test_the_log_says_loudly_what_starts_from_scratch(caplog):
    caplog.set_level(logging.INFO, "recckpt")
    REPORT.log_summary()
    said = {record.getMessage(): record.levelname for record in caplog.records}
    assert said["/a/c: 1 table, 1,234,567 rows, 0 tensors, 19.8 MB"] == "INFO"
    warnings = [text for text, level in said.items() if level == "WARNING"]
    assert warnings == [
        "from scratch: 't@sparse_m': /a/c has no 'u@sparse_m'",
        "from scratch: 'new': /a/c has no 'new'",
        "from scratch: '<b>\\nx': nothing asks for it",
        "from scratch: 'w@adam': /b/<c> has no 'adam'",
        "bank[0]: 'x*' matches nothing in the model",
    ]


def test_rows_of_a_report_are_those_that_were_taken(tmp_path):
    """Not those that are stored: by a filter, by the rows that are there, by the slice of a rank, by a delta."""

    def rows_of(report, name="t"):
        things = {item.name.slot: item.thing for item in report.items if item.name.table == name and item.offer == 0}
        assert all(thing.n_bytes % max(1, thing.rows) == 0 for thing in things.values())
        return {slot: thing.rows for slot, thing in things.items() if "step" not in slot}

    source = table("t", range(10))
    saver = run(tmp_path / "a", source, optimizer="adagrad", steps=1)
    saver.save("full")
    url = str(tmp_path / "a")

    def load(made, **conf):
        return run(tmp_path / "own", made, optimizer="adagrad").load_by_config([{"path": url, **conf}])

    some = load(table("t"), where={"sample": 0.5})
    n_some = some.rows_taken["t"]
    assert 0 < n_some < 10
    assert set(rows_of(some).values()) == {n_some}
    assert f"1 table, {n_some} rows, 0 tensors" in str(some)
    there = load(table("t", [1, 99]), exclude=["t@id"])
    assert rows_of(there).pop("embedding") == 1
    half = load(table("t", slice=gen_slice(0, 2)))
    assert set(rows_of(half).values()) == {half.rows_taken["t"]} != {10}
    assert json.loads(json.dumps(half.to_dict()))["items"][0]["rows"] == half.rows_taken["t"]


def test_a_report_says_what_happened_and_crosses_ranks():
    assert str(REPORT).splitlines()[-2:] == [
        "warning: bank[0]: 'x*' matches nothing in the model",
        "1,000,000 rows taken, 234,567 filtered, 20.0 MB read in 1.50 s",
    ]
    assert [item.name.text for item in PLAN.taken] == ["t@id", "t@embedding", "w", "lr"]
    assert len(PLAN.fresh) == 8
    assert [PLAN.source_of(item) for item in PLAN.items[1:3]] == ["/a/c", ""]
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT


def test_an_empty_plan_prints_and_many_names_with_one_reason_are_one_line():
    assert str(LoadPlan((), ())).split() == ["name", "from", "rows", "bytes", "note"], "nothing has another name there"
    names = [Planned(Name("dense", f"w{i}"), reason="gone") for i in range(1000)]
    assert LoadPlan(tuple(names), ())._fresh_lines() == [
        "from scratch: 'w0', 'w1', 'w2', 'w3', 'w4', 'w5', 'w6', 'w7' and 992 more: gone"
    ]
