"""How rows go from rank to rank: the all-to-all of ``torch.distributed``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from recckpt.parallel.process_group import rank_and_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Exchange(Protocol):
    """Ranks that send each other rows; all of them call the same things in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to every rank, and return what all of them sent to this one. Collective.

        Args:
            rows: shape (sum(sent), ...); the first ``sent[0]`` go to rank 0, and so on.
            sent: number of rows for each rank.
            received: number of rows that come from each rank.

        Returns:
            Shape (sum(received), ...), in the order of ranks, on the device of ``rows``.
        """


class SoloExchange:
    """One rank, alone."""

    rank, size = 0, 1

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows."""
        return rows


@dataclass(frozen=True)
class ProcessExchange:
    """The ranks of a process group: gloo takes rows through the CPU, nccl from device to device.

    Rows travel as bytes, so every dtype does, and the timeout is that of the group.

    Args:
        group: a process group that this process belongs to.
    """

    group: ProcessGroup

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to every rank, and return what all of them sent to this one."""
        import torch.distributed as dist

        flat = rows.detach().reshape(len(rows), math.prod(rows.shape[1:]))
        carrier = carrier_of(dist.get_backend_config(self.group), rows.device)
        message = flat.to(carrier).contiguous().view(torch.uint8)
        answer = message.new_empty((sum(received), message.shape[1]))
        dist.all_to_all_single(answer, message, list(received), list(sent), group=self.group)
        return answer.view(rows.dtype).view(len(answer), *rows.shape[1:]).to(rows.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessExchange:
        return self  # a copy of a model talks to the same ranks


def carrier_of(backends: str, device: torch.device) -> torch.device:
    """Return the device from which rows on ``device`` are sent: the same, unless its backend is gloo or missing.

    Args:
        backends: such as ``"cpu:gloo,cuda:nccl"``.
        device: where the rows lie.
    """
    pairs = (pair.split(":") for pair in backends.split(","))
    kinds = [kind for kind, backend in pairs if backend != "gloo" or kind == "cpu"]
    return device if device.type in kinds else torch.device("cpu" if "cpu" in kinds else kinds[0])


def exchange_of(group: ProcessGroup | Exchange | None) -> Exchange:
    """Return the exchange between the ranks of a group.

    Args:
        group: None for the default process group, and for one rank where there is none.

    Raises:
        ValueError: this is one of several processes, without a process group or not in this one.
    """
    import torch.distributed as dist

    if group is None:
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        elif (size := rank_and_size()[1]) > 1:
            raise ValueError(
                f"found one of {size} processes (WORLD_SIZE) and no process group: call "
                "torch.distributed.init_process_group before sharded tables are made"
            )
        else:
            return SoloExchange()
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return ProcessExchange(group) if group.size() > 1 else SoloExchange()
    if hasattr(group, "all_to_all"):
        return cast("Exchange", group)
    raise ValueError(f"found group={group!r}, expected a process group that this process belongs to")
