"""A manifest comes back as it was, and what cannot be in it is refused and named."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forge import sealed

from recckpt import __version__
from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout, manifest
from recckpt.format.manifest import (
    FileEntry,
    Manifest,
    Names,
    ShardEntry,
    Training,
    Unsaved,
    are_disjoint,
    decode,
    encode,
    in_manifest,
    misfit,
    overlap,
)
from recckpt.format.tables import ClockDates, LiveLayout, TableEntry
from recckpt.types import ITEM_BYTES, SlotSpec

PATH = "ckpt_1/manifest.json"
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.text() | NUMBERS
ONE, OTHER = ShardEntry("a", (0, 30), {"item": (0, 9)}), ShardEntry("b", (30, 60), {"item": (5, 90), "user": (1, 1)})


def example() -> Manifest:
    return Manifest(
        ckpt_id="ckpt_1",
        save_id="ab" * 16,
        seq=7,
        epoch=2,
        step=100,
        time="2026-11-20T12:00:00Z",
        shards=(ShardEntry(layout.catalog(0, 2), (0, 30_000)), ShardEntry(layout.catalog(1, 2), (0, 0))),
        tables=(
            TableEntry("item", 3, (SlotSpec("embedding", "float32", (2, 3)), SlotSpec("sparse_step", "int64", ()))),
            TableEntry(
                'ü "\\\n/',
                0,
                (SlotSpec("embedding", "bfloat16", (1,)),),
                evicted_to=12,
                clock=ClockDates(1.5, 1.79e9),
            ),
        ),
        files=(
            FileEntry("model.pt", 10, 2**64 - 1),
            FileEntry(layout.part(0, 2, 0, 0), 2**50),
            FileEntry(layout.catalog(0, 2), 3, 0),
            FileEntry(layout.catalog(1, 2), 4, 1),
        ),
        names=Names(("top.weight",), ("sparse_optim", "ü"), ()),
        state={"loss": 0.25, "epoch": 3, "name": "ü", "done": True, "best": None},
        writer={"recckpt": "0.1.0"},
        ephemeral=True,
    )


def test_it_prints_as_one_line_however_much_it_holds():
    many = replace(example(), files=example().files * 1000, tables=example().tables * 1000)
    assert repr(many) == repr(example())
    assert "ckpt_id='ckpt_1'" in repr(many)
    assert len(repr(many)) < 500


def edited(**changes) -> bytes:
    values = json.loads(encode(example()))
    del values["manifest_xxh3"]
    return sealed(json.dumps({**values, **changes}).encode())


def test_a_manifest_comes_back_as_it_was_from_the_bytes_of_the_specification():
    data = encode(example())
    assert decode(data, PATH) == example()
    values = json.loads(data)
    assert data.endswith(b',\n  "manifest_xxh3": "%s"\n}\n' % values["manifest_xxh3"].encode())
    assert list(values) == [
        *("format", "version", "reader", "checksum", "ckpt_id", "save_id", "kind", "parent", "epoch", "seq", "step"),
        *("time", "shards", "tables", "files", "names", "state", "flags", "writer", "manifest_xxh3"),
    ]
    assert values["files"][1] == {"name": "sparse/00000-of-00002.g0.00.arrow", "bytes": 2**50}
    assert values["files"][0]["xxh3"] == "f" * 16
    assert values["tables"][0]["slots"][0] == {"name": "embedding", "dtype": "float32", "shape": [2, 3]}
    assert example().table("item").row_bytes == 8 + 24 + 8
    assert example().file("model.pt").n_bytes == 10
    assert (example().table("x"), example().file("x")) == (None, None)
    assert example().n_bytes == 10 + 2**50 + 3 + 4
    orders = [replace(example(), epoch=e, seq=s).place for e, s in ((0, 9), (1, 1), (1, 10), (2, 2))]
    assert orders == sorted(orders)


@given(
    st.text(min_size=1, max_size=20).filter(lambda name: "\0" not in name and name.isprintable()),
    st.integers(0, 10**18 - 1),
    st.dictionaries(
        st.text(),
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    ),
    st.sampled_from(list(ITEM_BYTES)),
    st.lists(st.integers(1, 9), max_size=4).map(tuple),
)
def test_whatever_can_be_saved_comes_back(name, rows, state, dtype, shape):
    tables = (TableEntry(name, rows, (SlotSpec("embedding", dtype, shape),)),)
    record = replace(example(), tables=tables, state=state)
    assert decode(encode(record), PATH) == record


@pytest.mark.parametrize("columns", [(), ((0, 6),), ((0, 1), (1, 4), (4, 6))])
def test_how_a_table_was_live_comes_back_and_is_absent_where_it_was_not(columns):
    live = example().tables[0].but(live=LiveLayout(9, columns))
    data = encode(replace(example(), tables=(live,)))
    said = {"n_rows": 9, **({"columns": [list(each) for each in columns]} if columns else {})}
    assert json.loads(data)["tables"][0]["live"] == said
    assert decode(data, PATH).tables == (live,)
    assert all("live" not in table for table in json.loads(encode(example()))["tables"])


def test_ids_of_shards_come_back_and_are_absent_where_nothing_is_said_of_them():
    ranges = {"item": (-(2**63), 2**63 - 1), 'ü "\\\n/': (7, 7)}
    one, other = example().shards
    record = replace(example(), shards=(one.but(ids=ranges), other.but(ids={})))
    data = encode(record)
    assert [shard["ids"] for shard in json.loads(data)["shards"]] == [{n: list(r) for n, r in ranges.items()}, {}]
    assert decode(data, PATH) == record
    assert all("ids" not in shard for shard in json.loads(encode(example()))["shards"])


NAMES = {"dense": ["w"], "extra": ["x"], "io_state": []}


def test_state_of_a_parameter_is_named_with_its_object_and_what_nobody_knows_is_ignored():
    found = decode(edited(names={**NAMES, "extra_of_ranks": ["own"], "dense_opt": ["w@x", "a@b@own"]}), PATH)
    assert found.names.dense_opt == ("w@x", "a@b@own")
    found = decode(edited(names={**NAMES, "later": [1]}), PATH)
    assert found == replace(example(), names=Names(("w",), ("x",), ()))
    assert decode(edited(future=[1, {"a": 2}], flags={"ephemeral": True, "x": 1}), PATH) == example()
    later = {"optimizers": {"x": []}, "unsaved": {"later": ["y"]}, "later": 1}
    assert decode(edited(training=later), PATH).training == Training()


TRAINING = {"optimizers": {"x": ["AdamW", "Adam"]}, "unsaved": {"tables": ["item"]}}


def test_optimizers_and_what_is_not_saved_come_back_and_are_absent_where_there_is_nothing_to_say():
    said = Training({"x": ("AdamW", "Adam")}, Unsaved(tables=("item",)))
    data = encode(replace(example(), training=said))
    assert json.loads(data)["training"] == TRAINING
    assert decode(data, PATH).training == said
    assert "training" not in json.loads(encode(example()))


@pytest.mark.parametrize("key", ["optimizers", "unsaved"])
@pytest.mark.parametrize("value", [[], "x", 1, {"tables": "Adam"}, {"tables": [1]}, {"tables": None}])
def test_what_is_said_of_optimizers_in_another_form_is_corrupt(key, value):
    with pytest.raises(CorruptCheckpointError, match=f"training.{key}"):
        decode(edited(training={**TRAINING, key: value}), PATH)


def test_a_state_fits_its_class_and_those_that_inherit_one_from_the_other():
    assert misfit(("AdamW", "Adam"), ("Adam",)) == misfit(("Adam",), ("AdamW", "Adam")) == misfit((), ("Adam",)) == ""
    assert misfit(("AdamW", "Adam"), ("NAdam", "Adam")) == "AdamW, this one is NAdam"


@pytest.mark.parametrize(
    "names",
    [
        *([], "x", None, {}),
        *({group: names for group, names in NAMES.items() if group != left_out} for left_out in NAMES),
        *({**NAMES, "extra": names} for names in ("x", [1], ["x", "x"])),
        *({**NAMES, "dense_opt": [name]} for name in ("", "x", "@x", "w@", "w@elsewhere")),
    ],
)
def test_names_that_are_not_there_or_of_another_type_are_corrupt(names):
    with pytest.raises(CorruptCheckpointError, match=r"names|dense|extra|io_state|dense_opt"):
        decode(edited(names=names), PATH)


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_wherever_it_is(stride):
    data = bytearray(encode(example()))
    for position in range(0, len(data) * 8, stride):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises((CorruptCheckpointError, FormatVersionError)):
            decode(bytes(data), PATH)
        data[position // 8] ^= 1 << position % 8


def test_a_cut_is_found_wherever_it_is():
    data = encode(example())
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode(data[:end], PATH)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_nothing_else_is_raised(data):
    for candidate in (data, sealed(data)):
        with pytest.raises((CorruptCheckpointError, FormatVersionError)):
            decode(candidate, PATH)


def test_versions_kinds_and_checksums_that_nobody_knows_are_refused_by_name_whatever_the_seal():
    newer = edited(version=99, reader="1.3")
    for data in (newer, newer.replace(b"manifest_xxh3", b"signature")):
        with pytest.raises(FormatVersionError, match=rf"version 99.*{__version__}.*up to 1.*recckpt 1\.3$") as caught:
            decode(data, PATH)
        assert (caught.value.supported, caught.value.needed) == (1, "recckpt 1.3")
    for reader in (None, 5, "", "1.3\n", "1." * 9 + "1", ["1.3"]):
        with pytest.raises(FormatVersionError, match=r"needs a newer recckpt$"):
            decode(edited(version=99, reader=reader), PATH)
    with pytest.raises(FormatVersionError, match="a patch checkpoint"):
        decode(edited(kind="patch"), PATH)
    for data in (edited(checksum="crc32"), edited(checksum="crc32").replace(b"manifest_xxh3", b"manifest_crc3")):
        with pytest.raises(CorruptCheckpointError, match="unknown algorithm 'crc32'"):
            decode(data, PATH)
    for tail in (b" ", b"\n", b"{}", b"\0"):
        with pytest.raises(CorruptCheckpointError):
            decode(encode(example()) + tail, PATH)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            encode(replace(example(), state={"loss": value}))


def table(**changes):
    slots = [{"name": "embedding", "dtype": "float32", "shape": [2]}]
    return {"tables": [{"name": "item", "rows": 3, "slots": slots, **changes}]}


def slot(**changes):
    return table(slots=[{"name": "embedding", "dtype": "float32", "shape": [2], **changes}])


def file(**changes):
    others = [{"name": layout.catalog(n, 2), "bytes": 1, "xxh3": "0" * 16} for n in (0, 1)]
    return {"files": [{"name": "model.pt", "bytes": 1, "xxh3": "0" * 16, **changes}, *others]}


def shard(**changes):
    shards = [{"catalog": layout.catalog(n, 2), "buckets": [0, 5]} for n in (0, 1)]
    return {"shards": [{**shards[0], **changes}, shards[1]]}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"format": "other"}, "format"),
        ({"version": -1}, "version"),
        ({"version": "1"}, "version"),
        ({"ckpt_id": ""}, "ckpt_id"),
        ({"ckpt_id": "x" * 300}, "ckpt_id"),
        ({"seq": -1}, "seq"),
        ({"epoch": None}, "epoch"),
        ({"step": -5}, "step"),
        ({"step": 1.5}, "step"),
        ({"state": [1]}, "state"),
        ({"writer": {"a": [1]}}, "writer.a"),
        ({"flags": {"x": True}}, "flags.ephemeral"),
        ({"flags": {"ephemeral": 1}}, "flags.ephemeral"),
        (table(rows=-1), "tables[0].rows"),
        (table(evicted_to=-1), "tables[0].evicted_to"),
        (table(evicted_to=1.5), "tables[0].evicted_to"),
        (table(clock=1.5), "tables[0].clock"),
        (table(clock={"first": 1.5}), "tables[0].clock.last"),
        (table(clock={"first": -1.0, "last": 1.0}), "tables[0].clock.first"),
        (table(clock={"first": 2.0, "last": 1.0}), "tables[0].clock.last"),
        (table(live=5), "tables[0].live"),
        (table(live={}), "tables[0].live.n_rows"),
        (table(live={"n_rows": 0}), "tables[0].live.n_rows"),
        (table(live={"n_rows": 2}), "tables[0].live.n_rows"),  # of 3
        (table(live={"n_rows": 3.0}), "tables[0].live.n_rows"),
        (table(live={"n_rows": 3, "columns": 1}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": []}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": [1]}), "tables[0].live.columns[0]"),
        (table(live={"n_rows": 3, "columns": [[]]}), "tables[0].live.columns[0]"),
        (table(live={"n_rows": 3, "columns": [[0, 1]]}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": [[0, 3]]}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": [[1, 2]]}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": [[0, 2], [2, 2]]}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": [[1, 2], [0, 1]]}), "tables[0].live.columns"),
        (table(live={"n_rows": 3, "columns": [[0, 1, 2]]}), "tables[0].live.columns[0]"),
        (table(live={"n_rows": 3, "columns": [[0, 1], [1, True]]}), "tables[0].live.columns[1][1]"),
        (table(rows=10**18), "tables[0].rows"),
        (table(rows=1.0), "tables[0].rows"),
        (table(name=""), "tables[0].name"),
        (table(name="a\0b"), "tables[0].name"),
        (table(name="x" * 1025), "tables[0].name"),
        (table(name="\ud800"), ""),
        (table(slots=[]), "tables[0].slots"),
        ({"tables": table()["tables"] * 2}, "tables"),
        (slot(name="other"), "tables[0].slots"),
        (slot(name="id"), "tables[0].slots[0].name"),
        (slot(dtype="float8"), "tables[0].slots[0].dtype"),
        (slot(dtype="object"), "tables[0].slots[0].dtype"),
        (slot(shape=[0]), "tables[0].slots[0].shape[0]"),
        (slot(shape=[2, -1]), "tables[0].slots[0].shape[1]"),
        (slot(shape=[2**40]), "tables[0].slots[0].shape"),
        (slot(shape=[2**20, 2**20]), "tables[0].slots[0].shape"),
        (slot(shape="2"), "tables[0].slots[0].shape"),
        (table(slots=slot()["tables"][0]["slots"] * 2), "tables[0].slots"),
        (file(bytes=-1), "files[0].bytes"),
        (file(bytes=2**64), "files[0].bytes"),
        (file(xxh3="xyz"), "files[0].xxh3"),
        (file(xxh3=None), "files[0].xxh3"),
        (file(name=layout.catalog(0, 2)), "files"),
        (shard(buckets=[0]), "shards[0].buckets"),
        (shard(buckets=[5, 4]), "shards[0].buckets"),
        (shard(buckets=[0, 65537]), "shards[0].buckets[1]"),
        (shard(ids=[1, 2]), "shards[0].ids"),
        (shard(ids={"item": 1}), "shards[0].ids.item"),
        (shard(ids={"item": [1]}), "shards[0].ids.item"),
        (shard(ids={"item": [2, 1]}), "shards[0].ids.item"),
        (shard(ids={"item": [1, 2, 3]}), "shards[0].ids.item"),
        (shard(ids={"item": [1, 2**63]}), "shards[0].ids.item[1]"),
        (shard(ids={"item": [1.0, 2.0]}), "shards[0].ids.item[0]"),
        (shard(ids={"item": [True, 2]}), "shards[0].ids.item[0]"),
        (shard(ids={"item": [1, "2"]}), "shards[0].ids.item[1]"),
        (shard(ids={"nobody": [1, 2]}), "shards[0].ids"),
        (shard(catalog=layout.catalog(1, 2)), "shards[0].catalog"),
        (shard(catalog=layout.catalog(0, 3)), "shards[0].catalog"),
        ({"shards": shard()["shards"] * 2}, "shards[0].catalog"),
        ({"files": []}, "shards[0].catalog"),
    ],
)
def test_a_field_that_cannot_be_is_corrupt_and_named(changes, where):
    with pytest.raises(CorruptCheckpointError) as caught:
        decode(edited(**changes), PATH)
    assert caught.value.where == where


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "http://h/x", "a" * 300])
def test_an_unsafe_name_is_refused(name):
    for changes in (file(name=name), shard(catalog=name)):
        with pytest.raises(CorruptCheckpointError, match="unsafe path"):
            decode(edited(**changes), PATH)


@pytest.mark.parametrize("field", json.loads(encode(example())))
def test_a_whole_manifest_without_a_field_is_of_an_older_form(field):
    values = json.loads(encode(example()))
    del values["manifest_xxh3"]
    if values.pop(field, None) is None or field in ("reader", "step", "parent", "names"):
        return  # may be null, or absent
    is_ours = field not in ("format", "version")
    with pytest.raises(FormatVersionError if is_ours else CorruptCheckpointError):
        decode(sealed(json.dumps(values).encode()), PATH)


@pytest.mark.slow
def test_40_000_tables_fit():
    slots = (SlotSpec("embedding", "float32", (8,)),)
    tables = tuple(TableEntry(f"feature_{n}", n, slots) for n in range(40_000))
    record = decode(encode(replace(example(), tables=tables)), PATH)
    assert all(record.table(entry.name) is entry for entry in record.tables)


def test_a_manifest_that_no_reader_would_take_is_not_written(monkeypatch):
    data = encode(example())
    monkeypatch.setattr("recckpt.format.manifest.MAX_BYTES", len(data))
    assert decode(encode(example()), PATH) == example()
    monkeypatch.setattr("recckpt.format.manifest.MAX_BYTES", len(data) - 1)
    with pytest.raises(ValueError, match=f"{len(data)} bytes, of 4 files and 2 tables"):
        encode(example())


def test_ranges_of_ids_are_disjoint_where_no_id_is_in_two():
    for ranges in ([], [(3, 3)], [(5, 9), (0, 4)], [(-(2**63), -1), (0, 2**63 - 1)]):
        assert are_disjoint(ranges)
    for ranges in ([(0, 4), (4, 9)], [(0, 9), (3, 3)], [(10, 11), (0, 9), (9, 9)]):  # both ends are included
        assert not are_disjoint(ranges)


def test_a_manifest_has_the_ids_of_shards_whose_buckets_overlap_and_of_no_others(monkeypatch):
    assert not overlap([(30, 60), (0, 30), (0, 0), (15, 15)])
    assert overlap([(29, 60), (0, 30)])
    assert [shard.ids for shard in in_manifest([ONE, OTHER])] == [None, None]
    beside = OTHER.but(buckets=(29, 60))
    monkeypatch.setattr(manifest, "_MAX_RANGES", 3)
    assert in_manifest([ONE, beside]) == (ONE, beside)
    monkeypatch.setattr(manifest, "_MAX_RANGES", 2)  # it does not grow with tables times shards
    assert in_manifest([ONE, beside]) == (ONE.but(ids=None), beside.but(ids=None))
