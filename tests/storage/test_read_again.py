"""One bit flipped on the way from a storage that is not local: read once more, and the log says where it was."""

import logging

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.builders import Run, flip_bit, state_of
from support.sweeps import mostly_slow

from recckpt.inspect.reader import CheckpointReader, dataset
from recckpt.inspect.sql import connect, scan
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import newest_first
from recckpt.policies import Transfers
from recckpt.storage import open_storage
from recckpt.storage.objects import ObjectStorage
from recckpt.storage.remote import RangedFile
from recckpt.storage.retry import Retries, RetryPolicy, is_transient

FILES = ["manifest.json", "model.pt", "extra.pt", "rng_0.pt", "io_state_0.pt", "dense/00000-of-00001.json"]
FILES += ["sparse/00000-of-00001.json", "sparse/00000-of-00001.g0.00.arrow", "1.json", "1.list.json"]


@pytest.fixture
def flips(monkeypatch):
    """Flip a bit in the middle of what is read of files, by the ends of their names, so many times."""
    left: dict[str, int] = {}
    read, open_, read_range = ObjectStorage._read, ObjectStorage.open, RangedFile._read

    def flipped(name, data):
        end = next((end for end in left if name.endswith(end) and left[end] and data), None)
        if end is None:
            return data
        left[end] -= 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    def opened(storage, name):
        file = open_(storage, name)
        file.named = name
        return file

    monkeypatch.setattr(ObjectStorage, "_read", lambda storage, name, *span: flipped(name, read(storage, name, *span)))
    monkeypatch.setattr(ObjectStorage, "open", opened)
    monkeypatch.setattr(RangedFile, "_read", lambda file, size: flipped(file.named, read_range(file, size)))
    return left


def said(caplog, text):
    return [record.message for record in caplog.records if text in record.message]


@mostly_slow("file")
@pytest.mark.parametrize("pre_download", [False, True])
@pytest.mark.parametrize("file", FILES)
def test_a_bit_that_flips_on_the_way_costs_no_checkpoint(memory_url, flips, caplog, file, pre_download):
    run = Run(memory_url, max_keep=3).train(20)
    expected = state_of(run)
    other = Run(memory_url, max_keep=3, seed=1, transfers=Transfers(pre_download=pre_download))
    flips[file] = 1
    with caplog.at_level(logging.WARNING):
        assert other.manager.restore() == 20
    assert flips[file] == 0
    assert state_of(other) == expected
    assert len(said(caplog, f"{file} was corrupted in transfer; a second read succeeded")) == 1, caplog.text


@mostly_slow()
@pytest.mark.parametrize("file", [name for name in FILES if not name.startswith("1.")])
def test_what_is_damaged_in_the_storage_itself_is_damage_after_one_more_read(memory_url, caplog, file):
    Run(memory_url, max_keep=3).train(20)
    path = next(name for name in MemoryFileSystem.store if name.endswith(f"ckpt_20/{file}"))
    data = bytearray(MemoryFileSystem.store[path].getvalue())
    data[len(data) // 2] ^= 1
    MemoryFileSystem.store[path].seek(0)
    MemoryFileSystem.store[path].write(bytes(data))
    assert Run(memory_url, max_keep=3, seed=1).manager.restore() == 10
    assert said(caplog, f"ckpt_20/{file} was read twice, and is damaged in the storage itself")


def test_what_stays_damaged_is_said_once(memory_url, caplog):
    run = Run(memory_url, max_keep=None).train(20)
    path = next(name for name in MemoryFileSystem.store if name.endswith("ckpt_10/manifest.json"))
    MemoryFileSystem.store[path].seek(100)
    MemoryFileSystem.store[path].write(b"?")
    run = Run(memory_url, max_keep=None)
    run.manager.restore()
    run.train(30)
    for _ in range(3):
        assert len(newest_first(open_storage(memory_url))) == 4
    assert len(said(caplog, "ckpt_10/manifest.json was read twice")) == 1


@mostly_slow()
@pytest.mark.parametrize("file", FILES)
def test_verify_and_readers_read_once_more_too(memory_url, flips, file):
    Run(memory_url).train(10)
    flips[file] = 1
    assert verify(memory_url) == []
    assert flips[file] == 0
    flips["g0.00.arrow"] = 1
    with CheckpointReader(memory_url) as reader:
        assert sum(batch.num_rows for batch in reader.table("item"))
        flips["model.pt"] = 1
        assert reader.read_tensor("top.weight").shape == (1, 8)
    assert (flips["g0.00.arrow"], flips["model.pt"]) == (0, 0)


@mostly_slow()
@pytest.mark.parametrize(
    "query",
    [
        lambda url: connect(url).sql("select sum(id), sum(list_sum(embedding)) from item").fetchall(),
        lambda url: scan(url, "item").select("embedding").collect().height,
        lambda url: dataset(url, "item").to_table(columns=["embedding"]).num_rows,
        verify,
    ],
    ids=["sql", "scan", "dataset", "verify"],
)
def test_whatever_a_query_or_verify_reads_in_ranges_is_read_once_more_too(memory_url, monkeypatch, query):
    """The ends of a part when it is opened, values later; what is in an archive after its checksum."""
    Run(memory_url).train(10)
    expected, read, sizes = query(memory_url), RangedFile._read, []

    def flipped(file, size):
        data = bytearray(read(file, size))
        sizes.append(len(data))
        if len(sizes) == at and data:
            data[len(data) // 2] ^= 1
        return bytes(data)

    monkeypatch.setattr(RangedFile, "_read", flipped)
    at = 0
    query(memory_url)
    for at in range(1, len(sizes) + 1):
        sizes.clear()
        assert query(memory_url) == expected, at


def test_a_local_file_is_read_once_and_one_that_is_missing_is_not_looked_for_twice(tmp_path, memory_url, caplog):
    for url in (tmp_path, memory_url):
        Run(url, max_keep=3).train(20)
    flip_bit(tmp_path / "ckpt_20/model.pt")
    assert Run(tmp_path, max_keep=3, seed=1).manager.restore() == 10
    storage = open_storage(memory_url)
    storage.remove("ckpt_20/manifest.json")
    assert [found.ckpt_id for found in newest_first(storage)] == ["ckpt_10"]
    assert not said(caplog, "read twice")


@pytest.mark.parametrize(("name", "is_whole"), [("FlexibleChecksumError", True), ("ChecksumError", False)])
def test_an_answer_whose_checksum_its_backend_finds_wrong_is_asked_for_again_a_few_times(name, is_whole):
    answers = [type(name, (Exception,), {})("wrong checksum")] * (2 if is_whole else 1000)
    naps = []

    def ask():
        if answers:
            raise answers.pop()
        return "whole"

    retries = Retries(RetryPolicy(sleep=naps.append), "s3://b/x")
    if is_whole:
        assert retries.call("reading", ask) == "whole"
        return
    with pytest.raises(OSError, match=f"reading failed: {name}: wrong checksum"):
        retries.call("reading", ask)
    assert len(naps) == 3
    assert is_transient(bad_digest())


def bad_digest():
    """Return the error of botocore for bytes that changed on the way up."""
    error = Exception("what arrived is not what was sent")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": 400}, "Error": {"Code": "BadDigest"}}
    return error
