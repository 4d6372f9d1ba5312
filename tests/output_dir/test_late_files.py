"""Files of other hosts that show late: waited for, as long as was said and no longer."""

from dataclasses import replace

import pytest
from forge import fence_of
from late_storage import LateStorage

from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Manifest, ShardEntry
from recckpt.output_dir import commit as committing
from recckpt.output_dir.checkpoint_dir import write_intent
from recckpt.output_dir.commit import Lookout
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import NotPlainError

FILES = [layout.catalog(shard, 2) for shard in range(2)]
ALONE = layout.catalog(0, 1)
FOREVER = [None] * 1000
TIME = "2026-01-01T00:00:00Z"


@pytest.fixture
def storage(tmp_path):
    return LateStorage(tmp_path)


def attempt(storage, names=FILES):
    """Return what ranks have written, as the first one commits it."""
    intent, seq = committing.begin(storage, fence_of(storage), "c", step=None, overwrite=False, base=None)
    for name in names:
        with storage.create(f"c/{name}") as sink:
            sink.write(b"12345")
    entries = tuple(ShardEntry(name, (0, 0)) for name in names)
    files = tuple(FileEntry(name, 5, 0) for name in names)
    record = Manifest(entries, (), files, ckpt_id="c", save_id=intent.save_id, seq=seq, time=TIME, epoch=intent.epoch)
    return intent, record


def commit(storage, record):
    committing.commit(storage, fence_of(storage), "c", record, storage.visible)


def test_a_commit_waits_for_files_that_are_missing_or_short(storage):
    _, record = attempt(storage)
    storage.late = {f"c/{FILES[0]}": [None, 3, 0], f"c/{FILES[1]}": [4]}
    commit(storage, record)
    assert storage.waited > 0
    assert [found.ckpt_id for found in list_checkpoints(storage).committed] == ["c"]


@pytest.mark.parametrize(("seen", "problem"), [(None, "no such file"), (3, "3 bytes")])
@pytest.mark.parametrize("timeout_sec", [60.0, 0.0])
def test_a_commit_waits_no_longer_than_the_timeout_over_all_files(tmp_path, seen, problem, timeout_sec):
    storage = LateStorage(tmp_path, timeout_sec)
    _, record = attempt(storage)
    storage.late = {f"c/{FILES[0]}": [None] * bool(timeout_sec), f"c/{FILES[1]}": [seen] * 1000}
    message = f"found {problem}, 5 bytes were written|found {problem}, 5 were written"
    with pytest.raises(OSError, match=message) as failed:
        commit(storage, record)
    assert f"looking for up to {timeout_sec:g} s for what was written failed" in str(failed.value)
    assert f"{tmp_path}/c/{FILES[1]}" in str(failed.value)
    assert isinstance(failed.value, FileNotFoundError) == (seen is None)
    assert storage.waited <= timeout_sec
    assert list_checkpoints(storage).committed == ()


def test_a_file_that_is_longer_than_written_is_not_waited_for(storage):
    _, record = attempt(storage)
    storage.late = {f"c/{FILES[1]}": [6, 5]}
    with pytest.raises(OSError, match="found 6 bytes, 5 were written"):
        commit(storage, record)
    assert storage.waited == 0


def test_a_rank_alone_has_nobody_to_wait_for(storage):
    _, record = attempt(storage, [ALONE])
    storage.late = {f"c/{ALONE}": [None]}
    with pytest.raises(FileNotFoundError, match="found no such file, 5 bytes were written: "):
        commit(storage, record)
    assert storage.waited == 0


def test_a_link_out_of_the_checkpoint_is_not_waited_for(storage, tmp_path):
    _, record = attempt(storage)
    (tmp_path / "c" / FILES[1]).unlink()
    (tmp_path / "c" / FILES[1]).symlink_to("/etc/passwd")
    with pytest.raises(NotPlainError, match="found a symbolic link out of its directory"):
        commit(storage, record)
    assert storage.waited == 0


def test_a_rank_waits_for_the_directory_that_the_first_one_has_made(storage):
    intent, _ = attempt(storage)
    storage.late = {"c/INTENT": [None, None, None]}
    Lookout(storage, storage.visible).check_intent(intent)
    assert storage.waited > 0


def test_a_rank_that_sees_another_output_dir_says_so(storage):
    intent, _ = attempt(storage)
    storage.late = {"c/INTENT": FOREVER}
    with pytest.raises(FileNotFoundError, match=r"found no such file, .*the same one on every host: '.*/c/INTENT'"):
        Lookout(storage, storage.visible).check_intent(intent)
    assert 0 < storage.waited <= 60
    other = replace(intent, directory="d", save_id="0" * 32)
    storage.make_dir("d")
    write_intent(storage, other)
    with pytest.raises(FileNotFoundError, match=f"found that of save {'0' * 32}, rank 0 has written"):
        Lookout(storage, storage.visible).check_intent(replace(other, save_id="1" * 32))
