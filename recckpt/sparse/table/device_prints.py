"""The same fingerprints as :mod:`recckpt.sparse.table.fingerprints`, of rows on a device, made by torch where they lie.

Torch has few operations on uint64, so words are int64 with the same bits: sums and products wrap alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import M1, M2
from recckpt.sparse.table.print_words import MIX, factors_of, word_bytes
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import SlotSpec

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@torch.no_grad()
def prints_on_device(rows: Snapshot, begin: int, end: int) -> npt.NDArray[np.uint64]:
    """Return the prints of the rows [begin, end) of a snapshot; the bytes read were there when this returns."""
    prints = torch.zeros(end - begin, dtype=torch.int64)
    for spec in rows.slots:
        done, mixed = 0, []
        for memory in rows.memory(spec.name, begin, end):
            n_rows = len(memory) // spec.row_bytes
            mixed.append(_mixed(memory, spec, prints[done : done + n_rows].to(memory.device)))
            done += n_rows
        prints = torch.cat(mixed)
    on_host: npt.NDArray[np.uint64] = prints.cpu().numpy().view(np.uint64)
    return on_host


def _mixed(memory: Tensor, spec: SlotSpec, prints: Tensor) -> Tensor:
    """Return the prints of rows once the words of a slot are mixed into them."""
    n_bytes = word_bytes(spec.row_bytes)
    if memory.storage_offset() % n_bytes:  # torch shows bytes as longer words only from a multiple of them on
        memory = memory.clone()
    words = memory.view(_WORDS[n_bytes]).view(len(prints), -1).to(torch.int64)
    if n_bytes < 8:
        words &= (1 << 8 * n_bytes) - 1
    words = words ^ _shifted(words, 32)  # not in place: words of 8 bytes are the rows themselves
    words *= _signed(MIX)
    words ^= _shifted(words, 29)
    factors = torch.from_numpy(factors_of(words.shape[1]).view(np.int64)).to(memory.device)
    return _mix64(words.mul_(factors).sum(1) + prints)


def _mix64(z: Tensor) -> Tensor:
    """As :func:`recckpt.format.buckets.mix64`."""
    z = (z ^ _shifted(z, 30)) * _signed(int(M1))
    z = (z ^ _shifted(z, 27)) * _signed(int(M2))
    return z ^ _shifted(z, 31)


def _shifted(words: Tensor, n_bits: int) -> Tensor:
    """Shift unsigned words to the right: torch shifts the sign in."""
    return (words >> n_bits).bitwise_and_((1 << 64 - n_bits) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
