"""What stands on what: chains.py, without a disk, against the model of the protocol and against docs/format.md 12.3."""

from dataclasses import replace

import pytest
from faults import delta_states as model
from support.drawn import drawn
from support.links import SLOTS, as_in_the_model, compacted, delta, full, output_dirs

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format.manifest import MAX_LINKS, Manifest
from recckpt.format.tables import DeltaRows, LiveLayout, TableEntry
from recckpt.output_dir.listing import Chains
from recckpt.types import SlotSpec

A = full("a", 1)
B = delta("b", 2, A)
C = delta("c", 3, B)


def chains_of(*manifests: Manifest, damaged=None) -> Chains:
    return Chains({directory_of(record): record for record in manifests}, damaged or {})


def directory_of(record: Manifest) -> str:
    return record.ckpt_id if not record.is_compacted else f"{record.ckpt_id}.{record.save_id}"


def damage(directory: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{directory}/model.pt", "its size", found="3 bytes", expected="4 bytes")


def test_a_chain_goes_down_to_the_full_one():
    chains = chains_of(C, A, B)
    assert chains.links("c") == ("c", "b", "a")
    assert chains.links("a") == ("a",)
    assert (chains.broken, chains.is_incomplete) == ({}, False)


def test_a_link_is_read_through_the_last_of_its_name():
    chains = chains_of(A, B, C, compacted(B, "f1"), compacted(B, "f2"))
    assert chains.links("c") == ("c", "b.f2")
    assert chains.links("b") == ("b", "a")
    assert chains.named(B.save_id) == ["b.f2", "b.f1", "b"]
    assert chains_of(compacted(B, "f1"), C).links("c") == ("c", "b.f1")


def test_a_damaged_one_is_passed_over_for_the_delta():
    chains = chains_of(A, B, C, compacted(B, "f1"), damaged={"b.f1": damage("b.f1")})
    assert chains.links("c") == ("c", "b", "a")
    assert list(chains.broken) == ["b.f1"]


def test_a_copy_of_a_link_stands_in_for_it_and_comes_last():
    assert Chains({"0": A, "a": A, "z": A, "b": B}, {}).links("b") == ("b", "a")
    assert Chains({"a": A, "z": A, "b": B}, {"a": damage("a")}).links("b") == ("b", "z")


def test_what_must_stay_is_a_whole_chain_of_each():
    chains = chains_of(A, B, C, compacted(B, "f1"), full("x", 7))
    assert chains.closure([A.save_id]) == {"a"}
    assert chains.closure([B.save_id]) == {"b.f1"}
    assert chains.closure([C.save_id, "gone"]) == {"c", "b.f1"}


OTHER_SLOTS = (SlotSpec("embedding", "float32", (3,)),)
REFUSED = {
    "base missing": ([B], "found no such checkpoint, expected that of save save of a, in a/"),
    "base of another hash": ([replace(A, xxh3=7), B], "found a/ with the checksum 0000000000000007, expected"),
    "copied from another run": ([replace(A, save_id="another run's"), B], "found no such checkpoint"),
    "another id": ([replace(A, ckpt_id="other"), B], "found other/ with the id 'other', expected 'a'"),
    "not older": ([replace(A, seq=2), B], r"found a/ committed as \(1, 2\), expected one before \(1, 2\)"),
    "newer": ([replace(A, epoch=2), B], r"found a/ committed as \(2, 1\), expected one before \(1, 2\)"),
    "other slots": (
        [A, replace(B, tables=(TableEntry("item", 3, OTHER_SLOTS, DeltaRows(1, 0, False)),))],
        r"found a/ with slots embedding float32\[2\] in table 'item', expected embedding float32\[3\]",
    ),
    "another live layout": (
        [A, replace(B, tables=(B.tables[0].but(live=LiveLayout(9, ((0, 1), (1, 2)))),))],
        r"found a/ with table 'item' not live, expected live, of 9 rows and columns \[\[0, 1\], \[1, 2\]\], as in",
    ),
    "a table that the parent lacks": ([replace(A, tables=()), B], "found a/ with no table 'item', expected this table"),
}


@pytest.mark.parametrize(("manifests", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_delta_without_a_chain_is_refused_by_the_name_of_the_link(manifests, expected):
    chains = chains_of(*manifests, C, full("x", 9))
    assert list(chains.broken) == ["b", "c"]
    with pytest.raises(CorruptCheckpointError, match=f"^b/manifest.json at parent 'a': {expected}"):
        raise chains.broken["b"]
    with pytest.raises(CorruptCheckpointError, match=f"^b/manifest.json at parent 'a', in a link of 'c': {expected}"):
        raise chains.broken["c"]
    assert chains.is_incomplete == ("no such" in expected)
    assert chains.named("save of x") == ["x"]


def test_two_deltas_on_each_other_are_no_chain():
    one = delta("one", 5, full("two", 5))
    two = delta("two", 5, one)
    assert list(chains_of(one, two).broken) == ["one", "two"]


def test_a_table_that_is_replaced_need_not_be_below():
    other = (TableEntry("item", 3, OTHER_SLOTS), TableEntry("more", 3, SLOTS))
    whole = tuple(table.but(delta=DeltaRows(3, 0, True)) for table in other)
    assert chains_of(A, replace(B, tables=whole)).links("b") == ("b", "a")
    assert chains_of(A, replace(B, tables=())).links("b") == ("b", "a")


def test_a_thousand_links_are_a_chain_and_one_more_is_none():
    links = [full("0", 0)]
    while len(links) <= MAX_LINKS:
        links.append(delta(str(len(links)), len(links), links[-1], chain=()))
    chains = chains_of(*links)
    assert len(chains.links(str(MAX_LINKS - 1))) == MAX_LINKS
    assert list(chains.broken) == [str(MAX_LINKS)]
    assert "999/ with 1000 links, expected a chain of at most 1000" in str(chains.broken[str(MAX_LINKS)])


def test_damage_of_a_link_is_that_of_all_that_stand_on_it():
    chains = chains_of(A, B, C, full("x", 9), damaged={"a": damage("a")})
    assert list(chains.broken) == ["a", "b", "c"]
    assert str(chains.broken["c"]).startswith("a/model.pt at its size, in a link of 'c': found 3 bytes, expected 4")


def test_a_link_whose_manifest_cannot_be_read_is_named_by_the_hint():
    chains = chains_of(B, C, damaged={"a": damage("a")})
    assert str(chains.broken["c"]).startswith("a/model.pt at its size, in a link of 'c'")
    newer = FormatVersionError("a/manifest.json", found=2, supported=1)
    assert chains_of(B, damaged={"a": newer}).broken["b"] is newer
    lost = OSError("no permission")
    assert chains_of(B, damaged={"a": lost}).broken["b"] is lost


@drawn(output_dirs(), few=100, many=5000)
def test_the_chains_are_those_that_readers_of_the_model_take(made):
    there, damaged = made
    chains = Chains(there, {name: damage(name) for name in damaged})
    view = model.View(model.Rules(), *as_in_the_model(there, damaged))
    for record in there.values():
        expected = tuple(link.directory for link in view.chain(record.name))
        best = chains.named(record.name)[:1]
        assert (chains.links(best[0]) if best else ()) == expected
        assert chains.closure([record.name]) == set(expected)
    assert chains.broken.keys() >= damaged
