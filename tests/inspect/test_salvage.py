"""What is whole of a damaged table comes back bit for bit, and all that is lost is said."""

import errno
import json
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.builders import flip_bit, table_state, tree
from support.forge import Forge, empty, filled, load, save_tables
from support.paths import ROOT

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format.buckets import bucket_of
from recckpt.inspect.salvage import salvage
from recckpt.sparse import gen_slice
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage

SLOTS = {"sparse_m": (3,), "sparse_step": ()}
N_USERS, N_ITEMS = 600, 50
PAGE = ROOT / "docs/does-not-resume.md"


def storage_at(path):
    storage = open_storage(str(path))
    storage.prepare()
    return storage


def tables():
    return [filled("user/1", range(N_USERS), slots=SLOTS), filled("item", range(N_ITEMS), slots=SLOTS)]


@pytest.fixture
def forge(tmp_path):
    """A checkpoint of two tables in one part of many batches."""
    save_tables(storage_at(tmp_path / "runs"), tables(), concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


@pytest.fixture
def shards(tmp_path):
    """A checkpoint of three shards, each with a third of the ids."""
    slices = [gen_slice(number, 3) for number in range(3)]
    users = np.arange(N_USERS)
    storage = storage_at(tmp_path / "runs")
    parts = [[filled("user/1", users[s.owns(users)], slots=SLOTS, slice=s)] for s in slices]
    save_tables(storage, *parts, concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


def rows(path):
    """Return the rows of an Arrow file, id -> values; every value of a row is its id."""
    with pa.ipc.open_file(str(path)) as file:
        assert file.schema.names == ["id", "embedding", *SLOTS]
        found = {}
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            batch.validate(full=True)
            columns = [np.frombuffer(column_buffer(c), np.float32).reshape(len(batch), -1) for c in batch.columns[1:]]
            values = np.concatenate(columns, 1)
            for row, i in enumerate(batch.column("id").to_pylist()):
                assert i not in found
                assert (values[row] == np.float32(i)).all()
                found[i] = values[row]
        return found


def batches_of(forge, table="user/1"):
    """Return (number, rows, buckets) of the batches of a table, from the catalog."""
    part = json.loads(forge.path(forge.manifest["shards"][0]["catalog"]).read_text())["parts"][0]
    at = part["tables"].index(table)
    return [(n, b["rows"], b["buckets"]) for n, b in enumerate(part["batches"]) if b["table"] == at]


def offset_in(forge, number, column):
    """Return where in the part the values of a column of a batch begin."""
    whole = pa.py_buffer(forge.path(forge.parts[0]).read_bytes())
    with pa.ipc.open_file(whole) as file:
        return column_buffer(file.get_batch(number).column(column)).address - whole.address


def check(done, out):
    """Check that what was written and what is said to be lost make up the whole."""
    found = rows(out)
    assert done.rows == len(found)
    assert done.expected == N_USERS
    known = [lost.rows for lost in done.lost]
    if None not in known:
        assert sum(known) == N_USERS - len(found)
    gone = np.array(sorted(set(range(N_USERS)) - set(found)), np.int64)
    for bucket in bucket_of(gone):
        assert any(begin <= bucket < end for begin, end in (lost.buckets for lost in done.lost))
    return found


def test_all_of_a_table_that_is_whole_comes_out(forge, tmp_path):
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    assert (done.rows, done.expected, done.unverified, done.lost) == (N_USERS, N_USERS, 0, ())
    assert len(check(done, tmp_path / "out.arrow")) == N_USERS


def test_a_checkpoint_on_an_object_store_is_salvaged_to_one(memory_url, tmp_path):
    storage = open_storage(memory_url)
    save_tables(storage, tables())
    done = salvage(f"{memory_url}/ckpt_1", "user/1", f"{memory_url}/saved/user.arrow")
    assert done.rows == N_USERS
    (tmp_path / "out.arrow").write_bytes(storage.read("saved/user.arrow", 1 << 20))
    assert len(check(done, tmp_path / "out.arrow")) == N_USERS


@pytest.mark.parametrize("column", ["id", "embedding", "sparse_m", "sparse_step"])
def test_a_batch_with_a_flipped_bit_is_lost_and_no_other(forge, tmp_path, column):
    number, n_rows, buckets = batches_of(forge)[4]
    flip_bit(forge.path(forge.parts[0]), offset_in(forge, number, column) + 5)
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    (lost,) = done.lost
    assert (lost.file, lost.rows, list(lost.buckets)) == (f"ckpt_1/{forge.parts[0]}", n_rows, buckets)
    assert f"column {column!r}" in lost.reason
    assert len(check(done, tmp_path / "out.arrow")) == N_USERS - n_rows


def test_damaged_neighbours_are_one_range_and_others_their_own(forge, tmp_path):
    batches = batches_of(forge)
    for at in (2, 3, 4, 9):
        flip_bit(forge.path(forge.parts[0]), offset_in(forge, batches[at][0], "id"))
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    assert [list(lost.buckets) for lost in done.lost] == [[batches[2][2][0], batches[4][2][1]], batches[9][2]]
    assert [lost.rows for lost in done.lost] == [sum(b[1] for b in batches[2:5]), batches[9][1]]
    check(done, tmp_path / "out.arrow")


def test_damage_to_another_table_of_the_part_loses_nothing(forge, tmp_path):
    number, *_ = batches_of(forge, "item")[0]
    flip_bit(forge.path(forge.parts[0]), offset_in(forge, number, "id"))
    flip_bit(forge.path(forge.parts[0]), offset_in(forge, batches_of(forge)[0][0], "table"))  # a load needs it not
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    assert (done.rows, done.lost) == (N_USERS, ())


@pytest.mark.parametrize("keep", [0, 7, 8, 500, 0.25, 0.5, 0.9, -1])
def test_a_part_that_was_cut_gives_the_batches_before_the_cut(forge, tmp_path, keep):
    path = forge.path(forge.parts[0])
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    found = check(done, tmp_path / "out.arrow")
    whole = sum(n for number, n, _ in batches_of(forge) if batch_end(data, number) <= path.stat().st_size)
    assert len(found) == whole
    assert len(done.lost) == (whole < N_USERS)


def batch_end(data, number):
    whole = pa.py_buffer(data)
    with pa.ipc.open_file(whole) as file:
        values = column_buffer(file.get_batch(number).columns[-1])
    return values.address - whole.address + -(-values.size // 8) * 8  # each column is padded to 8 bytes


@pytest.mark.parametrize("page", [0, 512, 1024])
def test_zeros_over_schema_and_dictionary_cost_the_batches_there_only(forge, tmp_path, page):
    path = forge.path(forge.parts[0])
    data = path.read_bytes()
    path.write_bytes(data[:page] + bytes(512) + data[page + 512 :])
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    assert N_USERS - len(check(done, tmp_path / "out.arrow")) <= 2 * max(n for _, n, _ in batches_of(forge))


def test_every_zeroed_page_costs_a_few_batches_at_most(forge, tmp_path):
    path = forge.path(forge.parts[0])
    data = path.read_bytes()
    for number, page in enumerate(range(0, len(data), 700)):
        path.write_bytes(data[:page] + bytes(len(data[page : page + 256])) + data[page + 256 :])
        done = salvage(str(forge.directory), "user/1", str(tmp_path / f"{number}.arrow"))
        assert N_USERS - len(check(done, tmp_path / f"{number}.arrow")) <= 2 * max(n for _, n, _ in batches_of(forge))


def test_of_an_id_in_two_shards_one_row_comes_out_and_the_other_is_reported(tmp_path):
    first, second = filled("user/1", range(100), slots=SLOTS), filled("user/1", [7, 200, 77], slots=SLOTS)
    save_tables(storage_at(tmp_path / "runs"), [first], [second], concurrency=1, batch_bytes=1000)
    done = salvage(str(tmp_path / "runs/ckpt_1"), "user/1", str(tmp_path / "out.arrow"))
    assert sorted(rows(tmp_path / "out.arrow")) == [*range(100), 200]
    assert (done.rows, done.expected, sum(lost.rows for lost in done.lost)) == (101, 103, 2)
    for lost in done.lost:
        assert "another shard" in lost.reason
        assert lost.file.startswith("ckpt_1/sparse/00001-of-00002")


def test_shards_that_share_buckets_and_no_ids_lose_nothing(tmp_path):
    even, odd = (filled("user/1", range(n, 300, 2), slots=SLOTS) for n in (0, 1))
    save_tables(storage_at(tmp_path / "runs"), [even], [odd], concurrency=1, batch_bytes=1000)
    done = salvage(str(tmp_path / "runs/ckpt_1"), "user/1", str(tmp_path / "out.arrow"))
    assert (done.rows, done.lost) == (300, ())
    assert len(rows(tmp_path / "out.arrow")) == 300


def test_a_batch_with_ids_of_other_buckets_than_its_catalog_says_is_lost(forge, tmp_path):
    number, n_rows, _ = batches_of(forge)[3]
    forge.edit_catalog(lambda values: values["parts"][0]["batches"][number].update(buckets=[0, 1]))
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    (lost,) = done.lost
    assert (lost.rows, lost.reason) == (n_rows, "ids of other buckets than its catalog says")


def test_a_part_that_is_missing_is_lost_as_a_whole(shards, tmp_path):
    shards.path(shards.parts[1]).unlink()
    done = salvage(str(shards.directory), "user/1", str(tmp_path / "out.arrow"))
    (lost,) = done.lost
    assert (lost.file, lost.reason) == (f"ckpt_1/{shards.parts[1]}", "no such file")
    found = check(done, tmp_path / "out.arrow")
    assert set(range(N_USERS)) - set(found) == {i for i in range(N_USERS) if gen_slice(1, 3).owns(np.array([i]))[0]}


def test_a_part_of_another_checkpoint_under_the_same_name_gives_nothing(forge, tmp_path):
    other = filled("user/1", range(5000, 5000 + N_USERS), slots=SLOTS)
    save_tables(storage_at(tmp_path / "other"), [other], concurrency=1, batch_bytes=1000)
    stale = Forge(tmp_path / "other/ckpt_1")
    forge.path(forge.parts[0]).write_bytes(stale.path(stale.parts[0]).read_bytes())
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    assert done.rows == 0
    assert check(done, tmp_path / "out.arrow") == {}


def test_a_link_out_of_the_checkpoint_is_not_followed(forge, tmp_path):
    path = forge.path(forge.parts[0])
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow")).rows == 0


# Catalogs


def test_a_catalog_with_a_changed_checksum_costs_the_batch_it_is_of(shards, tmp_path):
    path = shards.path(shards.manifest["shards"][2]["catalog"])
    text = path.read_text()
    at = [found.start(1) for found in re.finditer(r'"embedding": "([0-9a-f])', text)][3]
    path.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    done = salvage(str(shards.directory), "user/1", str(tmp_path / "out.arrow"))
    (lost,) = done.lost
    assert 0 < lost.rows < 50
    assert len(check(done, tmp_path / "out.arrow")) == N_USERS - lost.rows


def test_a_catalog_that_gives_rows_to_another_table_is_not_believed(forge, tmp_path):
    path = forge.path(forge.manifest["shards"][0]["catalog"])
    whole = path.read_text()
    for wrong in (whole.replace('["user/1", "item"]', '["item", "user/1"]'), whole.replace('"table": 1', '"table": 0')):
        assert wrong != whole
        path.write_text(wrong)
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.arrow"
        done = salvage(str(forge.directory), "user/1", str(out))
        assert done.rows in (0, N_USERS)
        check(done, out)


@pytest.mark.parametrize("harm", ["missing", "cut", "empty", "another version"])
def test_rows_under_a_catalog_that_cannot_be_read_are_lost_unless_unverified_ones_are_asked_for(shards, tmp_path, harm):
    path = shards.path(shards.manifest["shards"][1]["catalog"])
    text = path.read_text()
    changed = {"cut": text[:-20], "empty": "", "another version": text.replace('"version": 1', '"version": 9')}
    path.write_text(changed.get(harm, ""))
    if harm == "missing":
        path.unlink()
    owned = gen_slice(1, 3).owns(np.arange(N_USERS)).sum()
    done = salvage(str(shards.directory), "user/1", str(tmp_path / "verified.arrow"))
    (lost,) = done.lost
    assert (lost.file, lost.rows) == ("ckpt_1/sparse/00001-of-00003.json", owned)
    assert len(check(done, tmp_path / "verified.arrow")) == N_USERS - owned

    done = salvage(str(shards.directory), "user/1", str(tmp_path / "all.arrow"), unverified=True)
    assert (done.rows, done.unverified, done.lost) == (N_USERS, owned, ())
    check(done, tmp_path / "all.arrow")


def test_unverified_rows_whose_ids_cannot_be_right_are_left_out(forge, tmp_path):
    number, n_rows, _ = batches_of(forge)[3]
    flip_bit(forge.path(forge.parts[0]), offset_in(forge, number, "id") + 8 * (n_rows // 2))
    forge.path(forge.manifest["shards"][0]["catalog"]).unlink()
    done = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"), unverified=True)
    assert (done.rows, done.unverified) == (N_USERS - n_rows, N_USERS - n_rows)
    assert [lost.rows for lost in done.lost] == [n_rows]
    check(done, tmp_path / "out.arrow")


def test_of_two_catalogs_that_are_gone_nobody_knows_which_had_how_many(shards, tmp_path):
    for number in (0, 2):
        shards.path(shards.manifest["shards"][number]["catalog"]).unlink()
    done = salvage(str(shards.directory), "user/1", str(tmp_path / "out.arrow"))
    assert [lost.rows for lost in done.lost] == [None, None]
    check(done, tmp_path / "out.arrow")


def test_rows_that_no_catalog_lists_are_lost(forge, tmp_path):
    forge.edit_manifest(lambda values: values["tables"][0].update(rows=N_USERS + 7))
    (lost,) = salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow")).lost
    assert (lost.file, lost.rows, lost.buckets) == ("ckpt_1/manifest.json", 7, (0, 65536))


def test_without_a_manifest_nothing_is_taken(forge, tmp_path):
    flip_bit(forge.path("manifest.json"))
    with pytest.raises(CorruptCheckpointError):
        salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    forge.path("manifest.json").unlink()
    for path in (forge.directory, forge.directory.parent, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError):
            salvage(str(path), "user/1", str(tmp_path / "out.arrow"))
    assert not (tmp_path / "out.arrow").exists()


# The file that is written


def test_a_table_that_is_not_there_is_named(forge, tmp_path):
    with pytest.raises(KeyError, match=r"user/2.*user/1"):
        salvage(str(forge.directory), "user/2", str(tmp_path / "out.arrow"))
    assert not (tmp_path / "out.arrow").exists()


def test_an_existing_file_is_never_overwritten(forge, tmp_path):
    (tmp_path / "out.arrow").write_bytes(b"mine")
    (tmp_path / "link.arrow").symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path)
    for out in ("out.arrow", "link.arrow", "runs"):
        with pytest.raises(FileExistsError, match=rf"it exists, expected a new file: remove it.*{out}"):
            salvage(str(forge.directory), "user/1", str(tmp_path / out))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_could_not_be_completed_is_removed(forge, tmp_path, monkeypatch, error):
    before, real, calls = tree(tmp_path), LocalStorage.create, []

    def full(storage, name):
        sink = real(storage, name)
        write = sink.write

        def failing(data):
            calls.append(1)
            if len(calls) == 40:
                raise error
            return write(data)

        sink.write = failing
        return sink

    monkeypatch.setattr(LocalStorage, "create", full)
    with pytest.raises(type(error)):
        salvage(str(forge.directory), "user/1", str(tmp_path / "out.arrow"))
    assert len(calls) == 40
    assert tree(tmp_path) == before


def test_an_empty_table_gives_an_empty_file(tmp_path):
    save_tables(storage_at(tmp_path / "runs"), [empty("user/1", slots=SLOTS)])
    done = salvage(str(tmp_path / "runs/ckpt_1"), "user/1", str(tmp_path / "out.arrow"))
    assert (done.rows, done.expected, done.lost) == (0, 0, ())
    assert rows(tmp_path / "out.arrow") == {}


# Back into a table


def fill_of_the_page():
    """Return the function that the page gives for loading a salvaged file."""
    (code,) = re.findall(r"```python\n(import pyarrow as pa\n.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    return names["fill"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_was_salvaged_goes_back_into_a_table_as_the_page_says(tmp_path, dtype):
    table = filled("t", range(-300, 300), dtype=dtype, slots=SLOTS, shape=(2, 3))
    save_tables(storage_at(tmp_path / "runs"), [table], concurrency=1, batch_bytes=2000)
    salvage(str(tmp_path / "runs/ckpt_1"), "t", str(tmp_path / "t.arrow"))
    again = empty("t", dtype=dtype, slots=SLOTS, shape=(2, 3))
    fill_of_the_page()(again, tmp_path / "t.arrow")
    assert table_state(again) == table_state(table)


def test_rows_that_are_lost_keep_what_an_older_checkpoint_had(tmp_path):
    storage = storage_at(tmp_path / "runs")
    older, newer = filled("t", range(400)), empty("t")
    newer.insert(torch.arange(400), torch.full((400, 2), -1.0))
    save_tables(storage, [older], ckpt_id="old")
    save_tables(storage, [newer], ckpt_id="new", concurrency=1, batch_bytes=1000)
    forge = Forge(tmp_path / "runs/new")
    flip_bit(forge.path(forge.parts[0]), offset_in(forge, 1, "embedding"))
    done = salvage(str(forge.directory), "t", str(tmp_path / "t.arrow"))
    live = empty("t")
    assert load(storage, [live], ckpt_id="old") == 400
    fill_of_the_page()(live, tmp_path / "t.arrow")
    values = live(torch.arange(400))[:, 0]
    assert int((values == -1.0).sum()) == done.rows < 400
    lost = torch.nonzero(values != -1.0).flatten()
    assert torch.equal(values[lost], lost.float())
