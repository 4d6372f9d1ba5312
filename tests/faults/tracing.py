"""Runs workers under strace: kills them at a call, lets a call fail, and reads what they did."""

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults.crash_worker import NOT_DURABLE, SAVE_FAILED, SAVED
from faults.job import State
from support.warm_python import Piped

_CHANGING = (
    "open openat openat2 creat write pwrite64 writev pwritev pwritev2 sendfile splice copy_file_range truncate "
    "ftruncate fallocate fsync fdatasync sync_file_range link linkat unlink unlinkat rename renameat renameat2 mkdir "
    "mkdirat rmdir symlink symlinkat mknod mknodat close dup dup2 dup3 lseek access faccessat faccessat2"
)
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_ACKNOWLEDGED = re.compile(r"/acknowledged/(\d+)\.(\d+)")
STRACE = shutil.which("strace")


@dataclass(frozen=True)
class Op:
    """One thing that was done.

    Attributes:
        kind: ``create``, ``write``, ``sync`` (of a file or a directory), ``link``, ``unlink``, ``rename``, ``mkdir``,
            ``rmdir``, or ``acknowledged``.
        path: relative to the directory; of an open file that of its opening.
        to: the new path of a link or a rename.
        data: what was written.
        file: the number of an open file.
        state: (step, branch) of what was acknowledged.
    """

    kind: str
    path: str = ""
    to: str = ""
    data: bytes = b""
    file: int = -1
    state: tuple[int, int] = (0, 0)


def recording(log):
    """Return the options of strace that record."""
    return "-xx", "-s", str(1 << 26), "-o", str(log), "-e", "trace=" + ",".join(f"?{n}" for n in _CHANGING.split())


def read_log(log, root, first_file=0):
    """Return what one process did below ``root``, in order; ``first_file`` begins the numbers of its open files."""
    reader = _Reader(str(root), first_file)
    for name, args, result in _calls(log):
        reader.take(name, args, result)
    return reader.ops


def _calls(log):
    """Yield name, arguments and result of each call that succeeded, or is an ``access``, once it has returned."""
    begun = {}
    for line in log.read_text().splitlines():
        pid, rest = line.split(maxsplit=1)
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>", rest):
            rest = begun.pop(pid) + rest[resumed.end() :]
        if found := _LINE.match(f"{pid} {rest}"):
            _, name, args, result = found.groups()
            if int(result) >= 0 or "access" in name:
                yield name, [_unescaped(arg) for arg in args.split(", ")], int(result)


def _unescaped(arg):
    found = _STRING.fullmatch(arg)
    return bytes.fromhex(found[1].replace("\\x", "")) if found else arg


class _Reader:
    def __init__(self, root, first_file):
        self._root, self._next_file = root, first_file
        self._open = {}  # descriptor -> (path, number of the file, -1 where it was not made here)
        self.ops = []

    def take(self, name, args, result):
        if handle := getattr(self, f"_{name}", None):
            handle(args, result)
        elif self._inside(args) is not None or any(arg.isdecimal() and int(arg) in self._open for arg in _words(args)):
            raise ValueError(f"{name}{args} is nothing that the model knows")

    def _openat(self, args, result):
        path = self._inside(args[1:2])
        self._open.pop(result, None)
        if path is None:
            return
        assert args[0] == "AT_FDCWD"
        flags = set(args[2].split("|"))
        number = -1
        if flags & {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC"}:
            assert flags == {"O_WRONLY", "O_CREAT", "O_EXCL", "O_CLOEXEC"}, f"{path}: {flags}"
            number, self._next_file = self._next_file, self._next_file + 1
            self.ops.append(Op("create", path, file=number))
        self._open[result] = path, number

    def _write(self, args, result):
        if int(args[0]) in self._open:
            path, number = self._open[int(args[0])]
            self.ops.append(Op("write", path, data=args[1][:result], file=number))

    def _lseek(self, args, result):
        assert self._open.get(int(args[0]), ("", -1))[1] < 0, "files are written from their start to their end"

    def _fsync(self, args, result):
        if int(args[0]) in self._open:
            path, number = self._open[int(args[0])]
            self.ops.append(Op("sync", path, file=number))

    def _close(self, args, result):
        self._open.pop(int(args[0]), None)

    def _link(self, args, result):
        self._paths("link", args)

    def _rename(self, args, result):
        self._paths("rename", args)

    def _unlink(self, args, result):
        self._paths("unlink", args)

    def _mkdir(self, args, result):
        self._paths("mkdir", args[:1])

    def _rmdir(self, args, result):
        self._paths("rmdir", args)

    def _access(self, args, result):
        if (path := self._inside(args)) is not None and (found := _ACKNOWLEDGED.fullmatch(f"/{path}")):
            self.ops.append(Op("acknowledged", state=(int(found[1]), int(found[2]))))

    def _paths(self, kind, args):
        paths = [self._inside([arg]) for arg in args]
        if paths[0] is None and paths[-1] is None:
            return
        assert None not in paths, f"{kind} {args} leads out of the directory"
        self.ops.append(Op(kind, *paths))

    def _inside(self, args):
        """Return the first path below the root, relative to it."""
        for arg in args:
            path = os.fsdecode(arg) if isinstance(arg, bytes) else ""
            if path == self._root or path.startswith(f"{self._root}/"):
                return path[len(self._root) + 1 :]
        return None


def _words(args):
    return [arg for arg in args[:2] if isinstance(arg, str)]


@dataclass(frozen=True)
class Save:
    """What a process does.

    Attributes:
        steps: that it saves, one after another.
        branch: of the run.
        restore: what it begins with: ``newest``, ``nothing`` or a step.
        before: the number of the save that strace comes before, or RESTORE.
        threads: of the saver.
        background: whether training could go on meanwhile.
        plant: a bug to plant.
        file_limit: bytes that a file may have.
        deltas: whether it saves what has changed.
        live: whether its tables are live ones.
        offers: whether it makes an offer of what it stands on before it saves, which it adopts then.
        forgets: an id that it forgets before it saves, for which it takes over from itself.
    """

    steps: tuple[int, ...]
    branch: int = 0
    restore: str | int = "newest"
    before: int = 0
    threads: int = 1
    background: bool = False
    plant: str | None = None
    file_limit: int | None = None
    deltas: bool = False
    live: bool = False
    offers: bool = False
    forgets: int | None = None

    @property
    def states(self):
        return [State(step, self.branch) for step in self.steps]


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    status: int
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def word(self):
        if os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL:
            return "killed"
        words = {SAVED: "saved", SAVE_FAILED: "failed", NOT_DURABLE: "not durable"}
        code = os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None
        assert code in words, f"wait status {self.status}: {self.told}"
        return words[code]


class Worker:
    """The process that forks the children, and the strace that is attached to one of them."""

    def __init__(self):
        if STRACE is None:
            pytest.skip("NO CRASH WAS TESTED: strace is not installed")
        self.process = Piped(Path(__file__).with_name("crash_worker.py"))
        assert self.process.stdout.readline() == "ready\n"

    def run(self, url, max_keep, save, *options):
        """Save in a child, with options of strace, and say how it ended."""
        order = {**asdict(save), "url": str(url), "max_keep": max_keep}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        if options:
            with traced(pid, options) as said:
                outcome = self._end(pid, signal.SIGCONT if "attached" in said else signal.SIGKILL)
            if "attached" not in said:
                pytest.skip(f"NO CRASH WAS TESTED, strace may not attach here: {said}")
            return outcome
        return self._end(pid, signal.SIGCONT)

    def _end(self, pid, how):
        os.kill(pid, how)
        return Outcome(*json.loads(self.process.stdout.readline()))

    def close(self):
        self.process.terminate()  # not by closing stdin: a child forked meanwhile, such as a data worker, has it too
        self.process.wait()


class traced:  # noqa: N801
    """Attach strace to a process until that has ended, which is for the block to see to."""

    def __init__(self, pid, options):
        command = [STRACE, "-f", *options, "-p", str(pid)]
        self._tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        return self._tracer.stderr.readline()

    def __exit__(self, *rest):
        self._tracer.communicate()


def disturbing(inject):
    """Return the options that fail a call or kill at it, such as ``write:signal=KILL:when=3``."""
    return "-o", "/dev/null", "-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}"


def killing(call, k):
    """Return the options that kill at the k-th call."""
    return disturbing(f"{call}:signal=KILL:when={k}")
