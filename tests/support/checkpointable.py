"""Tensors that say by attributes where their shards lie in a whole one, as a ``CheckpointableTensor`` of torch does."""

import torch
from torch import Tensor

GEOMETRY = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
PADDING = 1  # rows before the first shard, which are no part of the whole


class Sharded(torch.Tensor):
    """A local tensor that keeps its attributes where torch detaches or copies it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if func in (Tensor.detach, Tensor.clone, Tensor.requires_grad_):
            for name in GEOMETRY:
                setattr(out, name, getattr(args[0], name))
        return out


def describe(local: Tensor, whole: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Give a local tensor, which has these rows of the whole one behind the padding, its attributes."""
    rest, at, places = tuple(whole.shape[1:]), PADDING, []
    for begin, end in spans:
        places.append((at, *(0 for _ in rest)))
        at += end - begin
    local.global_shape, local.local_offsets = tuple(whole.shape), tuple(places)
    local.global_offsets = tuple((begin, *(0 for _ in rest)) for begin, _ in spans)
    local.local_sizes = tuple((end - begin, *rest) for begin, end in spans)
    return local


def local_of(whole: Tensor, spans: list[tuple[int, int]], padding: float = -1) -> Tensor:
    """Return these rows of a whole tensor behind the padding."""
    head = torch.full((PADDING, *whole.shape[1:]), padding, dtype=whole.dtype)
    return torch.cat([head, *(whole[begin:end] for begin, end in spans)])


def spans_of(rank: int, size: int, n_rows: int) -> list[tuple[int, int]]:
    """Return which rows a rank has: two ranges, dealt to the ranks in turn."""
    borders = [n_rows * number // (2 * size) for number in range(2 * size + 1)]
    return [(borders[number], borders[number + 1]) for number in (rank, size + rank)]
