"""What is unhealthy: judgement of what was found, without a disk."""

import dataclasses
from datetime import datetime, timedelta, timezone

import pytest

from recckpt.inspect.report.health import findings_of
from recckpt.inspect.report.result import CheckpointSize, LargeRow, RunHealth, TableHealth, UnusableDirectory
from recckpt.inspect.save_times import SaveTimes

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
        ({"damage": ("broken `here`", "there")}, "problem", "(and 1 more)", "recckpt salvage runs/clicks/ckpt_9"),
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


def test_problems_come_before_warnings_and_nothing_usable_is_one():
    found = said(checkpoints=(), leftovers=[UnusableDirectory("ckpt_8", "unfinished", "reason", True)])
    assert [finding.level for finding in found] == ["problem", "warning"]


def test_damage_beside_the_rows_is_a_problem():
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
