"""``diff`` and ``report``."""

from __future__ import annotations

import shutil

import pytest
import torch
from support import warm_python
from support.builders import Run
from support.delta_runs import run_with_chain
from support.forge import filled, save_tables
from support.pages import HOSTILE, harmless_text
from torch import nn

from recckpt import Saver
from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    Run(tmp_path / "run", max_keep=None).train(20)
    return tmp_path / "run"


def test_a_page_is_written_and_a_healthy_run_ends_with_0(recckpt, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = recckpt("report", run)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("METRIC ")  # nothing to say, and no empty line instead
    assert answer.out.endswith("\nhealthy: 2 checkpoints, the newest ckpt_20\nwrote report.html\n")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    again = recckpt("report", run)
    assert (again.code, "this file exists" in again.err) == (1, True)
    assert recckpt("report", run, "--quick", "--threads", 2, "--out", tmp_path / "quick.html").code == 0


@pytest.mark.slow
def test_a_page_is_written_where_a_notebook_starts_the_command_with_a_backend_of_plots_that_is_not_here(run, tmp_path):
    answer = warm_python.run(*("-m", "recckpt", "report", run), cwd=tmp_path, env={"MPLBACKEND": "of_a_notebook"})
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_json_is_the_data_and_writes_no_page_unless_asked_to(recckpt, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = recckpt("report", run, "--json").json
    assert found["healthy"] is True
    assert {table["name"] for table in found["tables"]} == {"user/1", "item"}
    assert not (tmp_path / "report.html").exists()
    assert recckpt("report", run, "--json", "--out", "page.html").json["newest"] == "ckpt_20"
    assert (tmp_path / "page.html").exists()


def test_an_overdue_save_is_a_problem_to_who_asks_for_it(recckpt, run, tmp_path):
    options = ("report", run, "--quick", "--json")
    assert recckpt(*options, "--overdue", 3600).code == 0
    answer = recckpt(*options, "--overdue", 1e-6)
    assert (answer.code, "1 problem" in answer.err) == (1, True)
    assert recckpt(*options, "--overdue", 0).code == 2


def test_problems_end_with_1_and_messages_leave_no_page(recckpt, run, tmp_path):
    (run / "ckpt_20/model.pt").unlink()
    answer = recckpt("report", run, "--out", tmp_path / "page.html")
    assert answer.code == 1
    assert "problem: ckpt_20 is damaged" in answer.out
    assert (tmp_path / "page.html").exists()
    for path, code in ((tmp_path / "nowhere", 1), (run / "ckpt_10", 1), ("nosuchscheme://x/y", 2)):
        wrong = recckpt("report", path, "--out", tmp_path / "other.html")
        assert (wrong.code, wrong.out, wrong.err.count("recckpt: ")) == (code, "", 1)
        assert not (tmp_path / "other.html").exists()
    assert recckpt("report", run, "--threads", 0).code == 2
    nowhere = recckpt("report", run, "--out", tmp_path / "nowhere/page.html")
    assert (nowhere.code, "the directory of this file does not exist" in nowhere.err) == (1, True)


def test_a_page_needs_nothing_else_and_shows_hostile_names_harmlessly(recckpt, tmp_path):
    storage = open_storage(str(tmp_path / "run"))
    storage.prepare()
    for number in (1, 2):
        tables = [filled(name, range(5 * number)) for name in HOSTILE]
        save_tables(storage, tables, ckpt_id=f"<i>{number}`", step=number)
    answer = recckpt("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert answer.code == 0
    assert "\x1b" not in answer.out
    assert "<i>2`" in harmless_text((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_who_says_how_often_a_run_fails_reads_how_often_it_would_best_save(recckpt, run, tmp_path):
    answer = recckpt("report", run, "--quick", "--failures-per-day", 2, "--out", tmp_path / "page.html")
    assert answer.code == 0
    [said] = [line for line in answer.out.splitlines() if line.startswith("at 2 failures a day, saving every ")]
    assert said in (tmp_path / "page.html").read_text()
    assert recckpt("report", run, "--quick", "--json", "--failures-per-day", 2).json["advice"]["best_sec"] > 0
    assert recckpt("report", run, "--quick", "--json").json["advice"] is None
    assert recckpt("report", run, "--failures-per-day", 0).code == 2


@pytest.fixture(scope="module")
def run_of_two_saves(tmp_path_factory):
    """What the tests change copies of."""
    path = tmp_path_factory.mktemp("run")
    Run(path, max_keep=None).train(20)
    return path


@pytest.fixture
def runs(tmp_path, run_of_two_saves):
    return shutil.copytree(run_of_two_saves, tmp_path, symlinks=True, dirs_exist_ok=True)


def saved(path, *tables, ckpt_id="ckpt_1"):
    storage = open_storage(str(path))
    storage.prepare()
    save_tables(storage, list(tables), ckpt_id=ckpt_id)
    return path


def test_the_exit_code_is_that_of_diff_and_json_has_all_of_it(recckpt, runs, tmp_path):
    equal = recckpt("diff", runs / "ckpt_20", runs)
    assert (equal.code, equal.err) == (0, "")
    assert equal.out.startswith("equal: 2 tables, 7 tensors and all else\n")
    different = recckpt("diff", runs / "ckpt_10", runs)
    assert different.code == 1
    assert different.err.startswith("recckpt: different: 2 tables, 7 tensors, ")
    found = recckpt("diff", runs / "ckpt_10", runs, "--json", "--top", 2).json
    assert found["equal"] is False
    assert {table["name"] for table in found["tables"]} == {"user/1", "item"}
    assert all(len(table["moved"]) == 2 for table in found["tables"])
    assert recckpt("diff", runs, tmp_path / "nowhere") == (2, "", f"recckpt: {tmp_path / 'nowhere'}: does not exist\n")
    for args in ((".",), (".", ".", "--tolerance", "-1"), (".", ".", "--tolerance", "nan"), (".", ".", "--top", "x")):
        assert recckpt("diff", *args).code == 2


def test_empty_foreign_and_damaged_directories_are_a_message_and_2(recckpt, runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/manifest.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    for name in ("empty", "foreign", "file"):
        for args in ((runs, tmp_path / name), (tmp_path / name, runs)):
            answer = recckpt("diff", *args)
            assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), answer.err
    (runs / "ckpt_20/model.pt").unlink()
    assert recckpt("diff", runs / "ckpt_10", runs / "ckpt_20").code == 2
    assert recckpt("diff", "nosuchscheme://x/y", runs).code == 2


def test_the_tolerance_is_one_of_single_values_and_rows_of_one_value_have_no_cosine(recckpt, tmp_path):
    near, after = filled("item", range(10)), filled("bias", [1], shape=1)
    near.insert(torch.tensor([3]), torch.tensor([[3.25, 3.0]]))
    after.insert(torch.tensor([1]), torch.tensor([[1.25]]))
    saved(tmp_path / "a", filled("item", range(10)), filled("bias", [1], shape=1))
    saved(tmp_path / "b", near, after)
    answer = recckpt("diff", tmp_path / "a", tmp_path / "b")
    assert answer.code == 1
    assert ["bias", "1", "0.25", "-"] in answer.lines
    assert recckpt("diff", tmp_path / "a", tmp_path / "b", "--tolerance", "0.25").code == 0


def test_a_page_of_a_diff_needs_nothing_else_and_shows_hostile_names_harmlessly(recckpt, tmp_path):
    saved(tmp_path / "a", *(filled(name, range(5)) for name in HOSTILE))
    saved(tmp_path / "b", *(filled(name, range(1, 9)) for name in HOSTILE))
    answer = recckpt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html")
    assert answer.code == 1
    assert "\x1b" not in answer.out
    harmless_text((tmp_path / "page.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_diff_compares_the_dense_tensors_of_other_programs_by_name_with_ours(recckpt, tmp_path, prefix):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    with Saver(model, output_dir=tmp_path / "run") as saver:
        saver.save("c", step=3)
    path = tmp_path / "model.pt"
    torch.save({f"{prefix}{name}": value for name, value in model.state_dict().items()}, path)
    answer = recckpt("diff", tmp_path / "run", path)
    assert (answer.code, answer.out.splitlines()[0]) == (0, "equal: 0 tables, 4 tensors")
    with torch.no_grad():
        model[1].weight[0, 2] += 0.5
    changed = {f"{prefix}{name}": value for name, value in model.state_dict().items()} | {"other": torch.tensor(2.0)}
    torch.save(changed, path)
    answer = recckpt("diff", tmp_path / "run", path, "--json")
    tensors = {one["name"]: (one["status"], one["largest"], one["at"]) for one in answer.json["tensors"]}
    assert answer.code == 1
    assert tensors["1.weight"] == ("changed", pytest.approx(0.5), [0, 2])
    assert (tensors["other"][0], tensors["0.weight"][0]) == ("added", "same")
    answer = recckpt("diff", tmp_path / "nothing", path)
    assert (answer.code, answer.out) == (2, "")
    assert "nothing: does not exist" in answer.err


def test_diff_with_what_another_program_saved_says_how_many_links_ours_has(recckpt, tmp_path):
    run_with_chain(tmp_path / "run")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    answer = recckpt("diff", tmp_path / "run", tmp_path / "model.pt")
    assert (answer.code, answer.out.splitlines()[2].count("(delta of 3 links, 150 rows)")) == (1, 1)
    assert recckpt("diff", tmp_path / "model.pt", tmp_path / "run", "--json").json["after"]["n_links"] == 3


def test_diff_leaves_no_tensor_out_where_a_name_without_what_is_before_it_is_there_already(recckpt, tmp_path):
    one, other = ({"a": 999.0, "model.a": 1.0, "model.b": 1.0}, {"a": 1.0, "b": 1.0})
    for name, values in (("one.pt", one), ("other.pt", other)):
        torch.save({key: torch.tensor([value]) for key, value in values.items()}, tmp_path / name)
    for pair in (("one.pt", "other.pt"), ("other.pt", "one.pt")):
        answer = recckpt("diff", *(tmp_path / name for name in pair), "--json")
        statuses = {tensor["name"]: tensor["status"] for tensor in answer.json["tensors"]}
        assert (answer.code, statuses["a"], len(statuses)) == (1, "changed", 4)
