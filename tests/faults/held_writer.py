"""Writers on threads of their own, of which one at a time runs, and each halts where it is told to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from faults.trainer import Trainer
from faults.watched_storage import Died, watch

Script = Callable[["HeldWriter"], None]

_CLAIM = re.compile(r"put_if_absent \.recckpt/owner/(\d+)\.json")
_HOLDS_NOTHING = ("write", "discard")  # nobody else can see what a file has while it is written


class HeldWriter:
    """A trainer that halts before its storage operations.

    Attributes:
        trainer: what it trains; to be used by its scripts only.
        epoch: of its claim; 0 before it has tried to make one.
        at: the operation that it halts before; "" where it does not.
        stood: where it halted first, and how many operations it had done.
    """

    def __init__(self, url: str, max_keep: int | None = 1) -> None:
        self.trainer = Trainer(url, max_keep)
        self.epoch, self.at, self.stood, self._done = 0, "", "", 0
        self._go, self._halted = threading.Semaphore(0), threading.Semaphore(0)
        self._left: int | None = 0  # operations that it may do, None for all
        self._is_dead, self._is_done = False, True
        self._error: BaseException | None = None
        watch(self.trainer.saver.storage, self._before)

    def begin(self, script: Script) -> HeldWriter:
        """Take up work, of which nothing is done yet."""
        self._is_done = False
        threading.Thread(target=self._run, args=(script,), daemon=True).start()
        return self

    def go(self, operations: int | None = None) -> bool:
        """Do so many operations, or all that are left of the work; return whether there are more.

        Raises:
            BaseException: what the work raised.
        """
        self._let_go(operations)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return not self._is_done

    def die(self) -> None:
        """Do nothing any more, wherever it is."""
        self._is_dead = True
        self._let_go(None)

    def _let_go(self, operations: int | None) -> None:
        if not self._is_done:
            self._left = operations
            self._go.release()
            self._halted.acquire()

    def _run(self, script: Script) -> None:
        self._go.acquire()
        try:
            script(self)
        except Died:
            pass
        except BaseException as error:
            self._error = error
        self._is_done, self.at = True, ""
        self._halted.release()

    def _before(self, operation: str) -> None:
        if self._is_dead:
            raise Died
        if operation.split(maxsplit=1)[0] in _HOLDS_NOTHING:
            return
        while self._left == 0:
            self.at = operation
            self.stood = self.stood or f"{operation} ({self._done})"
            self._halted.release()
            self._go.acquire()
            if self._is_dead:
                raise Died
        if self._left is not None:
            self._left -= 1
        self._done += 1
        if claim := _CLAIM.match(operation):
            self.epoch = int(claim[1])
