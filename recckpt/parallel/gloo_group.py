"""A gloo group of torch whose threads end before the interpreter does."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from recckpt.errors import RecckptError

_T = TypeVar("_T")


class GlooGroup:
    """A gloo group, closed when nothing holds this any more, and at the end of the interpreter.

    A thread of gloo drops the tensors of a collective after the collective has returned, and needs the interpreter to
    do so. If the interpreter is ending, CPython ends the thread inside a destructor, and the process aborts
    (https://github.com/pytorch/pytorch/issues/190489). A closed group has no threads.

    Closing waits for the threads of this process, never for other ranks. So a group is left open if a collective may
    be under way in it, as in a daemon thread or after an interrupt, or if it was made before this process was forked:
    its threads do not exist here.

    Attributes:
        close: closes it now.

    Args:
        group: of ``torch.distributed``; nothing else may hold it.
    """

    def __init__(self, group: Any) -> None:
        self._open = _OpenGroup(group)
        self.close = weakref.finalize(self, self._open.close)  # torch would keep the group, with its threads and files

    def run(self, work: Callable[[Any], _T]) -> _T:
        """Return what work makes of the group. One thread at a time.

        Raises:
            RecckptError: the interpreter is ending, and the group is closed.
        """
        return self._open.run(work)


class _OpenGroup:
    """The group as its finalizer knows it, which must not hold what it is for."""

    def __init__(self, group: Any) -> None:
        self._group, self._is_idle, self._made_by = group, True, os.getpid()

    def run(self, work: Callable[[Any], _T]) -> _T:
        if self._group is None:
            raise RecckptError("the interpreter is ending, and ranks no longer reach each other: save before it ends")
        self._is_idle = False
        try:
            result = work(self._group)
        except RuntimeError:  # gloo's: the collective has failed, and is over
            self._is_idle = True
            raise
        self._is_idle = True
        return result

    def close(self) -> None:
        import torch.distributed as dist

        if not self._is_idle or os.getpid() != self._made_by:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # else its destructor waits, at the end too
            return
        group, self._group = self._group, None
        with suppress(Exception):  # gone already
            dist.destroy_process_group(group)
