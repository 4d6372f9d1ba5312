"""What checksums cost: the same saves and loads with xxhash, and with a hash that looks at nothing.

For this comparison only: the hash is replaced in this process, and nothing of recckpt knows of it.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash
from measuring import report, scratch, timed, touch_memory, warm
from peers import State, model_of, unsynced

from recckpt import Saver

Took = tuple[float, float]  # seconds on the clock, and of the processors: those do not hang on who else is at work


class _Nothing:
    """A hash whose digest is always the same."""

    def __init__(self, data: object = None) -> None:
        del data

    def update(self, data: object) -> None:
        del data

    def intdigest(self) -> int:
        return 0


def _digest_of_nothing(data: object) -> int:
    del data
    return 0


@contextmanager
def unhashed() -> Iterator[None]:
    """Let every checksum be 0."""
    with (
        mock.patch.object(xxhash, "xxh3_64", _Nothing),
        mock.patch.object(xxhash, "xxh3_64_intdigest", _digest_of_nothing),
    ):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"checksums": nullcontext, "no checksums": unhashed}


def compare_checksums(root: Path, rows: int, rounds: int) -> None:
    """Save and load with and without, turn by turn, each round in the other order."""
    state = State(rows)
    with scratch(root) as directory, unsynced():
        savers = {way: Saver(state.model, output_dir=str(directory / way)) for way in WAYS}

        def save(way: str) -> Took:
            for path in (directory / way).glob("a*"):
                shutil.rmtree(path)
            warm(directory, state.n_bytes, sync=False)
            return _timed(way, lambda: savers[way].save("a", overwrite=True))

        _compare("save", state, rounds, save)

        def load(way: str) -> Took:
            gc.collect()
            touch_memory(2 * state.n_bytes)
            return _timed(way, lambda: _load(directory / way))

        _compare("load into an empty table", state, rounds, load)


def _load(directory: Path) -> object:
    model, _ = model_of()
    Saver(model, output_dir=str(directory)).load()
    return model


def _timed(way: str, work: Callable[[], object]) -> Took:
    with WAYS[way]():
        begin = time.process_time()
        wall = timed(work)
        return wall, time.process_time() - begin


def _compare(what: str, state: State, rounds: int, measure: Callable[[str], Took]) -> None:
    took: dict[str, list[Took]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in sorted(WAYS, reverse=number % 2 == 1):
            both = measure(way)
            if number:  # the first compiles and imports
                took[way].append(both)
    line: dict[str, Any] = {"case": f"cost of checksums, {what}, tmpfs", "gb": round(state.n_bytes / 1e9, 3)}
    for kind, name in enumerate(("wall", "cpu")):
        seconds = {way: [both[kind] for both in of_way] for way, of_way in took.items()}
        whole, without = (statistics.median(values) for values in seconds.values())
        line[f"{name}_median_sec"] = {"checksums": round(whole, 3), "no checksums": round(without, 3)}
        line[f"{name}_share"] = round(1 - without / whole, 3)
        line[f"{name}_all_sec"] = {way: [round(value, 3) for value in values] for way, values in seconds.items()}
    report({**line, "rounds": rounds})
