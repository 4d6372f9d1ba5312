import shutil

import pytest
import torch
from support.builders import Run
from support.forge import filled, save_tables
from support.pages import HOSTILE, harmless_text

from recckpt.storage import open_storage


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


def test_the_exit_code_is_that_of_diff(recckpt, runs, tmp_path):
    equal = recckpt("diff", runs / "ckpt_20", runs)
    assert (equal.code, equal.err) == (0, "")
    assert equal.out.endswith("equal: 2 tables, 7 tensors and all else\n")
    different = recckpt("diff", runs / "ckpt_10", runs)
    assert different.code == 1
    assert different.err.startswith("recckpt: different: 2 tables, 7 tensors, ")
    assert recckpt("diff", runs, tmp_path / "nowhere") == (2, "", f"recckpt: {tmp_path / 'nowhere'}: does not exist\n")


@pytest.mark.parametrize(
    "args", [(".",), (".", ".", "--tolerance", "-1"), (".", ".", "--tolerance", "nan"), (".", ".", "--top", "x")]
)
def test_wrong_usage_ends_with_2(recckpt, args):
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


def test_json_has_all_of_it(recckpt, runs):
    found = recckpt("diff", runs / "ckpt_10", runs, "--json", "--top", 2).json
    assert found["equal"] is False
    assert {table["name"] for table in found["tables"]} == {"user/1", "item"}
    assert all(len(table["moved"]) == 2 for table in found["tables"])


def test_the_tolerance_is_one_of_single_values(recckpt, tmp_path):
    saved(tmp_path / "a", filled("item", range(10)))
    near = filled("item", range(10))
    near.insert(torch.tensor([3]), torch.tensor([[3.25, 3.0]]))
    saved(tmp_path / "b", near)
    assert recckpt("diff", tmp_path / "a", tmp_path / "b").code == 1
    assert recckpt("diff", tmp_path / "a", tmp_path / "b", "--tolerance", "0.25").code == 0


def test_a_page_needs_nothing_else_and_shows_hostile_names_harmlessly(recckpt, tmp_path):
    saved(tmp_path / "a", *(filled(name, range(5)) for name in HOSTILE))
    saved(tmp_path / "b", *(filled(name, range(1, 9)) for name in HOSTILE))
    answer = recckpt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "page.html")
    assert answer.code == 1
    assert "\x1b" not in answer.out
    harmless_text((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_a_page_that_is_there_is_not_overwritten(recckpt, runs):
    (runs / "page.html").write_text("mine")
    answer = recckpt("diff", runs, runs, "--html", runs / "page.html")
    assert answer.code == 2
    assert "it exists" in answer.err
    assert (runs / "page.html").read_text() == "mine"


def test_rows_of_one_value_have_no_cosine(recckpt, tmp_path):
    before, after = filled("bias", [1], shape=1), filled("bias", [1], shape=1)
    after.insert(torch.tensor([1]), torch.tensor([[3.0]]))
    saved(tmp_path / "a", before)
    saved(tmp_path / "b", after)
    answer = recckpt("diff", tmp_path / "a", tmp_path / "b")
    assert ["bias", "1", "2", "-"] in answer.lines
