"""x"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.layout import checked_name

RESERVED = ["checkpoint", "timeline.jsonl", "manifest.json"]
ANY_TEXT = st.text(min_size=1, max_size=15).filter(lambda text: text not in RESERVED)


@given(ANY_TEXT)
def test_every_id_has_a_directory_name_that_decodes_to_it(ckpt_id):
    try:
        encoded = layout.encode_id(ckpt_id)
    except ValueError:
        assert len(ckpt_id.encode("utf-8", "replace")) * 3 > layout.MAX_ID_BYTES or not ckpt_id.isprintable()
        return
    assert layout.parse_pin(f"{encoded}.json") == ckpt_id
    assert encoded.isascii()
    assert "/" not in encoded
    assert encoded[0] not in ".-"


@given(ANY_TEXT, ANY_TEXT)
def test_different_ids_have_different_directories(one, other):
    if one != other:
        assert layout.encode_id(one) != layout.encode_id(other)


def test_ids_are_percent_encoded_and_what_cannot_be_one_is_refused():
    encoded = {"ckpt_100": "ckpt_100", "a/b": "a%2Fb", "..": "%2E.", ".": "%2E", "-rf": "%2Drf", "100%": "100%25"}
    encoded |= {"täglich": "t%C3%A4glich", "~": "%7E", "a b\n": "a%20b%0A"}
    assert {ckpt_id: layout.encode_id(ckpt_id) for ckpt_id in encoded} == encoded
    for ckpt_id in ("", "x" * 201, "ü" * 40, *RESERVED, None, 7, "\ud800"):
        with pytest.raises(ValueError):  # noqa: PT011  # of several reasons
            layout.encode_id(ckpt_id)


def test_attempts_after_the_first_have_their_writer_in_their_name():
    names = layout.attempt_dirs("a/b", 7)
    assert [next(names) for _ in range(4)] == ["a%2Fb", "a%2Fb.7", "a%2Fb.7.1", "a%2Fb.7.2"]
    assert all(layout.is_later_attempt(name, "a") for name in ("a.7", "a.7.1", layout.offer_dir("a", "0" * 32)))
    assert not any(layout.is_later_attempt(name, "a") for name in ("a", "a.b", "ab.7", "a.07", "a.1.2.3"))
    assert [layout.is_attempt(name, "a") for name in ("a", "a.7", "a.b")] == [True, True, False]


def test_an_offer_has_a_directory_that_no_attempt_takes():
    name = layout.offer_dir("a/b", "0f" * 16)
    assert name == "a%2Fb." + "0f" * 16
    assert layout.is_offer_dir(name)
    assert layout.is_attempt(name, "a/b")
    for other in ("a%2Fb", "a%2Fb.7", "a%2Fb.7.1", name[:-1], f"{name}0", f"{name}.7", "0f" * 16):
        assert not layout.is_offer_dir(other)
    attempts = layout.attempt_dirs(name, 7)
    assert next(attempts) == layout.encode_id(name) + ".7"


def test_the_step_of_a_directory_is_told_where_its_id_is_that_of_a_step():
    steps = {"ckpt_0": 0, "ckpt_12": 12, "ckpt_12.3": 12, "ckpt_12.3.4": 12}
    steps |= dict.fromkeys(["ckpt_", "ckpt_012", "ckpt_1.2.3.4", "ckpt_1.0", "ckpt_\u0661", "xckpt_1", "ckpt_1x", "1"])
    assert {name: layout.parse_step(name) for name in steps} == steps


def test_the_files_of_the_owner_and_of_pins_are_told_apart():
    claim, takeover = (make(12).rpartition("/")[2] for make in (layout.claim, layout.takeover))
    assert layout.parse_owner_file(claim) == layout.parse_owner_file(takeover) == 12
    for name in ("12.json.0f.tmp", "0.json", "-1.json", "x.json", "1.lists.json", "\u0661.json"):
        assert layout.parse_owner_file(name) is None
    assert layout.parse_pin(layout.pin("a/b").rpartition("/")[2]) == "a/b"
    assert layout.parse_pin("a.json.tmp") is None
    assert [layout.is_claim(name) for name in (claim, takeover, "notes.json")] == [True, False, False]


def test_the_names_of_files_are_those_of_the_specification():
    assert layout.catalog(3, 4) == "sparse/00003-of-00004.json"
    assert layout.part(3, 4, 12, 5) == "sparse/00003-of-00004.g12.05.arrow"
    assert layout.part(100_000, 100_001, 0, 123) == "sparse/100000-of-100001.g0.123.arrow"
    assert layout.dense_index(3, 4) == "dense/00003-of-00004.json"
    assert layout.dense_data(3, 4) == "dense/00003-of-00004.bin"
    assert (layout.of_rank("io_state", 7), layout.of_rank("rng", 7)) == ("io_state_7.pt", "rng_7.pt")
    assert layout.step_id(1000) == "ckpt_1000"


def test_what_recckpt_writes_is_known_as_its_own_and_what_others_put_there_is_not():
    names = [
        "manifest.json",
        "INTENT",
        "model.pt",
        "extra.pt",
        layout.of_rank("io_state", 0),
        layout.of_rank("rng", 12),
    ]
    names += [layout.catalog(0, 1), layout.part(0, 1, 0, 0), layout.part(123_456, 200_000, 3, 100)]
    names += [layout.dense_index(0, 2), layout.dense_data(123_456, 200_000)]
    names += [f"{name}.0123456789abcdef.tmp" for name in ("manifest.json", "INTENT", "offer.json")]
    names += ["offer.json"]
    for name in names:
        assert layout.is_ours(name)
    for name in ("notes.txt", "sparse/x.arrow", "model.pt.bak", "sparse", "a/model.pt", "io_state_.pt"):
        assert not layout.is_ours(name)


def test_what_a_file_holds_is_told_from_its_name():
    parts = layout.part(3, 4, 0, 1), layout.part(3, 4, None, 0)
    assert [layout.holds_deletes(name) for name in parts] == [False, True]
    assert all(layout.is_part_of(name, layout.catalog(3, 4)) for name in parts)
    assert not layout.is_part_of(layout.catalog(3, 4), layout.catalog(3, 4))
    assert not layout.is_part_of(layout.part(13, 14, 0, 1), layout.catalog(3, 4))
    names = [
        layout.of_rank("io_state", 7),
        layout.of_rank("rng", 0),
        layout.of_rank("extra", 12),
        "extra.pt",
        "io_state_x.pt",
    ]
    assert [layout.content_of_rank(name) for name in names] == ["io_state", "rng", "extra", None, None]
    assert [layout.is_torch_file(name) for name in ("model.pt", layout.of_rank("rng", 0), layout.dense_data(0, 1))] == [
        1,
        1,
        0,
    ]
    assert layout.subdirectories(["model.pt", *parts, layout.dense_index(0, 1)]) == {"", "sparse", "dense"}


def test_a_name_for_what_is_being_written_is_fresh_and_what_crashes_leave_is_known():
    first, second = layout.temporary(layout.INTENT), layout.temporary(layout.INTENT)
    assert first != second
    assert layout.is_draft(first)
    assert layout.is_draft(first, layout.INTENT)
    assert not layout.is_draft(first, layout.OFFER_JSON)
    assert not layout.is_draft(layout.INTENT)
    assert layout.is_ours(first)
    for name in (layout.INDEX_FILE, layout.TIMELINE, layout.FORGOTTEN, layout.claim(1), layout.pin("a")):
        assert layout.is_temporary(layout.temporary(name))
        assert not layout.is_temporary(name)
    assert layout.is_temporary(layout.probe())
    assert layout.is_temporary(layout.temporary(layout.probe()))


def test_a_name_that_could_lead_out_of_the_checkpoint_is_refused_and_a_plain_relative_one_passes():
    unsafe = ["", "/etc/x", "../x", "a/../../x", "a/./b", "a//b", "a/", "..", ".", "http://h/x", "file::x", "C:x"]
    for name in (*unsafe, "a\\b", "a\0b", "x" * 256, "ü" * 128, "a/" * 512 + "b", "\ud800"):
        with pytest.raises(CorruptCheckpointError, match="unsafe path") as caught:
            checked_name(name, "ckpt_1/manifest.json")
        assert caught.value.path == "ckpt_1/manifest.json"
    for name in ("model.pt", "sparse/00000-of-00001.json", "a b/ü…", "..a/b..", "x" * 255, "a/b/c/d/e"):
        assert checked_name(name, "manifest.json") == name
