"""Work that is killed at one of its calls of the local storage, or halts around one while something else happens."""

import os
import signal
import threading

from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import LocalDraft, LocalSink
from support.forked import in_fork

STORAGE_CALLS = ("make_dir", "put_if_absent", "replace", "create", "draft", "sync_dir", "remove", "remove_empty_dirs")
CALLS = [
    *((LocalStorage, name) for name in STORAGE_CALLS),
    *((LocalSink, name) for name in ("write", "close")),
    (LocalDraft, "close"),
]
READS = [(LocalStorage, name) for name in ("read", "open", "size", "list_dirs", "list_files", "listed")]


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


class Halt:
    """Halts whoever makes a call of the storage, once, and does something meanwhile. Thread-safe.

    Args:
        patch: puts it before the calls.
        number: 2 n for before the n-th call after :meth:`begin`, 2 n + 1 for after it.
        meanwhile: what to do; its own calls do not count.

    Attributes:
        n_calls: how many were made, but for those meanwhile.
        has_halted: whether there were as many.
    """

    def __init__(self, patch, number, meanwhile):
        self.n_calls, self.has_halted = 0, False
        self._number, self._meanwhile = number, meanwhile
        self._lock, self._is_counting = threading.Lock(), False
        for owner, name in [*CALLS, *READS]:
            patch.setattr(owner, name, self._counted(getattr(owner, name)))

    def begin(self):
        """Count from here on."""
        self._is_counting = True

    def end(self):
        """Count no more."""
        self._is_counting = False

    def _counted(self, real):
        def call(*args):
            with self._lock:
                number = 2 * self.n_calls if self._is_counting else None
                self.n_calls += self._is_counting
                is_before, is_after = number == self._number, number is not None and number + 1 == self._number
                self._is_counting = self._is_counting and not is_before
            if is_before:
                self._do()
            try:
                return real(*args)
            finally:  # also of one that raises, such as where a file is not there
                if is_after:
                    self._do()

        return call

    def _do(self):
        self._is_counting, self.has_halted = False, True
        self._meanwhile()
