"""What is whole of a delta's table, link by link, and what of the older links is doubtful then."""

import pyarrow as pa
import pytest
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta, write_form

from recckpt.inspect.salvage import salvage
from recckpt.storage import open_storage


@pytest.fixture
def base(tmp_path):
    """A full checkpoint with the ids 0 to 5, each of which is its value."""
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("t", range(6))], concurrency=1)
    return counting(tmp_path / "runs")[0]


@pytest.fixture
def delta(base):
    return write_delta(base, "ckpt_2", 5, [({1: (7, 7), 9: (9, 9)}, [2]), ({4: (8, 8)}, [3, 4])])


@pytest.fixture
def top(delta):
    return write_delta(delta, "ckpt_3", 5, [({0: (10, 10)}, [])])


WHOLE = {0: 10, 1: 7, 4: 8, 5: 5, 9: 9}


def salvaged(checkpoint, tmp_path, **options):
    """Return id -> first value, and what was done."""
    out = tmp_path / "out.arrow"
    out.unlink(missing_ok=True)
    done = salvage(str(checkpoint.directory), "t", str(out), **options)
    with pa.ipc.open_file(str(out)) as file:
        rows = {row["id"]: row["embedding"][0] for row in file.read_all().to_pylist()}
    assert done.rows == len(rows)
    return rows, done


def damage(path):
    path.write_bytes(bytes(path.stat().st_size))


def test_all_of_a_chain_that_is_whole_comes_out(top, tmp_path):
    rows, done = salvaged(top, tmp_path)
    assert rows == WHOLE
    assert (done.expected, done.unverified, done.lost) == (5, 0, ())


def test_rows_of_a_damaged_full_link_are_lost_and_those_of_newer_links_are_not(base, top, tmp_path):
    damage(next(base.directory.glob("sparse/*.arrow")))
    rows, done = salvaged(top, tmp_path)
    assert rows == {0: 10, 1: 7, 4: 8, 9: 9}
    (lost,) = done.lost
    assert (lost.file.split("/")[0], lost.rows) == ("ckpt_1", 6)


def test_older_rows_are_doubtful_where_a_newer_link_has_lost_some(delta, top, tmp_path):
    damage(next(delta.directory.glob("sparse/00000*.g0.*.arrow")))
    rows, done = salvaged(top, tmp_path)
    assert rows.items() <= WHOLE.items()
    assert {0, 4} <= rows.keys()
    kinds = [(lost.file.split("/")[0], lost.rows) for lost in done.lost]
    assert kinds[0] == ("ckpt_2", 2)
    doubtful = kinds[1:]
    assert {directory for directory, _ in doubtful} <= {"ckpt_1"}
    rows, done = salvaged(top, tmp_path, unverified=True)
    assert rows == {0: 10, 1: 1, 4: 8, 5: 5}, "the old row of 1"
    assert done.unverified == sum(count for _, count in doubtful) >= 1


def test_older_rows_are_doubtful_where_a_newer_link_has_lost_deletes(delta, top, tmp_path):
    damage(next(delta.directory.glob("sparse/00001*deletes*.arrow")))
    rows, done = salvaged(top, tmp_path)
    assert 3 not in rows
    assert rows.items() <= WHOLE.items()
    assert (done.lost[0].file, done.lost[0].rows) == ("ckpt_2/sparse/00001-of-00002.deletes.00.arrow", 0)
    assert done.lost[0].reason.startswith("deletes: ")
    rows, done = salvaged(top, tmp_path, unverified=True)
    assert rows == WHOLE | {3: 3}
    assert done.unverified >= 1


@pytest.mark.parametrize("harm", ["manifest removed", "manifest damaged", "of another save"])
def test_below_a_link_that_is_lost_all_is_doubtful(delta, top, tmp_path, harm):
    path = delta.directory / "manifest.json"
    if harm == "manifest removed":
        path.unlink()
    else:
        path.write_bytes(b"{" if harm == "manifest damaged" else path.read_bytes().replace(b'"time"', b'"tame"'))
    rows, done = salvaged(top, tmp_path)
    assert rows == {0: 10}
    assert done.lost[0].file == "ckpt_2/manifest.json"
    assert (done.lost[1].file, done.lost[1].rows) == ("ckpt_1/sparse", 5)
    rows, done = salvaged(top, tmp_path, unverified=True)
    assert rows == {0: 10, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert done.unverified == 5


def test_a_form_takes_the_place_of_a_link(delta, top, tmp_path):
    write_form(delta, {0: (0, 0), 1: (7, 7), 4: (8, 8), 5: (5, 5), 9: (9, 9)})
    (delta.directory / "manifest.json").unlink()
    assert salvaged(top, tmp_path)[0] == WHOLE


def test_what_is_older_than_a_replaced_table_is_not_looked_at(base, delta, tmp_path):
    replaced = write_delta(delta, "ckpt_3", 1, [({3: (1, 1)}, [])], replaced=True)
    (base.directory / "manifest.json").unlink()
    rows, done = salvaged(replaced, tmp_path)
    assert (rows, done.lost) == ({3: 1}, ())
