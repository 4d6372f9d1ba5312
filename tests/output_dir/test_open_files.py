"""The files of a checkpoint while its writer removes them."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from support.forge import filled, save_tables

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.output_dir.listing import locate
from recckpt.output_dir.open_files import OpenFiles
from recckpt.output_dir.rotation import remove
from recckpt.storage import open_storage

FILE = "ckpt_1/data"


@pytest.fixture
def storage(url):
    storage = open_storage(url)
    storage.prepare()
    storage.make_dir("ckpt_1")
    storage.put_if_absent("ckpt_1/manifest.json", b"{}")
    storage.put_if_absent(FILE, b"0123456789")
    return storage


def held(storage):
    return OpenFiles(storage, "ckpt_1", {"data": 10})


READS = {
    "open": lambda files: files.open(FILE).read(),
    "read": lambda files: files.read(FILE, 100),
    "size": lambda files: b"0123456789"[: files.size(FILE)],
    "map": lambda files: bytes(files.map(FILE) or b"0123456789"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_held_files_read_as_those_of_the_storage(storage, read):
    assert read(held(storage)) == read(storage) == b"0123456789"
    assert held(storage).read(FILE, 3) == b"012"


def test_a_mapped_file_is_a_file(tmp_path):
    storage = open_storage(str(tmp_path))
    storage.make_dir("ckpt_1")
    storage.put_if_absent(FILE, b"0123456789")
    with held(storage).open(FILE) as file:
        assert (file.read(2), file.tell(), file.read(0), file.read(None)) == (b"01", 2, b"", b"23456789")
        assert (file.seek(-4, 2), file.read(2), file.seek(1, 1), file.read(99), file.read(5)) == (
            6,
            b"67",
            9,
            b"9",
            b"",
        )
        assert (file.seek(50), file.read(1)) == (50, b"")
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
        assert pa.PythonFile(file, "r").size() == 10


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_mapped_files_stay_whole_when_they_are_removed(tmp_path, read):
    storage = open_storage(str(tmp_path))
    storage.make_dir("ckpt_1")
    storage.put_if_absent(FILE, b"0123456789")
    files = held(storage)
    shutil.rmtree(tmp_path / "ckpt_1")
    assert read(files) == b"0123456789"


@pytest.mark.parametrize("read", ["open", "read", "size"])
def test_a_file_that_went_after_its_manifest_was_removed_by_its_writer(storage, read, monkeypatch):
    monkeypatch.setattr("recckpt.output_dir.open_files._MOST_MAPS", 0)  # as where there are no maps
    files = held(storage)
    storage.remove("ckpt_1/manifest.json")
    storage.remove(FILE)
    with pytest.raises(CheckpointRemovedError, match=r"ckpt_1: its writer removed.*manager\.pin\(step\).*max_keep"):
        READS[read](files)
    with pytest.raises(CheckpointRemovedError):
        OpenFiles(storage, "ckpt_1", {"data": 10}).read(FILE, 10)


@pytest.mark.parametrize("read", ["open", "read", "size"])
def test_a_file_that_is_gone_while_the_manifest_is_there_is_damage(storage, read):
    storage.remove(FILE)
    with pytest.raises(CorruptCheckpointError, match="ckpt_1/data: found no such file, expected 10 bytes"):
        READS[read](held(storage))


def test_a_file_may_go_in_the_middle_of_a_read(storage, monkeypatch):
    monkeypatch.setattr("recckpt.output_dir.open_files._MOST_MAPS", 0)
    with held(storage).open(FILE) as file:
        assert file.read(2) == b"01"
        file._file = Vanished()
        storage.remove("ckpt_1/manifest.json")
        with pytest.raises(CheckpointRemovedError):
            file.read(2)


class Vanished:
    """A file whose object is deleted between two ranged reads."""

    def read(self, size):
        raise FileNotFoundError

    def close(self):
        pass


def test_holding_a_thousand_files_takes_no_descriptors(tmp_path):
    storage = open_storage(str(tmp_path))
    (tmp_path / "ckpt_1").mkdir()
    for number in range(1000):
        (tmp_path / "ckpt_1" / str(number)).write_bytes(b"%d" % number)
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = OpenFiles(storage, "ckpt_1", {str(number): 4 for number in range(1000)})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    shutil.rmtree(tmp_path / "ckpt_1")
    assert [files.read(f"ckpt_1/{number}", 9) for number in range(1000)] == [b"%d" % n for n in range(1000)]


def test_files_of_a_checkpoint_that_rotation_is_about_to_remove_are_all_held(tmp_path):
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled("t", range(100))], batch_bytes=100)
    checkpoint = locate(storage, "ckpt_1")
    sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
    files = OpenFiles(storage, checkpoint.directory, sizes)
    remove(storage, checkpoint, 1)
    assert not (tmp_path / "ckpt_1").exists()
    assert {name: len(files.read(f"ckpt_1/{name}", 1 << 20)) for name in sizes} == sizes
