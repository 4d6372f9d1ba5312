"""S3 against a real server process: large objects in parts, and a whole run."""

import gc
import os
import subprocess
import sys

import pytest
from support.builders import Run, state_of
from support.forge import filled, save_tables

from recckpt import CheckpointReader
from recckpt.errors import WriterFencedError
from recckpt.storage import open_storage
from recckpt.storage.upload import BLOCK_BYTES

CHUNK = bytes(range(256)) * (BLOCK_BYTES // 512)  # half a block


@pytest.fixture
def storage(s3_url):
    return open_storage(s3_url)


def unfinished(storage):
    bucket = storage.url.removeprefix("s3://").partition("/")[0]
    return storage._fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])


@pytest.mark.slow
def test_a_large_object_goes_up_in_parts_and_comes_back_whole(storage):
    with storage.create("d/x") as sink:
        for _ in range(4):
            sink.write(CHUNK)
        sink.write(memoryview(CHUNK * 4))
        sink.write(b"end")
        assert storage.list_files("d") == []
        assert len(unfinished(storage)) == 1
    assert storage.size("d/x") == 8 * len(CHUNK) + 3
    with storage.open("d/x") as file:
        file.seek(5 * len(CHUNK) + 7)
        assert file.read(100) == CHUNK[7:107]
        file.seek(-10, 2)
        assert file.read() == CHUNK[-7:] + b"end"
    assert unfinished(storage) == []


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_an_error_gives_the_parts_of_a_large_object_up(storage, error):
    def write():
        with storage.create("d/x") as sink:
            for _ in range(3):
                sink.write(CHUNK)
            raise error

    with pytest.raises(type(error)):
        write()
    gc.collect()
    assert storage.list_files("") == []
    assert unfinished(storage) == []


@pytest.mark.slow
def test_a_large_object_that_nobody_closes_is_never_published(storage):
    sink = storage.create("d/x")
    for _ in range(3):
        sink.write(CHUNK)
    del sink
    gc.collect()
    assert storage.list_files("") == []


def test_a_large_object_does_not_take_the_place_of_another(storage):
    storage.replace("d/x", b"first")

    def write():
        with storage.create("d/x") as sink:
            for _ in range(3):
                sink.write(CHUNK)

    with pytest.raises(FileExistsError, match=f"exists already.*{storage.url}/d/x"):
        write()
    assert storage.read("d/x", 10) == b"first"


@pytest.mark.slow
def test_a_large_draft_is_sealed_in_parts_and_replaces_at_the_end(storage):
    storage.replace("d/x", b"first")
    with storage.draft("d/x") as draft:
        for _ in range(3):
            draft.write(CHUNK)
        draft.seal()
        assert storage.read("d/x", 10) == b"first"
    assert storage.size("d/x") == 3 * len(CHUNK)
    assert unfinished(storage) == []


def test_a_bucket_that_is_not_there_is_not_made_but_named(s3_url):
    with pytest.raises(FileNotFoundError, match=r"putting failed: .*s3://no-such-bucket/runs"):
        open_storage("s3://no-such-bucket/runs").prepare()


@pytest.mark.slow
def test_the_command_line_finds_a_store_by_the_environment(s3_url, s3_options):
    save_tables(open_storage(s3_url), [filled("item", range(3))])
    options = {key: value for key, value in s3_options.items() if key != "session"}
    environment = {**os.environ, **{f"FSSPEC_S3_{key.upper()}": value for key, value in options.items()}}
    command = [sys.executable, "-m", "recckpt", "ls", s3_url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "ckpt_1" in done.stdout) == (0, True), done.stderr


def test_a_run_is_saved_rotated_and_restored(s3_url):
    run = Run(s3_url, interval=3, max_keep=2).train(10)
    storage = open_storage(s3_url)
    assert [name for name in storage.list_dirs() if name.startswith("ckpt")] == ["ckpt_6", "ckpt_9"]
    run.manager.save()
    again = Run(s3_url, interval=3, max_keep=2, seed=1)
    assert again.manager.restore() == 10
    assert state_of(again) == state_of(run)
    again.train(2)
    assert [name for name in storage.list_dirs() if name.startswith("ckpt")] == ["ckpt_10", "ckpt_12"]
    with pytest.raises(WriterFencedError):
        run.train(2)
    reader = CheckpointReader(s3_url)
    assert reader.manifest.step == 12
    ids = [int(i) for i in again.model.items.ids()[:3]]
    assert reader.lookup("item", ids).found.all()
