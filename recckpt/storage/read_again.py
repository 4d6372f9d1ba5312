"""Bytes that came over a network and have another checksum: read once more before that counts as damage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from functools import cache
from typing import TypeVar

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.storage.base import NOT_READABLE, Files

log = logging.getLogger("recckpt")
_T = TypeVar("_T")


def read_twice(files: Files, path: str, read: Callable[[], _T], reopen: Callable[[], object] = lambda: None) -> _T:
    """Return what ``read`` reads of a file and checks; where it finds damage, and the file is not local, once more.

    A bit may have been flipped on the way, or in a cache. The log says which it was.

    Args:
        files: where the file lies.
        path: its name there.
        read: raises CorruptCheckpointError or FormatVersionError where what it has read is not what was written.
        reopen: called before the second time, to drop what the caller keeps of the file.
    """
    try:
        return read()
    except (CorruptCheckpointError, FormatVersionError) as error:
        if isinstance(error.__cause__, NOT_READABLE) or not files.drop_cached(path):  # it is missing, or local
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
    """Return what ``check`` says of a file; where that is errors, and the file is not local, what it says once more."""
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
    """Say once of a file what does not change: each save and each look at the output dir may meet it."""
    log.warning("%s/%s was read twice, and is damaged in the storage itself", url, path)


def _log_flip(files: Files, path: str) -> None:
    log.warning("%s/%s was damaged on the way, and is whole in the storage, as it was read once more", files.url, path)
