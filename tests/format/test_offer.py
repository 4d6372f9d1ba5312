"""What a compactor says of the checkpoint that it offers."""

import json
from dataclasses import replace

import pytest

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.codec import seal
from recckpt.format.manifest import FileEntry, Names, ShardEntry
from recckpt.format.offer import Offer, Offered, decode, decode_first, encode, encode_first
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

PATH = "ckpt_1.abc/offer.json"
SAVE_ID = "ab" * 16


def example() -> Offer:
    return Offer(
        save_id=SAVE_ID,
        of=Offered("ckpt/1", "cd" * 16, 2**64 - 2),
        step=7,
        shards=(ShardEntry(layout.catalog(0, 1), (0, 30_000)),),
        tables=(TableEntry("item", 3, (SlotSpec("embedding", "float32", (2, 3)),)),),
        files=(FileEntry(layout.catalog(0, 1), 3, 0), FileEntry("model.pt", 9, 2**64 - 1)),
        names=Names(("top",), (), ("clicks",)),
        state={"auc": 0.5},
        writer={"recckpt": "1"},
        ephemeral=True,
    )


def edited(**changes):
    values = json.loads(encode(example()))
    del values["offer_xxh3"]
    return seal({**values, **changes}, "offer_xxh3")


def test_an_offer_comes_back_as_it_was():
    assert decode(encode(example()), PATH) == example()
    assert decode(edited(), PATH) == example()
    assert example().directory == f"ckpt%2F1.{SAVE_ID}"


def test_an_offer_of_a_checkpoint_without_a_step_comes_back():
    offer = replace(example(), step=None)
    assert decode(encode(offer), PATH) == offer


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "recckpt"),
        ("save_id", None),
        ("of", None),
        ("of", {"ckpt_id": "", "save_id": "cd" * 16, "manifest": "0" * 16}),
        ("of", {"ckpt_id": "c", "save_id": 3, "manifest": "0" * 16}),
        ("of", {"ckpt_id": "c", "save_id": "cd" * 16, "manifest": "12"}),
        ("step", -1),
        ("shards", []),
        ("shards", [{"catalog": "sparse/00001-of-00001.json", "buckets": [0, 1]}]),
        ("files", None),
        ("tables", [{"name": "item", "rows": -1, "slots": []}]),
        ("names", {}),
        ("flags", {}),
        ("writer", None),
    ],
)
def test_a_field_that_cannot_be_is_refused(key, value):
    with pytest.raises(CorruptCheckpointError, match=f"{PATH}.*{key}"):
        decode(edited(**{key: value}), PATH)


def test_a_file_outside_and_a_catalog_that_is_not_listed_are_refused():
    for files, problem in ([{"name": "../x", "bytes": 1, "xxh3": "0" * 16}], "unsafe"), ([], "listed"):
        with pytest.raises(CorruptCheckpointError, match=problem):
            decode(edited(files=files), PATH)


def test_the_tables_of_an_offer_are_those_of_a_full_checkpoint():
    tables = tuple(table.but(delta=DeltaRows(1, 0, False)) for table in example().tables)
    with pytest.raises(CorruptCheckpointError, match="delta"):
        decode(encode(replace(example(), tables=tables)), PATH)


def test_a_newer_offer_is_refused_by_its_number():
    with pytest.raises(FormatVersionError, match="2"):
        decode(edited(version=2), PATH)


def test_an_offer_that_is_cut_or_flipped_anywhere_is_refused():
    data = encode(example())
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 4
        for damaged in (data[:at], bytes(flipped)):
            with pytest.raises((CorruptCheckpointError, FormatVersionError)):
                decode(damaged, PATH)


def test_the_first_file_says_whose_offer_it_is():
    assert decode_first(encode_first("ckpt/1", SAVE_ID), "OFFER") == ("ckpt/1", SAVE_ID)
    for data in (b"", b"{}", b'{"save_id": 1, "ckpt_id": "c"}'):
        with pytest.raises(CorruptCheckpointError, match="OFFER"):
            decode_first(data, "OFFER")
