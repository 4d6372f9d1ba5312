import shutil

import pytest
from support.builders import Run
from support.forge import Forge

from recckpt.inspect import repair as repairing
from recckpt.output_dir.checkpoint_dir import Intent, write_intent
from recckpt.output_dir.rotation import pin
from recckpt.storage import open_storage


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An output dir without its index file, with a dead save, one that may be alive, and a late commit."""
    monkeypatch.setattr(repairing, "_LOOKS_APART", 0)
    root = tmp_path / "runs"
    for seed in range(2):
        run = Run(root, max_keep=9, interval=5, seed=seed)
        run.manager.restore()
        run.train(5)
    storage = open_storage(str(root))
    for directory, epoch in (("ckpt_20", 1), ("ckpt_25", 2)):
        storage.make_dir(directory)
        write_intent(storage, Intent(directory, epoch, "0" * 32, None))
    shutil.copytree(root / "ckpt_5", root / "late")
    Forge(root / "late").edit_manifest(lambda values: values.update(save_id="f" * 32, ckpt_id="late"))
    (root / "checkpoint").unlink()
    return root


def states(answer):
    return {line[0]: " ".join(line[1:4]) for line in answer.lines[3:]}


def test_what_would_be_done_is_said_and_not_done(recckpt, runs):
    answer = recckpt("repair", runs, "--dry-run", "--clean")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"{runs}: the index file was missing; would be made anew, 2 checkpoints\n")
    assert states(answer)["ckpt_20"] == "would be removed"
    assert states(answer)["late"] == "would be removed"
    assert states(answer)["ckpt_25"].startswith("left alone")
    assert not (runs / "checkpoint").exists()
    assert (runs / "ckpt_20").exists()


def test_the_index_is_made_anew_and_leftovers_are_listed(recckpt, runs):
    answer = recckpt("repair", runs)
    assert (answer.code, answer.err) == (0, "")
    assert "was missing; made anew, 2 checkpoints" in answer.out
    assert states(answer)["ckpt_20"] == "--clean removes it"
    assert (runs / "ckpt_20").exists()
    assert recckpt("repair", runs).out.startswith(f"{runs}: the index file is right, 2 checkpoints\n")


def test_clean_removes_what_is_dead(recckpt, runs):
    answer = recckpt("repair", runs, "--clean", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["removed"] == ["late", "ckpt_20"]
    assert answer.json["index"] == {"problem": "missing", "checkpoints": ["ckpt_5", "ckpt_10"]}
    assert {left["path"]: left["dead"] for left in answer.json["leftovers"]} == {
        "late": True,
        "ckpt_20": True,
        "ckpt_25": False,
    }
    assert not (runs / "late").exists()
    assert (runs / "ckpt_25").exists()


def test_damaged_checkpoints_are_a_problem(recckpt, runs):
    (runs / "ckpt_5/model.pt").unlink()
    answer = recckpt("repair", runs, "--clean")
    assert answer.code == 1
    assert "ckpt_5 is damaged, and stays: ckpt_5/model.pt: found no such file" in answer.out
    assert "1 damaged checkpoint" in answer.err


def test_what_is_no_output_dir_is_refused(recckpt, runs):
    for path in (runs / "ckpt_5", runs / "nowhere"):
        answer = recckpt("repair", path, "--clean")
        assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert recckpt("repair", "nosuch://x/y").code == 2


def test_ls_shows_late_commits_and_pins(recckpt, runs):
    pin(open_storage(str(runs)), "ckpt_5")
    answer = recckpt("ls", runs)
    marks = {line[0]: " ".join(line[6:]) for line in answer.lines[1:]}
    assert marks["ckpt_5"].endswith("pinned")
    assert "fenced: committed by the writer of epoch 1" in marks["late"]
    assert answer.code == 0
    data = recckpt("ls", runs, "--json").json
    assert [entry["directory"] for entry in data["fenced"]] == ["late"]
    assert [c["marks"] for c in data["checkpoints"]] == [["pinned"], ["newest"]]
