"""What a manifest says of other checkpoints, and of its tables where it is a delta."""

import json
from dataclasses import replace

import pytest
from support.forge import sealed

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Link, Manifest, Parent, ShardEntry, Supersedes, decode, encode
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

BASE = Parent("ckpt_0", "cd" * 16, "ckpt_0", 2**64 - 2)
OLDEST = Link("first", "ef" * 16, "first.3.1")
SAME = Supersedes("cd" * 16, 17, "ckpt_1", 1, 9, "same", "compacted")
FEWER = SAME.but(rows="fewer", why="forgotten", request="ef" * 16, n_rows=3)


PATH = "ckpt_1/manifest.json"
SLOTS = (SlotSpec("embedding", "float32", (2, 3)),)
CHANGED = DeltaRows(2, 1, False)


def example():
    return Manifest(
        ckpt_id="ckpt_1",
        save_id="ab" * 16,
        seq=7,
        epoch=2,
        time="2026-11-20T12:00:00Z",
        shards=(ShardEntry(layout.catalog(0, 1), (0, 30_000)),),
        tables=(TableEntry("item", 3, SLOTS), TableEntry("user", 0, SLOTS)),
        files=(FileEntry(layout.catalog(0, 1), 3, 0),),
    )


def delta(rows=CHANGED):
    first, second = example().tables
    tables = (first.but(delta=rows), second.but(delta=DeltaRows(0, 0, True)))
    return replace(
        example(), tables=tables, parent=BASE, chain=(Link(BASE.ckpt_id, BASE.save_id, BASE.directory), OLDEST)
    )


def compacted():
    return replace(example(), supersedes=SAME)


def edited(record, **changes):
    values = json.loads(encode(record))
    del values["manifest_xxh3"]
    return sealed(json.dumps({**values, **changes}).encode())


@pytest.mark.parametrize(
    "record", [delta(), delta(DeltaRows(3, 0, True)), compacted(), replace(delta(), supersedes=FEWER)]
)
def test_deltas_and_what_supersedes_come_back_as_they_were(record):
    assert decode(encode(record), PATH) == record


def test_what_has_the_same_rows_stands_where_the_delta_does_and_is_named_as_it():
    found = decode(encode(compacted()), PATH)
    assert (found.kind, found.place, found.name, found.name_xxh3) == ("full", (1, 9), SAME.save_id, 17)
    assert found.is_compacted


@pytest.mark.parametrize("record", [example(), delta()])
def test_what_has_fewer_rows_stands_there_too_and_has_a_name_of_its_own(record):
    found = decode(encode(replace(record, supersedes=FEWER)), PATH)
    assert (found.kind, found.place, found.is_compacted) == (record.kind, (1, 9), False)
    assert (found.name, found.name_xxh3) == ("ab" * 16, found.xxh3)


def test_rows_that_are_neither_the_same_nor_fewer_and_relations_of_before_are_refused_as_of_other_versions():
    with pytest.raises(FormatVersionError, match="'more'"):
        decode(encode(replace(example(), supersedes=FEWER.but(rows="more"))), PATH)
    for field in ("form_of", "revision_of"):
        with pytest.raises(FormatVersionError, match="unreleased"):
            decode(edited(example(), **{field: {"save_id": "cd" * 16}}), PATH)


def test_a_checkpoint_is_named_by_its_own_save_id_and_the_checksum_of_its_manifest():
    data = encode(delta())
    found = decode(data, PATH)
    assert (found.kind, found.place, found.name) == ("delta", (2, 7), "ab" * 16)
    assert data.endswith(b'"manifest_xxh3": "%016x"\n}\n' % found.name_xxh3)


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        (delta(), "parent", None),
        (delta(), "parent", {}),
        (delta(), "parent", {"ckpt_id": "ckpt_0", "save_id": "cd" * 16, "directory": "ckpt_0", "manifest": "12"}),
        (delta(), "parent", {"ckpt_id": "", "save_id": "cd" * 16, "directory": "ckpt_0", "manifest": "1" * 16}),
        (
            *(delta(), "parent"),
            {"ckpt_id": "ckpt_0", "save_id": "cd" * 16, "directory": "../ckpt_0", "manifest": "1" * 16},
        ),
        (delta(), "parent", {"ckpt_id": "other", "save_id": "cd" * 16, "directory": "ckpt_0", "manifest": "1" * 16}),
        (delta(), "chain", None),
        (delta(), "chain", []),
        (delta(), "chain", [{"ckpt_id": "first", "save_id": "ef" * 16, "directory": "first"}]),
        (delta(), "chain", [{"ckpt_id": "ckpt_0", "save_id": "cd" * 16, "directory": "ckpt_0"}] * 1000),
        (delta(), "supersedes", json.loads(encode(compacted()))["supersedes"]),
        (delta(), "kind", "full"),
        *((compacted(), "supersedes", value) for value in ({}, {"save_id": "a"}, 3)),
        (compacted(), "kind", "delta"),
        (compacted(), "chain", [{}]),
    ],
)
def test_a_delta_or_compacted_one_that_contradicts_itself_is_corrupt(record, key, value):
    with pytest.raises(CorruptCheckpointError, match=r"parent|chain|supersedes|file name"):
        decode(edited(record, **{key: value}), PATH)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        {"upserts": 4, "deletes": 0, "replaced": False},
        {"upserts": 2, "deletes": 0, "replaced": True},
        {"upserts": 3, "deletes": 1, "replaced": True},
        {"upserts": -1, "deletes": 0, "replaced": False},
        {"upserts": 1, "deletes": 0, "replaced": 0},
    ],
)
def test_counts_that_cannot_be_are_corrupt(rows):
    [first, second] = json.loads(encode(delta()))["tables"]
    with pytest.raises(CorruptCheckpointError, match=r"tables\[0\].*delta|upserts|deletes|replaced"):
        decode(edited(delta(), tables=[{**first, "delta": rows}, second]), PATH)


def test_a_full_checkpoint_has_no_rows_of_a_delta():
    [first, second] = json.loads(encode(delta()))["tables"]
    with pytest.raises(CorruptCheckpointError, match=r"tables\[0\].*delta"):
        decode(edited(example(), tables=[first, second]), PATH)
