"""Work that is killed at one of its calls of the local storage."""

import os
import signal

from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import LocalSink
from support.in_fork import in_fork

STORAGE_CALLS = ("make_dir", "put_if_absent", "replace", "create", "sync_dir", "remove", "remove_empty_dirs")
CALLS = [
    *((LocalStorage, name) for name in STORAGE_CALLS),
    *((LocalSink, name) for name in ("write", "close")),
]


def killed_at(number, work) -> bool:
    """Do some work in a child that is killed before or after one of its calls; False where it has not as many."""
    n_calls = 0

    def counted(real):
        def call(*args):
            nonlocal n_calls
            own, n_calls = n_calls, n_calls + 1
            if number == 2 * own:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args)
            if number == 2 * own + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def patched() -> str:
        for owner, name in CALLS:
            setattr(owner, name, counted(getattr(owner, name)))
        work()
        return str(n_calls)

    said = in_fork(patched)
    return not said or number < 2 * int(said)  # a call that raises has no end to be killed at
