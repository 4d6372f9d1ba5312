import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format.json_fields import MAX_DEPTH, Fields, parse


def fields(**values) -> Fields:
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
    assert fields(a=text).text("a") == text


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
    ("values", "wrong"),
    [
        ({"a": "0" * 16, "b": "f" * 15}, "b"),
        ({"a": f"{'0' * 16},{'1' * 16}", "b": ""}, "a"),
        ({"a": f"{'0' * 8},{'1' * 8}", "b": "2" * 15}, "a"),
        ({"a": "0" * 16, "b": "F" * 16}, "b"),
        ({"a": "0" * 16, "b": " " + "1" * 15}, "b"),
        ({"a": "0" * 16, "b": 7}, "b"),
        ({"a": None}, "a"),
    ],
)
def test_an_object_of_checksums_is_16_hex_digits_each(values, wrong):
    assert fields(x={"a": "0" * 15 + "1", "b": "f" * 16}).mapping("x").checksums() == {"a": 1, "b": 2**64 - 1}
    assert fields(x={}).mapping("x").checksums() == {}
    with pytest.raises(CorruptCheckpointError) as caught:
        fields(x=values).mapping("x").checksums()
    assert caught.value.where == f"x.{wrong}"


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000, '"\\' * 500_000, '"' * 500_001, "\\" * 500_000])
def test_a_string_left_open_takes_no_quadratic_time(text):
    with pytest.raises(CorruptCheckpointError):
        parse(b'{"a": ' + text.encode(), "f.json")


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=9)
)
def test_parsing_gives_what_json_gives(value):
    data = json.dumps({"a": value}).encode()
    assert parse(data, "f.json")._values == {"a": value}


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("text", 1),
        ("text", None),
        ("count", -1),
        ("count", 1.0),
        ("count", True),
        ("count", 10**18),
        ("count", "1"),
        ("maybe_count", -1),
        ("flag", 1),
        ("flag", "true"),
        ("checksum", "0123456789abcde"),
        ("checksum", "0123456789ABCDEF"),
        ("checksum", "0123456789abcdeg"),
        ("checksum", "0123456789abcdef\n"),
        ("checksum", 7),
        ("counts", [1, -1]),
        ("counts", [1, None]),
        ("counts", {"a": 1}),
        ("texts", ["a", 1]),
        ("texts", "ab"),
        ("mapping", []),
        ("objects", [{}, 1]),
        ("objects", {}),
        ("scalars", {"a": []}),
        ("scalars", [1]),
    ],
)
def test_a_field_of_another_type_is_corrupt_and_named(method, value):
    with pytest.raises(CorruptCheckpointError) as caught:
        getattr(fields(top={"key": value}).mapping("top"), method)("key")
    assert caught.value.where.startswith("top.key")
    assert caught.value.path == "f.json"


@pytest.mark.parametrize(
    "method", ["text", "count", "flag", "checksum", "counts", "texts", "mapping", "objects", "scalars"]
)
def test_a_missing_field_is_corrupt(method):
    with pytest.raises(CorruptCheckpointError, match="no such field"):
        getattr(fields(), method)("key")


def test_fields_come_with_their_type():
    found = fields(t="x", n=5, f=True, h="00000000000000ff", l=[1, 2], s=["a"], m={"k": None, "x": 1.5}, o=[{"a": 1}])
    assert (found.text("t"), found.count("n"), found.flag("f"), found.checksum("h")) == ("x", 5, True, 255)
    assert (found.counts("l"), found.texts("s"), found.scalars("m")) == ((1, 2), ["a"], {"k": None, "x": 1.5})
    assert found.objects("o")[0].count("a") == 1
    assert (found.maybe_count("none"), found.has("t"), found.has("none")) == (None, True, False)


def test_a_low_bound_is_held():
    with pytest.raises(CorruptCheckpointError, match="at least 1"):
        fields(shape=[2, 0]).counts("shape", low=1)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(CorruptCheckpointError) as caught:
        fields(a="x" * 100_000).count("a")
    assert len(str(caught.value)) < 1000


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


def test_what_kind_of_file_it_is_comes_before_its_version():
    fields(format="a", version=2).check_format("a", 2)
    with pytest.raises(CorruptCheckpointError, match="format"):
        fields(format="b", version=3).check_format("a", 2)
    with pytest.raises(FormatVersionError) as caught:
        fields(format="a", version=3).check_format("a", 2)
    assert (caught.value.found, caught.value.supported) == (3, 2)
