"""Files of other hosts that show late: waited for, as long as was said and no longer."""

from dataclasses import replace

import pytest
from support.builders import Run
from support.forge import fence_of
from support.late_storage import LateStorage

from recckpt.errors import SaveFailedError, WriterFencedError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry, Manifest, ShardEntry
from recckpt.output_dir import commit as committing
from recckpt.output_dir.checkpoint_dir import write_intent
from recckpt.output_dir.commit import Lookout
from recckpt.output_dir.fence import Fence, check_epoch
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import NotPlainError
from recckpt.storage.local import LocalStorage

FILES = [layout.catalog(shard, 2) for shard in range(2)]
ALONE = layout.catalog(0, 1)
FOREVER = [None] * 1000
TIME = "2026-01-01T00:00:00Z"


@pytest.fixture
def storage(tmp_path):
    return LateStorage(tmp_path)


def nobody():
    """Say that no other writer has taken over."""


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
    assert f"looking for up to {timeout_sec:g} s for written files failed" in str(failed.value)
    assert f"{tmp_path}/c/{FILES[1]}" in str(failed.value)
    assert isinstance(failed.value, FileNotFoundError) == (seen is None)
    assert storage.waited <= timeout_sec
    assert list_checkpoints(storage).committed == ()


def test_a_file_that_is_longer_than_written_or_a_link_out_is_not_waited_for(storage, tmp_path):
    _, record = attempt(storage)
    storage.late = {f"c/{FILES[1]}": [6, 5]}
    with pytest.raises(OSError, match="found 6 bytes, 5 were written"):
        commit(storage, record)
    (tmp_path / "c" / FILES[1]).unlink()
    (tmp_path / "c" / FILES[1]).symlink_to("/etc/passwd")
    storage.late = {}
    with pytest.raises(NotPlainError, match="found a symbolic link out of its directory"):
        commit(storage, record)
    assert storage.waited == 0


def test_a_rank_alone_has_nobody_to_wait_for(storage):
    _, record = attempt(storage, [ALONE])
    storage.late = {f"c/{ALONE}": [None]}
    with pytest.raises(FileNotFoundError, match="found no such file, 5 bytes were written: "):
        commit(storage, record)
    assert storage.waited == 0


def test_a_rank_waits_for_the_directory_that_the_first_one_has_made(storage):
    intent, _ = attempt(storage)
    storage.late = {"c/INTENT": [None, None, None]}
    Lookout(storage, storage.visible, nobody).check_intent(intent)
    assert storage.waited > 0


def test_a_rank_that_sees_another_output_dir_says_so(storage):
    intent, _ = attempt(storage)
    storage.late = {"c/INTENT": FOREVER}
    with pytest.raises(FileNotFoundError, match=r"found no such file, .*the same one on every host: '.*/c/INTENT'"):
        Lookout(storage, storage.visible, nobody).check_intent(intent)
    assert 0 < storage.waited <= 60
    other = replace(intent, directory="d", save_id="0" * 32)
    storage.make_dir("d")
    write_intent(storage, other)
    with pytest.raises(FileNotFoundError, match=f"found the file of save {'0' * 32}, rank 0 has written"):
        Lookout(storage, storage.visible, nobody).check_intent(replace(other, save_id="1" * 32))


@pytest.mark.parametrize("names", [FILES, [ALONE]])
def test_an_overtaken_writer_is_told_so_and_does_not_wait_for_what_the_later_one_has_removed(storage, names):
    fence = fence_of(storage)
    _, record = attempt(storage, names)
    Fence(storage).hold()
    assert not storage.list_files("c")
    with pytest.raises(WriterFencedError, match="taken over by process"):
        committing.commit(storage, fence, "c", record, storage.visible)
    assert storage.waited == 0


def test_a_writer_that_is_overtaken_while_it_waits_for_files_is_told_so(storage):
    fence = fence_of(storage)
    _, record = attempt(storage)
    storage.late = {f"c/{FILES[0]}": FOREVER}
    sleep, later = storage.visible.sleep, Fence(storage)
    policy = replace(storage.visible, sleep=lambda seconds: (later.hold(), sleep(seconds)))
    with pytest.raises(WriterFencedError):
        committing.commit(storage, fence, "c", record, policy)
    assert 0 < storage.waited < 5


def test_a_rank_without_a_claim_is_told_that_the_writer_was_overtaken(storage):
    fence = fence_of(storage)
    intent, _ = attempt(storage)
    Fence(storage).hold()
    with pytest.raises(WriterFencedError, match=f"this process has epoch {fence.epoch}"):
        Lookout(storage, storage.visible, lambda: check_epoch(storage, intent.epoch)).check_intent(intent)
    assert storage.waited == 0


def test_a_save_whose_storage_fails_looks_at_the_claim_first(tmp_path, monkeypatch):
    run, later = Run(tmp_path, interval=10**9).train(1), Run(tmp_path)
    run.saver.save("first")
    create = LocalStorage.create

    def overtaken(storage, name):
        later.saver.save("later")
        raise FileNotFoundError(2, "gone", name)

    monkeypatch.setattr(LocalStorage, "create", lambda *args: create(*args) if "later" in args[1] else overtaken(*args))
    with pytest.raises(WriterFencedError):
        run.saver.save("second")
    monkeypatch.setattr(LocalStorage, "create", lambda *args: (_ for _ in ()).throw(FileNotFoundError(2, "gone")))
    with pytest.raises(SaveFailedError, match="gone"):
        later.saver.save("third")
