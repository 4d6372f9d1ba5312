import io
import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
from support.builders import Run
from support.forge import filled, save_tables

from recckpt import text
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


@pytest.mark.parametrize("args", [("show",), ("head", "t"), ("get", "t", "1"), ("verify",), ("ls",)])
def test_what_is_not_there_ends_with_1_and_one_line(recckpt, tmp_path, args):
    answer = recckpt(args[0], tmp_path / "nowhere", *args[1:])
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == f"recckpt: {tmp_path / 'nowhere'}: does not exist\n"


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


def test_an_error_of_the_storage_is_one_line(recckpt, runs, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr("recckpt.storage.local.LocalStorage.read", refuse)
    answer = recckpt("show", runs)
    assert (answer.code, answer.err) == (1, "recckpt: [Errno 13] Permission denied: '/x'\n")


def test_an_interrupt_is_quiet(recckpt, runs, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("recckpt.cli.show"), "show", interrupt)
    assert recckpt("show", runs) == (130, "", "")


def test_no_command_imports_torch_or_numba_or_pandas_which_arrow_would(runs):
    commands = [
        ["ls", str(runs)],
        ["show", str(runs), "--files", "--json"],
        ["head", str(runs), "item"],
        ["get", str(runs), "item", "1", "-7"],
        ["verify", str(runs)],
        ["verify", str(runs), "--quick", "--json"],
        ["--version"],
    ]
    code = (
        "import sys, json; from recckpt.cli import main\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    assert main(args) in (0, 1), args\n"
        "    heavy = {'torch', 'numba', 'fsspec', 'pandas'} & set(sys.modules)\n"
        "    assert not heavy, (args, heavy)"
    )
    done = python("-c", code, json.dumps(commands))
    assert done.returncode == 0, done.stderr.decode()


def test_ls_and_show_do_without_arrow(runs):
    code = (
        "import sys; from recckpt.cli import main\n"
        f"main(['ls', {str(runs)!r}]); main(['show', {str(runs)!r}])\n"
        "assert not {'pyarrow', 'tqdm', 'rich'} & set(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr.decode()


def test_the_module_is_the_command(runs):
    done = python("-m", "recckpt", "ls", runs)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ckpt_10" in done.stdout
    assert python("-m", "recckpt", "show", runs / "nowhere").returncode == 1
    assert python("-m", "recckpt").returncode == 2


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled(f"{number} {'x' * 1000}", [number]) for number in range(100)])
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "recckpt", "show", str(tmp_path)], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_problem_stays_a_problem_when_nobody_reads_of_it(runs):
    (runs / "ckpt_10" / "extra.pt").unlink()
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "recckpt", "verify", str(runs)], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_a_terminal_that_knows_only_ascii_gets_escapes(tmp_path):
    save_tables(open_storage(str(tmp_path)), [filled("表", [1])])
    done = python("-m", "recckpt", "show", tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u8868" in done.stdout


def test_output_that_is_no_file_is_written_to(monkeypatch, runs):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert import_module("recckpt.cli").main(["ls", str(runs)]) == 0
    assert "ckpt_10" in out.getvalue()


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (10**17, "100.0 PB")],
)
def test_sizes_are_in_decimal_units(n_bytes, shown):
    assert text.size(n_bytes) == shown


def test_wide_and_combining_characters_take_their_columns():
    lines = text.grid(("NAME", "ROWS"), [("表", "1"), ("e\u0301", "22"), ("abc", "3")], right=("ROWS",))
    assert lines == ["NAME  ROWS", "表       1", "e\u0301       22", "abc      3"]
