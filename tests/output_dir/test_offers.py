"""What the owner of an output dir does with the offers in it."""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.delta_runs import rows_of, run_with_chain
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.errors import WriterFencedError
from recckpt.format import layout, offer
from recckpt.output_dir import rotation
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints, locate
from recckpt.output_dir.offers import DAY_SEC, adopt_offers, adoptable, find_offers
from recckpt.rewrite.compaction import make_offer
from recckpt.rewrite.whole import Means
from recckpt.storage import open_storage
from recckpt.storage.transfers import VISIBLE


@pytest.fixture
def run(tmp_path):
    """A chain of three links, and nobody who owns the dir."""
    return run_with_chain(tmp_path / "runs")


def offered(run, ckpt_id="ckpt_3") -> str:
    done = make_offer(run, locate(run, ckpt_id), Means(None, 1, 1 << 20))
    assert done.directory is not None, done.reason
    return done.directory


def adopt(run) -> list[str]:
    fence = Fence(run)
    fence.hold()
    return [form.directory for form in adopt_offers(run, fence, VISIBLE, 1)]


def said(run, directory) -> offer.Offer:
    path = layout.join(directory, layout.OFFER_JSON)
    return offer.decode(run.read(path, offer.MAX_BYTES), path)


def lie(run, directory, **changes) -> None:
    """Put another ``offer.json`` in the place of the right one."""
    data = offer.encode(replace(said(run, directory), **changes))
    path = layout.join(directory, layout.OFFER_JSON)
    run.remove(path)
    run.put_if_absent(path, data)


def make_older(run, directory, seconds) -> None:
    path = Path(run.url, directory, layout.OFFER)
    os.utime(path, times=(path.stat().st_atime, path.stat().st_mtime - seconds))


def everything(run) -> dict[str, bytes]:
    """Return all files but those that say who owns the output dir."""
    files = (path for path in Path(run.url).rglob("*") if path.is_file() and layout.OWN_DIR not in path.parts)
    return {str(path): path.read_bytes() for path in files}


def test_a_form_is_as_old_as_its_delta_so_that_policies_take_it_for_that(run):
    top = max(counting(Path(run.url)), key=lambda found: found.place)
    write_delta(top, "ckpt_4", 150, [({7: [3, 4]}, [])], time="2020-01-01T00:00:00Z")
    offered(run, "ckpt_4")
    adopt(run)
    assert locate(run, "ckpt_4").manifest.kind == "full"
    assert locate(run, "ckpt_4").manifest.time == "2020-01-01T00:00:00Z"


def test_an_offer_becomes_a_form_that_readers_take(run):
    expected, directory = rows_of(run, "ckpt_3"), offered(run)
    assert adopt(run) == [directory]
    found = locate(run, "ckpt_3")
    assert (found.directory, found.manifest.kind, found.below) == (directory, "full", ())
    assert found.manifest.place == (1, 3)
    assert rows_of(run, "ckpt_3") == expected
    for link in ("ckpt_1", "ckpt_2", "ckpt_3"):
        shutil.rmtree(f"{run.url}/{link}")
    assert rows_of(run, "ckpt_3") == expected
    assert locate(run, "ckpt_3").directory == directory


def test_an_offer_changes_nothing_for_readers_until_it_is_adopted(run):
    before = list_checkpoints(run).committed
    offered(run)
    assert list_checkpoints(run).committed == before


def test_a_delta_may_stand_on_what_has_a_form(run):
    directory = offered(run, "ckpt_2")
    expected = rows_of(run, "ckpt_3")
    assert adopt(run) == [directory]
    assert [link.directory for link in locate(run, "ckpt_3").links] == ["ckpt_3", directory]
    shutil.rmtree(f"{run.url}/ckpt_2")
    assert rows_of(run, "ckpt_3") == expected


def test_the_same_offer_is_not_adopted_twice_and_a_second_one_of_a_delta_is_not_adopted(run):
    first = offered(run)
    copied = said(run, first)
    assert adopt(run) == [first]
    second = layout.offer_dir("ckpt_3", "ab" * 16)
    shutil.copytree(f"{run.url}/{first}", f"{run.url}/{second}")
    run.remove(f"{second}/manifest.json")
    run.remove(f"{second}/{layout.OFFER}")
    run.put_if_absent(f"{second}/{layout.OFFER}", offer.encode_first("ckpt_3", "ab" * 16))
    lie(run, second, save_id="ab" * 16)
    assert copied.of == said(run, second).of
    assert adopt(run) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"of": offer.Offered("ckpt_3", "ab" * 16, 1)}, "counts here"),
        ({"of": offer.Offered("ckpt_1", "", 1)}, "those of ckpt_1"),
        ({"step": 17}, "step 17"),
        ({"ephemeral": True}, "ephemeral True"),
        ({"tables": ()}, "its tables"),
        ({"save_id": "ab" * 16}, "those of"),
    ],
)
def test_an_offer_of_something_else_is_refused_and_nothing_changes(run, caplog, changes, reason):
    directory = offered(run)
    lie(run, directory, **changes)
    refused_for(run, caplog, reason)


def refused_for(run, caplog, reason) -> None:
    before = everything(run)
    with caplog.at_level(logging.INFO):
        assert adopt(run) == []
    assert reason in caplog.text
    assert everything(run) == before


def test_an_offer_of_a_delta_that_was_written_anew_is_refused(run, caplog):
    directory = offered(run)
    of = said(run, directory).of
    lie(run, directory, of=of.but(manifest=of.manifest ^ 1))
    refused_for(run, caplog, "counts here")


def test_an_offer_with_other_rows_or_slots_than_the_delta_is_refused(run, caplog):
    directory = offered(run)
    [table] = said(run, directory).tables
    lie(run, directory, tables=(table.but(rows=149),))
    refused_for(run, caplog, "its tables")
    lie(run, directory, tables=(table.but(slots=(*table.slots, replace(table.slots[0], name="m"))),))
    refused_for(run, caplog, "its tables")


@pytest.mark.parametrize("file", ["sparse/00000-of-00002.g0.00.arrow", "sparse/00001-of-00002.json"])
def test_an_offer_that_is_not_whole_is_refused(run, caplog, file):
    directory = offered(run)
    path = Path(run.url, directory, file)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    refused_for(run, caplog, file)
    path.unlink()
    refused_for(run, caplog, file)
    path.write_bytes(data)
    assert adopt(run) == [directory]


def test_an_offer_that_was_never_finished_is_refused(run, caplog):
    directory = offered(run)
    run.remove(f"{directory}/{layout.OFFER_JSON}")
    refused_for(run, caplog, "its compactor is at work, or died")


@pytest.mark.parametrize("name", [layout.OFFER, layout.OFFER_JSON])
def test_a_damaged_offer_is_refused(run, caplog, name):
    path = Path(run.url, offered(run), name)
    path.write_bytes(path.read_bytes()[:-4])
    refused_for(run, caplog, name)


def test_an_offer_of_a_delta_whose_chain_is_broken_is_refused(run, caplog):
    offered(run)
    Path(run.url, "ckpt_1", "sparse", "00000-of-00002.json").write_text("{}")
    refused_for(run, caplog, "counts here")


def test_an_offer_of_a_delta_that_was_committed_too_late_is_refused(run, caplog):
    directory = offered(run)
    late = run.read("ckpt_3/manifest.json", 1 << 20)
    run.remove("ckpt_3/manifest.json")
    Fence(run).hold()  # an owner that has not seen it
    run.put_if_absent("ckpt_3/manifest.json", late)
    refused_for(run, caplog, "counts here")
    assert list(list_checkpoints(run).fenced) == ["ckpt_3"]
    assert directory in attempt_dirs(run)


def test_a_form_of_an_ephemeral_checkpoint_is_ephemeral(run):
    [top] = [found for found in counting(Path(run.url)) if found.directory.name == "ckpt_3"]
    write_delta(top, "ckpt_4", 150, [({7: [3, 4]}, [])], flags={"ephemeral": True})
    assert adopt(run) == [] != [offered(run, "ckpt_4")]
    adopt(run)
    found = locate(run, "ckpt_4").manifest
    assert (found.kind, found.ephemeral) == ("full", True)


def test_an_old_offer_is_not_adopted_and_goes_only_when_it_is_two_days_old(run):
    directory = offered(run)
    make_older(run, directory, DAY_SEC + 60)
    assert adopt(run) == []
    assert directory in attempt_dirs(run)
    make_older(run, directory, DAY_SEC)
    assert adopt(run) == []
    assert directory not in attempt_dirs(run)


def test_an_unfinished_offer_goes_when_it_is_two_days_old_and_not_before(run):
    directory = offered(run)
    run.remove(f"{directory}/{layout.OFFER_JSON}")
    make_older(run, directory, 2 * DAY_SEC - 3600)
    adopt(run)
    assert directory in attempt_dirs(run)
    make_older(run, directory, 3600)
    adopt(run)
    assert directory not in attempt_dirs(run)


def test_what_has_no_first_file_is_no_offer_and_goes(run):
    directory = offered(run)
    run.remove(f"{directory}/{layout.OFFER}")
    assert adopt(run) == []
    assert directory not in attempt_dirs(run)


def test_files_of_others_stay_in_the_directory_of_an_old_offer(run):
    directory = offered(run)
    Path(run.url, directory, "notes.txt").write_text("mine")
    make_older(run, directory, 2 * DAY_SEC)
    adopt(run)
    assert run.list_files(directory) == ["notes.txt"]


def test_who_has_lost_the_output_dir_adopts_and_removes_nothing(run):
    offered(run, "ckpt_2")
    make_older(run, offered(run), 2 * DAY_SEC)
    fence, later = Fence(run), Fence(run)
    fence.hold()
    later.hold()
    before = everything(run)
    with pytest.raises(WriterFencedError):
        adopt_offers(run, fence, VISIBLE, 1)
    assert everything(run) == before


def test_a_failed_adoption_removes_nothing(run, monkeypatch, caplog):
    directory = offered(run)
    fence = Fence(run)
    fence.hold()
    names = set(run.list_files(directory))
    monkeypatch.setattr(type(run), "put_if_absent", failing_on("manifest.json", type(run).put_if_absent))
    assert adopt_offers(run, fence, VISIBLE, 1) == []
    assert "No space left" in caplog.text
    assert set(run.list_files(directory)) == names
    monkeypatch.undo()
    assert [form.directory for form in adopt_offers(run, fence, VISIBLE, 1)] == [directory]


def failing_on(name, put):
    def put_or_fail(self, path, data):
        if path.endswith(name):
            raise OSError(28, "No space left on device", path)
        put(self, path, data)

    return put_or_fail


def test_a_manifest_that_another_owner_put_stays(run):
    directory = offered(run)
    fence = Fence(run)
    fence.hold()
    Path(run.url, directory, "manifest.json").write_text("another's")
    assert adopt_offers(run, fence, VISIBLE, 1) == []
    assert Path(run.url, directory, "manifest.json").read_text() == "another's"


def test_an_owner_that_adopts_too_late_brings_nothing_back(memory_url, tmp_path):
    """Two owners adopt one offer, the earlier when the form of the later has been listed, and is gone."""
    run, first = in_memory(run_with_chain(tmp_path / "runs").url, memory_url), open_storage(memory_url)
    offered(run)
    late, put = Fence(first), first.put_if_absent
    late.hold()

    def put_late(path, data):
        if path.endswith(layout.MANIFEST):
            adopt(run)  # the second owner
            third = Fence(run)
            third.hold()  # lists the form
            for checkpoint in third.listing.committed[::-1]:
                assert rotation.remove(run, checkpoint, 1)
        put(path, data)

    first.put_if_absent = put_late
    with pytest.raises(WriterFencedError):
        adopt_offers(first, late, VISIBLE, 1)
    listing = list_checkpoints(run)
    assert (listing.committed, listing.damaged, len(listing.fenced)) == ((), {}, 1)


def in_memory(path, url):
    """Return a copy of an output dir, on an object store: a file may be put where a directory was removed."""
    copy = open_storage(url)
    copy.prepare()
    for file in (file for file in Path(path).rglob("*") if file.is_file()):
        copy.put_if_absent(file.relative_to(path).as_posix(), file.read_bytes())
    return copy


def test_an_output_dir_without_offers_is_not_written_to(run):
    fence = Fence(run)
    fence.hold()
    times = {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")}
    assert adopt_offers(run, fence, VISIBLE, 1) == []
    assert {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")} == times


def test_whether_to_adopt_is_decided_without_a_disk(run):
    directory = offered(run)
    listing = list_checkpoints(run)
    fence = Fence(run)
    fence.hold()
    [found] = find_offers(run, fence.listing)
    assert (found.directory, found.problem, adoptable(found, listing)) == (directory, "", None)
    assert "how old" in adoptable(replace(found, age_sec=None), listing)
    assert adoptable(replace(found, age_sec=DAY_SEC - 1), listing) is None
    assert "24 hours" in adoptable(replace(found, age_sec=DAY_SEC), listing)
