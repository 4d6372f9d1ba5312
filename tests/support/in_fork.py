"""Work in a forked child, and what became of it."""

import os
import select
import signal
import traceback
from collections.abc import Callable


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
