"""What the owner of an output dir does with the offers in it."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.delta_runs import rows_of, run_with_chain
from support.spec_reader import counting
from support.spec_writer import write_delta
from support.sweeps import mostly_slow

from recckpt.errors import WriterFencedError
from recckpt.format import layout, manifest
from recckpt.format.manifest import Manifest
from recckpt.output_dir.claims import claimed_epochs
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints, locate
from recckpt.output_dir.offers import adopt_offers, offers_in, why_not
from recckpt.rewrite.compaction import make_offer
from recckpt.rewrite.whole import Means
from recckpt.storage.transfers import VISIBLE


@pytest.fixture
def run(tmp_path):
    """A chain of three links."""
    return run_with_chain(tmp_path / "runs")


@pytest.fixture
def fence(run):
    """The owner of the output dir."""
    fence = Fence(run)
    fence.hold()
    return fence


def offered(run, ckpt_id="ckpt_3") -> str:
    done = make_offer(run, locate(run, ckpt_id), Means(None, 1, 1 << 20))
    assert done.directory is not None, done.reason
    return done.directory


def adopt(run, fence) -> list[str]:
    fence.look_again()
    return [done.directory for done in adopt_offers(run, fence, VISIBLE)]


def record_of(run, directory) -> Manifest:
    path = layout.join(directory, layout.OFFER_JSON)
    return manifest.decode(run.read(path, manifest.MAX_BYTES), path)


def lie(run, directory, **changes) -> None:
    """Put another ``offer.json`` in the place of the right one."""
    data = manifest.encode(replace(record_of(run, directory), **changes))
    path = layout.join(directory, layout.OFFER_JSON)
    run.remove(path)
    run.put_if_absent(path, data)


def everything(run) -> dict[str, bytes]:
    """Return all files but those that say who owns the output dir."""
    files = (path for path in Path(run.url).rglob("*") if path.is_file() and layout.OWN_DIR not in path.parts)
    return {str(path): path.read_bytes() for path in files}


def refused_for(run, fence, caplog, reason) -> None:
    before = everything(run)
    with caplog.at_level(logging.INFO):
        assert adopt(run, fence) == []
    assert reason in caplog.text
    assert everything(run) == before


def test_an_offer_says_all_of_the_manifest_but_the_number_and_changes_nothing_until_it_is_adopted(run, fence):
    before, delta, directory = list_checkpoints(run).committed, locate(run, "ckpt_3").manifest, offered(run)
    assert list_checkpoints(run).committed == before
    record = record_of(run, directory)
    assert (record.kind, record.epoch, record.seq, record.place) == ("full", fence.epoch, 0, delta.place)
    assert (record.name, record.name_xxh3) == (delta.save_id, delta.xxh3)
    adopt(run, fence)
    assert locate(run, "ckpt_3").manifest == replace(record, seq=4)


def test_an_offer_becomes_what_readers_take(run, fence):
    expected, directory = rows_of(run, "ckpt_3"), offered(run)
    assert adopt(run, fence) == [directory]
    found = locate(run, "ckpt_3")
    assert (found.directory, found.manifest.kind, found.below) == (directory, "full", ())
    assert found.manifest.place == (1, 3)
    assert rows_of(run, "ckpt_3") == expected
    for link in ("ckpt_1", "ckpt_2", "ckpt_3"):
        shutil.rmtree(f"{run.url}/{link}")
    assert rows_of(run, "ckpt_3") == expected
    assert locate(run, "ckpt_3").directory == directory


def test_a_delta_may_stand_on_what_was_compacted(run, fence):
    directory = offered(run, "ckpt_2")
    expected = rows_of(run, "ckpt_3")
    assert adopt(run, fence) == [directory]
    assert [link.directory for link in locate(run, "ckpt_3").links] == ["ckpt_3", directory]
    shutil.rmtree(f"{run.url}/ckpt_2")
    assert rows_of(run, "ckpt_3") == expected


def test_a_second_offer_of_a_delta_is_not_adopted(run, fence, caplog):
    first, second = offered(run), layout.offer_dir("ckpt_3", "ab" * 16)
    shutil.copytree(f"{run.url}/{first}", f"{run.url}/{second}")
    lie(run, second, save_id="ab" * 16)
    [adopted] = adopt(run, fence)
    assert adopted in (first, second)
    refused_for(run, fence, caplog, "was superseded already")


def test_an_offer_of_another_epoch_is_refused(run, fence, caplog):
    lie(run, offered(run), epoch=fence.epoch - 1)
    refused_for(run, fence, caplog, f"begun under epoch {fence.epoch - 1}")


def test_an_offer_goes_when_another_owner_takes_over_and_not_before(run, fence):
    directory = offered(run)
    run.remove(f"{directory}/{layout.OFFER_JSON}")
    adopt(run, fence)
    assert directory in attempt_dirs(run)
    Path(run.url, directory, "notes.txt").write_text("mine")
    Fence(run).hold()
    assert run.list_files(directory) == ["notes.txt"]


@mostly_slow()
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ckpt_id": "ckpt_1"}, "those of ckpt_1"),
        ({"supersedes": None}, "or of a commit"),
        ({"seq": 7}, "or of a commit"),
        ({"step": 17}, "step 17"),
        ({"ephemeral": True}, "ephemeral True"),
        ({"tables": ()}, "its tables"),
        ({"save_id": "ab" * 16}, "those of"),
    ],
)
def test_an_offer_of_something_else_is_refused_and_nothing_changes(run, fence, caplog, changes, reason):
    lie(run, offered(run), **changes)
    refused_for(run, fence, caplog, reason)


@pytest.mark.parametrize("changes", [{"manifest": 1}, {"save_id": "ab" * 16}, {"seq": 9}, {"rows": "fewer"}])
def test_an_offer_of_another_manifest_than_the_one_that_counts_is_refused(run, fence, caplog, changes):
    directory = offered(run)
    lie(run, directory, supersedes=record_of(run, directory).supersedes.but(**changes))
    refused_for(run, fence, caplog, "is not adopted")


def test_an_offer_with_other_rows_or_slots_than_the_delta_is_refused(run, fence, caplog):
    directory = offered(run)
    [table] = record_of(run, directory).tables
    lie(run, directory, tables=(table.but(rows=149),))
    refused_for(run, fence, caplog, "its tables")
    lie(run, directory, tables=(table.but(slots=(*table.slots, replace(table.slots[0], name="m"))),))
    refused_for(run, fence, caplog, "its tables")


@pytest.mark.parametrize("file", ["sparse/00000-of-00002.g0.00.arrow", "sparse/00001-of-00002.json"])
def test_an_offer_that_is_not_whole_is_refused(run, fence, caplog, file):
    directory = offered(run)
    path = Path(run.url, directory, file)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    refused_for(run, fence, caplog, file)
    path.unlink()
    refused_for(run, fence, caplog, file)
    path.write_bytes(data)
    assert adopt(run, fence) == [directory]


def test_an_offer_that_is_damaged_or_was_never_finished_is_refused(run, fence, caplog):
    path = Path(run.url, offered(run), layout.OFFER_JSON)
    path.write_bytes(path.read_bytes()[:-4])
    refused_for(run, fence, caplog, layout.OFFER_JSON)
    path.unlink()
    refused_for(run, fence, caplog, "its compactor is at work, or died")


def test_an_offer_of_a_delta_whose_chain_is_broken_is_refused(run, fence, caplog):
    offered(run)
    Path(run.url, "ckpt_1", "sparse", "00000-of-00002.json").write_text("{}")
    refused_for(run, fence, caplog, "no valid delta")


def test_an_offer_of_a_delta_that_was_committed_too_late_is_not_adopted(run, fence):
    late = run.read("ckpt_3/manifest.json", 1 << 20)
    directory = offered(run)
    run.remove("ckpt_3/manifest.json")
    later = Fence(run)  # an owner that has not seen it
    later.hold()
    run.put_if_absent("ckpt_3/manifest.json", late)
    assert adopt(run, later) == []
    assert list(list_checkpoints(run).fenced) == ["ckpt_3"]
    assert directory not in attempt_dirs(run)


def test_what_is_compacted_of_an_ephemeral_checkpoint_is_ephemeral(run, fence):
    [top] = [found for found in counting(Path(run.url)) if found.directory.name == "ckpt_3"]
    options = {"flags": {"ephemeral": True}, "time": "2020-01-01T00:00:00Z", "epoch": fence.epoch}
    write_delta(top, "ckpt_4", 150, [({7: [3, 4]}, [])], **options)
    offered(run, "ckpt_4")
    adopt(run, fence)
    found = locate(run, "ckpt_4").manifest
    assert (found.kind, found.ephemeral) == ("full", True)
    assert found.time == "2020-01-01T00:00:00Z"  # as old as its delta, so that policies take it for that


def test_who_has_lost_the_output_dir_adopts_and_removes_nothing(run, fence):
    offered(run)
    fence.look_again()
    run.put_if_absent(layout.claim(fence.epoch + 1), b"{}")
    run.remove(layout.claim(fence.epoch))
    before = everything(run)
    with pytest.raises(WriterFencedError):
        adopt_offers(run, fence, VISIBLE)
    assert everything(run) == before


def test_a_failed_adoption_removes_nothing(run, fence, monkeypatch, caplog):
    directory = offered(run)
    names = set(run.list_files(directory))
    monkeypatch.setattr(type(run), "put_if_absent", failing_on("manifest.json", type(run).put_if_absent))
    assert adopt(run, fence) == []
    assert "No space left" in caplog.text
    assert set(run.list_files(directory)) == names
    monkeypatch.undo()
    assert adopt(run, fence) == [directory]


def failing_on(name, put):
    def put_or_fail(self, path, data):
        if path.endswith(name):
            raise OSError(28, "No space left on device", path)
        put(self, path, data)

    return put_or_fail


def test_a_manifest_that_is_there_already_stays(run, fence):
    directory = offered(run)
    fence.look_again()
    Path(run.url, directory, "manifest.json").write_text("another's")
    assert adopt_offers(run, fence, VISIBLE) == []
    assert Path(run.url, directory, "manifest.json").read_text() == "another's"


def test_an_output_dir_without_offers_is_not_written_to_and_whether_to_adopt_is_decided_without_a_disk(run, fence):
    times = {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")}
    assert adopt(run, fence) == []
    assert {path: path.stat().st_mtime_ns for path in Path(run.url).rglob("*")} == times
    directory, listing = offered(run), list_checkpoints(run)
    [found] = offers_in(run, listing)
    assert claimed_epochs(run)[-1] == fence.epoch
    assert (found.directory, found.problem, why_not(found, fence.epoch, listing)) == (directory, "", None)
    assert f"begun under epoch {fence.epoch}" in why_not(found, fence.epoch + 1, listing)
