"""The example and the page on checkpointers, run as they stand."""

import re
import runpy
import signal
import sys

import pytest
from support import warm_python
from support.paths import ROOT

EXAMPLE = ROOT / "examples/state_dict.py"
SMALL = ("--steps", "12", "--save-interval", "5", "--output-dir")


def test_the_example_trains_resumes_where_it_was_and_serves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for steps in ("12", "17"):
        monkeypatch.setattr(sys, "argv", ["state_dict.py", *SMALL, "out", "--steps", steps])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.findall(r"^step (\d+): loss", printed, re.MULTILINE) == ["5", "10", "12", "15", "17"]
    assert re.findall(r"^resuming at step (\d+)$", printed, re.MULTILINE) == ["12"]
    assert re.findall(r"^serving 8,705 weights of step (\d+)$", printed, re.MULTILINE) == ["12", "17"]


@pytest.mark.slow
def test_the_example_killed_between_two_saves_ends_with_the_same_bits_as_one_that_was_not(tmp_path):
    def run(*options):
        return warm_python.run(EXAMPLE, *SMALL, *options, cwd=tmp_path).returncode

    assert run("straight", "--steps", "20") == 0
    assert run("crashed", "--steps", "20", "--crash-at", "12") == -signal.SIGKILL
    crashed = (tmp_path / "crashed/checkpoint_0.pt").read_bytes()
    assert run("crashed", "--steps", "20") == 0
    straight = (tmp_path / "straight/checkpoint_0.pt").read_bytes()
    assert (tmp_path / "crashed/checkpoint_0.pt").read_bytes() == straight != crashed


def test_every_public_name_of_the_package_is_there():
    import recckpt.checkpointer as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing
