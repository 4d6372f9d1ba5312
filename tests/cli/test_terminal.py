"""What a person sees: colours on a terminal, and the same text without them everywhere else."""

from __future__ import annotations

import io
import re
import sys

import pytest
from support.builders import Run

from recckpt.cli import main
from recckpt.cli.terminal import complain, print_lines
from recckpt.text import Heading, Table, plain
from recckpt.text.columns import width_of

_CODES = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An output dir with a good checkpoint and a damaged one."""
    path = tmp_path_factory.mktemp("runs")
    Run(path, max_keep=None).train(20)
    (path / "ckpt_20" / "extra.pt").unlink()
    return path


@pytest.fixture
def on_terminal(monkeypatch, capsys):
    """Return a function that runs a command on a terminal so wide, and returns what it printed on both streams."""

    def run(*args, width=500, **env):
        for name, value in {"TERM": "xterm", "COLUMNS": str(width), "NO_COLOR": "", **env}.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, Terminal())
            main([str(arg) for arg in args])
            return sys.stdout.getvalue(), sys.stderr.getvalue()

    return run


def said(text: str) -> list[str]:
    return [line.rstrip() for line in _CODES.sub("", text).splitlines()]


@pytest.mark.parametrize("args", ["ls {}", "show {}/ckpt_10 --files", "head {} item", "verify {}", "diff {0} {0}"])
def test_colours_add_nothing_to_the_text(recckpt, on_terminal, runs, args):
    words = args.format(runs).split()
    piped = recckpt(*words)
    out, err = on_terminal(*words)
    assert said(out) == [line.rstrip() for line in piped.out.splitlines()]
    assert said(err)[-1:] == piped.err.splitlines()[-1:]
    assert "\x1b[" in out + err


@pytest.mark.parametrize("width", [60, 90, 110])
def test_a_time_is_never_broken(recckpt, on_terminal, runs, width):
    time = recckpt("ls", runs, "--json").json["checkpoints"][0]["time"]
    assert time in _CODES.sub("", on_terminal("ls", runs, width=width)[0])


def test_colours_mean_something(on_terminal, runs):
    out, err = on_terminal("ls", runs)
    assert re.search(r"\x1b\[31m *ckpt_20", out), "damaged is red"
    assert re.search(r"\x1b\[1m *ckpt_10", out), "the newest is bold"
    assert err.splitlines()[-1].startswith("\x1b[1;31mrecckpt: ")


def test_nobody_who_does_not_want_colours_gets_them(on_terminal, runs, monkeypatch):
    plain_text = on_terminal("ls", runs, NO_COLOR="1")
    assert "ckpt_10" in plain_text[0]
    assert on_terminal("ls", runs, TERM="dumb") == plain_text
    assert "\x1b[" not in "".join(on_terminal("ls", runs, "--json")[0])
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert on_terminal("ls", runs) == plain_text
    assert "\x1b" not in "".join(plain_text)


def test_characters_that_a_terminal_lacks_are_written_as_escapes(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    out.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    print_lines([Table(("NAME",), [("表é",)])])
    out.flush()
    assert "\\u8868é" in out.buffer.getvalue().decode("latin-1")


@pytest.mark.parametrize("width", range(12, 220, 13))
def test_a_narrow_terminal_breaks_names_but_no_numbers_and_nothing_is_lost(monkeypatch, width):
    names = ["[bold]x" * 12, "表" * 9, "word " * 12]
    rows = [(name, "123,456,789", "tail " * n, "7", f"{'y' * 30} because, {'z' * n}") for n, name in enumerate(names)]
    table = Table(("NAME", "ROWS", "MIDDLE", "N", "WHAT"), rows, ("ROWS", "N"), {0: "past"}, indent=2)
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(width)), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    print_lines([Heading("tables"), table, "  a line"])
    lines = said(out.getvalue())
    assert (lines[0], lines[-1]) == ("tables", "  a line")
    assert sorted("".join("".join(lines[1:-1]).split())) == sorted("".join("".join(plain([table])).split()))
    assert sum("123,456,789" in line for line in lines) == 3
    assert lines[1:-1] == [line.rstrip() for line in plain([table])] or all(width_of(line) <= width for line in lines)


@pytest.mark.parametrize("stream", [None, "closed", "broken"])
def test_a_message_that_nobody_reads_is_no_error(monkeypatch, stream):
    err = io.StringIO()
    if stream == "broken":
        monkeypatch.setattr(err, "write", lambda text: (_ for _ in ()).throw(BrokenPipeError(32, "Broken pipe")))
    if stream == "closed":
        err.close()
    monkeypatch.setattr(sys, "stderr", None if stream is None else err)
    complain("something")
