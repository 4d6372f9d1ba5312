"""``watch`` of a run, and ``ls`` and ``watch`` of a directory of runs."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest
from support.builders import Run, flip_bit

from recckpt.cli import terminal, watch
from recckpt.errors import SaveFailedError
from recckpt.inspect.watch import Watcher


@pytest.fixture
def looks(monkeypatch):
    """Let control-C end a watch after some looks, before each but the first of which something is done."""

    def prepare(*between):
        left = [*between, interrupt]
        monkeypatch.setattr(watch, "sleep", lambda seconds: left.pop(0)())

    def interrupt():
        raise KeyboardInterrupt

    return prepare


def failing(*_):
    raise OSError(5, "the network is down", "s3://x")


def test_sigterm_ends_a_watch_with_exit_code_0(recckpt, tmp_path, looks):
    Run(tmp_path, interval=10).train(10)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        looks(lambda: signal.raise_signal(signal.SIGTERM))
        answer = recckpt("watch", tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (answer.code, answer.err) == (0, "")


def test_once_says_what_is_known_and_ends(recckpt, tmp_path, monkeypatch):
    run = Run(tmp_path, interval=10).train(10)
    answer = recckpt("watch", tmp_path, "--once")
    assert (answer.code, answer.err) == (0, "")
    assert answer.lines[0] == ["step", "10"]
    assert re.search(r"^last save +.* ago: ckpt_10, full, \d+ rows, ", answer.out, re.MULTILINE)
    found = recckpt("watch", tmp_path, "--once", "--json").json
    assert (found["step"], found["last_save"]["ckpt_id"], found["failed"]) == (10, "ckpt_10", [])
    assert recckpt("watch", tmp_path, "--once", "--overdue", 3600).code == 0
    answer = recckpt("watch", tmp_path, "--once", "--overdue", 1e-6)
    assert (answer.code, "expected a save within" in answer.err) == (1, True)
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.save.save.write", failing)
        with pytest.raises(SaveFailedError, match="down"):
            run.train(10)
    answer = recckpt("watch", tmp_path, "--once")
    assert answer.code == 1
    assert re.search("the last save failed: SaveFailedError: .*OSError: .*network is down", answer.err)


def test_it_waits_for_a_directory_and_prints_a_line_when_something_has_changed(recckpt, tmp_path, looks):
    url = tmp_path / "runs"
    looks(lambda: None, lambda: Run(url, interval=2).train(2), lambda: None)
    answer = recckpt("watch", url)
    assert (answer.code, answer.err) == (0, "")
    first, second = answer.out.splitlines()
    assert re.fullmatch(r"\S+Z waits: does not exist", first)
    assert "step 2, ckpt_2 of" in second


def test_json_has_a_line_a_look_and_a_look_that_fails_ends_nothing(recckpt, tmp_path, looks, monkeypatch):
    Run(tmp_path, interval=2).train(2)
    real = Watcher.look

    def break_the_network():
        monkeypatch.setattr(Watcher, "look", failing)

    def mend_it():
        monkeypatch.setattr(Watcher, "look", real)

    looks(break_the_network, mend_it)
    answer = recckpt("watch", tmp_path, "--json")
    lines = [json.loads(line) for line in answer.out.splitlines()]
    assert [line.get("step") for line in lines] == [2, None, 2]
    assert "network is down" in lines[1]["error"]
    assert answer.code == 0


def test_what_cannot_be_watched_is_refused_in_a_line(recckpt, tmp_path):
    Run(tmp_path / "runs", interval=2).train(2)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    answers = {
        "it is a checkpoint": recckpt("watch", tmp_path / "runs/ckpt_2"),
        "not a directory": recckpt("watch", tmp_path / "file"),
        "does not exist": recckpt("watch", tmp_path / "nowhere", "--once"),
        "no checkpoint is committed yet": recckpt("watch", tmp_path / "empty", "--once"),
    }
    assert all(answer.code == 1 and answer.err.count("\n") == 1 for answer in answers.values())
    assert "is the checkpoint 'ckpt_2', not an output dir" in answers.pop("it is a checkpoint").err
    assert all(what in answer.err for what, answer in answers.items())
    assert recckpt("watch", "nosuch://x").code == 2
    for interval in ("0", "-1", "nan", "1e10"):  # no clock waits for so long
        assert recckpt("watch", tmp_path, f"--interval={interval}").code == 2


def test_a_terminal_gets_a_table_in_which_no_name_is_markup(recckpt, tmp_path, looks, monkeypatch):
    rich = pytest.importorskip("rich.console", reason="RICH IS NOT INSTALLED: pip install '.[cli]'")
    run = Run(tmp_path / "[red]runs", interval=2).train(2)
    run.saver.save("[bold]\x1b[2J[/bold]", step=3)
    with (tmp_path / "[red]runs/timeline.jsonl").open("a") as timeline:
        timeline.write('{"ckpt_id": "a", "error": "[blink]\\u001b[2Jx[/nothing]"}\n')
    monkeypatch.setattr(rich.Console, "is_terminal", True)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    looks(lambda: None)
    answer = recckpt("watch", tmp_path / "[red]runs")
    assert (answer.code, answer.err) == (0, "")
    assert "[red]runs" in answer.out
    assert "[bold]" in answer.out
    assert "[blink]" in answer.out
    assert "\x1b[2J" not in answer.out


def test_a_reader_that_has_seen_enough_ends_it(recckpt, tmp_path, monkeypatch):
    Run(tmp_path, interval=2).train(2)

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(watch, "_show_json", closed)
    left = []
    monkeypatch.setattr(watch, "leave_stdout", lambda: left.append(True))
    assert recckpt("watch", tmp_path, "--json") == (0, "", "")
    assert left == [True]


@pytest.fixture
def several_runs(tmp_path):
    """A directory with two several_runs and something else."""
    for name, n_steps in (("clicks", 4), ("ads", 2)):
        Run(tmp_path / name, interval=2, max_keep=None).train(n_steps)
    (tmp_path / "notes").mkdir()
    return tmp_path


def look_after(monkeypatch, *between):
    def end():
        raise KeyboardInterrupt

    left = [*between, end]
    monkeypatch.setattr(watch, "sleep", lambda seconds: left.pop(0)())


def test_watch_goes_on_with_a_line_for_each_run_that_changes(recckpt, several_runs, monkeypatch):
    look_after(monkeypatch, lambda: Run(several_runs / "new", interval=2).train(2), lambda: None)
    answer = recckpt("watch", several_runs)
    assert answer.code == 0
    assert [line.split(": ")[0] for line in answer.out.splitlines()] == ["ads", "clicks", "new"]
    look_after(monkeypatch, lambda: None)
    lines = [json.loads(line) for line in recckpt("watch", several_runs, "--json").out.splitlines()]
    assert [[run["run"] for run in line["runs"]] for line in lines] == [["ads", "clicks", "new"]] * 2


def test_on_a_terminal_the_table_changes(several_runs, monkeypatch, capsys):
    from recckpt.cli import main

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    look_after(monkeypatch)
    assert main(["watch", str(several_runs)]) == 0
    shown = capsys.readouterr().out
    assert "HEALTH" in shown
    assert "control-C ends" in shown
    assert "\x1b[" in shown


def test_each_of_several_runs_has_a_line_and_a_problem_of_it_its_name(recckpt, several_runs):
    answer = recckpt("ls", several_runs)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.split("\n", 1)[0].split("  ")[0] == "RUN"
    assert [(line[0], line[1], line[-1]) for line in answer.lines[1:]] == [
        ("ads", "2", "good"),
        ("clicks", "4", "good"),
    ]
    assert [line["run"] for line in recckpt("ls", several_runs, "--json").json["runs"]] == ["ads", "clicks"]
    watch_once = "watch", several_runs, "--once"
    answer = recckpt(*watch_once, "--overdue", 1e-6)
    assert (answer.code, answer.err.count(": overdue\n")) == (1, 2)
    data = recckpt(*watch_once, "--overdue", 1e-6, "--json").json
    assert [(run["overdue"], run["good"]) for run in data["runs"]] == [(True, False)] * 2
    assert recckpt(*watch_once, "--overdue", 3600).code == 0
    flip_bit(several_runs / "clicks/ckpt_2/manifest.json")
    for args in (("ls", several_runs), watch_once):
        answer = recckpt(*args)
        assert answer.code == 1
        assert answer.err.startswith(f"recckpt: {several_runs}/clicks: ckpt_2 is damaged: ")
        assert answer.err.count("\n") == 1
        answer = recckpt(*args, "--near", several_runs / "near")
        assert answer.code == 2
        assert f"--near needs the output dir of one run, such as {several_runs}/ads" in answer.err
