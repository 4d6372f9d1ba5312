"""The last step of a run is committed at its end, also where a near save has it and no step is left to do."""

import pytest
from near.test_near_saves import begun, rows
from near.test_ranks import on_near_ranks, together, trained
from support.near_runs import NearRun, output_dir

from recckpt import CheckpointManager
from recckpt.output_dir.listing import list_checkpoints

NEWEST = {1: 1.0, 2: 2.0}


def ended(run, *args, **options):
    """Let a run restore, and end well without a step."""
    with run.manager:
        run.restore(*args, **options)
    return run


def committed(root):
    return list_checkpoints(output_dir(root)).ckpt_ids


def test_a_near_save_that_was_restored_is_committed_when_the_block_ends(tmp_path):
    begun(tmp_path)
    run = ended(NearRun(tmp_path, max_keep=2))
    assert committed(tmp_path) == ["ckpt_1", "ckpt_2"]
    assert run.manager.counts.begun == 1
    assert rows(NearRun(tmp_path).restore(near=False)) == NEWEST


def test_all_ranks_commit_it(tmp_path):
    on_near_ranks(tmp_path, 2, trained)
    on_near_ranks(tmp_path, 2, ended)
    restored = on_near_ranks(tmp_path, 3, lambda run: rows(run.restore(near=False)))
    assert together(restored) == {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}


def test_it_is_committed_where_a_model_bank_was_loaded_with_it(tmp_path):
    begun(tmp_path)
    begun(tmp_path / "other")
    run = NearRun(tmp_path, max_keep=2, others=["u"])
    with run.manager:
        run.manager.load_model_bank([{"path": str(tmp_path / "other/runs"), "load": ["t"], "oname": [{"u": "t"}]}])
    assert committed(tmp_path) == ["ckpt_1", "ckpt_2"]


def test_it_is_not_committed_where_another_process_has_committed_a_newer_step_meanwhile(tmp_path, caplog):
    trained_beside = begun(tmp_path)
    run = NearRun(tmp_path)
    with run.manager:
        run.restore()
        trained_beside.put(_3=3.0).step().save()
    assert (committed(tmp_path), run.manager.counts.begun) == (["ckpt_1", "ckpt_3"], 0)
    assert "the restored near save is not made a checkpoint: there is a newer checkpoint by now" in caplog.text
    trained_beside.put(_3=4.0).step().save()
    assert rows(NearRun(tmp_path).restore()) == {**NEWEST, 3: 4.0}


def test_a_manager_that_makes_no_near_saves_commits_none(tmp_path):
    begun(tmp_path)
    run = NearRun(tmp_path, interval=None)
    with CheckpointManager(run.saver, 1000) as manager:
        assert manager.restore() == 2
    assert committed(tmp_path) == ["ckpt_1"]


def test_what_was_saved_since_is_saved_once(tmp_path):
    begun(tmp_path)
    run = NearRun(tmp_path)
    with run.manager:
        run.restore().save()
    assert run.manager.counts.begun == 1


def restored_checkpoint(run):
    run.restore(near=False)


def restored_in_part(run):
    run.restore(load_conf={"load": ["global_step"]})


def gone_back(run):
    run.restore().restore(1)


@pytest.mark.parametrize("restore", [restored_checkpoint, restored_in_part, gone_back])
def test_nothing_else_is_saved_without_a_step(tmp_path, restore):
    begun(tmp_path)
    run = NearRun(tmp_path)
    with run.manager:
        restore(run)
    assert run.manager.counts.begun == 0


def test_a_block_that_fails_commits_no_near_save(tmp_path):
    begun(tmp_path)
    run = NearRun(tmp_path)
    run.restore()
    with pytest.raises(KeyError), run.manager:
        raise KeyError("loss")
    assert committed(tmp_path) == ["ckpt_1"]
