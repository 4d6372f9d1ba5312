"""What is known of a run, look after look."""

import json
import re
import shutil
from collections import Counter
from datetime import datetime, timedelta, timezone

import pytest
from support.builders import Run
from support.forge import filled, save_tables

from recckpt import Deltas
from recckpt.errors import SaveFailedError
from recckpt.inspect.watch.history import history_of
from recckpt.inspect.watch.look import Watcher
from recckpt.inspect.watch.shown import facts, few, line
from recckpt.inspect.watch.status import status_of
from recckpt.output_dir.listing import look_around
from recckpt.storage import open_storage

DELTAS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)
NOW = datetime(2026, 11, 23, 12, 0, tzinfo=timezone.utc)


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


def test_a_run_that_was_begun_anew_under_the_same_names_is_seen_as_it_is(tmp_path):
    watcher = Watcher(open_storage(str(tmp_path)))
    save_tables(open_storage(str(tmp_path)), [filled("t", range(3))])
    assert watcher.look().last.rows == 3
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    save_tables(open_storage(str(tmp_path)), [filled("t", range(5))])
    assert watcher.look().last.rows == 5


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


def test_of_many_problems_the_first_are_shown_and_the_rest_are_counted():
    assert few(["a\nb"] * 3) == ["a; b"] * 3
    assert few(["a"] * 1203) == ["a"] * 3 + ["and 1,200 more: `recckpt ls` lists all"]


def saved(minutes, **more):
    time = NOW + timedelta(minutes=minutes)
    return {"ckpt_id": f"ckpt_{minutes}", "time": time.isoformat().replace("+00:00", "Z"), "blocked_sec": 0.1, **more}


def test_the_last_saves_are_shown_as_bars(tmp_path):
    Run(tmp_path, interval=2).train(6)
    status = Watcher(open_storage(str(tmp_path))).look()
    assert len(status.pauses) == len(status.sizes) == len(status.to_dict()["pauses_sec"]) == 3
    shown = {fact.name: fact.text for fact in facts(status)}
    assert re.fullmatch("[▁▂▃▄▅▆▇█]{3} of the last 3 saves, the newest last", shown["pauses"])
    assert re.fullmatch(r"[▁▂▃▄▅▆▇█]{3} at most \d.* kB", shown["bytes"])


def test_the_pace_is_the_usual_one_whatever_pause_there_was(tmp_path):
    assert history_of([]).every_sec is None
    assert history_of([saved(0)]).every_sec is None
    assert history_of([saved(0), saved(10), saved(20), saved(500), saved(510)]).every_sec == 600
    at_once = [saved(0), saved(0), saved(0), saved(1)]
    assert history_of(at_once).every_sec == 20, "times are in seconds: the mean is all that can be said"
    assert history_of([saved(0), saved(0)]).every_sec is None
    odd = [{"time": None}, {"time": "yesterday"}, *({"blocked_sec": sec} for sec in ("long", True, -1, 10**400))]
    assert (history_of(odd).every_sec, history_of(odd).pause) == (None, None)


def test_pauses_are_those_of_the_slowest_rank_and_failures_those_since_the_last_save(tmp_path):
    lines = [saved(0), saved(1, error="x"), saved(2, max_blocked_sec=0.3), saved(3, error="y"), saved(4, error="z")]
    history = history_of(lines)
    assert (history.pause.last_sec, history.pause.max_sec, history.pause.n_saves) == (0.3, 0.3, 2)
    assert [each.error for each in history.failed] == ["y", "z"]


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
