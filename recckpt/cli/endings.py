"""How a command ends early: by a signal, or because what it prints is read no more."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from recckpt.cli.result import PROBLEM, leave_stdout
from recckpt.cli.terminal import complain

INTERRUPTED, TERMINATED = 130, 143  # as a shell says it


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the block by SystemExit at SIGTERM and SIGINT, so that files that are half written go.

    As process 1 of a container, too, where the kernel drops signals that are not handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGTERM] is signal.SIG_DFL:  # not where a program that runs commands has its own
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait until all is tidy
    raise SystemExit(TERMINATED)


def written(code: int, write: Callable[[], object]) -> int:
    """Write to stdout, whose reader may be gone, and return the exit code: another where a disk is full."""
    if sys.stdout is None or sys.stdout.closed:
        return code
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        leave_stdout()
    except OSError as error:
        leave_stdout()
        complain(f"the output cannot be written: {error}")
        return code or PROBLEM
    return code
