"""Ranks that are threads of one process: what they send each other lies in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


class Room:
    """Where the ranks of one test meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.pieces: list[Sequence[Tensor]] = [()] * size
        self.n_messages = 0  # from each rank to all


class RoomExchange:
    """The exchange of one rank in a room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size

    def __deepcopy__(self, memo: object) -> RoomExchange:
        return self

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert sum(sent) == len(rows)
        self.room.pieces[self.rank] = torch.split(rows.clone(), list(sent))
        self.room.n_messages += self.rank == 0
        self.room.barrier.wait()
        own = [pieces[self.rank] for pieces in self.room.pieces]
        assert [len(piece) for piece in own] == list(received)
        answer = torch.cat(own)
        self.room.barrier.wait()
        return answer


def on_ranks(size: int, work: Callable[[RoomExchange], _T]) -> list[_T]:
    """Do work on every rank, each in a thread, and return the results; raise the first error."""
    room = Room(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(RoomExchange(room, rank))
        except BaseException as error:
            errors.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results
