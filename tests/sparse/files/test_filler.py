"""Rows that travel from rank to rank arrive as they were; values of ranges of columns, brought to other ranges."""

import numpy as np
import torch

from recckpt.sparse.files.filler import BatchRows, packed, regrouped, unpacked
from recckpt.types import SlotSpec

SPECS = (
    SlotSpec("embedding", "float32", (3,)),
    SlotSpec("count", "int64", ()),
    SlotSpec("half", "bfloat16", (2, 3)),
    SlotSpec("flag", "uint8", ()),
)


def rows_of(n_rows, shard=0, table="t"):
    rng = np.random.default_rng(n_rows)
    values = {spec.name: rng.integers(0, 2, n_rows * spec.row_bytes, np.uint8) for spec in SPECS}
    return BatchRows(table, shard, f"ckpt/{shard}.arrow", rng.integers(-(2**63), 2**63 - 1, n_rows), values)


def same(first, second):
    assert (first.table, first.shard, first.path) == (second.table, second.shard, second.path)
    assert first.ids.tolist() == second.ids.tolist()
    assert first.values.keys() == second.values.keys()
    for spec in SPECS:
        if spec.name in first.values:
            one, other = first.tensor(spec), second.tensor(spec)
            assert one.shape == (len(first.ids), *spec.shape)
            assert torch.equal(one.view(torch.uint8) if one.dim() else one, other.view(torch.uint8))


def test_several_pieces_arrive_as_they_were_sent():
    sent = [rows_of(5), rows_of(1, 7, "ein Tisch \u00fc"), rows_of(33, 2)]
    received = list(unpacked(packed(sent)))
    assert len(received) == 3
    for before, after in zip(sent, received, strict=True):
        same(before, after)
        assert before.n_bytes == after.n_bytes == len(before.ids) * (8 + sum(spec.row_bytes for spec in SPECS))
    assert not len(packed([]))
    assert list(unpacked(packed([]))) == []


def test_some_of_the_rows_with_some_of_their_slots():
    rows = rows_of(10)
    some = rows.some(np.array([9, 0, 3]), {"embedding", "half"})
    assert some.ids.tolist() == rows.ids[[9, 0, 3]].tolist()
    assert some.values.keys() == {"embedding", "half"}
    assert torch.equal(some.tensor(SPECS[0]), rows.tensor(SPECS[0])[[9, 0, 3]])
    assert torch.equal(some.tensor(SPECS[2]), rows.tensor(SPECS[2])[[9, 0, 3]])
    assert rows.some(np.array([1]), ()).values == {}


TWO, THREE = ((0, 8), (8, 12)), ((0, 4), (4, 8), (8, 12))
VALUES = torch.tensor([[3.0, 6.0], [0.0, 3.0]])


def test_a_whole_row_gets_the_mean_by_widths_and_other_ranges_get_that_of_the_whole_row():
    assert regrouped(VALUES, TWO, ()).tolist() == [4.0, 1.0]
    assert regrouped(VALUES.to(torch.bfloat16), TWO, ()).dtype == torch.bfloat16
    assert regrouped(torch.tensor([5.0, 7.0]), (), TWO).tolist() == [[5.0, 5.0], [7.0, 7.0]]
    assert regrouped(VALUES, TWO, THREE).tolist() == [[4.0] * 3, [1.0] * 3]
    assert regrouped(VALUES, TWO, TWO) is VALUES
