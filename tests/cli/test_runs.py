"""``ls`` and ``watch`` of a directory of runs."""

import json
import sys

import pytest
from support.builders import Run, flip_bit

from recckpt.cli import watch


@pytest.fixture
def runs(tmp_path):
    """A directory with two runs and something else."""
    for name, n_steps in (("clicks", 4), ("ads", 2)):
        Run(tmp_path / name, interval=2, max_keep=None).train(n_steps)
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_ls_has_a_line_for_each_run(recckpt, runs):
    answer = recckpt("ls", runs)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.split("\n", 1)[0].split("  ")[0] == "RUN"
    assert [(line[0], line[1], line[-1]) for line in answer.lines[1:]] == [
        ("ads", "2", "good"),
        ("clicks", "4", "good"),
    ]
    assert [line["run"] for line in recckpt("ls", runs, "--json").json["runs"]] == ["ads", "clicks"]


def test_damage_in_a_run_is_a_problem_and_names_it(recckpt, runs):
    flip_bit(runs / "clicks/ckpt_2/manifest.json")
    for args in (("ls", runs), ("watch", runs, "--once")):
        answer = recckpt(*args)
        assert answer.code == 1
        assert answer.err.startswith(f"recckpt: {runs}/clicks: ckpt_2 is damaged: ")
        assert answer.err.count("\n") == 1


def test_a_run_that_is_overdue_is_a_problem_to_watch_and_not_to_ls(recckpt, runs):
    answer = recckpt("watch", runs, "--once", "--overdue", 1e-6)
    assert (answer.code, answer.err.count(": overdue\n")) == (1, 2)
    data = recckpt("watch", runs, "--once", "--overdue", 1e-6, "--json").json
    assert [(run["overdue"], run["good"]) for run in data["runs"]] == [(True, False)] * 2
    assert recckpt("watch", runs, "--once", "--overdue", 3600).code == 0


def looks(monkeypatch, *between):
    def end():
        raise KeyboardInterrupt

    left = [*between, end]
    monkeypatch.setattr(watch, "sleep", lambda seconds: left.pop(0)())


def test_watch_goes_on_with_a_line_for_each_run_that_changes(recckpt, runs, monkeypatch):
    looks(monkeypatch, lambda: Run(runs / "new", interval=2).train(2), lambda: None)
    answer = recckpt("watch", runs)
    assert answer.code == 0
    assert [line.split(": ")[0] for line in answer.out.splitlines()] == ["ads", "clicks", "new"]
    looks(monkeypatch, lambda: None)
    lines = [json.loads(line) for line in recckpt("watch", runs, "--json").out.splitlines()]
    assert [[run["run"] for run in line["runs"]] for line in lines] == [["ads", "clicks", "new"]] * 2


def test_on_a_terminal_the_table_changes(runs, monkeypatch, capsys):
    from recckpt.cli import main

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    looks(monkeypatch)
    assert main(["watch", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "HEALTH" in shown
    assert "control-C ends" in shown
    assert "\x1b[" in shown


@pytest.mark.parametrize("command", [("ls",), ("watch", "--once")])
def test_near_saves_of_several_runs_are_refused_with_the_name_of_one(recckpt, runs, command):
    answer = recckpt(*command, runs, "--near", runs / "near")
    assert answer.code == 2
    assert f"--near goes with the output dir of one, such as {runs}/ads" in answer.err
