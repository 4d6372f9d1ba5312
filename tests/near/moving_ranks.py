"""Real ranks that make the moves in ROOT/moves, each in a directory of its own: ``moving_ranks.py ROOT SIZE``."""

import pickle
import sys
from pathlib import Path

import torch
from near.test_moving import SAVE
from support.rank_processes import fork_ranks

from recckpt.near.moving import MoveBuffers, move
from recckpt.parallel.ranks import RanksNow
from recckpt.storage.local import LocalStorage


def work(rank, size, root):
    """Return the moves that failed."""
    moves, storage = pickle.loads((root / "moves").read_bytes()), LocalStorage(str(root / f"{rank}"))
    ranks = RanksNow(60).of(rank, size)
    buffers = MoveBuffers()
    received = buffers.received.take(1 << 16)
    received[:] = 7
    failures = ranks.in_meetings(lambda meetings: move(meetings, storage, SAVE, moves, buffers, round_bytes=4096))
    assert (received != 7).any(), "what was sent to this rank is not in the memory that is kept for it"
    return failures


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(int(sys.argv[2]), Path(sys.argv[1]), work)
