"""Memory that is used again: as large as is asked for, and the same while it is large enough."""

import numpy as np

from recckpt.parallel.reused_buffer import ReusedBuffer


def test_bytes_are_taken_from_the_same_memory_while_it_is_large_enough():
    buffer = ReusedBuffer()
    assert len(buffer.take(0)) == 0
    first = buffer.take(100)
    first[:] = 7
    assert (buffer.take(60) == 7).all()
    assert len(buffer.take(60)) == 60
    assert np.shares_memory(buffer.take(100), first)
    larger = buffer.take(101)
    assert len(larger) == 101
    assert not np.shares_memory(larger, first)
