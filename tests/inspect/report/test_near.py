"""What a report says of near saves, by the lines of a timeline and by what a host has."""

import dataclasses
import json
from datetime import datetime, timedelta, timezone

import pytest
from support.near_runs import NearRun

import recckpt
from recckpt import Deltas
from recckpt.inspect.report.near import near_findings, near_health, near_lines
from recckpt.inspect.report.result import RunHealth
from recckpt.inspect.save_times import save_times

BEGIN = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
NEAR = {"made": 49, "failed": 0, "skipped": {}, "steps": [20, 980], "gap_steps": 20, "hosts": 4, "copies": 1}
NONE_MADE = {"made": 0, "skipped": {"too_much_changed": 49}, "gap_steps": 1000, "total_sec": 0.0}
NEAR |= {"blocked_sec": 0.49, "total_sec": 9.8, "n_bytes": 49_000_000}


def line(number, near=NEAR, **fields):
    """Return a checkpoint of each thousand steps, one a step each 0.1 s, in the background."""
    time = (BEGIN + timedelta(seconds=100 * number)).isoformat().replace("+00:00", "Z")
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


def test_near_saves_that_were_left_out_count_among_what_a_death_costs():
    near = near_health([line(1), line(2, NEAR | NONE_MADE)])
    assert (near.every_steps, near.process_steps) == (20, 1002)


def test_what_a_death_costs_is_not_said_where_no_line_says_it():
    without = {name: value for name, value in NEAR.items() if name != "gap_steps"}
    assert near_health([line(number, without) for number in (1, 2)]).process_steps is None


def test_without_copies_a_host_takes_its_near_saves_along():
    near = near_health([line(number, NEAR | {"copies": 0}) for number in range(1, 4)])
    assert (near.process_steps, near.host_steps) == (22, 1030)


def test_a_run_without_near_saves_has_none_in_its_report():
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


@pytest.mark.parametrize("near", [{"made": "x"}, {"made": -1}, {"made": 2, "steps": ["a"], "skipped": 3}, [], "x", 7])
def test_a_field_that_somebody_has_edited_breaks_no_report(near):
    health = near_health([line(1, near)])
    assert health is None or health.every_steps is None


def test_a_reason_that_somebody_has_made_up_stays_in_its_line():
    near = near_health([line(1, NEAR | {"skipped": {"\x1b[2J\nhealthy": 1}})])
    [said, *_] = near_lines(RunHealth("runs", (), (), (), (), None, (), (), True, near=near))
    assert "1 left out, since" in said
    assert said.isprintable()


def test_a_report_of_a_run_says_what_became_of_its_near_saves_and_what_is_lost_now(tmp_path):
    run = NearRun(tmp_path).put(_1=1.0).step().put(_1=2.0).step().put(_1=3.0).step().save().put(_1=4.0).step()
    path = tmp_path / "runs"
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


def test_a_near_dir_that_is_none_of_a_host_is_refused(tmp_path):
    NearRun(tmp_path).put(_1=1.0).step()
    with pytest.raises(ValueError, match="path must be a directory of this host"):
        recckpt.report(tmp_path / "runs", near="s3://bucket/near")
