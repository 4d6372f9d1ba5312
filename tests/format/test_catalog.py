import json
from dataclasses import replace

import pytest

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.catalog import Batch, Catalog, Part, decode, encode
from recckpt.format.manifest import FileEntry, Link, Manifest, Parent, ShardEntry
from recckpt.format.tables import DeltaRows, TableEntry
from recckpt.types import SlotSpec

PATH = "ckpt_1/sparse/00000-of-00002.json"
PART = layout.part(0, 2, 0, 0)
SLOTS = (SlotSpec("embedding", "float32", (2,)), SlotSpec("sparse_step", "int64", ()))
ROW_BYTES = 2 + 8 + 8 + 8
SUMS = {"table": 1, "id": 2, "embedding": 3, "sparse_step": 2**64 - 1}


def manifest() -> Manifest:
    return Manifest(
        ckpt_id="ckpt_1",
        save_id="ab" * 16,
        seq=1,
        time="",
        shards=tuple(ShardEntry(layout.catalog(n, 2), (0, 65536)) for n in (0, 1)),
        tables=(
            TableEntry("item", 30, SLOTS),
            TableEntry("ü/1", 5, SLOTS),
            TableEntry("other", 5, SLOTS[:1]),
        ),
        files=(FileEntry(PART, 5000),),
    )


def catalog(*batches: Batch) -> Catalog:
    batches = batches or (
        Batch("item", 10, (0, 30), (-(2**62), 90), SUMS),
        Batch("item", 20, (29, 65536), (-(2**63), 15), SUMS),
        Batch("ü/1", 5, (7, 8), (2**63 - 5, 2**63 - 1), SUMS),
    )
    return Catalog("ab" * 16, 0, 2, (Part(PART, 5000, 77, ("item", "ü/1"), batches),))


def edited(edit) -> bytes:
    values = json.loads(encode(catalog()))
    edit(values)
    return json.dumps(values).encode()


def test_a_catalog_comes_back_as_it_was():
    assert decode(encode(catalog()), PATH, manifest(), 0) == catalog()
    nothing = Catalog("ab" * 16, 1, 2, ())
    assert decode(encode(nothing), PATH, manifest(), 1) == nothing
    assert nothing.buckets == (0, 0)
    assert nothing.counts("rows") == nothing.ids == {}


def test_rows_buckets_and_ids_are_those_of_all_batches():
    assert catalog().counts("rows") == {"item": 30, "ü/1": 5}
    assert catalog().ids == {"item": (-(2**63), 90), "ü/1": (2**63 - 5, 2**63 - 1)}
    assert catalog().buckets == (0, 65536)
    assert catalog(Batch("item", 1, (7, 9), (3, 3), SUMS), Batch("item", 1, (8, 12), (2, 2), SUMS)).buckets == (7, 12)


def test_the_file_is_as_specified():
    values = json.loads(encode(catalog()))
    assert list(values) == ["format", "version", "reader", "save_id", "shard", "shards", "parts"]
    assert list(values["parts"][0]) == ["file", "bytes", "frame", "tables", "batches"]
    assert values["parts"][0]["batches"][2] == {
        "table": 1,
        "rows": 5,
        "buckets": [7, 8],
        "ids": [2**63 - 5, 2**63 - 1],
        "xxh3": {"table": f"{1:016x}", "id": f"{2:016x}", "embedding": f"{3:016x}", "sparse_step": "f" * 16},
    }


def part(**changes):
    return lambda values: values["parts"][0].update(changes)


def batch(**changes):
    return lambda values: values["parts"][0]["batches"][0].update(changes)


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (lambda v: v.update(format="recckpt"), "format"),
        (lambda v: v.update(save_id="cd" * 16), "save_id, shard, shards"),
        (lambda v: v.update(shard=1), "save_id, shard, shards"),
        (lambda v: v.update(shard=4, shards=4), "save_id, shard, shards"),
        (lambda v: v.update(shards=4), "save_id, shard, shards"),
        (lambda v: v.pop("parts"), "parts"),
        (part(file="model.pt"), "parts[0].file"),
        (part(bytes=4999), "parts[0].file"),
        (part(bytes=-1), "parts[0].bytes"),
        (part(frame="x"), "parts[0].frame"),
        (part(tables=["item", "nobody"]), "parts[0].tables"),
        (part(tables=["item", "other"]), "parts[0].tables"),
        (part(tables=["item", 5]), "parts[0].tables[1]"),
        (part(tables=["item"]), "parts[0].batches[2].table"),
        (batch(table=-1), "parts[0].batches[0].table"),
        (batch(table="item"), "parts[0].batches[0].table"),
        (batch(rows=0), "parts[0].batches[0].rows"),
        (batch(rows=-5), "parts[0].batches[0].rows"),
        (batch(rows=10**15), "parts[0].batches"),
        (batch(rows=5000 // ROW_BYTES), "parts[0].batches"),
        (batch(buckets=[3]), "parts[0].batches[0].buckets"),
        (batch(buckets=[3, 65537]), "parts[0].batches[0].buckets[1]"),
        (batch(buckets=[3, 3]), "parts[0].batches[0].buckets"),
        (batch(ids=None), "parts[0].batches[0].ids"),
        (batch(ids=[1]), "parts[0].batches[0].ids"),
        (batch(ids=[90, -4]), "parts[0].batches[0].ids"),
        (batch(ids=[0, 2**63]), "parts[0].batches[0].ids[1]"),
        (batch(ids=[-(2**63) - 1, 90]), "parts[0].batches[0].ids[0]"),
        (batch(ids=[0.0, 90.0]), "parts[0].batches[0].ids[0]"),
        (batch(ids=[False, 90]), "parts[0].batches[0].ids[0]"),
        (batch(xxh3={}), "parts[0].batches[0].xxh3"),
        (batch(xxh3={**dict.fromkeys(SUMS, "0" * 16), "more": "0" * 16}), "parts[0].batches[0].xxh3"),
        (batch(xxh3=dict.fromkeys(SUMS, "0")), "parts[0].batches[0].xxh3.table"),
    ],
)
def test_a_catalog_that_does_not_fit_its_manifest_is_corrupt(edit, where):
    with pytest.raises(CorruptCheckpointError) as caught:
        decode(edited(edit), PATH, manifest(), 0)
    assert (caught.value.path, caught.value.where) == (PATH, where)


def test_an_unsafe_name_a_newer_version_and_what_is_no_json_object_are_refused():
    for name in ("../x.arrow", "/etc/x.arrow", "http://h/x.arrow"):
        with pytest.raises(CorruptCheckpointError, match="unsafe path"):
            decode(edited(part(file=name)), PATH, manifest(), 0)
    with pytest.raises(FormatVersionError, match="99"):
        decode(edited(lambda v: v.update(version=99)), PATH, manifest(), 0)
    for data in (b"", b"{", b"\xff", b'{"format": NaN}', b"[]"):
        with pytest.raises(CorruptCheckpointError):
            decode(data, PATH, manifest(), 0)


def test_fields_that_nobody_knows_are_ignored():
    def edit(values):
        values["new"] = values["parts"][0]["new"] = values["parts"][0]["batches"][0]["new"] = {"a": [1]}

    assert decode(edited(edit), PATH, manifest(), 0) == catalog()


@pytest.mark.slow
def test_a_catalog_of_40_000_tables_is_read_at_once():
    names = [f"feature_{n}" for n in range(40_000)]
    big = Manifest(
        ckpt_id="ckpt_1",
        save_id="ab" * 16,
        seq=1,
        time="",
        shards=(ShardEntry(layout.catalog(0, 1), (0, 65536)),),
        tables=tuple(TableEntry(name, 1, SLOTS) for name in names),
        files=(FileEntry(PART, 10**9),),
    )
    batches = tuple(Batch(name, 1, (5, 6), (1, 1), SUMS) for name in names)
    whole = Catalog("ab" * 16, 0, 1, (Part(PART, 10**9, 0, tuple(names), batches),))
    assert decode(encode(whole), PATH, big, 0) == whole


def test_a_catalog_that_no_reader_would_take_is_not_written(monkeypatch):
    data = encode(catalog())
    monkeypatch.setattr("recckpt.format.catalog.MAX_BYTES", len(data))
    assert decode(encode(catalog()), PATH, manifest(), 0) == catalog()
    monkeypatch.setattr("recckpt.format.catalog.MAX_BYTES", len(data) - 1)
    with pytest.raises(ValueError, match=f"shard 0 would have {len(data)} bytes, expected at most {len(data) - 1}"):
        encode(catalog())


DELETES = layout.part(0, 2, None, 0)
DELETE_SUMS = {"table": 5, "id": 6}


def delta_manifest() -> Manifest:
    """A delta with a part of rows, and one of ids that were deleted from tables of different groups."""
    tables = tuple(table.but(delta=DeltaRows(table.rows, 3, replaced=False)) for table in manifest().tables)
    parent = Parent("ckpt_0", "cd" * 16, "ckpt_0", 1)
    files = (*manifest().files, FileEntry(DELETES, 900))
    return replace(manifest(), tables=tables, files=files, parent=parent, chain=(Link("ckpt_0", "cd" * 16, "ckpt_0"),))


def delta_catalog() -> Catalog:
    batches = (Batch("item", 3, (0, 30), (-9, 900), DELETE_SUMS), Batch("other", 3, (7, 9), (1, 3), DELETE_SUMS))
    part = Part(DELETES, 900, 78, ("item", "other"), batches, holds="deletes")
    return catalog().but(parts=(*catalog().parts, part))


def test_a_catalog_of_a_delta_comes_back_as_it_was_and_counts_deletes_beside_rows():
    found = decode(encode(delta_catalog()), PATH, delta_manifest(), 0)
    assert found == delta_catalog()
    assert found.counts("rows") == {"item": 30, "ü/1": 5}
    assert found.ids == catalog().ids  # of rows alone
    assert found.counts("deletes") == {"item": 3, "other": 3}
    assert [(part.file, numbers) for part, numbers in found.parts_of("item", "rows")] == [(PART, [0, 1])]
    assert [(part.file, numbers) for part, numbers in found.parts_of("item", "deletes")] == [(DELETES, [0])]


def test_rows_are_what_a_part_holds_that_does_not_say():
    values = json.loads(encode(delta_catalog()))
    assert "holds" not in values["parts"][0]
    values["parts"][0]["holds"] = "rows"
    assert decode(json.dumps(values).encode(), PATH, delta_manifest(), 0) == delta_catalog()


def deletes(**changes):
    return lambda values: values["parts"][1].update(changes)


def delete_batch(**changes):
    return lambda values: values["parts"][1]["batches"][0].update(changes)


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (deletes(holds="ids"), "parts[1].holds"),
        (deletes(holds=1), "parts[1].holds"),
        (deletes(holds="rows"), "parts[1].tables"),  # which are not of one group
        (part(holds="deletes"), "parts[0].batches[0].xxh3"),  # of slots
        (deletes(tables=["item", "nobody"]), "parts[1].tables"),
        (deletes(bytes=899), "parts[1].file"),
        (delete_batch(rows=90), "parts[1].batches"),
        (delete_batch(rows=0), "parts[1].batches[0].rows"),
        (delete_batch(xxh3={"id": "0" * 16}), "parts[1].batches[0].xxh3"),
        (delete_batch(xxh3=dict.fromkeys(SUMS, "0" * 16)), "parts[1].batches[0].xxh3"),
    ],
)
def test_a_part_of_deletes_that_does_not_fit_or_is_in_a_full_checkpoint_is_corrupt(edit, where):
    values = json.loads(encode(delta_catalog()))
    edit(values)
    with pytest.raises(CorruptCheckpointError) as caught:
        decode(json.dumps(values).encode(), PATH, delta_manifest(), 0)
    assert (caught.value.path, caught.value.where) == (PATH, where)
    full = replace(delta_manifest(), parent=None, chain=(), tables=manifest().tables)
    with pytest.raises(CorruptCheckpointError, match="in a full checkpoint"):
        decode(encode(delta_catalog()), PATH, full, 0)
