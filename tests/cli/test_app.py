"""Arguments, exit codes, help, early ends: what all commands have in common."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from support.builders import Run
from support.forge import filled, save_tables
from support.paths import ROOT
from support.sweeps import mostly_slow

from recckpt import text
from recckpt.cli.commands import examples_of, parsers
from recckpt.storage import open_storage


@pytest.fixture
def runs(tmp_path):
    """An output dir with a checkpoint of a training run."""
    Run(tmp_path).train(10)
    return tmp_path


def python(*args, **options):
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, check=False, **options)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("frobnicate",),
        ("ls",),
        ("show", ".", "--nope"),
        ("head", ".", "t", "-n", "-1"),
        ("head", ".", "t", "-n", "many"),
        ("get", ".", "t"),
        ("get", ".", "t", "1.5"),
        ("get", ".", "t", 2**63),
        ("get", ".", "t", -(2**63) - 1),
        ("show", "nosuchscheme://x/y"),
        ("ls", "nosuchscheme://x/y"),
        ("verify", "nosuchscheme://x/y"),
        ("head", "nosuchscheme://x/y", "t"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_message(recckpt, args):
    answer = recckpt(*args)
    assert (answer.code, answer.out) == (2, "")
    assert "recckpt" in answer.err


def test_arguments_too_many_are_answered_with_where_examples_are(recckpt, runs):
    answer = recckpt("forget", runs, "item", "17")
    assert answer.code == 2
    assert answer.err.endswith("unrecognized arguments: item 17; `recckpt forget --help` has examples\n")
    assert "examples:\n  recckpt forget " in recckpt("forget", "--help").out


def test_help_and_version_end_with_0(recckpt):
    assert recckpt("--version").code == 0
    assert "format version 1" in recckpt("--version").out
    assert "exit codes: 0 good, 1 a problem was found, 2 wrong usage" in recckpt("--help").out
    for command in ("ls", "show", "head", "get", "verify"):
        assert recckpt(command, "--help").code == 0
        assert command in recckpt("--help").out


def test_an_error_of_the_storage_is_one_line_and_an_interrupt_is_quiet(recckpt, runs, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/x")

    def interrupt(args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("recckpt.storage.local.LocalStorage.read", refuse)
        answer = recckpt("show", runs)
    assert (answer.code, answer.err) == (1, "recckpt: [Errno 13] Permission denied: '/x'\n")
    monkeypatch.setattr(import_module("recckpt.cli.show"), "run_show", interrupt)
    assert recckpt("show", runs) == (130, "", "")


@pytest.mark.parametrize(
    ("lines", "absent"),
    [
        (
            [
                "ls {}",
                "show {} --files --json",
                "head {} item",
                "get {} item 1 -7",
                "verify {} --quick --json",
                "--version",
            ],
            {"torch", "numba", "fsspec", "pandas"},  # the last of which Arrow would import
        ),
        (["ls {}", "show {}"], {"pyarrow", "tqdm", "rich"}),
    ],
)
def test_no_command_imports_what_it_does_without(runs, lines, absent):
    code = (
        "import sys, json; from recckpt.cli import main\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    assert main(args) in (0, 1), args\n"
        f"    assert not {absent} & set(sys.modules), (args, {absent} & set(sys.modules))"
    )
    done = python("-c", code, json.dumps([line.format(runs).split() for line in lines]))
    assert done.returncode == 0, done.stderr.decode()


def test_the_module_is_the_command_and_output_that_is_no_file_is_written_to(monkeypatch, runs):
    done = python("-m", "recckpt", "ls", runs)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ckpt_10" in done.stdout
    assert python("-m", "recckpt", "show", runs / "nowhere").returncode == 1
    assert python("-m", "recckpt").returncode == 2
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert import_module("recckpt.cli").main(["ls", str(runs)]) == 0
    assert "ckpt_10" in out.getvalue()


@mostly_slow()
@pytest.mark.parametrize(("command", "code"), [("show", 0), ("verify", 1)])
def test_a_reader_that_leaves_early_is_no_error_and_a_problem_stays_one(wide, command, code):
    if code:
        next(wide.rglob("*.arrow")).unlink()
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "recckpt", command, str(wide)]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, b"Traceback" in done.stderr, bool(code or not done.stderr)) == (code, False, True)


def test_a_terminal_that_knows_only_ascii_gets_escapes(tmp_path):
    save_tables(open_storage(str(tmp_path)), [filled("表", [1])])
    done = python("-m", "recckpt", "show", tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u8868" in done.stdout


def test_sizes_are_in_decimal_units_and_wide_and_combining_characters_take_their_columns():
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_950: "1.0 MB", 10**17: "100.0 PB"}
    assert {n_bytes: text.size(n_bytes) for n_bytes in sizes} == sizes
    lines = text.grid(("NAME", "ROWS"), [("表", "1"), ("e\u0301", "22"), ("abc", "3")], right=("ROWS",))
    assert lines == ["NAME  ROWS", "表       1", "e\u0301       22", "abc      3"]


# A command that has a file half written when the signal comes, and says so.
WAITS = """
import sys
from recckpt.cli import app
from recckpt.cli.result import CommandResult
from recckpt.storage import new_file
def run(args):
    with new_file(args.dir + "/half") as sink:
        sink.write(b"half")
        print("ready", flush=True)
        while True:  # not a wait for a lock: CPython follows no signal that comes just before it, until it ends
            pass
app._run = run
sys.exit(app.main(["ls", sys.argv[1]]))
"""


@mostly_slow()
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("as_process_1", [False, True])
def test_a_signal_ends_a_command_without_a_traceback_or_half_a_file(tmp_path, number, code, as_process_1):
    around = ["unshare", "--pid", "--fork", "--kill-child"] if as_process_1 else []
    if as_process_1 and subprocess.run([*around, "true"], capture_output=True, check=False).returncode:
        pytest.skip("NO NAMESPACES OF PROCESSES HERE: not tried as process 1")
    command = subprocess.Popen(
        [*around, sys.executable, "-c", WAITS, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout.readline() == b"ready\n"
    pid = child_of(command.pid) if as_process_1 else command.pid
    os.kill(pid, number)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (code, b"")
    assert list(tmp_path.iterdir()) == []


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.fixture
def wide(tmp_path):
    """An output dir of which much is printed."""
    save_tables(open_storage(str(tmp_path)), [filled(f"{number} {'x' * 1000}", [number]) for number in range(100)])
    return tmp_path


@mostly_slow()
@pytest.mark.parametrize("line", ["show {}", "show {} --json", "--help", "show {}/nowhere"])
def test_a_pipe_that_nobody_reads_is_quiet(wide, line):
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m recckpt {line.format(wide)} 2>&1 | true"], capture_output=True, check=False
    )
    assert (done.stdout, done.stderr) == (b"", b"")


def test_a_full_disk_and_a_closed_stdout_are_said_in_one_line_or_not_at_all(wide):
    def run(line):
        return subprocess.run(["sh", "-c", line], capture_output=True, check=False)

    full = run(f"{sys.executable} -m recckpt show {wide} > /dev/full")
    assert (full.returncode, full.stderr.count(b"\n")) == (1, 1)
    assert b"the output cannot be written: [Errno 28]" in full.stderr
    closed = run(f"{sys.executable} -m recckpt show {wide} >&-")
    assert (closed.returncode, closed.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("line", "usage", "message"),
    [
        ("shwo runs", "usage: recckpt [-h]", "there is no command 'shwo'; did you mean 'show'?"),
        ("frobnicate", "usage: recckpt [-h]", "there is no command 'frobnicate'; there are ls, show, "),
        (
            "first runs --where norm>1",
            "usage: recckpt [-h]",
            "there is no command 'first': to find the first checkpoint",
        ),
        ("load runs", "usage: recckpt [-h]", "there is no command 'load': a script does that, by recckpt.Checkpoint"),
        ("latest runs", "usage: recckpt [-h]", "there is no command 'latest': write `recckpt ls RUN`"),
        ("metrics runs", "usage: recckpt [-h]", "there is no command 'metrics'; there are ls, show, "),
        ("ls runs --jsn", "usage: recckpt ls [-h]", "there is no option '--jsn'; did you mean '--json'?"),
        ("get runs item --colums=a 1", "usage: recckpt get", "did you mean '--columns'?"),
        ("get runs item --colums a 1", "usage: recckpt get", "did you mean '--columns'?"),
        ("get runs item one", "usage: recckpt get", "invalid id value: 'one'"),
        ("compact runs --budget lots", "usage: recckpt compact", "such as 500000 or 50MB, found 'lots'"),
        ("mirror runs to --max-upload-rate 50MB", "usage: recckpt mirror", "shaped by the store or the host"),
        ("compact runs --budget 0", "usage: recckpt compact", "a number of bytes such as 500000 or 50MB, found '0'"),
        ("report runs --failures-per-day lots", "usage: recckpt report", "above 0 such as 0.5 or 3, found 'lots'"),
        ("report runs --failures-per-day nan", "usage: recckpt report", "above 0 such as 0.5 or 3, found 'nan'"),
        ("ls runs -x", "usage: recckpt ls", "unrecognized arguments: -x"),
        ("ls runs more", "usage: recckpt ls", "unrecognized arguments: more"),
        ("verify", "usage: recckpt verify", "required: CKPT|DIR"),
        ("verify runs --table t", "usage: recckpt verify", "--table and --print-ids need --absent"),
        ("forget runs --table t", "usage: recckpt forget", "--table and --ids go together"),
    ],
)
def test_a_wrong_argument_gets_the_usage_of_its_command(recckpt, line, usage, message):
    answer = recckpt(*line.split())
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(usage)
    assert message in answer.err.splitlines()[-1]


@pytest.mark.parametrize("line", ["sql runs '-- a comment, no option\nselect 1'", "get runs t -- --1", "ls runs --js"])
def test_what_only_looks_like_an_option_is_none(recckpt, line):
    assert "there is no option" not in recckpt(*shlex.split(line)).err


def test_a_misspelt_table_or_slot_is_told_the_nearest(recckpt, tmp_path):

    save_tables(open_storage(str(tmp_path)), [filled("item", [1])])
    (tmp_path / "ids.txt").write_text("1\n")
    for line in (
        "head {} itme",
        "get {} itme 1",
        "export {}/latest {}/x --to npy --skip-damaged --table itme",
        "export {} {}/x --to npy --table itme",
        "verify {} --absent {}/ids.txt --table itme",
        "forget {} --table itme --ids {}/ids.txt",
    ):
        answer = recckpt(*line.replace("{}", str(tmp_path)).split())
        assert answer.code in (1, 2), line
        assert "did you mean 'item'?" in answer.err, line
    assert "did you mean 'embedding'?" in recckpt("head", tmp_path, "item", "--columns", "embeding").err


def test_each_command_has_examples_that_it_takes(recckpt):
    parser, commands = parsers()
    for name in commands:
        lines = examples_of(name)
        assert lines[0] in recckpt(name, "--help").out
        for line in lines:
            words = shlex.split(line, comments=True)
            assert words[:2] == ["recckpt", name]
            parser.parse_args(words[1:])


def test_the_page_of_the_command_line_is_the_help_of_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.setenv("COLUMNS", "100")
    from command_line import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run `python docs/command_line.py`"
