"""Python's cyclic garbage collector while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_NEW_OBJECTS = 100_000
_lock = Lock()
_n_running = 0
_before: tuple[int, int, int] = gc.get_threshold()
_rare = _before


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the collector run once in 100,000 new objects at most, in all threads, until the end of the block.

    A load of 10,000 tables makes a million objects, none of them garbage, and the collector walks over them again and
    again: a fifth of the load. It is not turned off: other threads may serve or train for as long as a load takes. A
    threshold that is higher already stays, and so does a collector that is off. Thread-safe; blocks may overlap.
    """
    global _n_running, _before, _rare
    with _lock:
        _n_running += 1
        if _n_running == 1:
            _before = gc.get_threshold()
            _rare = (max(_before[0], _NEW_OBJECTS) if _before[0] else 0, *_before[1:])
            gc.set_threshold(*_rare)
    try:
        yield
    finally:
        with _lock:
            _n_running -= 1
            if not _n_running and gc.get_threshold() == _rare:  # else somebody has set it meanwhile
                gc.set_threshold(*_before)
