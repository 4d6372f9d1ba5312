"""Catalogs held against their manifest: of a delta, what its own files hold."""

from pathlib import Path

import pytest
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.errors import CorruptCheckpointError
from recckpt.output_dir.at_path import read_checkpoint
from recckpt.sparse.files.catalogs import read_catalogs

ROWS = {2: (2.5, 2.5), 9: (9, 9)}


@pytest.fixture
def base(local):
    save_tables(local, [filled("t", range(5))])
    return counting(Path(local.url.removeprefix("file://")))[0]


def catalogs(storage):
    return read_catalogs(read_checkpoint(storage, "ckpt_2"), storage)


def test_the_catalogs_of_a_delta_hold_its_rows_and_its_deletes(local, base):
    write_delta(base, "ckpt_2", 4, [(ROWS, [0]), ({}, [1, 4])])
    one, other = catalogs(local)
    assert (one.rows, one.deletes) == ({"t": 2}, {"t": 1})
    assert (other.rows, other.deletes) == ({}, {"t": 2})
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
