"""The benchmarks of recovery and of recommenders: what they compute from what they measure, and that both run."""

import importlib
import json
import math
from dataclasses import replace

import pytest
import torch
from support import warm_python
from support.paths import ROOT

from recckpt.policies.schedule import best_interval, lost_share

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def useful(load):
    return load("useful_time")


def job_of(useful, **changed):
    checkpoints = useful.Kept(every_sec=100.0, cost_sec=1.0, late_sec=0.0)
    job = useful.Job(checkpoints, None, process_sec=0.0, host_sec=0.0, process_failures=20.0, host_failures=0.0)
    return replace(job, **changed)


def test_without_failures_saves_alone_cost_time(useful):
    job = job_of(useful, process_failures=0.0)
    assert useful.useful_share(job, days=1.0, seed=0) == (pytest.approx(1 / 1.01), 0.0)


def test_failures_cost_what_the_formula_says(useful):
    job = job_of(useful, checkpoints=useful.Kept(every_sec=200.0, cost_sec=2.0, late_sec=10.0), process_sec=30.0)
    share, lost_sec = useful.useful_share(job, days=3000.0, seed=0)
    expected = lost_share(200.0, 2.0, 10.0, useful.DAY / 20) + 30.0 * 20 / useful.DAY
    assert 1 - share == pytest.approx(expected, abs=0.003)
    assert lost_sec == pytest.approx(110.0, rel=0.05)


def test_near_saves_narrow_what_the_death_of_a_process_costs_and_not_that_of_a_host(useful):
    near = useful.Kept(every_sec=1.0, cost_sec=0.0, late_sec=0.0)
    for failures, expected in ({"process_failures": 20.0}, 0.5), ({"process_failures": 0.0, "host_failures": 20.0}, 50):
        _, lost_sec = useful.useful_share(job_of(useful, near=near, **failures), days=3000.0, seed=0)
        assert lost_sec == pytest.approx(expected, rel=0.05)


def test_what_near_saves_had_reached_goes_with_the_host_they_lie_on(useful):
    """Lives are too short for a checkpoint: near saves add them up, until the host is lost."""
    rare = useful.Kept(every_sec=10**9, cost_sec=0.0, late_sec=0.0)
    often = useful.Kept(every_sec=1.0, cost_sec=0.0, late_sec=0.0)
    job = job_of(useful, checkpoints=rare, near=often)
    assert useful.useful_share(job, days=100.0, seed=0)[0] > 0.999
    assert useful.useful_share(replace(job, host_failures=1.0), days=100.0, seed=0)[0] < 0.1


def test_the_same_seed_gives_the_same_figures(useful):
    one, same, other = (useful.useful_share(job_of(useful), days=30.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other


def test_a_save_counts_once_it_is_late_no_more(useful):
    kept = useful.Kept(every_sec=10.0, cost_sec=0.0, late_sec=3.0)
    assert [kept.covered(trained) for trained in (0.0, 2.0, 12.9, 13.0, 22.9, 23.0)] == [0, 0, 0, 10, 10, 20]


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_ids_are_skewed_by_zipf(load, exponent):
    generator = torch.Generator().manual_seed(0)
    ranks = load("recsys_peers").skewed_ranks(200_000, 1000, exponent, generator)
    assert (int(ranks.min()), int(ranks.max())) == (0, 999)
    # What is drawn is a density over [1, 1001), of which each rank takes a stretch of 1.
    weights = torch.arange(1, 1001, dtype=torch.float64).pow(-exponent)
    half = int((weights.cumsum(0) < weights.sum() / 2).sum())
    assert float((ranks <= half).double().mean()) == pytest.approx(0.5, abs=0.06)


def test_the_interval_is_the_one_that_pays_but_never_shorter_than_a_save(load):
    at_best = load("recsys").at_best
    medians = {"save_sec": 5.0, "pause_sec": 1.0, "training_lost_sec": 2.0, "restore_sec": 10.0}
    every = best_interval(2.0, 86_400 / 4)
    assert at_best(medians, 4.0, 0.1) == {
        "best_interval_sec": round(every, 1),
        "steps_lost_a_failure": round((every / 2 + 4.0) / 0.1),
        "time_lost_percent": round(100 * (lost_share(every, 2.0, 4.0, 86_400 / 4) + 10.0 * 4 / 86_400), 3),
    }
    assert at_best({**medians, "training_lost_sec": 1e-9}, 4.0, 0.1)["best_interval_sec"] == 5.0


def lines_of(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_each_way_to_save_a_recommender_is_measured_or_skipped_aloud(load, tmp_path):
    options = ("--rows", 2000, "--width", 4, "--changed", 0.1, "--rounds", 1, "--threads", 1, "--root", tmp_path)
    done = warm_python.run(BENCHMARKS / "recsys.py", *options, cwd=tmp_path)
    machine, *ways = lines_of(done)
    assert machine["case"] == "machine"
    peers = load("recsys_peers")
    assert {line["way"] for line in ways} == set(peers.WAYS)
    for line in ways:
        if (package := peers.lacking(line["way"])) is not None:
            assert line["SKIPPED"] == f"{package} is not installed here"
        else:
            assert line["pause_ms"] > 0 < line["mb"]
            assert line["changed"] >= 0.1
            assert line["save_sec"] >= line["pause_ms"] / 1000 - 1e-3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_deaths_are_timed_part_by_part_and_feed_the_simulation(tmp_path):
    small = ("--rows", 2000, "--look-ups", 64, "--hidden", 8, "--threads", 1, "--save-every", 6, "--near-every", 2)
    few = ("--rounds", 1, "--deaths", 1, "--accelerator-ms", 1, "--days", 30, "--root", tmp_path)
    done = warm_python.run(BENCHMARKS / "recovery.py", *small, *few, cwd=tmp_path)
    lines = lines_of(done)
    process, host = (line for line in lines if line["case"].startswith("death of a"))
    for line in (process, host):
        parts = [line["sec"][part] for part in ("detect", "start", "restore", "first_step")]
        assert math.isclose(sum(parts), line["sec"]["in_all"], abs_tol=0.01)
    assert min(host["steps_lost"]) >= 0 <= min(process["steps_lost"])
    assert [line["useful_percent"] > 0 for line in lines if line["case"].startswith("useful time")] == [True] * 8
    assert list(tmp_path.iterdir()) == []
