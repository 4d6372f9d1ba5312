"""What is known of a run, look after look, of each in a directory of runs, and of the near saves of a host."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from support.builders import Run
from support.forge import filled, save_tables
from support.near_runs import NearRun

import recckpt
from recckpt import Deltas, Near
from recckpt.errors import SaveFailedError
from recckpt.inspect.save_times import history_of
from recckpt.inspect.status import near_now, status_of
from recckpt.inspect.watch import RunsWatcher, Watcher, is_output_dir
from recckpt.inspect.watch_text import facts, few, line, near_facts
from recckpt.near.views import NearHere
from recckpt.output_dir.claims import claimed_epochs
from recckpt.output_dir.listing import Checkpoint, look_around
from recckpt.storage import open_storage

DELTAS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)
NOW = datetime(2026, 11, 23, 12, 0, tzinfo=timezone.utc)
TODAY = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)


def said(status):
    return {name: text for name, text, _ in facts(status)}


def failing(*_):
    raise OSError(28, "No space left on device")


def test_a_run_is_told_from_its_first_step_to_a_save_that_fails(url, monkeypatch):
    watcher = Watcher(open_storage(url))
    assert said(watcher.look()).keys() == {"waits"}
    run = Run(url, interval=2, max_keep=None, deltas=DELTAS).train(4)
    status = watcher.look()
    assert (status.last.ckpt_id, status.last.step, status.last.n_links) == ("ckpt_4", 4, 2)
    assert (status.n_checkpoints, status.pause.n_saves, status.writer.epoch, status.failed) == (2, 2, 1, [])
    assert status.last.rows == sum(len(table) for table in run.model.tables)
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.save.save.write", failing)
        with pytest.raises(SaveFailedError, match="No space"):
            run.train(2)
    status = watcher.look()
    assert [(each.ckpt_id, each.step) for each in status.failed] == [("ckpt_6", 6)]
    assert "No space left" in said(status)["failed"]
    assert "1 FAILED since, the last ckpt_6: SaveFailedError" in line(status)
    assert json.dumps(status.to_dict())
    run.train(2)
    assert watcher.look().failed == []


def test_a_run_that_ended_well_says_so_and_is_not_overdue_until_it_saves_again(url):
    def looked():
        status, found = (
            Watcher(open_storage(url), overdue_sec=-1.0).look(),
            recckpt.report(url, overdue_sec=1e-9).findings,
        )
        return status.is_overdue, "ended" in said(status), any("no save since" in each.what for each in found)

    run = Run(url, interval=2)
    with run.manager:
        run.train(3)
    assert looked() == (False, True, False)
    last = json.loads(open_storage(url).read("timeline.jsonl", 1 << 20).decode().splitlines()[-1])
    assert (last["kind"], last["step"]) == ("ended", 3)
    again = Run(url, interval=2)
    again.manager.restore()
    with pytest.raises(KeyError), again.manager:
        again.train(1).model.state_dict()["killed"]
    assert looked() == (True, False, True)


def test_a_look_reads_a_manifest_once_and_lists_no_directory_again(storage, monkeypatch):
    Run(storage.url, interval=2, max_keep=None).train(6)
    watcher, asked = Watcher(storage), Counter()
    first = watcher.look()
    for name in ("read", "listed", "size", "open"):
        method = getattr(type(storage), name)
        monkeypatch.setattr(
            type(storage),
            name,
            lambda *args, name=name, method=method: asked.update([(name, args[1])]) or method(*args),
        )
    second = watcher.look()
    assert second.last.ckpt_id == first.last.ckpt_id == "ckpt_6"
    assert not [name for _, name in asked if name.endswith("manifest.json") or name.startswith("ckpt")], asked
    assert ("read", "timeline.jsonl") not in asked
    assert sum(asked.values()) <= 3, asked


def test_a_save_under_way_is_shown_until_it_is_committed_and_one_that_died_until_the_run_has_gone_on(tmp_path, gate):
    run = Run(tmp_path, interval=2, max_keep=None).train(2)
    watcher = Watcher(run.saver.storage)
    writing = gate(type(run.saver.storage), "threads")
    handle = run.saver.save_async("by hand", step=3)
    writing.wait()
    assert [(each.directory, each.step) for each in watcher.look().attempts] == [("by%20hand", 3)]
    writing.open()
    handle.wait()
    assert watcher.look().attempts == []
    (tmp_path / "ckpt_2.1").mkdir()
    (tmp_path / "ckpt_2.1/INTENT").write_text('{"epoch": 1, "save_id": "0", "step": 2}')
    assert watcher.look().attempts == [], "it is older than what is committed"
    (tmp_path / "ckpt_9").mkdir()
    (tmp_path / "ckpt_9/INTENT").write_text('{"epoch": 0, "save_id": "0", "step": 9}')
    assert watcher.look().attempts == [], "it is of an earlier writer"


def test_damaged_and_foreign_things_are_problems_and_no_errors(tmp_path):
    Run(tmp_path, interval=2, max_keep=None).train(4)
    (tmp_path / "ckpt_2/manifest.json").write_text("{")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/manifest.json").write_text("{}")
    (tmp_path / ".recckpt/owner/1.json").write_text("\0")
    (tmp_path / "timeline.jsonl").write_bytes(
        b'[]\n\xff\n{"error": {"a": 1}, "time": 5, "ckpt_id": [], "step": "\\u001b[2J"}\n'
    )
    status = Watcher(open_storage(str(tmp_path))).look()
    assert status.last.ckpt_id == "ckpt_4"
    assert any("ckpt_2" in problem for problem in status.problems)
    assert status.writer is None
    assert all(text.isprintable() for _, text, _ in facts(status))
    assert line(status).isprintable()
    (tmp_path / "timeline.jsonl").unlink()
    (tmp_path / "timeline.jsonl").mkdir()
    assert Watcher(open_storage(str(tmp_path))).look().pause is None


def saved(minutes, **more):
    time = NOW + timedelta(minutes=minutes)
    return {"ckpt_id": f"ckpt_{minutes}", "time": time.isoformat().replace("+00:00", "Z"), "blocked_sec": 0.1, **more}


def test_the_last_saves_are_shown_as_bars_and_of_many_problems_the_first(tmp_path):
    Run(tmp_path, interval=2).train(6)
    watcher = Watcher(open_storage(str(tmp_path)))
    status = watcher.look()
    assert len(status.pauses) == len(status.sizes) == len(status.to_dict()["pauses_sec"]) == 3
    shown = {fact.name: fact.text for fact in facts(status)}
    assert re.fullmatch("[▁▂▃▄▅▆▇█]{3} of the last 3 saves, the newest last", shown["pauses"])
    assert re.fullmatch(r"[▁▂▃▄▅▆▇█]{3} at most \d.* kB", shown["bytes"])
    assert few(["a\nb"] * 3) == ["a; b"] * 3
    assert few(["a"] * 1203) == ["a"] * 3 + ["and 1,200 more: `recckpt ls` lists all"]
    for n_rows in (3, 5):  # a run that was begun anew under the same names is seen as it is
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        save_tables(open_storage(str(tmp_path)), [filled("t", range(n_rows))])
        assert watcher.look().last.rows == n_rows


def test_the_pace_is_the_usual_one_whatever_pause_there_was():
    assert history_of([]).every_sec is None
    assert history_of([saved(0)]).every_sec is None
    assert history_of([saved(0), saved(10), saved(20), saved(500), saved(510)]).every_sec == 600
    assert history_of([saved(0), saved(10)]).overdue_sec == 1800
    assert history_of([saved(0), saved(0.1)]).overdue_sec == 60, "a minute at least"
    at_once = [saved(0), saved(0), saved(0), saved(1)]
    assert history_of(at_once).every_sec == 20, "times are in seconds: the mean is all that can be said"
    assert history_of([saved(0), saved(0)]).every_sec is None
    odd = [{"time": None}, {"time": "yesterday"}, *({"blocked_sec": sec} for sec in ("long", True, -1, 10**400))]
    assert (history_of(odd).every_sec, history_of(odd).pause) == (None, None)
    lines = [saved(0), saved(1, error="x"), saved(2, max_blocked_sec=0.3), saved(3, error="y"), saved(4, error="z")]
    history = history_of(lines)
    assert (history.pause.last_sec, history.pause.max_sec, history.pause.n_saves) == (0.3, 0.3, 2), "the slowest rank"
    assert [each.error for each in history.failed] == ["y", "z"], "since the last save"


def test_a_save_that_is_missing_for_three_times_as_long_as_usual_is_overdue(storage):
    Run(storage.url, interval=2).train(2)
    listing = look_around(storage)
    saved_at = datetime.fromisoformat(listing.committed[0].manifest.time.replace("Z", "+00:00"))

    def after(minutes, lines):
        now = saved_at + timedelta(minutes=minutes)
        return status_of("run", now, listing, history_of(lines), writer=None, intents=[], why_empty="")

    every_ten = [saved(0), saved(10)]
    assert not after(29, every_ten).is_overdue
    assert after(31, every_ten).is_overdue
    assert "overdue" in said(after(31, every_ten))
    assert "OVERDUE" in line(after(31, every_ten))
    assert not after(31, []).is_overdue, "nobody knows how often it saves"
    assert after(-1, every_ten).last.age_sec == 0, "the clock of the run is ahead"


def run_saved(url, step, **fields):
    save_tables(url, [filled("item", range(3))], ckpt_id=f"ckpt_{step}", step=step, **fields)


def test_each_output_dir_is_a_run_of_any_name_and_nothing_else_is(url):
    run_saved(f"{url}/line\nbreak ü", 10)
    run_saved(f"{url}/ads", 20)
    with open_storage(url).create("notes/todo.txt") as sink:
        sink.write(b"eggs")
    watcher = RunsWatcher(open_storage(url))
    assert [(run.name, run.status.last.step) for run in watcher.look().runs] == [("ads", 20), ("line\nbreak ü", 10)]
    run_saved(f"{url}/line\nbreak ü", 11)
    run_saved(f"{url}/new", 1)
    steps = {run.name: run.status.last.step for run in watcher.look().runs}
    assert steps == {"ads": 20, "line\nbreak ü": 11, "new": 1}
    assert not is_output_dir(open_storage(url))
    assert is_output_dir(open_storage(f"{url}/ads"))
    assert not is_output_dir(open_storage(f"{url}/ads/ckpt_20"))


def test_health_is_the_worst_of_what_is_known(tmp_path):
    Run(tmp_path / "good", interval=2).train(2)
    Run(tmp_path / "damaged", interval=2, max_keep=None).train(4)
    (tmp_path / "damaged/ckpt_2/extra.pt").unlink()
    (tmp_path / "waits/.recckpt").mkdir(parents=True)
    runs = {run.name: run for run in RunsWatcher(open_storage(str(tmp_path)), overdue_sec=3600).look().runs}
    assert {name: run.health[1] for name, run in runs.items()} == {
        "good": "good",
        "damaged": "bad",
        "waits": "doubtful",
    }
    assert "ckpt_2 is damaged" in runs["damaged"].health[0]
    assert runs["waits"].health[0].startswith("waits: ")
    [_, good, _] = RunsWatcher(open_storage(str(tmp_path)), overdue_sec=1e-9).look().runs
    assert (good.health, good.overdue_by == "-") == (("overdue", "doubtful"), False)
    assert runs["good"].overdue_by == "-"


def test_a_run_that_cannot_be_looked_at_hides_no_other(tmp_path, monkeypatch):
    for name in ("a", "b"):
        run_saved(tmp_path / name, 1)
    watcher = RunsWatcher(open_storage(str(tmp_path)))
    watcher.look()

    def refuse(storage):
        if storage.url.endswith("/b"):
            raise PermissionError(13, "Permission denied")
        return claimed_epochs(storage)

    run_saved(tmp_path / "a", 2)
    monkeypatch.setattr("recckpt.inspect.watch.claimed_epochs", refuse)
    first, second = watcher.look().runs
    assert (first.name, first.status.last.step) == ("a", 2)
    assert (second.status, second.health) == (None, ("cannot look: [Errno 13] Permission denied", "bad"))
    assert second.to_dict()["error"] == "[Errno 13] Permission denied"


def begun(root):
    run = NearRun(root).put(**{f"_{id_}": 0.5 for id_ in range(10)}).step()
    return run.put(_1=1.0).step().put(_2=2.0).step()


@pytest.fixture
def newest(tmp_path):
    begun(tmp_path)
    return look_around(open_storage(str(tmp_path / "runs"))).current[-1]


def at(checkpoint, step, seconds):
    """Return a checkpoint or near save as made of a step, so many seconds before now."""
    time = (TODAY - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    manifest = replace(checkpoint.manifest, step=step, time=time)
    return Checkpoint(checkpoint.directory, manifest, checkpoint.below, near_dir=checkpoint.near_dir)


def here(save, n_here=4, is_elsewhere=False):
    return NearHere(save, 4, n_here, is_lost=False, is_elsewhere=is_elsewhere)


def test_a_look_says_what_is_lost_with_processes_and_with_the_host(newest):
    saves = [here(at(newest, 140, 2)), here(at(newest, 120, 12))]
    near = near_now(saves, at(newest, 20, 62), history_of([]), TODAY)
    assert (near.n_saves, near.newest.step, near.newest.age_sec) == (2, 140, 2.0)
    assert (near.with_processes.steps, near.with_host.steps) == (4, 124)
    assert dict(near_facts(near))["lost now"] == "about 4 steps if its processes die, about 124 steps if the host does"
    saves = [here(at(newest, 140, 2), 2), here(at(newest, 120, 12), 2, is_elsewhere=True)]
    near = near_now(saves, at(newest, 20, 62), history_of([]), TODAY)
    assert (near.with_processes.steps, near.with_host.steps) == (4, 24), "what other hosts have too outlives the host"
    assert ", 2 of 4 shards here; 2 kept" in dict(near_facts(near))["near"]
    near = near_now([here(at(newest, 140, 20))], at(newest, 150, 5), history_of([]), TODAY)
    assert near.with_processes == near.with_host, "a newer checkpoint is what comes back of either"
    assert near.with_host.sec == 5.0
    assert "5 s of training if its processes die" in dict(near_facts(near))["lost now"], "its pace is not known"
    assert dict(near_facts(near_now([], None, history_of([]), TODAY))) == {
        "near": "no near save that counts",
        "lost now": "all if its processes die, all if the host does",
    }


def test_the_pace_of_near_saves_is_that_of_the_last_checkpoints_too(newest):
    lines = [
        {"ckpt_id": f"{step}", "step": step, "time": f"2026-11-22T11:{minute}:00Z"}
        for step, minute in ((100, 10), (700, 20), (1300, 30))
    ]
    near = near_now([], at(newest, 1300, 1800), history_of(lines), TODAY)
    assert near.with_host.steps == 1800
    assert not near.is_overdue
    ended = near_now([], at(newest, 1300, 1801), history_of(lines), TODAY)
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
