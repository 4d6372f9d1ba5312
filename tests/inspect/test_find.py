"""Which checkpoints there are, for programs."""

import re
import shutil

import pytest
import torch
from support.builders import Run
from torch import nn

import recckpt
from recckpt import CheckpointManager, Saver, find_checkpoint, list_checkpoints
from recckpt.errors import CheckpointNotFoundError
from recckpt.inspect import is_checkpoint
from recckpt.policies.keep import Best, Newest
from recckpt.sparse import HashTable

AUCS = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.9, 5: 0.6}


def run_of(url, max_keep=None):
    """A manager whose table holds the step, after five saves."""
    table = HashTable(1, name="t")
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(url), max_keep=max_keep)
    manager = CheckpointManager(saver, 1)
    for step, auc in AUCS.items():
        table.insert(torch.tensor([1]), torch.tensor([[float(step)]]))
        manager.step(metrics={"auc": auc})
    return table, manager


def test_checkpoints_are_listed_and_found_by_step_age_metric_and_id(url):
    run_of(url)
    found = list_checkpoints(url)
    assert [(c.ckpt_id, c.step, c.kind, c.state["auc"]) for c in found] == [
        (f"ckpt_{step}", step, "full", auc) for step, auc in AUCS.items()
    ]
    assert find_checkpoint(url, 3) == find_checkpoint(url, "ckpt_3") == found[2]
    assert find_checkpoint(url, "latest") == found[-1]
    assert find_checkpoint(url, "best", "auc") == found[3], "the newer of two"
    assert find_checkpoint(url, "best", "auc", "min") == found[0]
    assert all(is_checkpoint(c.path) for c in found)
    with recckpt.CheckpointReader(found[2].path) as reader:
        assert reader.lookup("t", [1]).values.tolist() == [[3]]


def test_what_is_no_output_dir_has_no_list(tmp_path):
    run_of(tmp_path / "run")
    (tmp_path / "file").write_text("x")
    for name, match in (("typo", "does not exist"), ("file", "not a directory"), ("run/ckpt_3", "a checkpoint itself")):
        with pytest.raises(CheckpointNotFoundError, match=f"{name}: .*{match}, expected an output dir"):
            list_checkpoints(tmp_path / name)


def test_the_best_of_a_run_is_none_that_is_soon_gone(tmp_path):
    _, manager = run_of(tmp_path, Newest(2) | Best(1, "auc"))
    manager.saver.save("ckpt_6", step=6, state={"auc": 0.99}, ephemeral=True)
    assert find_checkpoint(tmp_path, "latest").ephemeral
    assert find_checkpoint(tmp_path, "best", "auc").step == 4
    assert manager.restore("best") == 4


def test_the_best_by_several_metrics_is_that_of_their_weighted_sum(tmp_path):
    weights = {"auc": 1, "loss": -1}
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path), max_keep=Best(2, weights))
    manager = CheckpointManager(saver, 1)
    for auc, loss in ((0.9, 0.8), (0.7, 0.1), (0.8, 0.4), (0.5, 0.5)):
        manager.step(metrics={"auc": auc, "loss": loss})
    assert manager.all_steps() == [2, 3, 4]
    assert find_checkpoint(tmp_path, "best", weights).step == manager.restore("best") == 2
    with pytest.raises(CheckpointNotFoundError, match=r"found no checkpoint with the metric \{'auc': 1, 'clicks': 1\}"):
        find_checkpoint(tmp_path, "best", {"auc": 1, "clicks": 1})


def test_which_of_two_metrics_is_best_is_for_the_caller_to_say(tmp_path):
    _, manager = run_of(tmp_path, Best(1, "auc") | Best(2, "loss", "min"))
    with pytest.raises(ValueError, match=r"'auc' \(max\) and 'loss' \(min\).*find_checkpoint"):
        manager.restore("best")


def test_where_there_is_none_the_list_is_empty_and_nothing_is_found(tmp_path):
    assert list_checkpoints(tmp_path) == []
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="found no checkpoint 'latest'; there are no checkpoints"):
        find_checkpoint(tmp_path, "latest")


def test_an_output_dir_and_a_damaged_checkpoint_are_no_checkpoints(tmp_path):
    run_of(tmp_path)
    assert not is_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "ckpt_3" / "sparse")
    assert not is_checkpoint(tmp_path / "ckpt_3")
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2, 4, 5]


def test_what_is_not_there_or_makes_no_sense_is_said(tmp_path):
    run_of(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"found no checkpoint 9; there are 'ckpt_1', .*'ckpt_5'"):
        find_checkpoint(tmp_path, 9)
    with pytest.raises(CheckpointNotFoundError, match=r"the metric 'loss', only with \['auc'\]"):
        find_checkpoint(tmp_path, "best", "loss")
    run = Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "nan"), max_keep=None)
    run.save("ckpt_1", state={"loss": float("nan")})
    run.save("ckpt_2", state={"loss": "low"})
    text = "only with []; 'loss' is low in 'ckpt_2', 'loss' is nan in 'ckpt_1', which is not compared"
    with pytest.raises(CheckpointNotFoundError, match=re.escape(text)):
        find_checkpoint(tmp_path / "nan", "best", "loss")
    for which, metric in (("best", None), (3, "auc"), (True, None), (None, None)):
        with pytest.raises(ValueError, match="expected a step, 'latest' or an id alone, or 'best' with the name"):
            find_checkpoint(tmp_path, which, metric)


def test_a_manager_restores_the_best_by_its_policy(url):
    table, manager = run_of(url, Newest(2) | Best(1, "auc"))
    assert [c.step for c in list_checkpoints(url)] == [4, 5]
    assert manager.restore("best") == 4
    assert table.lookup(torch.tensor([1]))[0].tolist() == [[4]]
    assert manager.restore("latest") == 5
    manager.saver.max_keep = 2
    with pytest.raises(ValueError, match=r"max_keep=2, which has no Best.*Best\(1, 'auc'\)"):
        manager.restore("best")
    with pytest.raises(TypeError, match="found 'newest'"):
        manager.restore("newest")


def test_checkpoints_are_found_by_the_labels_they_were_saved_with(url):
    saver = Saver(nn.ModuleDict({"t": HashTable(1, name="t")}), output_dir=url, max_keep=None)
    for step, day in enumerate(("mon", "tue", "tue"), 1):
        saver.save(f"ckpt_{step}", step=step, state={"day": day, "auc": step / 10, "final": step == 2})
    assert [c.step for c in list_checkpoints(url, state={"day": "tue"})] == [2, 3]
    assert list_checkpoints(url, state={"day": "tue", "final": True})[0].step == 2
    assert find_checkpoint(url, "latest", state={"day": "mon"}).step == 1
    assert find_checkpoint(url, "best", "auc", "min", state={"day": "tue"}).step == 2
    assert list_checkpoints(url, state={"day": "sun"}) == []
    with pytest.raises(CheckpointNotFoundError, match=r"saved with {'day': 'sun'}.* there are day='mon', day='tue'"):
        find_checkpoint(url, "latest", state={"day": "sun"})
    with pytest.raises(CheckpointNotFoundError, match="found no checkpoint 1; "):
        find_checkpoint(url, 1, state={"day": "tue"})
    for call in (list_checkpoints, lambda url, state: find_checkpoint(url, "latest", state=state)):
        with pytest.raises(TypeError, match="state must be a mapping of names to values, or None, found 'day'"):
            call(url, state="day")


def test_a_step_that_is_not_there_names_those_that_are(tmp_path):
    Run(tmp_path, interval=5, max_keep=None).train(10).manager.close()
    with pytest.raises(CheckpointNotFoundError, match="ckpt_7: does not exist; there are 'ckpt_5', 'ckpt_10'"):
        recckpt.CheckpointReader(tmp_path / "ckpt_7").close()
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere: does not exist$"):
        recckpt.CheckpointReader(tmp_path / "nowhere").close()
