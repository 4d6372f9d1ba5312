"""Retries of what failed in the network: full jitter, and a deadline for each file.

Follows "Exponential Backoff And Jitter" (M. Brooker, AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from recckpt.storage.backend_errors import is_transient, os_error
from recckpt.storage.plain_files import NotPlainError

log = logging.getLogger("recckpt")
_T = TypeVar("_T")

_jitter = random.Random()  # its own: a retry must not change the random numbers of training


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait between attempts, and for how long to go on."""

    first_sec: float = 0.2  # the longest wait after the first failure; it doubles with each further one
    cap_sec: float = 20.0  # the longest wait of all
    deadline_sec: float = 600.0  # what failed attempts at one file and the waits between them may take together
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def wait_sec(self, n_failures: int) -> float:
        """Return how long to wait after ``n_failures`` in a row."""
        return _jitter.uniform(0, min(self.cap_sec, self.first_sec * 2.0 ** min(n_failures - 1, 60)))


class Retries:
    """The attempts at one file, which share a deadline. Not thread-safe."""

    def __init__(self, policy: RetryPolicy, url: str) -> None:
        self.url = url
        self._policy, self._left_sec = policy, policy.deadline_sec

    def call(self, operation: str, work: Callable[[], _T], *, again: bool = True) -> _T:
        """Return what ``work`` returns; try it again after a failure that may pass, if ``again``.

        Raises an OSError that names the URL and the operation when it fails for good, or the deadline has passed.
        """
        handled = sys.exc_info()[1]
        n_failures = 0
        while True:
            began = self._policy.clock()
            try:
                return work()
            except (MemoryError, NotPlainError):
                raise
            except Exception as error:
                n_failures += 1
                failure = error
            wait_sec = self._policy.wait_sec(n_failures)
            self._left_sec -= self._policy.clock() - began + wait_sec
            if not again or self._left_sec < 0 or not is_transient(failure, handled):
                raise os_error(failure, operation, self.url) from failure
            log.warning("%s: %s failed, trying again in %.1f s: %r", self.url, operation, wait_sec, failure)
            self._policy.sleep(wait_sec)
