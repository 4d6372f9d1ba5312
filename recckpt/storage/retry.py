"""Retries requests that failed in the network, or whose data arrived corrupted: full jitter, one deadline per file.

Follows "Exponential Backoff And Jitter" (M. Brooker, AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import errno
import logging
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from recckpt.errors import CorruptCheckpointError, FormatVersionError, RecckptError
from recckpt.storage.base import NOT_READABLE, Files, NotPlainError

log = logging.getLogger("recckpt")
_T = TypeVar("_T")


class NobodyAnswersError(ConnectionError):
    """No server has ever answered at an address: the address is probably wrong, rather than the server down."""


_jitter = random.Random()  # separate: a retry must not change the random numbers of training
_TRANSIENT_STATUS = frozenset({408, 429})
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
)
_TRANSIENT_ERRNO = frozenset(
    {errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE}
    | {errno.ENETUNREACH, errno.ENETRESET, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.EAGAIN}
)
_TRANSIENT_NAMES = frozenset(  # names, because these may be missing: botocore, aiohttp, azure-core, paramiko, asyncio
    {"ConnectionError", "ConnectionClosedError", "HTTPClientError", "IncompleteReadError", "ResponseParserError"}
    | {"ClientPayloadError", "ClientConnectionError", "ServiceRequestError", "ServiceResponseError"}
    | {"SSHException", "EOFError", "IncompleteRead", "TimeoutError", "FSTimeoutError"}
)
_BROKEN_NAMES = frozenset({"FlexibleChecksumError", "ChecksumError", "DataCorruption"})  # in botocore, gcsfs and google
_BROKEN_CODES = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"})
_BROKEN_CODES |= {"IncompleteBody", "Md5Mismatch"}
_BROKEN_TRIES = 4  # for bytes corrupted in transfer; if all fail, the store or memory is bad
_REFUSALS = (FileNotFoundError, FileExistsError, PermissionError)
_FINAL = (*_REFUSALS, IsADirectoryError, NotADirectoryError, NobodyAnswersError)
_MOST_LINKS = 16  # links in a chain of causes
_ERRNO_OF_STATUS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 408: errno.ETIMEDOUT, 429: errno.EBUSY}
_ERRNO_OF_TYPE = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (TimeoutError, errno.ETIMEDOUT),
    (ConnectionError, errno.ECONNRESET),
    (NotImplementedError, errno.ENOSYS),
)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait between attempts, and when to stop trying."""

    first_sec: float = 0.2  # longest wait after the first failure; doubles with each further one
    cap_sec: float = 20.0  # longest wait of all
    deadline_sec: float = 600.0  # for all failed attempts at one file, with the waits between them
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def wait_sec(self, n_failures: int) -> float:
        return _jitter.uniform(0, min(self.cap_sec, self.first_sec * 2.0 ** min(n_failures - 1, 60)))


class Retries:
    """The attempts at one file, which share a deadline. Not thread-safe.

    Args:
        policy: how long to wait, and when to give up.
        url: the URL of the file.
        on_retry: called before each attempt except the first.
        attempt: makes an attempt, given the work and the exception that was being handled when the call began; None to
            call the work directly.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        url: str,
        on_retry: Callable[[], object] = lambda: None,
        attempt: Callable[[Callable[[], Any], BaseException | None], Any] | None = None,
    ) -> None:
        self.url = url
        self._policy, self._left_sec, self._on_retry, self._attempt = policy, policy.deadline_sec, on_retry, attempt

    def call(self, operation: str, work: Callable[[], _T], *, again: bool = True, url: str | None = None) -> _T:
        """Return the result of ``work``. If ``again``, retry after a failure that may be temporary.

        Raises an OSError that names the operation and ``url`` (None for the file's URL) if the deadline has passed, or
        if retrying cannot help.
        """
        handled = sys.exc_info()[1]
        n_failures, url = 0, url or self.url
        while True:
            began = self._policy.clock()
            try:
                result: _T = work() if self._attempt is None else self._attempt(work, handled)
                return result
            except (MemoryError, NotPlainError, RecckptError):
                raise
            except Exception as error:
                n_failures += 1
                failure = error
            wait_sec = self._policy.wait_sec(n_failures)
            self._left_sec -= self._policy.clock() - began + wait_sec
            is_hopeless = n_failures >= _BROKEN_TRIES and is_broken(failure, handled)
            if not again or is_hopeless or self._left_sec < 0 or not is_transient(failure, handled):
                raise os_error(failure, operation, url) from failure
            log.warning("%s: %s failed, trying again in %.1f s: %r", url, operation, wait_sec, failure)
            self._on_retry()
            self._policy.sleep(wait_sec)


class TryAgainError(OSError):
    pass


def is_transient(error: BaseException, handled: BaseException | None = None) -> bool:
    """Return whether the same call may succeed a little later.

    True for timeouts, lost connections, 408, 429, 5xx and SlowDown; false for other answers of a server (400, 401, 403,
    404, a missing bucket) and for a device that is full or read-only. ``handled`` is the exception that was being
    handled when the call began: it is in the context of ``error``, but is not a cause.
    """
    if isinstance(error, TryAgainError):
        return True
    links = list(_chain(error, handled))
    if isinstance(error, _FINAL) or any(isinstance(link, ssl.SSLCertVerificationError) for link in links):
        return False
    if any(map(_is_broken, links)):
        return True
    for link in links:  # the nearest clear one: aiohttp has a 400 for a broken answer behind a lost connection
        status, code = _answer(link)
        if _is_of_the_network(link):
            return True
        if status is not None:
            return code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS or (status >= 500 and status != 501)
    return False


def is_broken(error: BaseException, handled: BaseException | None = None) -> bool:
    """Return whether a checksum, here or in the store, found that bytes changed in transfer."""
    return any(map(_is_broken, _chain(error, handled)))


def is_unreachable(error: BaseException, handled: BaseException | None = None) -> bool:
    """Return whether no server listens at an address, or the host name is unknown, which may be temporary."""
    return any(
        isinstance(link, ConnectionRefusedError)
        or (isinstance(link, socket.gaierror) and link.errno != socket.EAI_AGAIN)
        or (isinstance(link, OSError) and link.errno == errno.ECONNREFUSED)
        for link in _chain(error, handled)
    )


def is_answer(error: BaseException, handled: BaseException | None = None) -> bool:
    """Return whether a server answered. Some backends also report a missing file when they cannot reach the server."""
    links = list(_chain(error, handled))
    if any(_answer(link)[0] is not None for link in links):
        return True
    return isinstance(error, _REFUSALS) and not any(_is_of_the_network(link) for link in links)


def is_conflict(error: BaseException) -> bool:
    """Return whether a conditional put was refused because of its condition: 409, 412, or FileExistsError."""
    return isinstance(error, FileExistsError) or status_of(error) in (409, 412)


def status_of(error: BaseException) -> int | None:
    return next((status for link in _chain(error) if (status := _answer(link)[0]) is not None), None)


def os_error(error: BaseException, operation: str, url: str) -> OSError:
    """Return an OSError of the fitting subclass that says what was done, where, and why it failed."""
    reason = error.strerror if isinstance(error, OSError) else None
    if not reason:
        reason = ": ".join(filter(None, (type(error).__name__, str(error))))
    number = error.errno if isinstance(error, OSError) else None
    if not isinstance(number, int) or number <= 0:
        number = next((number for kind, number in _ERRNO_OF_TYPE if isinstance(error, kind)), None)
    if number is None:
        status = status_of(error)
        is_late = status is None and "Timeout" in type(error).__name__
        number = errno.ETIMEDOUT if is_late else _ERRNO_OF_STATUS.get(status or 0, errno.EIO)
    return OSError(number, f"{operation} failed: {reason}", url)


def _chain(error: BaseException, handled: BaseException | None = None) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_MOST_LINKS):
        if link is None or link is handled:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _answer(error: BaseException) -> tuple[int | None, str]:
    """Return the HTTP status and the error code of a server's answer; (None, "") without one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return (status if isinstance(status, int) else None), str(response.get("Error", {}).get("Code", ""))
    for name in ("status", "status_code", "code"):  # aiohttp, azure-core, gcsfs
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status, str(getattr(error, "error_code", ""))
    return None, ""


def _is_broken(error: BaseException) -> bool:
    return _answer(error)[1] in _BROKEN_CODES or any(kind.__name__ in _BROKEN_NAMES for kind in type(error).__mro__)


def _is_of_the_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    if str(error) == "Socket is closed":  # from paramiko, without an errno
        return True
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


def read_twice(files: Files, path: str, read: Callable[[], _T], reopen: Callable[[], object] = lambda: None) -> _T:
    """Return the result of ``read``. If ``read`` finds damage and the file is remote, call it once more.

    The damage may have happened in transfer or in a cache. The log says whether the stored file is damaged.

    Args:
        files: where the file lies.
        path: its name there.
        read: raises CorruptCheckpointError or FormatVersionError if the file is not what was written.
        reopen: called before the second read, to drop data of the file that the caller keeps.
    """
    try:
        return read()
    except (CorruptCheckpointError, FormatVersionError) as error:
        if isinstance(error.__cause__, NOT_READABLE) or not files.drop_cached(path):  # missing or local
            raise
    try:
        reopen()
        value = read()
    except (CorruptCheckpointError, FormatVersionError):
        _log_damage(files.url, path)
        raise
    _log_flip(files, path)
    return value


def check_twice(files: Files, path: str, check: Callable[[], _T], errors_of: Callable[[_T], Sized]) -> _T:
    """Return the result of ``check`` on a file; if it has errors and the file is remote, check it once more."""
    problems = check()
    if not errors_of(problems) or not files.drop_cached(path):
        return problems
    again = check()
    if errors_of(again):
        _log_damage(files.url, path)
    else:
        _log_flip(files, path)
    return again


@cache
def _log_damage(url: str, path: str) -> None:
    """Log once per file, because each save and each listing may find the same damage."""
    log.warning("%s/%s was read twice, and is damaged in the storage itself", url, path)


def _log_flip(files: Files, path: str) -> None:
    log.warning(
        "%s/%s was corrupted in transfer; a second read succeeded, so the stored file is intact", files.url, path
    )
