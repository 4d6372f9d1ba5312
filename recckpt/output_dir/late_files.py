"""What another host has written: a network file system may show it a little late."""

from __future__ import annotations

import errno
from collections.abc import Callable

from recckpt.format import layout
from recckpt.output_dir.attempt import Intent, read_intent
from recckpt.storage import Storage
from recckpt.storage.backend_errors import TryAgainError
from recckpt.storage.retry import Retries, RetryPolicy

_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


class Lookout:
    """Looks for files until they are there, or the time is up that the policy gives for all of them.

    Args:
        storage: where they are.
        policy: how often to look, and for how long.
        is_patient: whether another host may have written them; one look is enough otherwise.
    """

    def __init__(self, storage: Storage, policy: RetryPolicy, *, is_patient: bool = True) -> None:
        self._storage, self._is_patient, self._retries = storage, is_patient, Retries(policy, storage.url)
        self._operation = "looking for what was written"
        if is_patient:
            self._operation = f"looking for up to {policy.deadline_sec:g} s for what was written"

    def check_size(self, name: str, n_bytes: int) -> None:
        """Return once a file is there with its size.

        Raises:
            OSError: it is not there, or shorter, for all that time; or it is longer.
        """

        def look() -> None:
            try:
                found = self._storage.size(name)
            except OSError as error:
                is_outdated = self._is_patient and error.errno == errno.ESTALE
                if not (is_outdated or error.errno in _MISSING):
                    raise
                problem = f"found no such file, {n_bytes} bytes were written"
                raise TryAgainError(errno.ENOENT, problem) from error
            if found != n_bytes:
                problem = f"found {found} bytes, {n_bytes} were written; check the storage"
                raise (TryAgainError if found < n_bytes else OSError)(errno.EIO, problem)

        self._look(name, look)

    def check_intent(self, intent: Intent) -> None:
        """Return once the directory of an attempt can be seen here.

        Raises:
            OSError: it cannot, for all that time.
        """
        name = layout.join(intent.directory, layout.INTENT)

        def look() -> None:
            found = read_intent(self._storage, intent.directory)
            if found is None or found.save_id != intent.save_id:
                what = "no such file" if found is None else f"that of save {found.save_id}"
                problem = f"found {what}, rank 0 has written that of save {intent.save_id}"
                raise TryAgainError(errno.ENOENT, f"{problem}; the output dir must be the same one on every host")

        self._look(name, look)

    def _look(self, name: str, look: Callable[[], None]) -> None:
        self._retries.url = f"{self._storage.url}/{name}"
        self._retries.call(self._operation, look, again=self._is_patient)
