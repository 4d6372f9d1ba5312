import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.conversions import some_rows

from recckpt import CheckpointReader


@pytest.fixture
def vectors(tmp_path):
    np.savez(tmp_path / "t.npz", **some_rows())
    return tmp_path / "t.npz"


def test_a_dry_run_prints_the_plan_and_an_import_does_it(recckpt, vectors, tmp_path):
    planned = recckpt("import", vectors, tmp_path / "out", "--table", "item", "--step", 5, "--dry-run")
    assert planned.code == 0
    assert ["item", "100", "embedding", "float32[3],", "count", "int32[]"] in planned.lines
    assert planned.lines[-1] == ["would", "write", f"{tmp_path}/out/ckpt_5"]
    assert not (tmp_path / "out").exists()

    done = recckpt("import", vectors, tmp_path / "out", "--table", "item", "--step", 5)
    assert done.out.splitlines()[-1].startswith(f"wrote {tmp_path}/out/ckpt_5, ")
    assert CheckpointReader(tmp_path / "out").manifest.rows == 100


def test_an_older_step_than_the_latest_there_is_said_to_become_the_newest(recckpt, vectors, tmp_path):
    said = "restore() takes ckpt_5, the newest there once it is written, though ckpt_7 is of a later step"
    assert "restore()" not in recckpt("import", vectors, tmp_path / "out", "--step", 7).out
    for options in (["--dry-run"], []):
        assert said in recckpt("import", vectors, tmp_path / "out", "--step", 5, *options).out
    noted = recckpt("import", vectors, tmp_path / "out", "--step", 6, "--json").json["notes"]
    assert [note.partition(", which")[0] for note in noted] == [said.replace("ckpt_5", "ckpt_6")]
    assert CheckpointReader(tmp_path / "out").manifest.step == 6


def test_json_lists_all_that_came_and_all_that_did_not(recckpt, tmp_path):
    save_file({"a": np.ones((2, 3), "f4"), "b": np.ones(2, "f4")}, tmp_path / "x.safetensors", {"by": "me"})
    done = recckpt("import", tmp_path / "x.safetensors", tmp_path / "out", "--as-table", "a", "--json")
    assert done.json["tables"] == [
        {"name": "a", "rows": 2, "slots": [{"name": "embedding", "dtype": "float32", "shape": [3]}]}
    ]
    assert done.json["dense"] == [{"name": "b", "dtype": "float32", "shape": [2]}]
    assert [left["name"] for left in done.json["left_out"]] == ["__metadata__ by"]
    assert done.json["directory"] == "ckpt_0"


def test_a_refusal_is_one_line_and_exit_code_1(recckpt, vectors, tmp_path):
    recckpt("import", vectors, tmp_path / "out")
    again = recckpt("import", vectors, tmp_path / "out")
    assert (again.code, again.err.count("\n")) == (1, 1)
    assert "'ckpt_0' is committed already" in again.err
    gone = recckpt("import", tmp_path / "none", tmp_path / "other", "--json")
    assert gone.code == 1
    assert "found no file" in gone.json["problems"][0]


def test_plain_values_and_the_tensors_inside_them_are_listed(recckpt, tmp_path):
    nested = {"rates": [0.1], "state": {0: {"m": torch.ones(2), "v": torch.ones(2)}}}
    torch.save({"w": torch.ones(2), "epoch": 3, "optimizer": nested}, tmp_path / "x.pt")
    planned = recckpt("import", tmp_path / "x.pt", tmp_path / "out", "--dry-run")
    assert "plain values, to model.pt: epoch, optimizer (with 2 tensors inside)\n" in planned.out
    done = recckpt("import", tmp_path / "x.pt", tmp_path / "out", "--json").json
    assert (done["values"], done["tensors_inside"]) == (["epoch", "optimizer"], {"optimizer": 2})


def test_a_table_gets_the_name_that_is_given(recckpt, tmp_path):
    np.savez(tmp_path / "t.npz", id=np.array([1]), embedding=np.ones((1, 2), np.float32))
    done = recckpt("import", tmp_path / "t.npz", tmp_path / "out", "--name", "t=a=b", "--json")
    assert [table["name"] for table in done.json["tables"]] == ["a=b"]


SAME_TWICE = ["--as-table", "a", "--as-table", "a=b"]
WRONG = [["--step", -1], ["--from", "parket"], ["--as-table", "=x"], ["--name", "a"], SAME_TWICE]


@pytest.mark.parametrize(
    "options", [["--step", -1], ["--from", "parket"], ["--as-table", "=x"], ["--name", "a"], SAME_TWICE]
)
def test_wrong_usage_is_exit_code_2(recckpt, vectors, tmp_path, options):
    assert recckpt("import", vectors, tmp_path / "out", *options).code == 2
    assert not (tmp_path / "out").exists()
