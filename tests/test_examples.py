"""The examples and the README, run as a user runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support import warm_python
from support.documents import blocks
from support.paths import ROOT

from recckpt import CheckpointReader

DATA = ROOT.parent / "shared/data"
RATINGS, IMPRESSIONS = DATA / "ml-latest-small/ratings.csv.gz", DATA / "open-bandit-small/random_women.csv.gz"
SESSIONS = DATA / "otto-sample/train.jsonl.gz"


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as from a shell, with this checkout importable whether it is installed or not."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)


def train(cwd: Path, output_dir: str, *options: object) -> subprocess.CompletedProcess[str]:
    small = ("--steps", 12, "--save-interval", 5, "--batch-size", 64, "--output-dir", output_dir)
    return warm_python.run(ROOT / "examples/train_ctr.py", *small, *options, cwd=cwd)


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\S+)", output)]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo

    return demo


def resumes_as_if_nothing_had_happened(tmp_path: Path, demo: ModuleType, *options: object) -> None:
    straight = train(tmp_path, "straight", *options)
    assert straight.returncode == 0, straight.stderr
    crashed = train(tmp_path, "crashed", *options, "--crash-at", 8)
    assert crashed.returncode == -signal.SIGKILL, crashed.stderr
    resumed = train(tmp_path, "crashed", *options)
    assert resumed.returncode == 0, resumed.stderr

    assert "resuming at step 5" in resumed.stdout
    assert demo.compare(tmp_path / "straight/ckpt_12", tmp_path / "crashed/ckpt_12") == []
    assert demo.compare(tmp_path / "straight/ckpt_12", tmp_path / "crashed/ckpt_10") != []  # the comparison can fail


@pytest.mark.slow
def test_a_run_killed_between_two_saves_resumes_and_ends_equal_to_one_that_was_not(
    tmp_path: Path, demo: ModuleType
) -> None:
    resumes_as_if_nothing_had_happened(tmp_path, demo)


@pytest.mark.slow
def test_a_run_with_deltas_that_was_killed_ends_equal_to_one_that_was_not(tmp_path: Path, demo: ModuleType) -> None:
    resumes_as_if_nothing_had_happened(tmp_path, demo, "--deltas", "--max-keep", 3)


def two_towers_resume(tmp_path: Path, demo: ModuleType, *options: object) -> None:
    def train(output_dir: str, *more: object) -> subprocess.CompletedProcess[str]:
        small = ("--steps", 12, "--save-interval", 5, "--batch-size", 64, "--output-dir", output_dir)
        return warm_python.run(ROOT / "examples/train_embedding.py", *small, *options, *more, cwd=tmp_path)

    assert train("straight").returncode == 0
    assert train("crashed", "--crash-at", 8).returncode == -signal.SIGKILL
    resumed = train("crashed")
    assert "resuming at step 5" in resumed.stdout
    assert "as a delta" in resumed.stderr
    assert demo.compare(tmp_path / "straight/ckpt_12", tmp_path / "crashed/ckpt_12") == []
    assert demo.compare(tmp_path / "straight/ckpt_12", tmp_path / "crashed/ckpt_10") != []


@pytest.mark.slow
def test_plain_embeddings_killed_between_two_saves_end_equal_to_those_that_were_not(
    tmp_path: Path, demo: ModuleType
) -> None:
    two_towers_resume(tmp_path, demo)


@pytest.mark.slow
@pytest.mark.skipif(not RATINGS.exists(), reason="the MovieLens ratings are not here")
def test_plain_embeddings_of_movie_ratings_resume_as_well(tmp_path: Path, demo: ModuleType) -> None:
    two_towers_resume(tmp_path, demo, "--ratings", RATINGS)


@pytest.mark.slow
@pytest.mark.skipif(not RATINGS.exists(), reason="the MovieLens ratings are not here")
def test_a_run_on_movie_ratings_resumes_as_well(tmp_path: Path, demo: ModuleType) -> None:
    resumes_as_if_nothing_had_happened(tmp_path, demo, "--ratings", RATINGS)


@pytest.mark.slow
@pytest.mark.skipif(not IMPRESSIONS.exists(), reason="the impressions of the Open Bandit Dataset are not here")
def test_features_of_several_values_are_learned_from_impressions_and_the_run_resumes(tmp_path: Path) -> None:
    def train(steps: int) -> str:
        command = (ROOT / "examples/train_bandit.py", IMPRESSIONS, "--steps", steps, "--output-dir", "runs")
        done = warm_python.run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert train(3).startswith("starting, with 10,000 impressions\ndone at step 3: 46 items, ")
    assert train(5).startswith("resuming at step 3\ndone at step 5: 46 items, ")
    assert set(CheckpointReader(str(tmp_path / "runs")).tables()) == {"item", "attribute"}


@pytest.mark.slow
@pytest.mark.skipif(not SESSIONS.exists(), reason="the sessions of the OTTO dataset are not here")
def test_the_next_item_of_a_session_is_learned_against_negatives_and_the_run_resumes(tmp_path: Path) -> None:
    def train(steps: int) -> str:
        command = (ROOT / "examples/train_sessions.py", SESSIONS, "--steps", steps, "--output-dir", "runs")
        done = warm_python.run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train(40)
    found = re.search(
        r"^resuming at step 40\nstep 100  loss (\S+)\ndone at step 100: 510 items\n$", train(100), re.MULTILINE
    )
    assert found
    assert float(found[1]) < 2  # by chance it would be log(21), about 3


@pytest.mark.slow
@pytest.mark.skipif(not SESSIONS.exists(), reason="the sessions of the OTTO dataset are not here")
def test_rows_that_are_not_asked_for_go_at_no_loss_and_too_small_a_table_costs_quality(tmp_path: Path) -> None:
    done = warm_python.run(ROOT / "examples/evict_rows.py", SESSIONS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loss (\S+)  at most (\d+) rows, \d+ in the end, ([\d,]+) evicted", done.stdout)
    (all_loss, all_rows, none), (unseen_loss, _, some), (small_loss, small_rows, many) = found
    assert (all_rows, none) == ("510", "0")
    assert int(small_rows) <= 450
    assert int(some) > 0 < int(many.replace(",", ""))
    assert float(all_loss) < 2.5
    assert abs(float(unseen_loss) - float(all_loss)) < 0.1 < float(small_loss) - float(all_loss)


@pytest.mark.slow
def test_an_evaluator_beside_a_trainer_reads_what_each_checkpoint_has_new(tmp_path: Path) -> None:
    evaluator = warm_python.Piped(ROOT / "examples/evaluate.py", "runs", "--last-step", 12, cwd=tmp_path)
    trained = train(tmp_path, "runs", "--deltas", "--max-keep", 9)
    assert trained.returncode == 0, trained.stderr
    lines = evaluator.stdout.read().splitlines()
    assert evaluator.wait(60) == 0
    steps = [re.fullmatch(r"step (\d+)  loss \d\.\d{4}  ([\d,]+) rows, .* MB read in .* s", line) for line in lines]
    found = [(int(step[1]), int(step[2].replace(",", ""))) for step in steps if step]
    assert [step for step, _ in found] == [5, 10, 12]
    assert found[2][1] < found[0][1], "the last delta has fewer rows than the first checkpoint"


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    done = train(tmp_path, "runs", "--steps", 300, "--batch-size", 256, "--save-interval", 300)

    assert done.returncode == 0, done.stderr
    first, *_, last = losses(done.stdout)
    assert last < first - 0.02


@pytest.mark.slow
def test_a_warm_start_does_what_it_planned_begins_below_a_cold_one_and_resumes_when_run_again(tmp_path: Path) -> None:
    done = warm_python.run(ROOT / "examples/warm_start.py", "--steps", 100, "--output-dir", "runs", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    _, planned, report, resumed = done.stdout.split("\n== ")
    for text in (planned, report):
        for number, run in enumerate(("search", "ads", "feed")):
            assert re.search(rf"^\[{number}\] \S+/runs/{run}/ckpt_100: ", text, re.MULTILINE)
        assert re.search(r"^user@embedding +\[0\] +member@embedding ", text, re.MULTILINE)
        assert re.search(r"^tower.0.weight +\[0\] +layers.0.weight ", text, re.MULTILINE)
        assert re.search(r"^item@id +\[1\] +ad@id ", text, re.MULTILINE)
        assert re.search(r"^item@sparse_adamw_exp_avg +- ", text, re.MULTILINE)
        assert re.search(r"^context@sparse_adamw_exp_avg +\[2\] ", text, re.MULTILINE)
        assert re.search(r"^context_2@embedding +- ", text, re.MULTILINE)
    assert re.search(r"[1-9][\d,]* rows? taken, [1-9][\d,]* filtered", report)
    found = re.search(r"first step: (\S+), and (\S+) without", report)
    assert found
    assert float(found[1]) < float(found[2]) - 0.02
    assert re.search(r"^step 100, all from \S+/runs/home/ckpt_100$", resumed, re.MULTILINE)
    assert "context_2" in done.stderr  # what starts from scratch is said aloud


def train_async(cwd: Path, *options: object) -> subprocess.CompletedProcess[str]:
    small = ("--steps", 40, "--save-interval", 10, "--batch-size", 64, "--old-items", 1000, "--output-dir", "runs")
    return warm_python.run(ROOT / "examples/train_async.py", *small, *options, cwd=cwd)


@pytest.mark.slow
def test_a_run_that_saves_in_the_background_saves_the_step_of_a_sigterm_and_goes_on_from_there(tmp_path: Path) -> None:
    ended = train_async(tmp_path, "--sigterm-at", 23)
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert "ckpt_23: training stood still for " in ended.stdout
    assert "saving step 23" in ended.stderr

    done = train_async(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resuming at step 23\n")
    assert re.search(r"^ckpt_\d+ \(ephemeral\): training stood still for ", done.stdout, re.MULTILINE)
    counts = r"SaveCounts\(begun=\d+, deltas=0, failed=0"
    assert re.search(rf"^done at step 40, loss 0\.\d+; {counts}", done.stdout, re.MULTILINE)
    assert CheckpointReader(str(tmp_path / "runs")).manifest.step == 40


@pytest.mark.slow
def test_three_ways_to_save_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='the plot needs pip install ".[examples]"')

    done = train_async(tmp_path, "--plot", "steps.png")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done at step 40, ") == 3
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_quick_start_runs_as_users_run_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("".join(block.text for block in blocks("README.md") if block.language == "python"))

    done = run(script, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/clicks/ckpt_300/manifest.json").exists()
    assert done.stdout == ""
    saved = [f"saving ckpt_{step}: " for step in (100, 200, 300)]
    assert all(text in done.stderr for text in ("no checkpoint to restore, starting from step 0", *saved))
    done = run("-m", "recckpt", "verify", "runs/clicks", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
