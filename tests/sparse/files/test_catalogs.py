"""Catalogs held against their manifest, and which batches may have some ids."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from support.drawn import drawn
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.checkpoint.chain import OpenLink
from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import bucket_of
from recckpt.output_dir.at_path import read_checkpoint
from recckpt.sparse.files.catalogs import IdSet

ROWS = {2: (2.5, 2.5), 9: (9, 9)}
IDS = st.sets(st.integers(-20, 20) | st.sampled_from([-(2**63), 2**63 - 1]))
BUCKETS = st.tuples(st.integers(0, 65536), st.integers(0, 65536)).map(lambda pair: tuple(sorted(pair)))
RANGES = st.tuples(st.integers(-25, 25), st.integers(-25, 25)).map(lambda pair: tuple(sorted(pair)))
EVERY = (-(2**63), 2**63 - 1)


@pytest.fixture
def base(local):
    save_tables(local, [filled("t", range(5))])
    return counting(Path(local.url.removeprefix("file://")))[0]


def catalogs(storage):
    return OpenLink.of(storage, read_checkpoint(storage, "ckpt_2")).catalogs


def test_the_catalogs_of_a_delta_hold_its_rows_and_its_deletes(local, base):
    write_delta(base, "ckpt_2", 4, [(ROWS, [0]), ({}, [1, 4])])
    one, other = catalogs(local)
    assert (one.counts("rows"), one.counts("deletes")) == ({"t": 2}, {"t": 1})
    assert (other.counts("rows"), other.counts("deletes")) == ({}, {"t": 2})
    found = [(part.holds, numbers) for part, numbers in [*one.parts_of("t", "rows"), *one.parts_of("t", "deletes")]]
    assert found == [("rows", [0]), ("deletes", [0])]
    assert list(one.parts_of("u", "rows")) == []


@pytest.mark.parametrize("count", ["upserts", "deletes"])
def test_counts_of_a_delta_that_its_catalogs_do_not_add_up_to_are_damage(local, base, count):
    delta = write_delta(base, "ckpt_2", 9, [(ROWS, [0, 1])])
    Forge(delta.directory).edit_manifest(lambda values: values["tables"][0]["delta"].update({count: 7}))
    with pytest.raises(CorruptCheckpointError) as caught:
        catalogs(local)
    assert (caught.value.path, caught.value.where) == ("ckpt_2/manifest.json", "table 't'")
    assert (caught.value.found, caught.value.expected) == (f"7 {count}", "2, as in the catalogs")


@drawn(IDS, BUCKETS, RANGES | st.none() | st.just(EVERY), few=100, many=2000)
def test_a_batch_may_have_an_id_that_is_in_its_buckets_and_in_its_range(ids, buckets, ranged):
    ordered = np.array(sorted(ids), np.int64)
    least, greatest = ranged or EVERY
    of_ids = zip(ordered.tolist(), bucket_of(ordered).tolist(), strict=True)
    met = any(buckets[0] <= bucket < buckets[1] and least <= id_ <= greatest for id_, bucket in of_ids)
    assert IdSet(ordered).meets(buckets, ranged) == met
