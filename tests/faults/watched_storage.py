"""A storage that asks before each operation, so that whoever uses it can be held up there, or die there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from recckpt.storage import Sink, Storage

OPERATIONS = sorted(Storage.__abstractmethods__ | {"read", "free_bytes"})

Before = Callable[[str], None]  # gets operation and name; what it raises, the operation raises


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

    for operation in OPERATIONS:
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
