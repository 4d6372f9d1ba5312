"""Work in children that may crash, hang, or ask for too much memory, and what became of it."""

import faulthandler
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_CASES = 50  # a child


def outcomes(
    work: Callable[[_T], str], cases: Sequence[_T], *, seconds: float = 60, more_bytes: int = 1 << 30
) -> list[str]:
    """Return what ``work`` returns for each case; of one that ended its child, how.

    Args:
        work: called in a child; what it changes in memory lasts for the cases that the child does.
        cases: what to call it with.
        seconds: a case that takes longer is killed.
        more_bytes: address space that a child may take beyond what it begins with.
    """
    done: list[str] = []
    while len(done) < len(cases):
        some = cases[len(done) : len(done) + _CASES]
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            _run(work, some, write, seconds, more_bytes)
        os.close(write)
        with os.fdopen(read, encoding="utf-8") as lines:
            said = [line.rstrip("\n") for line in lines]
        _, status = os.waitpid(child, 0)
        done += said
        if len(said) < len(some):
            code = os.waitstatus_to_exitcode(status)
            done.append(f"ended by {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")
    return done


def _run(work: Callable[[_T], str], cases: Sequence[_T], write: int, seconds: float, more_bytes: int) -> None:
    """Be the child."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for case in cases:
            faulthandler.dump_traceback_later(0.9 * seconds, file=sys.__stderr__)  # says where it hangs
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                text = work(case)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error!s:.300} ({where.filename}:{where.lineno})"
            os.write(write, (" ".join(text.split()) + "\n").encode("utf-8", "backslashreplace"))
    finally:
        os._exit(0)


def in_fork(work: Callable[[], object], seconds: float = 60) -> str:
    """Return what ``work`` returned in a forked child as text, or its error, or "hung" where it takes too long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc()
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        is_over = bool(select.select([said], [], [], seconds)[0])
        if not is_over:
            os.kill(child, signal.SIGKILL)
        text = said.read()
    os.waitpid(child, 0)
    return text if is_over else "hung"
