"""Work that is killed at one of its calls of the storage."""

import os
import signal

from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import LocalDraft, LocalSink
from support.in_fork import in_fork

STORAGE_CALLS = ("make_dir", "put_if_absent", "replace", "create", "draft", "sync_dir", "remove", "remove_empty_dirs")
CALLS = [
    *((LocalStorage, name) for name in STORAGE_CALLS),
    *((LocalSink, name) for name in ("write", "close")),
    (LocalDraft, "close"),
]


def kill_at(number, calls):
    """Have this process killed before a call, or after it, for odd numbers; return what says how many there were."""
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

    for owner, name in calls:
        setattr(owner, name, counted(getattr(owner, name)))
    return lambda: n_calls


def killed_at(number, work) -> bool:
    """Do some work in a child that is killed before or after one of its calls; False where it has not as many."""

    def patched() -> str:
        count = kill_at(number, CALLS)
        work()
        return str(count())

    said = in_fork(patched)
    return not said or number < 2 * int(said)  # a call that raises has no end to be killed at
