"""A storage whose operations are watched, and of which one fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

from recckpt.storage import Sink, Storage

WATCHED = sorted(Storage.__abstractmethods__ | {"read", "free_bytes"})
Before = Callable[[str], None]  # gets operation and name; what it raises, the operation raises
OPERATIONS = Storage.__abstractmethods__ | {"read", "free_bytes"} - {"prepare"}
WHEN = ("before", "after", "half")  # nothing is done, all is done, or half of a write


class Died(BaseException):
    """A process is gone: nothing that it would still do is done."""


def watch(storage: Storage, before: Before) -> None:
    """Let all who use a storage ask before each operation, and before each one of a file that is being written."""
    inside = threading.local()

    def watched(operation: str) -> Callable[..., Any]:
        real = getattr(storage, operation)

        def call(*args: Any) -> Any:
            if getattr(inside, "it", False):  # one operation that is made of others
                return real(*args)
            before(" ".join([operation, *map(str, args[:1])]))
            inside.it = True
            try:
                result = real(*args)
            finally:
                inside.it = False
            if operation in ("create", "draft"):
                _watch_sink(result, before, str(args[0]))
            return result

        return call

    for operation in WATCHED:
        setattr(storage, operation, watched(operation))


def _watch_sink(sink: Sink, before: Before, name: str) -> None:
    """Let a file ask before it is written to and published; one that could not be written must not be published."""
    write, close, discard = sink.write, sink.close, sink.discard
    failed = False

    def ask(operation: str) -> None:
        try:
            before(f"{operation} {name}")
        except Died:
            with suppress(OSError):  # whoever is dead has no open files
                os.close(getattr(sink, "_fd", -1))
            raise

    def watched_write(data: Any) -> int:
        nonlocal failed
        try:
            ask("write")
            return write(data)
        except BaseException:
            failed = True
            raise

    def watched_close() -> None:
        ask("close")
        assert not failed, f"{name} is published, and not all of it was written"
        close()

    def watched_discard() -> None:
        ask("discard")
        discard()

    vars(sink).update(write=watched_write, close=watched_close, discard=watched_discard)


class Faults:
    """Counts the operations of a storage and of the files that it opens for writing, and fails one of them.

    Attributes:
        log: what was done since the last fault was planted, in order, such as ``put_if_absent`` and ``file.write``.
    """

    def __init__(self, storage):
        self._url, self._depth = storage.url, threading.local()
        self.plant(0, 0)
        for name in OPERATIONS:
            setattr(storage, name, self._counted(name, getattr(storage, name)))

    def plant(self, number, code, *, for_ever=False, when="before"):
        """Fail the operation of a number, and those after it where it is for ever; 0 fails none."""
        self._number, self._code, self._for_ever, self._when = number, code, for_ever, when
        self._spoiled = set()  # paths of files of which a write has failed
        self.log = []

    @property
    def has_struck(self):
        return 0 < self._number <= len(self.log)

    def _counted(self, name, real, path=None):
        def call(*args):
            with self._inside() as is_inside:
                if is_inside:
                    return real(*args)
                self.log.append(name)
                assert name == "file.write" or path not in self._spoiled, f"{path} is published, and not all is written"
                if self._strikes:
                    self._spoiled |= {path} if name == "file.write" else set()
                    if self._when == "after":
                        self._drop(real(*args))
                    elif self._when == "half" and name == "file.write":
                        real(bytes(args[0])[: len(args[0]) // 2])
                    raise OSError(self._code, os.strerror(self._code), path or "/".join([self._url, *args[:1]]))
                result = real(*args)
            if name in ("create", "draft"):
                for method in ("write", "close", "seal"):
                    if hasattr(result, method):
                        counted = self._counted(f"file.{method}", getattr(result, method), f"{self._url}/{args[0]}")
                        setattr(result, method, counted)
            return result

        return call

    @property
    def _strikes(self):
        count = len(self.log)
        return count == self._number or (self._for_ever and count > self._number > 0)

    def _drop(self, result):
        """Let go of what an operation returned whose answer is lost."""
        if hasattr(result, "discard"):
            result.discard()
        elif hasattr(result, "close"):
            result.close()

    @contextmanager
    def _inside(self):
        """Say whether this is an operation within another, which does not count."""
        was = getattr(self._depth, "is_inside", False)
        self._depth.is_inside = True
        try:
            yield was
        finally:
            self._depth.is_inside = was
