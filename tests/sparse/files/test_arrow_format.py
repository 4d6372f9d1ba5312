"""Where the values of a part lie, and batches that no catalog lists."""

import io
import struct

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.forge import Forge, filled, parts_of, save_tables

from recckpt import CheckpointReader
from recckpt.errors import CorruptCheckpointError
from recckpt.inspect import dataset
from recckpt.inspect.absent import look_for
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import locate
from recckpt.sparse.files import part_reader
from recckpt.sparse.files.arrow_format import PartLayout, column_buffer, unlisted_batches
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage import open_storage

TABLES = [
    filled("item", range(300), shape=(2, 3), dtype=torch.bfloat16, slots={"sparse_m": (3,), "sparse_step": ()}),
    filled("ü/user", range(99), shape=(2, 3), dtype=torch.bfloat16, slots={"sparse_m": (3,), "sparse_step": ()}),
]


@pytest.fixture
def forge(tmp_path):
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, TABLES, concurrency=1, batch_bytes=1000)
    return Forge(tmp_path / "runs/ckpt_1")


def arrow_batches(data):
    with pa.ipc.open_file(pa.py_buffer(data)) as reader:
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def test_columns_are_where_arrow_has_them(forge):
    data = forge.path(forge.parts[0]).read_bytes()
    whole, batches = pa.py_buffer(data), arrow_batches(data)
    widths = {"table": 2, "id": 8, "embedding": 12, "sparse_m": 6, "sparse_step": 2}
    (part,) = parts_of(open_storage(str(forge.directory.parent)))
    layout = PartLayout(lambda begin, end: data[begin:end], widths, part)
    assert layout.other_names() is None
    assert len(batches) > 5
    for number, batch in enumerate(batches):
        layout.check_length(number, lambda begin, end: data[begin:end])
        buffers = {name: column_buffer(batch.column(name)) for name in batch.schema.names}
        there = [(name, b.address - whole.address, b.address - whole.address + b.size) for name, b in buffers.items()]
        assert list(layout.columns(number)) == there


def test_a_part_without_a_catalog_gives_its_batches_by_the_lengths_of_their_bodies(forge):
    data = forge.path(forge.parts[0]).read_bytes()
    found = list(unlisted_batches(memoryview(data)))
    for (names, columns), batch in zip(found, arrow_batches(data), strict=True):
        assert names == ["item", "ü/user"]
        assert {name: bytes(values) for name, values in columns.items()} == {
            name: column_buffer(batch.column(name)).to_pybytes() for name in batch.schema.names
        }


@pytest.mark.parametrize("n_rows", [*range(1, 40), 1000])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_the_number_of_rows_is_found_whatever_the_padding(n_rows, width):
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n_rows, np.int16)), pa.array(["a", "bc"]))
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(n_rows * width, np.int8)), width)
    batch = pa.record_batch({"table": names, "id": pa.array(np.arange(n_rows)), "v": rows})
    ((found, columns),) = unlisted_batches(memoryview(in_a_file(batch)))
    assert found == ["a", "bc"]
    assert np.frombuffer(columns["id"], np.int64).tolist() == list(range(n_rows))
    assert len(columns["v"]) == n_rows * width


def in_a_file(*batches, **options):
    file = io.BytesIO()
    with pa.ipc.new_file(file, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return file.getvalue()


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("n_rows", [3, 500])
def test_compressed_batches_are_nothing_that_ids_can_be_looked_for_in(forge, codec, n_rows):
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n_rows, np.int16)), pa.array(["item" * 50]))
    batch = pa.record_batch({"table": names, "id": pa.array(np.arange(n_rows))})
    name = "sparse/00007-of-00008.g0.00.arrow"
    forge.path(name).write_bytes(in_a_file(batch, compression=codec))
    unread = look_for(str(forge.directory.parent), np.array([10**6])).unread
    assert list(unread) == [f"ckpt_1/{name}"]


@pytest.fixture
def bomb(tmp_path):
    """A checkpoint of ten rows, in whose part a few bytes ask for the memory of millions."""
    storage = open_storage(str(tmp_path / "bomb"))
    storage.prepare()
    save_tables(storage, [filled("item", range(10))], concurrency=1)
    return Forge(tmp_path / "bomb/ckpt_1")


@pytest.fixture
def pool():
    """What Arrow takes its memory from, counted from here on."""
    before = pa.default_memory_pool()
    proxy = pa.proxy_memory_pool(before)
    pa.set_memory_pool(proxy)
    yield proxy
    pa.set_memory_pool(before)


def inflate(forge, n_rows, *, as_long=False):
    """Put a part in place that has far more rows than the catalog says, in a few bytes; ``as_long`` as the true one."""
    name = forge.parts[0]
    true = forge.path(name).read_bytes()
    with pa.ipc.open_file(pa.BufferReader(true)) as reader:
        schema, names = reader.schema, reader.get_batch(0).column("table").dictionary
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2 * n_rows, np.float32)), 2)
    columns = [
        pa.DictionaryArray.from_arrays(pa.array(np.zeros(n_rows, np.int16)), names),
        pa.array(np.zeros(n_rows, np.int64)),
        vectors,
    ]
    data = in_a_file(pa.RecordBatch.from_arrays(columns, schema=schema), compression="zstd")
    data = lengthened(data, true) if as_long else data
    forge.write(name, data)
    forge.edit_catalog(lambda values: values["parts"][0].update(bytes=len(data)))


def lengthened(data, true):
    """Return a file with the batch of another, compressed, in which names and bodies are as long as in the true one."""
    (head, _, _), (_, message, footer) = messages(true), messages(data)
    meta, body = message
    wanted = 24 + 80 + 80  # ten rows: table, id and vector
    body = body.ljust(wanted, b"\0")
    old = struct.pack("<q", len(message[1]))
    assert meta.count(old) == footer.count(old) == 1
    return head + meta.replace(old, struct.pack("<q", wanted)) + body + footer.replace(old, struct.pack("<q", wanted))


def messages(data):
    """Return what is before the batch of a file, its description and body, and what is behind."""
    source = pa.BufferReader(data[8:])
    pa.ipc.read_message(source), pa.ipc.read_message(source)
    begin = 8 + source.tell()
    batch = pa.ipc.read_message(source)
    end = 8 + source.tell()
    at = end - batch.body.size
    return data[:begin], (data[begin:at], data[at:end]), data[end:]


def refused(url, match):
    with CheckpointReader(url) as reader, pytest.raises(CorruptCheckpointError, match=match):
        list(reader.table("item"))
    assert verify(url)


@pytest.mark.parametrize("has_maps", [True, False])
@pytest.mark.parametrize("how", ["read", "query without checks"])
def test_a_part_that_would_expand_without_end_is_refused_before_it_takes_memory(bomb, pool, memory_url, has_maps, how):
    inflate(bomb, 4_000_000)
    copied(bomb, memory_url)
    assert bomb.path(bomb.parts[0]).stat().st_size < 10_000
    url, before = str(bomb.directory) if has_maps else memory_url, pool.max_memory()
    if how == "read":
        refused(url, "compressed")
    else:
        with pytest.raises(CorruptCheckpointError, match="compressed"):
            dataset(url, "item", checked=False)
    assert pool.max_memory() - before < 1 << 20


def test_one_that_is_as_long_as_it_should_be_is_read_as_it_lies_there(bomb, pool):
    inflate(bomb, 2_000, as_long=True)
    data = bomb.path(bomb.parts[0]).read_bytes()
    before = pool.max_memory()
    refused(str(bomb.directory), "of another table")
    assert pool.max_memory() - before < 1 << 14, "Arrow has expanded nothing"
    _, batch, _ = messages(data)
    kinds = {"table": pa.int16(), "id": pa.int64(), "embedding": pa.list_(pa.field("item", pa.float32()), 2)}
    expanded = pa.ipc.read_record_batch(pa.ipc.read_message(b"".join(batch)), pa.schema(kinds))
    assert expanded.num_rows == 2_000, "though it would"


def copied(forge, url):
    storage = open_storage(url)
    for name in open_storage(str(forge.directory.parent)).list_files("ckpt_1"):
        with storage.create(f"ckpt_1/{name}") as sink:
            sink.write(forge.path(name).read_bytes())


@pytest.mark.parametrize("has_maps", [True, False])
def test_what_arrow_queries_without_checks_is_no_file_that_could_ask_for_memory(bomb, pool, memory_url, has_maps):
    inflate(bomb, 2_000, as_long=True)
    copied(bomb, memory_url)
    before = pool.max_memory()
    rows = dataset(str(bomb.directory) if has_maps else memory_url, "item", checked=False)
    assert [len(part.to_table()) for part in rows.get_fragments()] == [10]
    assert set(rows.to_table()["table"].to_pylist()) == {"item"}
    assert pool.max_memory() - before < 1 << 14, "Arrow has expanded nothing"


def test_a_store_without_maps_is_asked_for_the_chosen_columns_alone(forge, monkeypatch):
    storage = open_storage(str(forge.directory.parent))
    monkeypatch.setattr(storage, "map", lambda name: None)
    (part,) = parts_of(storage)
    slots = locate(storage, "ckpt_1").manifest.tables[0].slots
    reader, asked = PartReader(storage, "ckpt_1", part, slots, ["sparse_step"]), []
    read = storage.read
    monkeypatch.setattr(storage, "read", lambda *args: asked.append(args[1]) or read(*args))
    monkeypatch.setattr(part_reader, "_GAP_BYTES", 0)
    rows = part.batches[3].rows
    assert list(reader.read(3)) == ["table", "id", "sparse_step"]
    assert sorted(asked) == [8, 2 * rows, 2 * rows, 8 * rows]
