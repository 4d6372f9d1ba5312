"""An exception, or a call as from a signal handler, at every Python line of some files, one after another."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import recckpt


@cache
def _silent(code: CodeType) -> frozenset[int]:
    """Return where instructions begin at which tracers see a line, and neither a signal nor an error can arise.

    They do nothing, or end a ``with`` block by ``__exit__(None, None, None)``; Python lets no handler cover them.
    """
    instructions = list(dis.get_instructions(code))
    found = {i.offset for i in instructions if i.opname == "NOP"}
    for three in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if all(i.opname in ("LOAD_CONST", "DUP_TOP") and i.argval is None for i in three):
            found.add(three[0].offset)
    return frozenset(found)


_ROOT = str(Path(recckpt.__file__).parent)


class RaisingAt:
    """Raises an error where a block reaches a line of recckpt for the n-th time, counted from 0.

    No garbage is looked for meanwhile: a finalizer of what another test has left would be struck in its place.

    Args:
        number: -1 raises never.
        error: what is raised.
        rooms: folders of recckpt whose lines count.
    """

    def __init__(self, number: int, error: type[BaseException], *rooms: str) -> None:
        self._number, self._error = number, error
        self._folders = tuple(f"{_ROOT}/{room}" for room in rooms)
        self.n_lines = 0
        self.where = ""

    def __enter__(self) -> RaisingAt:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *rest: Any) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    def _trace(self, frame: Any, event: str, argument: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        if event == "line" and frame.f_lasti not in _silent(frame.f_code):
            self.n_lines += 1
            if self.n_lines - 1 == self._number:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                self._strike()
        return self._trace

    def _strike(self) -> None:
        raise self._error("planted")


class CallingAt(RaisingAt):
    """Calls a function there instead, as a signal handler would be."""

    def __init__(self, number: int, call: Callable[[], object], *rooms: str) -> None:
        super().__init__(number, RuntimeError, *rooms)
        self._strike = call  # type: ignore[method-assign]
