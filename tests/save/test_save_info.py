"""Where the time of a save went, or why it failed: a line for each, and a call of on_save."""

import errno
import json
from pathlib import Path

import pytest
import torch
from support.rank_processes import results, run_script
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import CommitNotDurableError, SaveFailedError, WriterFencedError
from recckpt.format import layout
from recckpt.inspect import is_checkpoint
from recckpt.output_dir import index_file
from recckpt.save.background import SaveRunner
from recckpt.save.save_info import SaveInfo
from recckpt.sparse import HashTable
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.retry import RetryPolicy

SECONDS = [f"{phase}_sec" for phase in ("stage", "write", "agree", "commit", "rotate", "blocked", "total")]
SECONDS += ["max_stage_sec", "max_blocked_sec"]


def build(url, **options):
    table = HashTable(2, name="t")
    table(torch.arange(50))
    return table, Saver(nn.ModuleDict({"t": table, "top": nn.Linear(2, 1)}), output_dir=url, **options)


def lines(url):
    data = open_storage(url).read(layout.TIMELINE, 1 << 30)
    return [json.loads(line) for line in data.decode().splitlines()]


def test_a_save_leaves_a_line_that_says_what_it_was_and_where_its_time_went(url):
    _, saver = build(url)
    manifest = saver.save("c", step=7)
    [line] = lines(url)
    assert line.keys() == {
        *("ckpt_id", "step", "ephemeral", "background", "time", "n_bytes", "n_rows", "kept_rows", "slowest_shard"),
        *("kind", "why_full", "n_links", "n_upserts", "n_deletes", "gb_per_sec", "max_rank_bytes", *SECONDS),
        *("n_left_out", "largest_errors", "n_evicted", "metrics"),
    }
    said = {name: line[name] for name in ("ckpt_id", "step", "ephemeral", "background", "time", "n_bytes", "n_rows")}
    assert said == {
        **{"ckpt_id": "c", "step": 7, "ephemeral": False, "background": False},
        **{"time": manifest.time, "n_bytes": manifest.n_bytes, "n_rows": 50},
    }
    assert (line["slowest_shard"], line["kept_rows"]) == (0, 0)
    own = (line["stage_sec"], line["blocked_sec"], line["n_bytes"])
    assert (line["max_stage_sec"], line["max_blocked_sec"], line["max_rank_bytes"]) == own
    assert all(line[name] >= 0 for name in SECONDS)
    assert line["stage_sec"] + line["write_sec"] + line["commit_sec"] + line["rotate_sec"] <= line["total_sec"]
    assert line["gb_per_sec"] == pytest.approx(manifest.n_bytes / 1e9 / line["total_sec"], abs=1e-5)


def test_a_blocking_save_blocks_to_its_end_and_one_in_the_background_counts_rows_that_training_changed(url, gate):
    build(url)[1].save("of an earlier run", step=3)
    table, saver = build(url)
    saver.save("a")
    writing = gate(type(saver.storage), "threads")
    handle = saver.save_async("b", ephemeral=True)
    writing.wait()
    table.insert(torch.arange(20), torch.zeros(20, 2))
    writing.open()
    handle.wait()
    earlier, first, second = lines(url)
    assert earlier["step"] == 3
    assert first["blocked_sec"] == first["total_sec"]
    assert 0 < second["blocked_sec"] < second["total_sec"]
    assert (second["background"], second["ephemeral"], second["kept_rows"]) == (True, True, 20)


def test_the_time_that_a_save_waits_for_the_one_before_is_time_that_training_stood_still(url, gate, monkeypatch):
    _, saver = build(url, max_keep=None)
    writing, settle = gate(type(saver.storage), "threads"), SaveRunner.settle

    def open_and_settle(self, timeout_sec=None):
        writing.open()
        return settle(self, timeout_sec)

    first = saver.save_async("a")
    writing.wait()
    monkeypatch.setattr(SaveRunner, "settle", open_and_settle)
    second = saver.save_async("b")
    assert second.info.blocked_sec >= first.info.commit_sec + first.info.rotate_sec
    blocked_sec = second.info.blocked_sec
    second.wait()
    assert lines(url)[1]["blocked_sec"] == round(blocked_sec, 6)
    assert second.info.blocked_sec == blocked_sec


def broken(self, *args):
    raise OSError(5, "broken")


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_leaves_a_line_and_is_reported_with_its_error(url, monkeypatch, background):
    told = []
    _, saver = build(url, on_save=told.append)
    saver.save("a")
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.save.save.write", broken)
        with pytest.raises(SaveFailedError, match=r"rank 0: OSError: .*broken"):
            saver.save_async("b", step=7).wait() if background else saver.save("b", step=7)
    [before, failed] = lines(url)
    assert (failed["ckpt_id"], failed["step"], failed["n_bytes"]) == ("b", 7, 0)
    assert "failed on rank 0: OSError: [Errno 5] broken; nothing was committed" in failed["error"]
    assert failed["time"] >= before["time"]
    assert "error" not in before
    assert "broken" in str(told[1].error)
    assert (told[1].path, told[1].n_bytes) == ("", 0)
    saver.save("c")
    assert ["error" in line for line in lines(url)] == [False, True, False]


def test_a_failure_waits_for_the_next_line_where_the_output_dir_is_not_held_or_the_network_is_down(url, monkeypatch):
    _, saver = build(url)

    def fails_with(error, ckpt_id):
        with monkeypatch.context() as patch:
            patch.setattr("recckpt.save.propose.check", lambda *_: raising(error))
            with pytest.raises((type(error), SaveFailedError)) as raised:
                saver.save(ckpt_id)
            assert error in (raised.value, raised.value.__cause__)

    fails_with(RuntimeError("not held yet"), "a")
    with pytest.raises(FileNotFoundError):
        lines(url)
    saver.save("b")
    fails_with(ConnectionResetError(104, "down"), "c")
    fails_with(WriterFencedError("another's"), "d")
    assert [line["ckpt_id"] for line in lines(url)] == ["a", "b"]
    saver.save("e")
    assert [line["ckpt_id"] for line in lines(url)] == ["a", "b", "c", "e"]


def test_who_has_lost_the_output_dir_leaves_no_line_of_its_failures(tmp_path, monkeypatch):
    _, saver = build(str(tmp_path))
    saver.save("a")
    _, other = build(str(tmp_path))
    other.load()
    other.save("b")
    monkeypatch.setattr("recckpt.save.propose.check", lambda *_: raising(RuntimeError("broken")))
    with pytest.raises(RuntimeError):
        saver.save("c")
    assert [line["ckpt_id"] for line in lines(str(tmp_path))] == ["a", "b"]


def raising(error):
    raise error


def test_a_timeline_that_cannot_be_written_fails_no_save_and_its_line_comes_later(url, monkeypatch, caplog):
    _, saver = build(url)
    replace = type(saver.storage).replace
    is_written = []

    def fail_there(self, name, data):
        if name == layout.TIMELINE:
            if is_written:
                replace(self, name, data)
            raise OSError(28, "full")
        replace(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(type(saver.storage), "replace", fail_there)
        assert saver.save("a").ckpt_id == "a"
        is_written.append(True)
        assert saver.save("b").ckpt_id == "b"
    assert "full" in caplog.text
    saver.save("c")
    assert [line["ckpt_id"] for line in lines(url)] == ["a", "b", "c"], "no line is there twice"


def test_the_line_of_the_end_is_given_up_soon_where_the_store_is_away(memory_url, monkeypatch, caplog):
    _, saver = build(memory_url)
    saver.save("a")
    now = [0.0]
    policy = RetryPolicy(sleep=lambda seconds: now.append(now[-1] + seconds), clock=lambda: now[-1])
    monkeypatch.setattr(saver.storage, "policy", policy)
    with monkeypatch.context() as patch:
        patch.setattr(saver.storage._fs, "cat_file", lambda *_, **__: raising(ConnectionResetError(104, "away")))
        saver._note_end(7)
    assert now[-1] <= 5
    assert caplog.text.count("the timeline lacks its last lines: ") == 1
    assert saver.storage.policy is policy, "saves that follow wait as long as before"
    saver.save("b")
    assert [line["kind"] for line in lines(memory_url)] == ["full", "ended", "full"]


def test_the_file_is_bounded_and_the_oldest_lines_go(url, monkeypatch):
    storage = open_storage(url)
    storage.prepare()
    n_bytes = len(SaveInfo("ckpt_000").to_json())
    monkeypatch.setattr(index_file, "_TIMELINE_BYTES", 5 * n_bytes)
    for number in range(20):
        index_file.append_timeline(storage, [SaveInfo(f"ckpt_{number:03}").to_json()])
        assert storage.size(layout.TIMELINE) < 7 * n_bytes
    kept = [line["ckpt_id"] for line in lines(url)]
    assert kept == [f"ckpt_{number:03}" for number in range(20 - len(kept), 20)]
    assert 4 <= len(kept) <= 6


def test_seconds_of_a_phase_add_up_also_where_it_fails():
    info = SaveInfo("c")
    with info.timed("stage"):
        pass
    once = info.stage_sec
    with pytest.raises(KeyError), info.timed("stage"):
        raise KeyError
    assert info.stage_sec > once > 0


def test_the_maxima_are_those_of_the_slowest_and_of_the_largest_of_real_ranks(tmp_path):
    run_script(Path(__file__).with_name("save_info_ranks.py"), tmp_path, 2)
    [first, second] = results(tmp_path, 2)
    assert first == second, "all ranks know the same"
    maxima, write_sec, slowest, of_all = first
    for name in ("stage_sec", "blocked_sec"):
        assert maxima[name] == max(own[name] for own in of_all), name
    assert maxima["stage_sec"] == of_all[1]["stage_sec"] > of_all[0]["stage_sec"], "rank 1 takes longer"
    assert maxima["n_bytes"] >= of_all[1]["n_bytes"] > of_all[0]["n_bytes"]
    [line] = lines(str(tmp_path / "run"))
    assert (line["write_sec"], line["slowest_shard"]) == (round(write_sec, 6), slowest)
    assert line["max_rank_bytes"] == maxima["n_bytes"]
    assert line["max_stage_sec"] == round(maxima["stage_sec"], 6)


class Breaks:
    """State that cannot be taken."""

    broken = False

    def state_dict(self):
        if self.broken:
            raise RuntimeError("out of order")
        return {}

    def load_state_dict(self, state):
        pass


def test_a_save_is_reported_with_its_path_and_metrics_or_its_error(url):
    told, part = [], Breaks()
    _, saver = build(url, max_keep=None, on_save=told.append)
    saver.register_for_checkpointing("part", part)
    CheckpointManager(saver, 1, async_save=True).step(metrics={"auc": 0.5}, state={"note": "x"})
    saver.settle()
    [info] = told
    assert (info.error, info.metrics, info.step) == (None, {"auc": 0.5}, 1)
    assert is_checkpoint(info.path)
    part.broken = True
    with pytest.raises(RuntimeError, match="out of order") as caught:
        saver.save("a", step=3)
    assert [(info.ckpt_id, info.step, info.error, info.path) for info in told[1:]] == [("a", 3, caught.value, "")]
    part.broken = False
    saver.save("b")
    assert [(info.ckpt_id, info.error) for info in told[2:]] == [("b", None)]


def test_a_save_that_is_in_place_is_reported_with_its_path_though_it_may_be_lost(tmp_path, monkeypatch):
    told = []
    _, saver = build(str(tmp_path), on_save=told.append)

    def fail(storage, name):
        if not name and (tmp_path / "a/manifest.json").exists():
            raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "sync_dir", fail)
        with pytest.raises(CommitNotDurableError, match="'a' is in place") as caught:
            saver.save("a")
    assert [(info.error, info.path) for info in told] == [(caught.value, str(tmp_path / "a"))]
    assert is_checkpoint(told[0].path)
