"""Deltas and forms in an output dir: which count, and which links they come with, however they are asked for."""

import pickle
import shutil
from pathlib import Path

import pytest
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.output_dir import at_path
from recckpt.output_dir.at_path import locate_path, open_checkpoint
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import Checkpoint, list_checkpoints, locate, newest, newest_first
from recckpt.storage import Storage

ROWS = {1: (1, 1)}


@pytest.fixture
def chain(local):
    """The full checkpoint a, b on it, and c on that."""
    save_tables(local, [filled("item", range(3))], ckpt_id="a")
    [full] = counting(Path(local.url))
    links = [full]
    for ckpt_id in "bc":
        links.append(write_delta(links[-1], ckpt_id, 3, [(ROWS, [])]))
    return links


def names(checkpoint: Checkpoint) -> list[str]:
    return [link.directory for link in checkpoint.links]


def committed(storage: Storage) -> list[str]:
    return [checkpoint.directory for checkpoint in list_checkpoints(storage).committed]


def test_a_delta_comes_with_its_links_however_it_is_asked_for(local, chain):
    asked = [newest(local), locate(local, "c"), newest_first(local)[0], list_checkpoints(local).find("c")]
    asked += [open_checkpoint(f"{local.url}/c")[1], locate_path(f"{local.url}/c")[1], locate_path(local.url)[1]]
    assert [names(found) for found in asked] == [["c", "b", "a"]] * len(asked)
    assert all(link.below == () for found in asked for link in found.below)


def test_a_form_is_taken_for_its_delta_and_for_what_is_below(local, chain):
    form = write_compacted(chain[1], ROWS).directory.name
    assert committed(local) == ["a", "b", form, "c"]
    assert [found.directory for found in list_checkpoints(local).current] == ["a", form, "c"]
    assert (names(locate(local, "b")), names(newest(local))) == ([form], ["c", form])
    for gone in chain[:2]:
        (gone.directory / "manifest.json").unlink()
    assert names(newest(local)) == names(open_checkpoint(f"{local.url}/c")[1]) == ["c", form]
    assert names(locate_path(f"{local.url}/b")[1]) == [form]


def test_a_damaged_form_leaves_its_delta_to_readers(local, chain):
    form = write_compacted(chain[1], ROWS).directory
    next(form.glob("sparse/*.arrow")).unlink()
    assert list(list_checkpoints(local).damaged) == [form.name]
    assert names(locate(local, "b")) == names(open_checkpoint(str(form))[1]) == ["b", "a"]


def test_a_damaged_delta_is_read_by_its_form(local, chain):
    form = write_compacted(chain[1], ROWS).directory
    next(chain[1].directory.glob("sparse/*.arrow")).unlink()
    assert names(open_checkpoint(f"{local.url}/b")[1]) == [form.name]
    assert names(open_checkpoint(f"{local.url}/c")[1]) == ["c", form.name]


def test_restoring_falls_back_past_all_that_stand_on_a_damaged_link(local, chain, caplog):
    write_delta(chain[0], "d", 3, [(ROWS, [])], seq=9)
    next(chain[1].directory.glob("sparse/*.arrow")).unlink()
    assert [found.directory for found in newest_first(local)] == ["d", "a"]
    assert list(list_checkpoints(local).damaged) == ["b", "c"]
    for look in (lambda: locate(local, "c"), lambda: open_checkpoint(f"{local.url}/c")):
        with pytest.raises(CorruptCheckpointError, match=r"^b/sparse/.*a link of 'c'"):
            look()


def test_a_missing_link_is_looked_for_again_before_that_is_damage(local, chain, monkeypatch):
    manifest, hidden = chain[1].directory / "manifest.json", chain[1].directory / "hidden"
    manifest.rename(hidden)
    looks, look = [], type(local).list_dirs

    def list_dirs(storage):
        looks.append(storage)
        if len(looks) == 3 and hidden.exists():
            hidden.rename(manifest)
        return look(storage)

    monkeypatch.setattr(type(local), "list_dirs", list_dirs)
    assert names(newest(local)) == ["c", "b", "a"]
    shutil.rmtree(chain[1].directory)
    del looks[:]
    assert names(newest(local)) == ["a"]
    assert len(looks) == 3


def test_a_delta_that_was_copied_alone_says_what_is_missing_and_how_to_make_a_whole_one(chain, tmp_path):
    alone = shutil.copytree(chain[2].directory, tmp_path / "other" / "place")
    with pytest.raises(CorruptCheckpointError) as caught:
        open_checkpoint(str(alone))
    assert str(caught.value) == (
        "place/manifest.json at chain: found no b/, a/ beside it, expected the base of this delta; copy its links "
        "too, or make it a full checkpoint beside them: `recckpt compact DIR c --out OTHER`"
    )
    with pytest.raises(
        CorruptCheckpointError, match=r"links too, or make it a full checkpoint .*`recckpt compact DIR c --out OTHER`"
    ):
        locate_path(str(alone.parent))
    shutil.copytree(chain[1].directory, alone.parent / "b")
    with pytest.raises(CorruptCheckpointError, match="found no a/ beside it"):
        locate_path(str(alone))
    shutil.copytree(chain[0].directory, alone.parent / "base")
    assert names(locate_path(str(alone))[1]) == ["place", "b", "base"]


def test_links_are_found_and_missed_where_nothing_can_be_listed(local, chain, monkeypatch):
    def refuses(storage):
        raise PermissionError("may be entered, not listed")

    monkeypatch.setattr(type(local), "list_dirs", refuses)
    assert names(open_checkpoint(f"{local.url}/c")[1]) == ["c", "b", "a"]
    (chain[0].directory / "manifest.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="found no a/ beside it"):
        open_checkpoint(f"{local.url}/c")


def test_a_delta_among_checkpoints_of_another_run_is_refused(local, chain, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(chain[1].directory, other / "b")
    shutil.copytree(chain[2].directory, other / "a")
    with pytest.raises(CorruptCheckpointError, match=r"^b/manifest\.json at parent 'a': found no such checkpoint"):
        open_checkpoint(str(other / "b"))


def test_the_links_of_a_delta_are_read_where_its_manifest_says_and_the_rest_is_left_alone(local, chain, monkeypatch):
    write_delta(chain[0], "d", 3, [(ROWS, [])])
    read = []

    def read_noted(storage, directory):
        read.append(directory)
        return read_manifest(storage, directory)

    monkeypatch.setattr(at_path, "read_manifest", read_noted)
    monkeypatch.setattr(type(local), "list_dirs", lambda storage: pytest.fail("listed"))
    assert names(open_checkpoint(f"{local.url}/c")[1]) == ["c", "b", "a"]
    assert sorted(read) == ["a", "b", "c"]


def test_a_delta_that_a_lost_writer_committed_is_none(local, chain):
    late = write_delta(chain[2], "d", 3, [(ROWS, [])], epoch=0)
    assert names(newest(local)) == ["c", "b", "a"]
    with pytest.raises(CheckpointNotFoundError, match="ignored"):
        open_checkpoint(str(late.directory))


def test_a_checkpoint_of_a_thousand_links_travels_to_other_ranks(local, chain):
    link = Checkpoint("a", list_checkpoints(local).committed[0].manifest)
    long = Checkpoint("z", link.manifest, (link,) * 999)
    assert pickle.loads(pickle.dumps([long] * 3))[2].below == long.below


def test_a_listing_knows_what_was_committed_and_removed_since(local, chain):
    listing = list_checkpoints(local)
    form = write_compacted(chain[1], ROWS).directory.name
    grown = listing.plus(next(c for c in list_checkpoints(local).committed if c.directory == form))
    assert [c.directory for c in grown.committed] == ["a", "b", form, "c"]
    assert names(grown.find("c")) == ["c", form]
    assert grown.chains.closure(["c"]) == set()
    assert grown.chains.closure([chain[2].name[0]]) == {"c", form}
    assert names(grown.minus(["a", "b"]).find("c")) == ["c", form]
    assert grown.newest_place == chain[2].place
    assert grown.named(chain[1].name[0]).directory == form


def test_a_delta_on_what_a_lost_writer_committed_has_no_chain_though_its_hints_lead_there(local, chain):
    late = write_delta(chain[0], "late", 3, [(ROWS, [])], epoch=0)
    write_delta(late, "d", 3, [(ROWS, [])], epoch=1, seq=9)
    assert names(newest(local)) == ["c", "b", "a"]
    with pytest.raises(CorruptCheckpointError, match="parent 'late': found no such checkpoint"):
        open_checkpoint(f"{local.url}/d")
