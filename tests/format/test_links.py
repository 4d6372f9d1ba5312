"""What a manifest says of other checkpoints, and of its tables where it is a delta."""

import json
from dataclasses import replace

import pytest
from support.forge import sealed

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry, FormOf, Link, Manifest, Parent, ShardEntry, decode, encode
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

BASE = Parent("ckpt_0", "cd" * 16, "ckpt_0", 2**64 - 2)
OLDEST = Link("first", "ef" * 16, "first.3.1")
FORM = FormOf("cd" * 16, 17, 1, 9, "12" * 16)


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


def form():
    return replace(example(), form_of=FORM)


def edited(record, **changes):
    values = json.loads(encode(record))
    del values["manifest_xxh3"]
    return sealed(json.dumps({**values, **changes}).encode())


@pytest.mark.parametrize("record", [delta(), delta(DeltaRows(3, 0, True)), form()])
def test_deltas_and_forms_come_back_as_they_were(record):
    assert decode(encode(record), PATH) == record


def test_a_form_stands_where_its_delta_does_and_is_named_as_it():
    found = decode(encode(form()), PATH)
    assert (found.kind, found.place, found.origin, found.origin_xxh3) == ("full", (1, 9), FORM.save_id, 17)
    assert found.files_id == FORM.offer


def test_a_checkpoint_is_named_by_its_own_save_id_and_the_checksum_of_its_manifest():
    data = encode(delta())
    found = decode(data, PATH)
    assert (found.kind, found.place, found.origin, found.files_id) == ("delta", (2, 7), "ab" * 16, "ab" * 16)
    assert data.endswith(b'"manifest_xxh3": "%016x"\n}\n' % found.origin_xxh3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parent", None),
        ("parent", {}),
        ("parent", {"ckpt_id": "ckpt_0", "save_id": "cd" * 16, "directory": "ckpt_0", "manifest": "12"}),
        ("parent", {"ckpt_id": "", "save_id": "cd" * 16, "directory": "ckpt_0", "manifest": "1" * 16}),
        ("parent", {"ckpt_id": "ckpt_0", "save_id": "cd" * 16, "directory": "../ckpt_0", "manifest": "1" * 16}),
        ("parent", {"ckpt_id": "other", "save_id": "cd" * 16, "directory": "ckpt_0", "manifest": "1" * 16}),
        ("chain", None),
        ("chain", []),
        ("chain", [{"ckpt_id": "first", "save_id": "ef" * 16, "directory": "first"}]),
        ("chain", [{"ckpt_id": "ckpt_0", "save_id": "cd" * 16, "directory": "ckpt_0"}] * 1000),
        ("form_of", {"save_id": "cd" * 16, "manifest": "1" * 16, "epoch": 1, "seq": 1, "offer": "12" * 16}),
        ("kind", "full"),
    ],
)
def test_a_delta_that_contradicts_itself_is_corrupt(key, value):
    with pytest.raises(CorruptCheckpointError, match=r"parent|chain|form_of|file name"):
        decode(edited(delta(), **{key: value}), PATH)


@pytest.mark.parametrize(
    ("key", "value"),
    [("form_of", {}), ("form_of", {"save_id": "a"}), ("form_of", 3), ("kind", "delta"), ("chain", [{}])],
)
def test_a_form_that_contradicts_itself_is_corrupt(key, value):
    with pytest.raises(CorruptCheckpointError, match=r"parent|chain|form_of"):
        decode(edited(form(), **{key: value}), PATH)


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
