"""Rows found by their ids on both sides, held against a dict."""

import numpy as np
import pytest

from recckpt.format.buckets import bucket_of, mix64
from recckpt.inspect.diff.pairing import paired


def hashes(ids):
    """Return the hashes of ids in the order of their buckets, within one in the order of the ids."""
    ids = np.array(ids, np.int64)
    return mix64(ids[np.argsort(bucket_of(ids), kind="stable")].view(np.uint64))


EVERY = np.arange(3000) * 2**40 - 7


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EVERY, EVERY),
        (EVERY, np.concatenate([EVERY, EVERY + 1])),  # new rows behind those that were there
        (EVERY, np.concatenate([EVERY + 1, EVERY])),  # before them
        (EVERY, EVERY[::-1]),  # another run
        (EVERY, np.concatenate([EVERY[::3], EVERY[1::3] + 5])),  # rows went, others came in their places
        (EVERY, EVERY[1500:]),
        (EVERY[:1], EVERY),
        (EVERY, EVERY + 1),
        (EVERY, []),
        ([], EVERY),
        ([], []),
    ],
)
def test_rows_are_paired_whatever_their_order_within_a_bucket(before, after):
    for one, other in ((hashes(before), hashes(after)), (hashes(after), hashes(before))):
        place = {int(value): number for number, value in enumerate(other)}
        expected = [(row, place[int(value)]) for row, value in enumerate(one) if int(value) in place]
        assert [(int(row), int(at)) for row, at in zip(*paired(one, other), strict=True)] == expected
