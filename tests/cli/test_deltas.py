"""The commands on deltas."""

import json

import pytest
import torch
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta, write_form
from torch import nn

from recckpt import Saver
from recckpt.storage import open_storage


@pytest.fixture
def runs(tmp_path):
    """Of a full checkpoint with the ids 0 to 5 and a delta: 1 has changed, 9 is new, 2 and 77 were deleted."""
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("t", range(6))], concurrency=1)
    write_delta(counting(tmp_path / "runs")[0], "ckpt_2", 6, [({1: (7, 7), 9: (9, 9)}, [2, 77])])
    return tmp_path / "runs"


def test_verify_counts_deletes_of_ids_that_are_not_there(recckpt, runs):
    answer = recckpt("verify", runs)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "ckpt_2: 1 delete of ids that are not there, which means nothing"
    found = recckpt("verify", runs, "--json").json["checkpoints"]
    assert {entry["directory"]: entry["absent_deletes"] for entry in found} == {"ckpt_1": 0, "ckpt_2": 1}


def test_get_and_head_give_the_rows_of_the_chain(recckpt, runs):
    rows = recckpt("head", runs, "t", "--json").json["rows"]
    assert {row["id"]: row["embedding"][0] for row in rows} == {0: 0, 1: 7, 3: 3, 4: 4, 5: 5, 9: 9}
    answer = recckpt("get", runs, "t", "9", "2", "1", "--json")
    assert [row["id"] for row in answer.json["rows"]] == [9, 1]
    assert (answer.code, answer.json["missing"]) == (1, [2])


def test_show_says_what_a_delta_stands_on_and_what_it_holds(recckpt, runs):
    base = counting(runs)[0]
    answer = recckpt("show", runs)
    assert answer.code == 0
    assert ["kind", "delta", "on", "ckpt_1"] in answer.lines
    assert [line[:3] for line in answer.lines if line and line[0].startswith("ckpt_")] == [
        ["ckpt_2/", "delta", "2"],
        ["ckpt_1/", "full", "6"],
    ]
    assert any("2 rows, 2 deletes" in line for line in answer.out.splitlines())
    shown = recckpt("show", runs, "--json").json
    assert (shown["kind"], [link["directory"] for link in shown["links"]]) == ("delta", ["ckpt_2", "ckpt_1"])
    assert shown["tables"][0]["delta"] == {"upserts": 2, "deletes": 2, "replaced": False}
    assert (shown["rows"], shown["form_of"]) == (6, None)
    assert "kind" not in [line[0] for line in recckpt("show", base.directory).lines if line]
    files = recckpt("show", runs, "--files", "--json").json["tables"][0]["files"]
    assert [name.split(".")[1] for name in files] == ["g0", "deletes"]


def test_show_says_which_tables_are_whole_in_a_delta(recckpt, runs):
    newest = max(counting(runs), key=lambda found: found.place)
    write_delta(newest, "ckpt_3", 1, [({1: (7, 7)}, [])], replaced=True)
    assert any("all rows" in line for line in recckpt("show", runs).out.splitlines())


def test_show_says_that_a_checkpoint_is_a_form(recckpt, runs):
    newest = max(counting(runs), key=lambda found: found.place)
    write_form(newest, {0: (0, 0), 1: (7, 7), 3: (3, 3), 4: (4, 4), 5: (5, 5), 9: (9, 9)})
    assert any("full, made of a delta" in line for line in recckpt("show", runs).out.splitlines())
    assert recckpt("show", runs, "--json").json["form_of"] == newest.origin


def run(path, **modules):
    """Return the saver with deltas of a model with a table of 1,000 rows."""
    model = nn.ModuleDict({"t": filled("t", range(1000)), **modules})
    return Saver(model, output_dir=str(path), max_keep=None, deltas=True)


def test_a_bank_of_deltas_is_planned_as_the_saver_would(recckpt, tmp_path):
    source, bank = run(tmp_path / "source"), [{"path": str(tmp_path / "source")}]
    source.save("full")
    source.model["t"].insert(torch.tensor([5000]), torch.ones(1, 2))
    assert source.save("newest").kind == "delta"
    saver = run(tmp_path / "own")
    (tmp_path / "names").write_text("\n".join(saver.names()))
    (tmp_path / "bank.json").write_text(json.dumps(bank))
    answer = recckpt("plan", "--model-names", tmp_path / "names", tmp_path / "bank.json", "--json")
    assert (answer.code, answer.json) == (0, saver.plan(bank).to_dict())
    assert "1001" in answer.out


def test_the_dense_state_of_a_delta_is_consolidated(recckpt, tmp_path):
    source = run(tmp_path / "source", top=nn.Linear(2, 1))
    source.save("full")
    nn.init.constant_(source.model["top"].weight, 7)
    assert source.save("newest").kind == "delta"
    assert recckpt("consolidate", tmp_path / "source", "--out", tmp_path / "model.pt").code == 0
    assert (torch.load(tmp_path / "model.pt")["top.weight"] == 7).all()
