"""Of which shards a query of Arrow reads, held against the rows that it returns."""

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from recckpt.format.catalog import Batch, Catalog, Part
from recckpt.sparse.files.dataset import shards_that_meet

SCHEMA = pa.schema([("table", pa.dictionary(pa.int16(), pa.utf8())), ("id", pa.int64()), ("weight", pa.float32())])
ID = ds.field("id")
LARGE = 2**53 + 1


def shard(number, *ids):
    batches = tuple(Batch("item", 1, (0, 65536), (id_, id_), {}) for id_ in ids)
    return Catalog("save", number, 4, (Part("file", 1, 0, ("item",), batches),))


SHARDS = [shard(0, 0, 9), shard(1, 10, 19), shard(2), shard(3, -5, -1, LARGE)]


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        (None, [0, 1, 2, 3]),
        (ID == 5, [0, 3]),
        (ID == 15, [1, 3]),
        (ID == LARGE + 1, []),
        (ID.isin([3, 12]), [0, 1, 3]),
        (ID < 0, [3]),
        ((ID > 9) & (ID <= 12), [1, 3]),
        ((ID == -9) | (ID == LARGE), [3]),
        ((ID == -9) & (ds.field("weight") > 0), []),
        (ds.field("weight") > 0, [0, 1, 3]),
        (ID.cast(pa.float64(), safe=False) == 2.0**53, [0, 1, 2, 3]),  # which Arrow does not compare with ranges
    ],
)
def test_shards_are_met_whose_range_has_an_id_that_the_condition_lets_pass(condition, met):
    assert [catalog.shard for catalog in shards_that_meet(SHARDS, "item", SCHEMA, condition)] == met
    assert shards_that_meet(SHARDS[1:3], "item", SCHEMA, ID == 500) == SHARDS[1:3], "one is always met"
