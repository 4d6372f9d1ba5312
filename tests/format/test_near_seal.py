"""What the seal of a near save says, and what is refused in its place."""

import json
from dataclasses import replace

import pytest

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout, near_seal
from recckpt.format.codec import seal
from recckpt.format.manifest import FileEntry, Link, Manifest, Parent, ShardEntry
from recckpt.format.near_seal import NearSeal, decode, encode
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

NAME = near_seal.near_name(3, "ab" * 16, 12)
PATH = f"{near_seal.near_dir(NAME)}/near.json"


def example() -> NearSeal:
    catalog = layout.catalog(0, 1)
    record = Manifest(
        ckpt_id="near_240",
        save_id=NAME,
        epoch=3,
        seq=5,
        cut=12,
        step=240,
        time="2026-01-01T00:00:00Z",
        shards=(ShardEntry(catalog, (0, 30_000)),),
        tables=(TableEntry("item", 3, (SlotSpec("embedding", "float32", (2,)),), DeltaRows(1, 0, False)),),
        files=(FileEntry(catalog, 3, 0),),
        parent=Parent("ckpt_200", "cd" * 16, "ckpt_200", 7),
        chain=(Link("ckpt_200", "cd" * 16, "ckpt_200"),),
    )
    return NearSeal(record, "0123456789abcdef", ("ef" * 16,))


def edited(**changes):
    values = json.loads(encode(example()))
    del values["near_xxh3"]
    return seal({**values, **changes}, "near_xxh3")


def test_what_was_encoded_is_decoded():
    assert decode(encode(example()), PATH) == example()
    copied = replace(example(), copies={"ef" * 16: ("ef" * 16,)})
    assert decode(encode(copied), PATH) == copied


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"format": "recckpt"}, "format"),
        ({"epoch": 4}, "save_id"),
        ({"cut": 13}, "save_id"),
        ({"cut": None}, "save_id"),
        ({"save_id": "ab" * 16}, "save_id"),
        ({"kind": "full", "parent": None, "chain": None, "tables": []}, "kind"),
        ({"world": {"hosts": []}}, "world.hosts"),
        ({"world": {"hosts": [1]}}, "world.hosts"),
        ({"world": {"hosts": ["ef" * 16], "copies": []}}, "world.copies"),
        ({"world": {"hosts": ["ef" * 16], "copies": {"ef" * 16: [1]}}}, "world.copies"),
        ({"world": {"hosts": ["ef" * 16], "copies": {"ef" * 16: ["12" * 16]}}}, "world.copies"),
        ({"world": {"hosts": ["ef" * 16], "copies": {"12" * 16: []}}}, "world.copies"),
        ({"place": 7}, "place"),
    ],
)
def test_what_contradicts_itself_is_damage(changes, where):
    with pytest.raises(CorruptCheckpointError) as caught:
        decode(edited(**changes), PATH)
    assert where in str(caught.value)
    assert PATH in str(caught.value)


def test_a_changed_byte_and_a_newer_version_are_told_apart():
    data = encode(example())
    with pytest.raises(CorruptCheckpointError, match="near_xxh3"):
        decode(data.replace(b"near_240", b"near_241"), PATH)
    with pytest.raises(CorruptCheckpointError):
        decode(data[:-1], PATH)
    with pytest.raises(FormatVersionError):
        decode(edited(version=2), PATH)


def test_names_of_near_saves_are_parsed_as_they_are_made():
    assert near_seal.parse_near(NAME) == near_seal.parse_near(near_seal.near_dir(NAME)) == (3, "ab" * 16, 12)
    for other in ("", "3.ab.12", f"0{NAME}", f"{NAME}.1", "ckpt_1"):
        assert near_seal.parse_near(other) is None
