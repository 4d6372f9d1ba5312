"""How commands end early: by signals, as process 1 too, and where nobody reads what they print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.forge import filled, save_tables
from support.sweeps import mostly_slow

from recckpt.storage import open_storage

# A command that has a file half written when the signal comes, and says so.
WAITS = """
import sys, threading
from recckpt.cli import app
from recckpt.cli.result import CommandResult
from recckpt.storage import new_file
def run(args):
    with new_file(args.dir + "/half") as sink:
        sink.write(b"half")
        print("ready", flush=True)
        threading.Event().wait()
app._run = run
sys.exit(app.main(["ls", sys.argv[1]]))
"""


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
