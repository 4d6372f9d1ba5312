import io

import numpy as np
import pyarrow as pa
import pytest
from support.forge import Forge, filled, save_tables

from recckpt import CheckpointReader
from recckpt.errors import CorruptCheckpointError
from recckpt.inspect.salvage import salvage
from recckpt.inspect.verify import verify
from recckpt.sparse.files.arrow_format import Messages, check_message
from recckpt.storage import open_storage

OPTIONS = {
    "version 5": {},
    "version 4": {"metadata_version": pa.ipc.MetadataVersion.V4},
    "before 0.15": {"metadata_version": pa.ipc.MetadataVersion.V4, "use_legacy_format": True},
}


def arrow_file(n_batches=3, **options):
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(500, np.int16)), pa.array(["user" * 50]))
    batch = pa.record_batch({"table": names, "id": pa.array(np.arange(500))})
    file = io.BytesIO()
    with pa.ipc.new_file(file, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for _ in range(n_batches):
            writer.write_batch(batch)
    return memoryview(file.getvalue())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_is_not_compressed_is_let_through(options):
    messages = Messages(arrow_file(**options))
    messages.check_all()
    messages.check_batch(2)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_is_compressed_is_refused_dictionaries_too(options, codec):
    messages = Messages(arrow_file(compression=codec, **options))
    for check in (
        messages.check_dictionaries,
        messages.check_all,
        *(lambda n=n: messages.check_batch(n) for n in (0, 2)),
    ):
        with pytest.raises(ValueError, match="compressed"):
            check()


def test_a_compression_in_the_metadata_that_version_4_had_it_in_is_refused():
    schema = pa.schema({"id": pa.int64()})
    batch = pa.record_batch([pa.array([1])], schema=schema)
    file = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_file(file, schema, options=options) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "zstd"})
    messages = Messages(memoryview(file.getvalue()))
    messages.check_batch(0)
    with pytest.raises(ValueError, match="compressed"):
        messages.check_batch(1)


@pytest.mark.parametrize("n_bytes", range(0, 40, 3))
def test_what_is_no_message_is_left_to_arrow(n_bytes):
    for data in (b"\xff" * n_bytes, bytes(n_bytes), b"\xff\xff\xff\xff" + b"\x10\0\0\0" * n_bytes, b"x" * n_bytes):
        check_message(data)
    for number in range(n_bytes):
        check_message((n_bytes - 4).to_bytes(4, "little", signed=True) + bytes([number]) * max(0, n_bytes - 4))


@pytest.fixture
def forge(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("item", range(10))], concurrency=1)
    return Forge(tmp_path / "runs/ckpt_1")


@pytest.fixture
def pool():
    """What Arrow takes its memory from, counted from here on."""
    before = pa.default_memory_pool()
    proxy = pa.proxy_memory_pool(before)
    pa.set_memory_pool(proxy)
    yield proxy
    pa.set_memory_pool(before)


def inflate(forge, n_rows):
    """Put a part in place that has far more rows than the catalog says, in a few bytes, and return its name."""
    name = forge.parts[0]
    with pa.ipc.open_file(pa.BufferReader(forge.path(name).read_bytes())) as reader:
        schema, names = reader.schema, reader.get_batch(0).column("table").dictionary
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2 * n_rows, np.float32)), 2)
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(np.zeros(n_rows, np.int16)), names),
        pa.array(np.zeros(n_rows, np.int64)),
        vectors,
    ]
    file = io.BytesIO()
    with pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    forge.write(name, file.getvalue())
    forge.edit_catalog(lambda values: values["parts"][0].update(bytes=len(file.getvalue())))
    return name


def test_a_part_that_would_expand_without_end_is_refused_before_it_takes_memory(forge, pool, tmp_path):
    inflate(forge, 4_000_000)
    assert forge.path(forge.parts[0]).stat().st_size < 10_000
    before = pool.max_memory()
    with CheckpointReader(str(forge.directory)) as reader, pytest.raises(CorruptCheckpointError, match="compressed"):
        list(reader.table("item"))
    assert any("compressed" in problem.found for problem in verify(str(forge.directory)))
    for unverified in (False, True):
        done = salvage(str(forge.directory), "item", str(tmp_path / f"{unverified}.arrow"), unverified=unverified)
        assert (done.rows, len(done.lost)) == (0, 1)
    assert pool.max_memory() - before < 1 << 20


def test_the_same_on_a_store_without_memory_maps(forge, pool, memory_url):
    inflate(forge, 4_000_000)
    storage = open_storage(memory_url)
    for name in open_storage(str(forge.directory.parent)).list_files("ckpt_1"):
        with storage.create(f"ckpt_1/{name}") as sink:
            sink.write(forge.path(name).read_bytes())
    before = pool.max_memory()
    with CheckpointReader(memory_url) as reader, pytest.raises(CorruptCheckpointError, match="compressed"):
        list(reader.table("item"))
    assert pool.max_memory() - before < 1 << 20
