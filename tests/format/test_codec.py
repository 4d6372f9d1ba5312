"""Files of JSON are parsed strictly, and decoded into records: what is unfit is named with its place."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format.codec import (
    MAX_DEPTH,
    Buckets,
    Checksum,
    CkptId,
    Count,
    FileKind,
    FileName,
    IdRange,
    JsonRecord,
    Number,
    PositiveCount,
    Scalar,
    parse,
    plain,
    seal,
    sums_of,
)


def fields(**values):
    return parse(json.dumps(values).encode(), "f.json")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"1",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": 1, "a": 1}',
        b'{"b": {"a": 1, "a": 2}}',
        b'{"a": 1} x',
        b'{"a": 1,}',
        b"\xff\xfe{\0}\0",
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xff"}',
        b'{"a": "x\ny"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"{'a': 1}",
        b'{"a": ["\\ud800"]}',
        b'{"a": {"\\uDFFF": 1}}',
        b'{"a": "\\ude00\\ud83d"}',
    ],
)
def test_what_is_not_strict_json_is_corrupt(data):
    with pytest.raises(CorruptCheckpointError) as caught:
        parse(data, "dir/f.json")
    assert caught.value.path == "dir/f.json"


def nested(depth: int) -> bytes:
    return b'{"a": ' * (depth - 1) + b"{" + b"}" * depth


def test_nesting_is_limited_before_the_parser_recurses():
    parse(nested(MAX_DEPTH), "f.json")
    with pytest.raises(CorruptCheckpointError, match="deeper than 16"):
        parse(nested(MAX_DEPTH + 1), "f.json")
    with pytest.raises(CorruptCheckpointError, match="deeper than 16"):
        parse(nested(1_000_000), "f.json")


def test_brackets_in_strings_are_no_nesting():
    text = '[{"' * 50 + "\\"
    assert fields(a=text).values == {"a": text}


@given(st.lists(st.sampled_from(['"', "[", "]", "{", "}", "x", ",", "\\", '\\"']), max_size=60), st.integers(10, 20))
def test_nesting_is_counted_outside_strings_alone(pieces, depth):
    strings = json.dumps("".join(pieces)), '"' + "".join(piece for piece in pieces if piece not in '\\"') + '"'
    for string in strings:
        data = b'{"a": ' + b"[" * (depth - 1) + string.encode() + b"]" * (depth - 1) + b"}"
        if depth <= MAX_DEPTH:
            parse(data, "f.json")
        else:
            with pytest.raises(CorruptCheckpointError, match="deeper than 16"):
                parse(data, "f.json")


@pytest.mark.parametrize(
    "texts",
    [
        {"a": "0" * 16, "b": "f" * 15},
        {"a": f"{'0' * 16},{'1' * 16}", "b": ""},
        {"a": f"{'0' * 8},{'1' * 8}", "b": "2" * 15},
        {"a": "0" * 16, "b": "F" * 16},
        {"a": "0" * 16, "b": " " + "1" * 15},
    ],
)
def test_an_object_of_checksums_is_16_hex_digits_each(texts):
    assert sums_of({"a": "0" * 15 + "1", "b": "f" * 16}) == {"a": 1, "b": 2**64 - 1}
    assert sums_of({}) == {}
    assert sums_of(texts) is None


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000, '"\\' * 500_000, '"' * 500_001, "\\" * 500_000])
def test_a_string_left_open_takes_no_quadratic_time(text):
    with pytest.raises(CorruptCheckpointError):
        parse(b'{"a": ' + text.encode(), "f.json")


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=9)
)
def test_parsing_gives_what_json_gives(value):
    data = json.dumps({"a": value}).encode()
    assert parse(data, "f.json").values == {"a": value}


class Inner(JsonRecord, frozen=True):
    n: PositiveCount


class Every(JsonRecord, frozen=True, rename={"n_bytes": "bytes"}):
    text: str = ""
    n_bytes: Count = 0
    flag: bool = False
    number: Number = 0.0
    xxh3: Checksum | None = None
    sums: tuple[Checksum, ...] = ()
    counts: tuple[Count, ...] = ()
    span: Buckets = (0, 0)
    ids: Mapping[str, IdRange] | None = None
    inner: tuple[Inner, ...] = ()
    scalars: Mapping[str, Scalar] = {}
    ckpt_id: CkptId = "c"
    file: FileName = "f"


ALL = {"text": "x", "bytes": 5, "flag": True, "number": 3, "xxh3": "00000000000000ff", "sums": ["f" * 16]}
ALL |= {"counts": [1, 2], "span": [1, 65536], "ids": {"a": [-(2**63), 2**63 - 1]}, "inner": [{"n": 1}]}
ALL |= {"scalars": {"a": None, "b": 1.5}, "ckpt_id": "ü", "file": "a/b", "unknown": {"a": [1]}}


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        *(("text", value, "text") for value in (1, None, [])),
        *(("bytes", value, "bytes") for value in (-1, 1.0, True, 10**18, 10**30, "1", None)),
        *(("flag", value, "flag") for value in (1, "true", None)),
        *(("number", value, "number") for value in (-1, "1", True, None)),
        *(("xxh3", value, "xxh3") for value in ("0" * 15, "0123456789ABCDEF", "0" * 15 + "g", "0" * 16 + "\n", 7)),
        ("sums", ["0" * 16, None], "sums[1]"),
        ("counts", [1, -1], "counts[1]"),
        ("counts", {"a": 1}, "counts"),
        ("span", [0, 65537], "span[1]"),
        ("span", [0], "span"),
        ("ids", {"a": [1, 2], "b.c[0]": [1, "2"], "d": [1, "2"]}, "ids.b.c[0][1]"),
        ("ids", {"": [1]}, "ids."),
        ("ids", [1, 2], "ids"),
        ("inner", [{"n": 1}, 1], "inner[1]"),
        ("inner", [{"n": 1}, {"n": 0}], "inner[1].n"),
        ("inner", [{"n": 1}, {}], "inner[1].n"),
        ("scalars", {**dict.fromkeys(map(str, range(99)), 0), "x": [], "y": []}, "scalars.x"),
        ("ckpt_id", "", "ckpt_id"),
        ("ckpt_id", 5, "ckpt_id"),
        ("file", 5, "file"),
        ("file", "../x", "file name"),
    ],
)
def test_a_field_of_another_type_is_corrupt_and_named(key, value, where):
    document = fields(**{**ALL, key: value})
    before = json.dumps(document.values)
    with pytest.raises(CorruptCheckpointError) as caught:
        document.read(Every)
    assert (caught.value.path, caught.value.where) == ("f.json", where)
    assert json.dumps(document.values) == before
    assert len(str(caught.value)) < 1000


def test_records_come_with_their_types_and_go_back_without_what_has_its_default():
    found = fields(**ALL).read(Every)
    assert (found.n_bytes, found.number, found.xxh3, found.sums) == (5, 3.0, 255, (2**64 - 1,))
    assert (found.ids, found.inner, found.but(text="y").text) == ({"a": (-(2**63), 2**63 - 1)}, (Inner(1),), "y")
    assert {type(found.xxh3), type(found.ckpt_id), type(found.file)} == {int, str}
    assert json.loads(json.dumps(plain(found))) == {key: value for key, value in ALL.items() if key != "unknown"}
    assert (plain(Every()), plain(Every(ids={}))) == ({}, {"ids": {}})


KIND = FileKind("kind", 2, "kind_xxh3", 1000)


def test_a_field_that_is_missing_is_damage_but_in_a_whole_file_which_is_older():
    for data in (b"{}", b'{"format": "kind", "version": 2}', seal({"a": 1}, "kind_xxh3")):
        with pytest.raises(CorruptCheckpointError, match="no such field"):
            parse(data, "f.json").read(Inner)
    with pytest.raises(FormatVersionError, match="older"):
        KIND.open(KIND.encode({}), "f.json").read(Inner)


def test_what_kind_of_file_it_is_comes_before_its_version_and_that_before_its_seal():
    assert KIND.open(KIND.encode({"n": 7}), "f.json").read(Inner) == Inner(7)
    newer = {"format": "kind", "version": 3}
    with pytest.raises(FormatVersionError) as caught:
        KIND.open(json.dumps(newer).encode(), "f.json")
    assert (caught.value.found, caught.value.supported) == (3, 2)
    for values, problem in (
        ({**newer, "format": "other"}, "format"),
        ({**newer, "version": 1}, "its end"),
        ({**newer, "version": 1, "checksum": "crc32"}, "unknown algorithm"),
        ({**newer, "x": "y" * 1000}, "its size"),
    ):
        with pytest.raises(CorruptCheckpointError, match=problem):
            KIND.open(json.dumps(values).encode(), "f.json")


def test_a_key_twice_among_very_many_is_found_at_once():
    pairs = ", ".join(f'"{number}": 0' for number in (*range(200_000), 199_999))
    assert "duplicate key '199999'" in wrong(f"{{{pairs}}}".encode()).found


@pytest.mark.parametrize("digits", [41, 5_000, 3_000_000])
def test_a_number_longer_than_any_count_is_refused_before_it_is_computed(digits):
    error = wrong(b'{"a": ' + b"9" * digits + b"}")
    assert f"{digits} digits" in error.found


def test_what_is_wrong_is_said_in_a_few_words_however_long_it_is():
    assert len(str(wrong(b'{"' + b"x" * 10**6 + b'": 1, "' + b"x" * 10**6 + b'": 1}'))) < 1000


def wrong(data):
    with pytest.raises(CorruptCheckpointError) as caught:
        parse(data, "f.json")
    return caught.value
