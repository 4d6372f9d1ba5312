"""Which rank this is, and the file that it writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """One rank among others.

    Attributes:
        global_rank: 0 to ``global_world_size`` - 1.
        global_world_size: number of ranks that save together.
    """

    global_rank: int
    global_world_size: int

    def __post_init__(self) -> None:
        rank, size = self.global_rank, self.global_world_size
        if not (type(rank) is int and type(size) is int and 0 <= rank < size):
            raise ValueError(f"global_rank must be 0 to global_world_size - 1, found rank {rank!r} of {size!r}")

    @property
    def file_name(self) -> str:
        """Name of the file of this rank; part of the format."""
        return f"checkpoint_{self.global_rank}.pt"
