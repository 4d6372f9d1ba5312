"""Of a damaged checkpoint all that is whole comes out, as the checkpoint has it, and the rest is listed."""

import errno
import io
import json
import os
import re
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import load_file
from support.bank_runs import run, table
from support.builders import flip_bit
from support.forge import Forge, filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta
from support.sweeps import mostly_slow

from recckpt import CheckpointReader
from recckpt.convert import TARGETS, export_checkpoint, import_checkpoint
from recckpt.errors import CheckpointNotFoundError, ConversionError, CorruptCheckpointError
from recckpt.format.buckets import bucket_of
from recckpt.sparse import gen_slice
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.sparse.files.pieces import IdCheck
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import LocalSink

N_USERS, N_ITEMS = 600, 50
SLOTS = {"sparse_m": (3,)}


def storage_at(path):
    storage = open_storage(str(path))
    storage.prepare()
    return storage


@pytest.fixture
def forge(tmp_path):
    """Two tables in one part of many batches; every value of a row is its id."""
    tables = [filled("user/1", range(N_USERS), slots=SLOTS), filled("item", range(N_ITEMS), slots=SLOTS)]
    save_tables(storage_at(tmp_path / "runs"), tables, concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


@pytest.fixture
def shards(tmp_path):
    """One table in three shards, each with a third of the ids."""
    users, slices = np.arange(N_USERS), [gen_slice(number, 3) for number in range(3)]
    parts = [[filled("user/1", users[s.owns(users)], slots=SLOTS, slice=s)] for s in slices]
    save_tables(storage_at(tmp_path / "runs"), *parts, concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


def exported(path, tmp_path, to="parquet", **options):
    target = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    return export_checkpoint(path, target, to=to, skip_damaged=True, **options)


def rows(done, name="user/1"):
    """Return id -> first value of its vector."""
    found = parquet.read_table(Path(done.target) / name.replace("/", "%2F")).to_pylist()
    values = {row["id"]: row["embedding"][0] for row in found}
    assert len(values) == len(found), "an id twice"
    return values


def places(forge, name="user/1"):
    """Return (number, ids, buckets) of the batches of a table, from a part that is whole."""
    part = json.loads(forge.path(forge.manifest["shards"][0]["catalog"]).read_text())["parts"][0]
    with pa.ipc.open_file(pa.py_buffer(forge.path(forge.parts[0]).read_bytes())) as file:
        return [
            (n, set(file.get_batch(n).column("id").to_pylist()), tuple(batch["buckets"]))
            for n, batch in enumerate(part["batches"])
            if part["tables"][batch["table"]] == name
        ]


def flip(forge, number, column):
    """Flip a bit in the values of a column of a batch."""
    whole = pa.py_buffer(forge.path(forge.parts[0]).read_bytes())
    with pa.ipc.open_file(whole) as file:
        begin = column_buffer(file.get_batch(number).column(column)).address - whole.address
    flip_bit(forge.path(forge.parts[0]), begin + 5)


def as_saved(ids):
    return {n: float(n) for n in ids}


# One checkpoint


@pytest.mark.parametrize("harm", ["none", "schema and footer"])
def test_what_is_whole_comes_out_whole_and_nothing_is_listed(forge, tmp_path, harm):
    if harm != "none":
        path = forge.path(forge.parts[0])
        data = bytearray(path.read_bytes())
        data[20:60], data[-30:] = bytes(40), bytes(30)
        path.write_bytes(data)
    done = exported(forge.directory, tmp_path)
    assert (rows(done), rows(done, "item")) == (as_saved(range(N_USERS)), as_saved(range(N_ITEMS)))
    assert done.skipped == ()
    assert done.metadata["skipped"] == []


@mostly_slow()
@pytest.mark.parametrize("harm", ["id", "embedding", "sparse_m", errno.EIO, errno.EBADMSG])
def test_a_batch_that_is_damaged_or_not_to_be_read_is_skipped_and_no_other(request, forge, tmp_path, harm):
    number, ids, buckets = places(forge)[4]
    if isinstance(harm, str):
        flip(forge, number, harm)
    else:
        request.getfixturevalue("broken")[forge.parts[0]] = begin_of(forge, number, "embedding") + 9, harm
    done = exported(forge.directory, tmp_path)
    assert rows(done) == as_saved(set(range(N_USERS)) - ids)
    assert rows(done, "item") == as_saved(range(N_ITEMS))
    (skipped,) = done.skipped
    assert (skipped.file, skipped.table) == (f"ckpt_1/{forge.parts[0]}", "user/1")
    assert (skipped.batch, skipped.buckets, skipped.rows) == (number, buckets, len(ids))
    assert (f"column {harm!r}: checksum" if isinstance(harm, str) else os.strerror(harm)) in skipped.reason
    record = json.loads((Path(done.target) / "_recckpt.json").read_text())
    assert [(each["batch"], each["rows"]) for each in record["skipped"]] == [(number, len(ids))]
    assert record["tables"]["user/1"]["rows"] == N_USERS - len(ids)


def test_damage_is_an_error_without_skip_damaged_and_beside_since(forge, tmp_path):
    flip(forge, places(forge)[4][0], "id")
    with pytest.raises(CorruptCheckpointError):
        export_checkpoint(forge.directory, tmp_path / "out", to="parquet")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConversionError, match="since: found since with skip_damaged"):
        exported(forge.directory, tmp_path, since="ckpt_0")


@mostly_slow()
@pytest.mark.parametrize("to", TARGETS)
def test_every_target_takes_what_is_whole(forge, tmp_path, to):
    number, ids, _ = places(forge)[4]
    flip(forge, number, "embedding")
    done = exported(forge.directory, tmp_path, to)
    assert done.metadata["tables"]["user/1"]["rows"] == N_USERS - len(ids)
    assert [each.rows for each in done.skipped] == [len(ids)]


@pytest.mark.parametrize("share", [0.3, 0.9, 1])
def test_of_a_part_that_was_cut_the_batches_before_the_cut_come_out(forge, tmp_path, share):
    path, batches = forge.path(forge.parts[0]), places(forge)
    data = path.read_bytes()
    whole = pa.py_buffer(data)
    with pa.ipc.open_file(whole) as file:
        last = {n: column_buffer(file.get_batch(n).columns[-1]) for n, *_ in batches}
        ends = {n: values.address + values.size - whole.address for n, values in last.items()}
    path.write_bytes(data[: int(share * len(data)) - 1])
    done = exported(forge.directory, tmp_path)
    there = [ids for n, ids, _ in batches if ends[n] <= path.stat().st_size]
    assert rows(done) == as_saved(set().union(*there))
    assert sum(each.rows for each in done.skipped if each.table == "user/1") == N_USERS - len(rows(done))


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_part_of_which_little_is_left_is_skipped_as_one(forge, tmp_path, size):
    forge.path(forge.parts[0]).write_bytes(forge.path(forge.parts[0]).read_bytes()[:size])
    done = exported(forge.directory, tmp_path)
    assert rows(done) == {}
    assert [(each.table, each.batch, each.rows) for each in done.skipped] == [
        ("user/1", None, N_USERS),
        ("item", None, N_ITEMS),
    ]


@pytest.mark.parametrize("harm", ["missing", "not to be read"])
def test_a_part_that_is_missing_or_not_to_be_read_is_skipped_and_the_others_are_not(request, shards, tmp_path, harm):
    if harm == "missing":
        shards.path(shards.parts[1]).unlink()
    else:
        request.getfixturevalue("broken")[shards.parts[1]] = 8, errno.EIO
    done = exported(shards.directory, tmp_path)
    assert rows(done) == as_saved(of_others())
    (skipped,) = done.skipped
    assert (skipped.file, skipped.batch) == (f"ckpt_1/{shards.parts[1]}", None)
    assert skipped.rows == N_USERS - len(of_others())
    assert harm != "missing" or skipped.reason == "no such file"


def of_others():
    """Return the ids that are not in the second of three shards."""
    users = np.arange(N_USERS)
    return users[~gen_slice(1, 3).owns(users)].tolist()


@pytest.mark.parametrize("harm", ["flipped", "cut", "missing", "not to be read"])
def test_of_a_damaged_catalog_the_shard_is_skipped_and_no_number_is_made_up(request, shards, tmp_path, harm):
    path = shards.path(shards.manifest["shards"][1]["catalog"])
    if harm == "missing":
        path.unlink()
    elif harm == "not to be read":
        request.getfixturevalue("broken")["00001-of-00003.json"] = 0, errno.EIO
    else:
        path.write_bytes(path.read_bytes()[:-20] if harm == "cut" else path.read_bytes().replace(b"rows", b"rowt", 1))
    done = exported(shards.directory, tmp_path)
    assert rows(done) == as_saved(of_others())
    (skipped,) = done.skipped
    assert (skipped.file, skipped.batch, skipped.rows) == ("ckpt_1/sparse/00001-of-00003.json", None, None)
    place = {"flipped": "its checksum: ", "cut": "its size: "}.get(harm, "")
    assert harm == "not to be read" or re.fullmatch(
        f"{place}found .+, expected .+: its rows cannot be checked", skipped.reason
    )
    begin, end = skipped.buckets
    assert all(begin <= bucket < end for bucket in bucket_of(np.setdiff1d(np.arange(N_USERS), of_others())))


def test_a_part_of_another_checkpoint_gives_nothing(forge, tmp_path):
    tables = [filled("user/1", range(5000, 5000 + N_USERS), slots=SLOTS), filled("item", range(50), slots=SLOTS)]
    save_tables(storage_at(tmp_path / "other"), tables, concurrency=1, batch_bytes=1000)
    stale = Forge(tmp_path / "other/ckpt_1")
    forge.path(forge.parts[0]).write_bytes(stale.path(stale.parts[0]).read_bytes())
    assert rows(exported(forge.directory, tmp_path)) == {}


def test_of_an_id_in_two_shards_one_row_comes_out_and_the_other_batch_is_skipped(tmp_path):
    first, second = filled("user/1", range(100), slots=SLOTS), filled("user/1", [7, 200], slots=SLOTS)
    save_tables(storage_at(tmp_path / "runs"), [first], [second], concurrency=1, batch_bytes=100_000)
    done = exported(tmp_path / "runs/ckpt_1", tmp_path)
    assert rows(done) == as_saved(range(100))
    (skipped,) = done.skipped
    assert (skipped.rows, skipped.reason) == (2, "id 7, which is also in another batch")


def test_of_a_part_that_a_catalog_lists_twice_each_row_comes_out_once(forge, tmp_path):
    forge.edit_catalog(lambda values: values["parts"].append(values["parts"][0]))
    done = exported(forge.directory, tmp_path)
    assert (rows(done), rows(done, "item")) == (as_saved(range(N_USERS)), as_saved(range(N_ITEMS)))
    assert sum(each.rows for each in done.skipped) == N_USERS + N_ITEMS


def test_rows_that_no_catalog_lists_are_missed(forge, tmp_path):
    forge.edit_manifest(lambda values: values["tables"][0].update(rows=N_USERS + 7))
    (skipped,) = exported(forge.directory, tmp_path).skipped
    assert (skipped.file, skipped.rows) == ("ckpt_1/manifest.json", 7)


def test_without_a_manifest_nothing_says_what_there_was(forge, tmp_path):
    flip_bit(forge.path("manifest.json"))
    for path in (forge.directory, tmp_path / "runs"):
        with pytest.raises(CorruptCheckpointError):
            exported(path, tmp_path)
    forge.path("manifest.json").unlink()
    for path in (forge.directory, forge.directory.parent, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError):
            exported(path, tmp_path)


def test_of_an_output_dir_the_newest_is_meant_though_it_is_damaged(forge, tmp_path):
    newer = filled("user/1", range(300), slots=SLOTS)
    save_tables(storage_at(tmp_path / "runs"), [newer], ckpt_id="ckpt_2", step=2)
    damaged = Forge(tmp_path / "runs/ckpt_2")
    damaged.path(damaged.parts[0]).unlink()
    done = exported(tmp_path / "runs", tmp_path)
    assert (done.ckpt_id, rows(done)) == ("ckpt_2", {})
    assert export_checkpoint(tmp_path / "runs", tmp_path / "older", to="parquet").ckpt_id == "ckpt_1"


@pytest.mark.parametrize("harm", ["flipped", "not to be read"])
def test_an_output_dir_with_a_manifest_that_is_damaged_says_so(forge, tmp_path, broken, caplog, harm):
    save_tables(storage_at(tmp_path / "runs"), [filled("user/1", range(300))], ckpt_id="ckpt_2", step=2)
    broken["ckpt_2/manifest.json"] = 0, errno.EACCES
    with pytest.raises(OSError, match=os.strerror(errno.EACCES)):
        exported(tmp_path / "runs", tmp_path)
    broken["ckpt_2/manifest.json"] = 0, errno.EIO
    if harm == "flipped":
        del broken["ckpt_2/manifest.json"]
        flip_bit(tmp_path / "runs/ckpt_2/manifest.json")
    done = exported(tmp_path / "runs", tmp_path)
    assert (done.ckpt_id, rows(done)) == ("ckpt_1", as_saved(range(N_USERS)))
    (skipped,) = done.skipped
    assert (skipped.file, skipped.table, skipped.rows) == ("ckpt_2/manifest.json", "", None)
    assert "this checkpoint may be newer" in skipped.reason
    assert [each["file"] for each in done.metadata["skipped"]] == [skipped.file]
    assert "ckpt_2 is damaged and skipped" in caplog.text


def test_a_damaged_manifest_of_a_link_is_said_once(delta, tmp_path):
    top = write_delta(delta, "ckpt_3", 5, [({0: (10, 10)}, [])])
    (delta.directory / "manifest.json").write_bytes(b"{")
    done = exported(tmp_path / "runs", tmp_path)
    assert (done.ckpt_id, [each.file for each in done.skipped]) == (top.directory.name, ["ckpt_2/manifest.json"])


def test_a_checkpoint_on_an_object_store_is_read_alike(forge, memory_url, tmp_path):
    number, ids, _ = places(forge)[4]
    flip(forge, number, "id")
    storage = open_storage(memory_url)
    for name in open_storage(str(forge.directory.parent)).list_files("ckpt_1"):
        with storage.create(f"ckpt_1/{name}") as sink:
            sink.write(forge.path(name).read_bytes())
    assert rows(exported(f"{memory_url}/ckpt_1", tmp_path)) == as_saved(set(range(N_USERS)) - ids)


@pytest.mark.parametrize("link", ["a full one", "a delta"])
def test_while_a_link_is_looked_at_one_batch_is_held(forge, tmp_path, monkeypatch, link):
    at = forge.directory
    if link == "a delta":
        save_tables(storage_at(tmp_path / "others"), [filled("t", range(6))], concurrency=1)
        changed = {n: (n, n) for n in range(400)}
        shards = [(dict(list(changed.items())[begin::8]), []) for begin in range(8)]
        at = write_delta(counting(tmp_path / "others")[0], "ckpt_2", 400, shards).directory
    seen, n_held = list[weakref.ref[np.ndarray]](), list[int]()

    def watched(*args):
        piece = read(*args)
        n_held.append(sum(each() is not None for each in seen))
        seen.append(weakref.ref(piece.columns[0]))
        return piece

    read = IdCheck.piece
    monkeypatch.setattr(IdCheck, "piece", watched)
    exported(at, tmp_path)
    assert len(n_held) >= 8
    assert max(n_held) <= 1


def test_rows_are_chosen_among_those_that_are_whole_and_an_import_makes_a_checkpoint_of_them(forge, tmp_path):
    number, ids, _ = places(forge)[4]
    flip(forge, number, "id")
    even = exported(forge.directory, tmp_path, tables=["user/1"], where={"ids": [*range(0, N_USERS, 2)]})
    assert rows(even) == as_saved(n for n in range(0, N_USERS, 2) if n not in ids)
    done = exported(forge.directory, tmp_path)
    import_checkpoint(done.target, tmp_path / "new")
    assert CheckpointReader(tmp_path / "new").schema("item").names == ["id", "embedding", "sparse_m"]
    again = exported(tmp_path / "new", tmp_path)
    assert rows(again) == rows(done) == as_saved(set(range(N_USERS)) - ids)
    assert again.skipped == ()


@pytest.mark.parametrize("to", ["parquet", "npy", "safetensors", "dcp"])
def test_all_slots_come_out_unless_some_are_named(forge, tmp_path, to):
    tables = exported(forge.directory, tmp_path, to).metadata["tables"]
    assert [list(tables[name]["slots"]) for name in ("user/1", "item")] == [["embedding", "sparse_m"]] * 2
    tables = exported(forge.directory, tmp_path, to, slots=["embedding"]).metadata["tables"]
    assert list(tables["item"]["slots"]) == ["embedding"]


# What a disk has and cannot read


@pytest.fixture
def broken(monkeypatch):
    """Make the disk answer an error for bytes of files whose names end so: ending -> (first byte, errno)."""
    faults, opening, reading = dict[str, tuple[int, int]](), LocalStorage.open, LocalStorage.read

    class Broken(io.FileIO):
        def read(self, size=-1):
            (first, code), begin = self.fault, self.tell()
            data = super().read(size)
            if begin <= first < begin + len(data):
                raise OSError(code, os.strerror(code))
            return data

    def fault_of(name):
        return next((fault for ending, fault in faults.items() if name.endswith(ending)), None)

    def open_(storage, name):
        if (fault := fault_of(name)) is None:
            return opening(storage, name)
        file = Broken(Path(storage.url, name))
        file.fault = fault
        return file

    def read(storage, name, max_bytes, begin=0):
        fault = fault_of(name)
        if fault is None or not begin <= fault[0] < begin + max_bytes:
            return reading(storage, name, max_bytes, begin)
        raise OSError(fault[1], os.strerror(fault[1]), name)

    monkeypatch.setattr(LocalStorage, "open", open_)
    monkeypatch.setattr(LocalStorage, "read", read)
    monkeypatch.setattr(LocalStorage, "map", lambda storage, name: pytest.fail(f"{name} is mapped"))
    return faults


def begin_of(forge, number, column):
    whole = pa.py_buffer(forge.path(forge.parts[0]).read_bytes())
    with pa.ipc.open_file(whole) as file:
        return column_buffer(file.get_batch(number).column(column)).address - whole.address


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ETIMEDOUT, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_an_error_that_says_nothing_of_the_file_or_is_of_the_target_ends_the_export(
    forge, tmp_path, broken, monkeypatch, code
):
    flip(forge, places(forge)[4][0], "id")

    def write(sink, data):
        raise OSError(code, os.strerror(code))

    if code in (errno.ENOSPC, errno.EIO):
        monkeypatch.setattr(LocalSink, "write", write)
    else:
        broken[forge.parts[0]] = begin_of(forge, 4, "embedding"), code
    with pytest.raises(OSError, match=os.strerror(code)):
        exported(forge.directory, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"runs"}


# A delta and what it stands on


@pytest.fixture
def base(tmp_path):
    """A full checkpoint with the ids 0 to 5, each of which is its value."""
    save_tables(storage_at(tmp_path / "runs"), [filled("t", range(6))], concurrency=1)
    return counting(tmp_path / "runs")[0]


@pytest.fixture
def delta(base):
    return write_delta(base, "ckpt_2", 5, [({1: (7, 7), 9: (9, 9)}, [2, 4]), ({4: (8, 8)}, [3])])


@pytest.fixture
def top(delta):
    return write_delta(delta, "ckpt_3", 5, [({0: (10, 10)}, [])])


WHOLE = {0: 10, 1: 7, 4: 8, 5: 5, 9: 9}


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def in_buckets(ids, buckets):
    return {n for n in ids if buckets[0] <= bucket_of(np.array([n]))[0] < buckets[1]}


def test_all_of_a_chain_that_is_whole_comes_out(top, tmp_path):
    done = exported(top.directory, tmp_path)
    assert (rows(done, "t"), done.skipped) == (WHOLE, ())
    plain = export_checkpoint(top.directory, tmp_path / "plain", to="parquet")
    assert rows(plain, "t") == WHOLE


def test_of_an_id_that_its_shard_has_and_deletes_no_row_comes_out(base, tmp_path):
    delta = write_delta(base, "ckpt_2", 6, [({1: (7, 7)}, []), ({4: (8, 8)}, [4])])
    with pytest.raises(CorruptCheckpointError, match="found id 4 twice"):
        export_checkpoint(delta.directory, tmp_path / "plain", to="parquet")
    done = exported(delta.directory, tmp_path)
    assert rows(done, "t") == as_saved([0, 2, 3, 5]) | {1: 7.0}
    assert [(each.file.split("/")[0], each.rows) for each in done.skipped] == [("ckpt_2", 1)]
    assert done.skipped[0].reason == "id 4, which its shard also deletes"


def test_rows_of_a_damaged_full_link_are_missing_and_those_of_newer_links_are_not(base, top, tmp_path):
    zero(next(base.directory.glob("sparse/*.arrow")))
    done = exported(top.directory, tmp_path)
    assert rows(done, "t") == {0: 10, 1: 7, 4: 8, 9: 9}
    (skipped,) = done.skipped
    assert (skipped.file.split("/")[0], skipped.rows) == ("ckpt_1", 6)


def test_older_rows_are_left_out_where_a_newer_link_has_lost_some(delta, top, tmp_path):
    zero(next(delta.directory.glob("sparse/00000*.g0.*.arrow")))
    done = exported(top.directory, tmp_path)
    lost, *doubtful = done.skipped
    assert (lost.file.split("/")[0], lost.rows) == ("ckpt_2", 2)
    gone = {1, 9} | in_buckets({5}, lost.buckets)
    assert rows(done, "t") == {n: value for n, value in WHOLE.items() if n not in gone}
    of_base = in_buckets({1, 5}, lost.buckets)
    assert 1 in of_base
    assert [(each.file, each.rows) for each in doubtful] == [("ckpt_1", len(of_base))]
    assert "may have changed or been deleted" in doubtful[0].reason


def test_older_rows_between_the_buckets_of_two_losses_come_out(tmp_path):
    ids = np.argsort(bucket_of(np.arange(3000)))  # of which the first and the last lie far apart
    low, high, between = int(ids[0]), int(ids[-1]), set(ids[1:-1].tolist())
    save_tables(storage_at(tmp_path / "runs"), [filled("t", range(3000))], concurrency=1)
    link = counting(tmp_path / "runs")[0]
    link = write_delta(link, "ckpt_2", 3000, [({low: (7, 7), int(ids[1500]): (5, 5)}, [])])
    link = write_delta(link, "ckpt_3", 3000, [({low: (9, 9)}, []), ({high: (9, 9)}, [])])
    for part in link.directory.glob("sparse/*.arrow"):
        zero(part)
    done = exported(link.directory, tmp_path)
    assert rows(done, "t") == as_saved(between) | {int(ids[1500]): 5.0}
    assert [(each.file.split("/")[0], each.rows) for each in done.skipped] == [
        ("ckpt_3", 1),
        ("ckpt_3", 1),
        ("ckpt_2", 1),
        ("ckpt_1", 1),
    ]


def test_an_id_whose_delete_is_lost_does_not_come_back(delta, top, tmp_path):
    zero(next(delta.directory.glob("sparse/00001*deletes*.arrow")))
    done = exported(top.directory, tmp_path)
    lost, *_ = done.skipped
    assert (lost.file, lost.rows) == ("ckpt_2/sparse/00001-of-00002.deletes.00.arrow", 0)
    assert lost.reason.startswith("deletes: ")
    assert rows(done, "t") == {n: value for n, value in WHOLE.items() if n not in in_buckets({5}, lost.buckets)}


@pytest.mark.parametrize(("lacks", "n_rows"), [("rows", 2), ("deletes", 0)])
def test_nothing_older_comes_out_below_a_link_whose_catalog_lacks_what_its_manifest_counts(
    base, tmp_path, lacks, n_rows
):
    first, *inner, last = np.argsort(bucket_of(np.arange(6))).tolist()
    ends, inner = (inner[:2], [first, last]) if lacks == "rows" else ([first, last], inner[:2])
    delta = write_delta(base, "ckpt_2", 4, [(dict.fromkeys(ends, (7, 7)), inner)])
    forge = Forge(delta.directory)
    forge.edit_catalog(
        lambda values: values.update(parts=[part for part in values["parts"] if part.get("holds", "rows") != lacks])
    )
    forge.edit_manifest(lambda values: values["shards"][0].pop("ids", None))  # which would give it away
    done = exported(delta.directory, tmp_path)
    assert rows(done, "t") == ({} if lacks == "rows" else dict.fromkeys(ends, 7.0))
    lost, _ = done.skipped
    assert (lost.file, lost.rows, lost.buckets) == ("ckpt_2/manifest.json", n_rows, (0, 65536))
    assert lost.reason == f"2 {lacks}, but its catalogs list 0"


@pytest.mark.parametrize("harm", ["removed", "damaged", "of another save", "not to be read"])
def test_below_a_link_without_its_manifest_nothing_comes_out(delta, top, tmp_path, broken, harm):
    path = delta.directory / "manifest.json"
    if harm == "not to be read":
        broken["ckpt_2/manifest.json"] = 0, errno.EIO
    elif harm == "removed":
        path.unlink()
    else:
        path.write_bytes(b"{" if harm == "damaged" else path.read_bytes().replace(b'"time"', b'"tame"'))
    done = exported(top.directory, tmp_path)
    assert rows(done, "t") == {0: 10}
    (skipped,) = done.skipped
    assert (skipped.file, skipped.buckets, skipped.rows) == ("ckpt_2/manifest.json", (0, 65536), None)


@pytest.mark.parametrize("lost", ["ckpt_2/manifest.json", "ckpt_2/sparse/00000*.arrow", "ckpt_1/sparse/00000*.arrow"])
def test_a_form_that_is_whole_takes_the_place_of_a_link_that_is_not(delta, top, tmp_path, lost):
    write_compacted(delta, {0: (0, 0), 1: (7, 7), 4: (8, 8), 5: (5, 5), 9: (9, 9)})
    next((tmp_path / "runs").glob(lost)).unlink()
    done = exported(top.directory, tmp_path)
    assert (rows(done, "t"), done.skipped) == (WHOLE, ())


def test_so_it_does_below_a_checkpoint_that_has_lost_a_part_itself(delta, top, tmp_path):
    write_compacted(delta, {0: (0, 0), 1: (7, 7), 4: (8, 8), 5: (5, 5), 9: (9, 9)})
    for link in (delta, top):
        next(link.directory.glob("sparse/00000*.arrow")).unlink()
    done = exported(top.directory, tmp_path)
    lost, *doubtful = done.skipped
    assert (lost.file.split("/")[0], lost.rows) == ("ckpt_3", 1)
    assert sum(each.rows for each in doubtful) == len(in_buckets(WHOLE, lost.buckets))
    assert rows(done, "t") == {n: value for n, value in WHOLE.items() if n not in in_buckets({n}, lost.buckets)}


def test_a_delta_that_is_whole_is_preferred_to_a_damaged_form_of_it(delta, tmp_path):
    form = write_compacted(delta, {0: (0, 0), 1: (7, 7), 4: (8, 8), 5: (5, 5), 9: (9, 9)})
    next(form.directory.glob("sparse/*.arrow")).unlink()
    done = exported(tmp_path / "runs", tmp_path)
    assert (rows(done, "t"), done.skipped) == (WHOLE | {0: 0}, ())


def test_what_is_older_than_a_replaced_table_is_not_looked_at(base, delta, tmp_path):
    replaced = write_delta(delta, "ckpt_3", 1, [({3: (1, 1)}, [])], replaced=True)
    (base.directory / "manifest.json").unlink()
    done = exported(replaced.directory, tmp_path)
    assert (rows(done, "t"), done.skipped) == ({3: 1}, ())


# What is no row


@pytest.fixture
def saved(tmp_path):
    """A run with dense tensors, and what they are."""
    saver = run(tmp_path / "runs", table("t", [1, 2]), value=3.0, top=torch.nn.Linear(2, 3))
    saver.save("a")
    done = export_checkpoint(tmp_path / "runs/a", tmp_path / "before.safetensors", to="safetensors")
    dense = {name: values for name, values in load_file(done.target).items() if not name.startswith("t.")}
    assert len(dense) >= 2
    return Forge(tmp_path / "runs/a"), dense


def tensor_at(forge, name):
    (index,) = forge.directory.glob("dense/*.json")
    return next(tensor for tensor in json.loads(index.read_text())["chunks"] if tensor["name"] == name)


@pytest.mark.parametrize("harm", ["flipped", "not to be read"])
def test_a_tensor_with_a_damaged_block_is_left_out_and_named(request, saved, tmp_path, harm):
    forge, dense = saved
    name = next(iter(dense))
    chunk = tensor_at(forge, name)
    if harm == "flipped":
        flip_bit(forge.path(chunk["file"]), chunk["at"])
    else:
        request.getfixturevalue("broken")[chunk["file"]] = chunk["at"], errno.EIO
    done = exported(forge.directory, tmp_path, "safetensors")
    found = load_file(done.target)
    others = {other: values for other, values in found.items() if not other.startswith("t.")}
    assert others.keys() == dense.keys() - {name}
    assert all((others[other] == dense[other]).all() for other in others)
    assert sorted(found["t.id"].tolist()) == [1, 2]
    (skipped,) = done.skipped
    assert (skipped.tensor, skipped.table, skipped.rows) == (name, "", None)
    assert name not in {left.name for left in done.left_out}


@pytest.mark.parametrize("harm", ["flipped", "not to be read"])
def test_a_damaged_index_leaves_all_tensors_out_and_a_file_of_states_itself(saved, tmp_path, broken, harm):
    forge, dense = saved
    (index,) = forge.directory.glob("dense/*.json")
    for path in (forge.path("extra.pt"), index):
        if harm == "flipped":
            flip_bit(path)
        else:
            broken[str(path.relative_to(forge.directory))] = 0, errno.EIO
        if path != index:
            done = exported(forge.directory, tmp_path, "recis")
            assert [each.file for each in done.skipped] == ["a/extra.pt"]
            assert torch.load(next(Path(done.target).glob("*/model.pt"))).keys() >= set(dense)
    done = exported(forge.directory, tmp_path, "safetensors")
    assert not dense.keys() & load_file(done.target).keys()
    (skipped,) = done.skipped
    assert skipped.file == (f"a/dense/{index.name}" if harm == "flipped" else "a/dense")
    assert index.name in skipped.file + skipped.reason
    assert "all dense tensors are left out" in skipped.reason
