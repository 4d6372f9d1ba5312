"""What near saves of a host would give back, look after look."""

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from support.near_runs import NearRun

from recckpt import Near
from recckpt.inspect.watch.history import history_of
from recckpt.inspect.watch.look import Watcher
from recckpt.inspect.watch.near import near_facts, near_now
from recckpt.inspect.watch.shown import facts, line
from recckpt.near.here import NearHere
from recckpt.output_dir.listing import Checkpoint, look_around
from recckpt.storage import open_storage

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)


def begun(root):
    run = NearRun(root).put(**{f"_{id_}": 0.5 for id_ in range(10)}).step()
    return run.put(_1=1.0).step().put(_2=2.0).step()


def at(checkpoint, step, seconds):
    """Return a checkpoint or near save as made of a step, so many seconds before now."""
    time = (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    manifest = replace(checkpoint.manifest, step=step, time=time)
    return Checkpoint(checkpoint.directory, manifest, checkpoint.below, near_dir=checkpoint.near_dir)


def here(save, n_here=4, is_elsewhere=False):
    return NearHere(save, 4, n_here, is_lost=False, is_elsewhere=is_elsewhere)


def test_a_look_says_what_is_lost_with_processes_and_with_the_host(tmp_path):
    begun(tmp_path)
    [newest] = look_around(open_storage(str(tmp_path / "runs"))).current
    saves = [here(at(newest, 140, 2)), here(at(newest, 120, 12))]
    near = near_now(saves, at(newest, 20, 62), history_of([]), NOW)
    assert (near.n_saves, near.newest.step, near.newest.age_sec) == (2, 140, 2.0)
    assert (near.with_processes.steps, near.with_host.steps) == (4, 124)
    assert dict(near_facts(near))["lost now"] == "about 4 steps if its processes die, about 124 steps if the host does"


def test_what_other_hosts_have_too_outlives_the_host(tmp_path):
    begun(tmp_path)
    [newest] = look_around(open_storage(str(tmp_path / "runs"))).current
    saves = [here(at(newest, 140, 2), 2), here(at(newest, 120, 12), 2, is_elsewhere=True)]
    near = near_now(saves, at(newest, 20, 62), history_of([]), NOW)
    assert (near.with_processes.steps, near.with_host.steps) == (4, 24)
    assert ", 2 of 4 shards here; 2 kept" in dict(near_facts(near))["near"]


def test_a_newer_checkpoint_is_what_comes_back_of_either(tmp_path):
    begun(tmp_path)
    [newest] = look_around(open_storage(str(tmp_path / "runs"))).current
    near = near_now([here(at(newest, 140, 20))], at(newest, 150, 5), history_of([]), NOW)
    assert near.with_processes == near.with_host
    assert near.with_host.sec == 5.0
    assert "5 s of training if its processes die" in dict(near_facts(near))["lost now"], "its pace is not known"


def test_without_any_save_all_is_lost():
    near = near_now([], None, history_of([]), NOW)
    assert dict(near_facts(near)) == {
        "near": "no near save that counts",
        "lost now": "all if its processes die, all if the host does",
    }


def test_the_pace_is_that_of_the_last_checkpoints_too(tmp_path):
    begun(tmp_path)
    [newest] = look_around(open_storage(str(tmp_path / "runs"))).current
    lines = [
        {"ckpt_id": f"{step}", "step": step, "time": f"2026-11-22T11:{minute}:00Z"}
        for step, minute in ((100, 10), (700, 20), (1300, 30))
    ]
    near = near_now([], at(newest, 1300, 1800), history_of(lines), NOW)
    assert near.with_host.steps == 1800
    assert not near.is_overdue
    ended = near_now([], at(newest, 1300, 1801), history_of(lines), NOW)
    assert dict(near_facts(ended))["lost now"].endswith(
        "about 1,801 steps if the host does, nothing if the run has ended"
    )


def test_a_watcher_shows_near_saves_where_it_is_asked_to(tmp_path):
    run = begun(tmp_path)
    storage = open_storage(str(tmp_path / "runs"))
    status = Watcher(storage, near=Near(run.near_path)).look()
    said = {name: text for name, text, _ in facts(status)}
    assert "step 3, 2 rows, " in said["near"]
    assert said["near"].endswith("on ckpt_1; 2 kept")
    assert "near " in line(status)
    assert json.loads(json.dumps(status.to_dict()))["near"]["newest"]["step"] == 3
    status = Watcher(storage).look()
    assert "near" not in {name for name, _, _ in facts(status)}
    assert "near" not in status.to_dict()
    assert Watcher(storage, near=Near(tmp_path / "other")).look().near.newest is None
