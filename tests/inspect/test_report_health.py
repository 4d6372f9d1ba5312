"""What is unhealthy, how often to save, and what near saves cost: judgement of what was found, without a disk."""

import dataclasses
import json
from datetime import datetime, timedelta, timezone

import pytest
from support.near_runs import NearRun

import recckpt
from recckpt import Deltas
from recckpt.inspect.report_health import advice_of, findings_of, near_findings, near_health
from recckpt.inspect.report_result import CheckpointSize, LargeRow, RunHealth, TableHealth, UnusableDirectory
from recckpt.inspect.report_text import advice_words, near_lines
from recckpt.inspect.save_times import SaveTimes, save_times

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)


def checkpoint(**fields):
    links, time = fields.pop("links", ("ckpt_9",)), fields.pop("time", "")
    sizes = {"n_bytes": 100, "chain_bytes": 100, "full_bytes": 100, **fields}
    flags = {"ephemeral": False, "pinned": False, "tables": {}}
    return CheckpointSize("ckpt_9", "ckpt_9", 9, "full", time, 10, links=links, **sizes, **flags)


def save(**fields):
    nothing = {field.name: None for field in dataclasses.fields(SaveTimes)}
    return SaveTimes(**{**nothing, "ckpt_id": "ckpt_9", **fields})


def said(checkpoints=None, leftovers=(), saves=(), tables=(), damage=(), deep=True, overdue_sec=None):
    checkpoints = [checkpoint()] if checkpoints is None else checkpoints
    found = RunHealth("runs/clicks", (), checkpoints, leftovers, saves, None, damage, tables, deep)
    return findings_of(found, NOW, overdue_sec)


def table(**fields):
    return TableHealth("item", 1000, 72, rows_read=1000, not_finite=fields.pop("not_finite", {}), **fields)


def test_a_healthy_run_has_no_findings():
    busy = table(dead=10, exploding=0, untrained=500, busy=3)
    assert said(saves=[save(blocked_sec=0.1, total_sec=5)] * 20, tables=[busy]) == []
    assert said(tables=[TableHealth("item", 1000, 72)]) == []  # rows were not read


@pytest.mark.parametrize(
    ("fields", "level", "what", "remedy"),
    [
        ({"not_finite": {"embedding": 3}, "not_finite_ids": (7,)}, "problem", "3 of 1,000 rows", "clip gradients"),
        ({"exploding": 2, "largest": (LargeRow(5, 1e6),)}, "warning", "5 (1e+06)", "weight decay"),
        ({"dead": 11}, "warning", "11 of 1,000 rows are all zeros", "start at zeros"),
        ({"untrained": 501}, "warning", "never trained", "MinCount"),
        ({"untrained": 501, "is_live": True}, "warning", "never trained", "a table of fewer rows would do"),
        ({"damage": ("broken `here`", "there")}, "problem", "(and 1 more)", "export runs/clicks/ckpt_9"),
    ],
)
def test_unhealthy_rows_are_named_with_what_to_do(fields, level, what, remedy):
    [found] = said(tables=[table(**fields)])
    assert found.level == level
    assert what in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("kind", "is_dead", "level", "remedy"),
    [
        ("damaged", False, "problem", "recckpt verify"),
        ("newer", False, "problem", "Install that version"),
        ("unreadable", False, "problem", "grant access"),
        ("fenced", True, "warning", "end the older one"),
        ("unfinished", True, "warning", "recckpt repair --clean"),
        ("unfinished", False, "warning", "repair --dry-run"),
    ],
)
def test_directories_that_do_not_count_are_named_with_what_to_do(kind, is_dead, level, remedy):
    [found] = said(leftovers=[UnusableDirectory("ckpt_8", kind, "reason", is_dead)])
    assert (found.level, "reason" in found.what) == (level, True)
    assert remedy in found.remedy


def test_problems_come_before_warnings_and_nothing_usable_or_damage_beside_the_rows_is_one():
    found = said(checkpoints=(), leftovers=[UnusableDirectory("ckpt_8", "unfinished", "reason", True)])
    assert [finding.level for finding in found] == ["problem", "warning"]
    [found] = said(damage=["model.pt: found x", "y"])
    assert found.what == "the newest checkpoint is damaged: model.pt: found x (and 1 more)"
    assert "recckpt verify runs/clicks/ckpt_9" in found.remedy


@pytest.mark.parametrize("fields", [{"links": ("x",) * 41}, {"links": ("x",) * 2, "chain_bytes": 401}])
def test_a_chain_is_too_long_by_its_links_or_its_bytes(fields):
    [found] = said(checkpoints=[checkpoint(**fields)])
    assert "recckpt compact runs/clicks" in found.remedy
    assert said(checkpoints=[checkpoint(links=("x",) * 40, chain_bytes=400)]) == []


def test_failed_saves_are_a_problem_as_long_as_the_last_one_is_among_them():
    [found] = said(saves=[save(), save(error="OSError: no space")])
    assert (found.level, "no space" in found.what) == ("problem", True)
    assert [finding.level for finding in said(saves=[save(error="x"), save()])] == ["warning"]
    assert said(saves=[save(error="x"), *[save()] * 10]) == []


def test_slow_saves_and_long_pauses_are_told_from_usual_ones():
    usual = [save(blocked_sec=1.0, total_sec=10.0)] * 8
    assert said(saves=[*usual, save(blocked_sec=2.9, total_sec=29)]) == []
    [paused, slow] = said(saves=[*usual, save(blocked_sec=3.1, total_sec=31)])
    assert "3.1 s" in paused.what
    assert "31.0 s" in slow.what
    assert said(saves=[save(blocked_sec=0.001)] * 8 + [save(blocked_sec=0.9)]) == []  # too short to matter
    assert said(saves=[save(total_sec=50), *usual, *usual]) == []  # long ago
    assert said(saves=[save(total_sec=1), save(total_sec=50)]) == []  # too few to say what is usual


@pytest.mark.parametrize(
    ("minutes", "options", "level"),
    [
        (29, {}, None),
        (31, {}, "warning"),  # it may have ended
        (31, {"deep": False}, "problem"),
        (31, {"overdue_sec": 3600}, None),
        (31, {"overdue_sec": 1800}, "problem"),
        (31, {"saves": ()}, None),  # nobody knows how often it saves
        (31, {"saves": (), "overdue_sec": 1800}, "problem"),
    ],
)
def test_a_save_that_is_missing_for_three_times_as_long_as_usual_or_asked_is_found(minutes, options, level):
    times = [(NOW - timedelta(minutes=minutes + ago)).isoformat() for ago in (20, 10, 0)]
    checkpoints = [checkpoint(time=times[-1])]
    found = said(checkpoints, **{"saves": [save(time=time) for time in times], **options})
    assert [finding.level for finding in found] == [level] * (level is not None)
    assert all("no save since ckpt_9" in finding.what for finding in found)


def saves(n, every_sec, **fields):
    times = [(NOW + timedelta(seconds=every_sec * number)).isoformat() for number in range(n)]
    return [save(time=time.replace("+00:00", "Z"), **fields) for time in times]


def test_who_saves_too_rarely_reads_how_often_would_cost_less_where_there_are_figures():
    advice = advice_of(saves(9, 1000, blocked_sec=0.556, total_sec=2.0), 1.0)
    assert round(advice.best_sec) == 310
    assert advice_words(advice) == (
        "at one failure a day, saving every 5 min 10 s would cost 0.36 % of the time; you save every 16 min 40 s, "
        "which costs 0.64 % (a save holds training up for 556 ms and takes 2 s)"
    )
    assert advice_of(saves(3, 1000, blocked_sec=0.001, total_sec=60.0), 24.0).best_sec == 60.0, "as long as a save"
    advice = advice_of(saves(1, 0, blocked_sec=1.0, total_sec=2.0), 0.5)
    assert (advice.every_sec, advice.every_share) == (None, None)
    assert advice_words(advice).startswith("at 0.5 failures a day, saving every 9 min 48 s would cost 0.34 % of the ")
    failed = saves(5, 100, blocked_sec=1.0, total_sec=2.0, error="OSError")
    assert advice_of([], 1.0) is None
    assert advice_of([*failed, *saves(5, 100, total_sec=2.0)], 1.0) is None


NEAR = {"made": 49, "failed": 0, "skipped": {}, "steps": [20, 980], "gap_steps": 20, "hosts": 4, "copies": 1}
NONE_MADE = {"made": 0, "skipped": {"too_much_changed": 49}, "gap_steps": 1000, "total_sec": 0.0}
NEAR |= {"blocked_sec": 0.49, "total_sec": 9.8, "n_bytes": 49_000_000}


def line(number, near=NEAR, **fields):
    """Return a checkpoint of each thousand steps, one a step each 0.1 s, in the background."""
    time = (NOW + timedelta(seconds=100 * number)).isoformat().replace("+00:00", "Z")
    what = {"ckpt_id": f"ckpt_{1000 * number}", "step": 1000 * number, "kind": "delta", "time": time}
    costs = {"blocked_sec": 0.02, "total_sec": 3.0, "n_bytes": 80_000_000, "near": near}
    return save_times(what | costs | fields)


def test_near_saves_are_set_beside_deltas_with_what_a_death_costs():
    near = near_health([line(1), line(2), line(3, NEAR | {"failed": 1, "skipped": {"under_way": 2}, "made": 47})])
    assert (near.due, near.made, near.failed, near.skipped) == (148, 145, 1, {"under_way": 2})
    assert (near.every_steps, near.hosts, near.copies) == (pytest.approx(2880 / 145), 4, 1)
    assert (near.delta.total_sec, near.delta.n_bytes) == (3.0, 80_000_000)
    assert near.near.n_bytes == pytest.approx(3 * 49_000_000 / 145)
    assert (near.process_steps, near.host_steps) == (22, 22)  # every 20 steps, and 2 until one counts


def test_what_a_death_costs_counts_what_was_left_out_and_with_a_host_goes_what_has_no_copy():
    near = near_health([line(1), line(2, NEAR | NONE_MADE)])
    assert (near.every_steps, near.process_steps) == (20, 1002)
    without = {name: value for name, value in NEAR.items() if name != "gap_steps"}
    assert near_health([line(number, without) for number in (1, 2)]).process_steps is None, "no line says it"
    near = near_health([line(number, NEAR | {"copies": 0}) for number in range(1, 4)])
    assert (near.process_steps, near.host_steps) == (22, 1030)
    assert near_health([line(1, None), line(2, {"made": 0})]) is None


@pytest.mark.parametrize(
    ("became", "what"),
    [
        ({"failed": 3}, "3 of the 52 near saves before the newest checkpoint failed"),
        ({"skipped": {"stopped": 1}}, "there are no more in this process"),
        ({"skipped": {"too_much_changed": 1}}, "too much had changed"),
        ({"skipped": {"under_way": 50}}, "one was under way"),
        ({"skipped": {"under_way": 40}}, None),
        ({}, None),
    ],
)
def test_a_report_warns_of_near_saves_that_fell_out(became, what):
    found = [finding.what for finding in near_findings([line(1, NEAR | {"failed": 9}), line(2, NEAR | became)])]
    assert len(found) == (what is not None)
    assert all(what in each for each in found)


def test_a_field_that_somebody_has_edited_breaks_no_report_and_a_reason_stays_in_its_line():
    for edited in ({"made": "x"}, {"made": -1}, {"made": 2, "steps": ["a"], "skipped": 3}, [], "x", 7):
        health = near_health([line(1, edited)])
        assert health is None or health.every_steps is None
    near = near_health([line(1, NEAR | {"skipped": {"\x1b[2J\nhealthy": 1}})])
    [said, *_] = near_lines(RunHealth("runs", (), (), (), (), None, (), (), True, near=near))
    assert "1 left out, since" in said
    assert said.isprintable()


def test_a_report_of_a_run_says_what_became_of_its_near_saves_and_what_is_lost_now(tmp_path):
    run = NearRun(tmp_path).put(_1=1.0).step().put(_1=2.0).step().put(_1=3.0).step().save().put(_1=4.0).step()
    path = tmp_path / "runs"
    with pytest.raises(ValueError, match="path must be a directory of this host"):
        recckpt.report(path, near="s3://bucket/near")
    without = recckpt.report(path)
    assert without.near.made == 2
    assert without.near_now is None
    how = recckpt.report(path, near=tmp_path / "near")
    assert how.near_now.newest.step == run.manager.global_step
    said = list(near_lines(how))
    assert said[0] == "near saves: 2 made of 2 that were due every step; each file on 1 host"
    assert said[-1].startswith("lost now: ")
    assert "2 made of 2 that were due" in str(how)
    assert json.dumps(how.to_dict()["near"])
    page = how.to_html()
    assert "Near saves" in page
    assert "the delta after it" in page
    assert "Near saves" not in dataclasses.replace(how, near=None, near_now=None).to_html()


def test_the_key_of_a_plot_names_what_is_drawn_in_it_alone(tmp_path):
    run = NearRun(tmp_path, max_keep=None, deltas=Deltas(max_dirty=0.5)).put(_1=1.0, _2=1.0, _3=1.0).step()
    run.put(_1=2.0).step().put(_1=3.0, _2=3.0, _3=3.0).step().save()
    assert [save.kind for save in recckpt.report(tmp_path / "runs").saves] == ["full", "full"]
    page = recckpt.report(tmp_path / "runs").to_html()
    assert "a near save" in page
    assert "the delta after it" not in page
