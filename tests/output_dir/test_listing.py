import logging
import shutil
from pathlib import Path

import pytest
from support.forge import Forge, filled, save_tables

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.output_dir.at_path import locate_path, open_checkpoint, read_checkpoint
from recckpt.output_dir.listing import describe, list_checkpoints, locate, newest
from recckpt.storage import Storage, open_storage


def save(storage: Storage, *ids: str, **options) -> None:
    for ckpt_id in ids:
        save_tables(storage, [filled("item", range(3))], ckpt_id=ckpt_id, **options)


def ids(storage: Storage) -> list[str]:
    return [checkpoint.ckpt_id for checkpoint in list_checkpoints(storage).current]


def test_an_empty_output_dir_has_no_checkpoints(storage, tmp_path):
    for place in (storage, open_storage(str(tmp_path / "nowhere"))):
        listing = list_checkpoints(place)
        assert (listing.committed, listing.damaged, listing.next_seq) == ((), {}, 1)
        is_there = place is storage
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint" if is_there else "does not exist"):
            newest(place)
        with pytest.raises(CheckpointNotFoundError, match="there are no checkpoints" if is_there else "does not exist"):
            locate(place, "ckpt_1")


def test_checkpoints_are_listed_in_order_of_commit_not_of_name(storage):
    save(storage, "ckpt_9", "ckpt_10", "z", "a", "ckpt_1")
    assert ids(storage) == ["ckpt_9", "ckpt_10", "z", "a", "ckpt_1"]
    assert newest(storage).ckpt_id == "ckpt_1"
    assert locate(storage, "a").manifest.seq == 4
    assert list_checkpoints(storage).next_seq == 6


def test_the_id_is_that_of_the_manifest_wherever_it_lies_and_whatever_its_directory_is_called(local, tmp_path):
    save(local, "täglich/1")
    copy = shutil.copytree(Path(local.url, "t%C3%A4glich%2F1"), tmp_path / "other" / "place")
    (copy / "manifest.json").touch()
    storage, checkpoint = open_checkpoint(str(copy))
    assert (checkpoint.ckpt_id, checkpoint.directory, storage.url) == ("täglich/1", "place", str(copy.parent))
    Path(local.url, "t%C3%A4glich%2F1").rename(Path(local.url, "copy"))
    assert locate(local, "täglich/1").directory == "copy"


def test_the_newest_directory_of_an_id_counts_and_an_id_that_looks_like_an_attempt_is_no_attempt(storage):
    save(storage, "a.1", "a", "b")
    save(storage, "a", overwrite=True)
    listing = list_checkpoints(storage)
    assert [c.directory for c in listing.committed] == ["a.1", "a", "b", "a.1.1"]
    assert [c.directory for c in listing.current] == ["a.1", "b", "a.1.1"]
    assert locate(storage, "a").directory == "a.1.1"
    assert locate(storage, "a.1").directory == "a.1"


def test_a_directory_without_a_manifest_is_no_checkpoint_and_a_link_to_one_can_be_opened(local):
    save(local, "a", "b")
    Path(local.url, "b", "manifest.json").unlink()
    Path(local.url, "c", "manifest.json").mkdir(parents=True)
    (Path(local.url) / "notes").mkdir()
    (Path(local.url) / "file").write_text("x")
    Path(local.url, "latest").symlink_to("a")
    listing = list_checkpoints(local)
    assert [c.ckpt_id for c in listing.current] == [c.ckpt_id for c in listing.committed] == ["a"]
    assert "b" not in listing.damaged
    assert open_checkpoint(f"{local.url}/latest")[1].ckpt_id == "a"


@pytest.mark.parametrize("harm", ["cut", "missing", "grown", "manifest", "link", "loop", "directory"])
def test_a_damaged_checkpoint_is_passed_over_with_an_error_and_does_not_hide_the_others(local, harm, caplog):
    save(local, "a", "b")
    forge = Forge(Path(local.url, "b"))
    part = forge.path(forge.parts[0])
    data = part.read_bytes()
    if harm == "cut":
        part.write_bytes(data[:-1])
    elif harm == "grown":
        part.write_bytes(data + b"x")
    elif harm == "manifest":
        forge.path("manifest.json").write_bytes(b"{}")
    else:
        part.unlink()
    if harm == "link":
        outside = Path(local.url).parent / "outside"
        outside.write_bytes(data)
        part.symlink_to(outside)
    elif harm == "loop":
        part.symlink_to(part.name)
    elif harm == "directory":
        part.mkdir()
    listing = list_checkpoints(local)
    assert list(listing.damaged) == ["b"]
    assert newest(local).ckpt_id == "a"
    assert [(r.levelno, "b" in r.message) for r in caplog.records if r.levelno >= logging.ERROR] == [
        (logging.ERROR, True)
    ]
    with pytest.raises(CorruptCheckpointError):
        locate(local, "b")
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(f"{local.url}/b")


def test_what_is_all_damaged_raises_the_damage_but_not_of_an_id_that_begins_like_it(local):
    save(local, "a.b")
    Path(local.url, "a.b", "manifest.json").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        newest(local)
    with pytest.raises(CorruptCheckpointError):
        locate(local, "a.b")
    with pytest.raises(CheckpointNotFoundError, match="found no committed checkpoint 'a'"):
        locate(local, "a")


def test_a_newer_format_is_refused_by_number(local):
    save(local, "a")
    Forge(Path(local.url, "a")).edit_manifest(lambda values: values.update(version=99))
    for look in (lambda: newest(local), lambda: locate(local, "a"), lambda: open_checkpoint(f"{local.url}/a")):
        with pytest.raises(FormatVersionError, match="99"):
            look()


def test_a_damaged_checkpoint_keeps_its_number(local):
    save(local, "a", "b")
    part = Path(local.url, "b", Forge(Path(local.url, "b")).parts[0])
    hidden = part.rename(part.with_suffix(".hidden"))
    save(local, "c")
    hidden.rename(part)
    assert ids(local) == ["a", "b", "c"]


def test_a_path_is_a_checkpoint_or_an_output_dir_and_a_message_says_which_there_are(storage):
    save(storage, "a", "b")
    assert locate_path(f"{storage.url}/a")[1].ckpt_id == "a"
    assert locate_path(f"{storage.url}/a/")[1].ckpt_id == "a"
    found, checkpoint = locate_path(storage.url)
    assert (found.url, checkpoint.ckpt_id) == (storage.url, "b")
    with pytest.raises(CheckpointNotFoundError):
        locate_path(f"{storage.url}/nothing")
    with pytest.raises(CheckpointNotFoundError, match=r"manifest\.json"):
        open_checkpoint(storage.url)
    with pytest.raises(CheckpointNotFoundError, match="'c'; there are 'a', 'b'"):
        locate(storage, "c")
    assert describe([]) == "there are no checkpoints in this output dir"
    assert read_checkpoint(storage, "nothing") is None


def test_a_relative_path_is_understood(local, monkeypatch):
    save(local, "a")
    monkeypatch.chdir(local.url)
    assert open_checkpoint("a")[1].ckpt_id == "a"
    monkeypatch.chdir("a")
    assert locate_path(".")[1].ckpt_id == "a"


def test_a_reader_that_meets_rotation_finds_what_took_the_place(local, monkeypatch):
    """The old one goes, and the new one is committed, between the listing of the names and the look at the first."""
    save(local, "old")
    look, began = type(local).list_dirs, []

    def list_dirs(storage):
        found = look(storage)
        if not began:
            began.append(True)
            save(storage, "new")
            shutil.rmtree(Path(storage.url, "old"))
        return found

    monkeypatch.setattr(type(local), "list_dirs", list_dirs)
    assert newest(local).ckpt_id == "new"


def test_a_checkpoint_that_goes_while_it_is_looked_at_is_not_damaged(local, monkeypatch):
    save(local, "a", "b")
    listed = type(local).listed

    def removed_first(storage, directory):
        shutil.rmtree(Path(storage.url, "a"), ignore_errors=True)
        return listed(storage, directory)

    monkeypatch.setattr(type(local), "listed", removed_first)
    listing = list_checkpoints(local)
    assert ([c.ckpt_id for c in listing.committed], listing.damaged) == (["b"], {})


def test_a_directory_that_cannot_be_listed_is_looked_at_file_by_file(local, monkeypatch):
    save(local, "a", "b")
    Forge(Path(local.url, "b")).path("model.pt").touch()  # not listed in the manifest, so it does not count
    Path(local.url, "b", Forge(Path(local.url, "b")).parts[0]).unlink()

    def refused(storage, directory):
        raise PermissionError(13, "may not be listed", directory)

    monkeypatch.setattr(type(local), "listed", refused)
    listing = list_checkpoints(local)
    assert ([c.ckpt_id for c in listing.committed], list(listing.damaged)) == (["a"], ["b"])


def test_looking_at_a_checkpoint_takes_one_listing_whatever_the_number_of_its_files(local, monkeypatch):
    save_tables(local, *[[filled("item", [shard])] for shard in range(5)], ckpt_id="a")
    asked = []
    monkeypatch.setattr(type(local), "size", lambda storage, name: asked.append(name))
    assert len(list_checkpoints(local).committed) == 1
    assert asked == []


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "not mounted"])
def test_a_checkpoint_moved_out_behind_a_link_is_damaged_and_not_passed_over_in_silence(local, tmp_path, is_there):
    save(local, "a")
    shutil.move(f"{local.url}/a", tmp_path / "elsewhere")
    Path(local.url, "a").symlink_to(tmp_path / ("elsewhere" if is_there else "gone"))
    for use in (newest, lambda storage: locate(storage, "a")):
        with pytest.raises(CorruptCheckpointError, match=r"a/manifest\.json: found .*a symbolic link"):
            use(local)
    save(local, "b")
    assert ids(local) == ["b"]
    assert list(list_checkpoints(local).damaged) == ["a"]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_links_of_other_people_in_an_output_dir_are_left_out(local, tmp_path):
    save(local, "a")
    (tmp_path / "data").mkdir()
    Path(local.url, "data").symlink_to(tmp_path / "data")
    Path(local.url, "latest").symlink_to("a")
    Path(local.url, "rotated").symlink_to("ckpt_1")
    listing = list_checkpoints(local)
    assert (listing.directories, listing.damaged) == (("a",), {})
