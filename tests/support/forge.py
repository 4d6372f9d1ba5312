"""Checkpoints of tables alone, and damaged ones whose planted fault is the only one."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash

from recckpt.checkpoint.attempt import BATCH_BYTES, Attempt, with_shards
from recckpt.checkpoint.chain import OpenLink
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.dense.saver import save_tensors
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Catalog, Part
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.load import load as loading
from recckpt.load.conf import parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import opened
from recckpt.load.problems import Problems
from recckpt.load.source import LocatedCheckpoint
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import locate
from recckpt.parallel.ranks import Meetings
from recckpt.save.job import SparseSaver
from recckpt.sparse import HashTable
from recckpt.sparse.files.arrow_format import column_buffer
from recckpt.sparse.files.table_rows import source_of
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import WorkDir


def filled(
    name: str,
    ids: Sequence[int] | np.ndarray,
    *,
    shape: int | Sequence[int] = 2,
    dtype: torch.dtype = torch.float32,
    slots: Mapping[str, Sequence[int]] | None = None,
    slice: Slice | None = None,
) -> HashTable:
    """Return a table whose every value is its id."""
    table = empty(name, shape=shape, dtype=dtype, slots=slots, slice=slice)
    ids = torch.as_tensor(np.asarray(ids, np.int64))

    def values(shape):
        return ids.to(dtype).view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()

    table.insert(ids, values(table.embedding_shape), {slot: values(shape) for slot, shape in (slots or {}).items()})
    return table


def empty(
    name: str,
    *,
    shape: int | Sequence[int] = 2,
    dtype: torch.dtype = torch.float32,
    slots: Mapping[str, Sequence[int]] | None = None,
    slice: Slice | None = None,
) -> HashTable:
    """Return a table without rows."""
    table = HashTable(shape, name=name, dtype=dtype, slice=slice)
    for slot, slot_shape in (slots or {}).items():
        table.add_slot(slot, slot_shape, dtype)
    return table


_fences: WeakKeyDictionary[Storage, Fence] = WeakKeyDictionary()


def fence_of(storage: Storage) -> Fence:
    """Return the one writer's hold on a storage."""
    return _fences.setdefault(storage, Fence(storage))


def save_tables(
    storage: Storage | str | Path,
    *shards: Sequence[Any],
    ckpt_id: str = "ckpt_1",
    concurrency: int = 2,
    batch_bytes: int = BATCH_BYTES,
    overwrite: bool = False,
    advance: Callable[[int], object] = lambda n_bytes: None,
    **fields: Any,
) -> Manifest:
    """Commit a checkpoint of the tables of each shard, and of nothing else; a path is made if it is not there yet."""
    if isinstance(storage, str | Path):
        storage = open_storage(str(storage))
        storage.prepare()
    fence = fence_of(storage)
    attempt = Attempt.begin(storage, fence, ckpt_id, step=fields.get("step"), overwrite=overwrite)
    records, rows, slots = [], Counter[str](), {}
    for number, tables in enumerate(shards):
        sources = [source_of(table) for table in tables]
        shard = attempt.shard(number, len(shards))
        SparseSaver(concurrency, batch_bytes=batch_bytes).save(sources, shard, advance)
        records.append(shard.record())
        rows.update({source.name: source.n_rows for source in sources})
        slots |= {source.name: source.slots for source in sources}
    head = Manifest(
        (),
        tuple(TableEntry(name, rows[name], slots[name]) for name in slots),
        (),
        ckpt_id=ckpt_id,
        save_id=attempt.save_id,
        seq=attempt.seq,
        time="",
        epoch=attempt.intent.epoch,
        **fields,
    )
    return attempt.commit(fence, with_shards(head, records))


def written_parts(
    saver: SparseSaver, sources: Sequence[Any], storage: Storage, directory: str, advance: Any = id
) -> Catalog:
    """Have a saver write the parts of one shard of a directory, and return what their catalog would say."""
    shard = Attempt(storage, Intent(directory, 0, "a", None)).shard(0, 1)
    saver.save(sources, shard, advance)
    return shard.catalog


class Tables(torch.nn.Module):
    """A model that is nothing but tables, ours or foreign."""

    def __init__(self, tables: Iterable[Any]) -> None:
        super().__init__()
        self._tables = list(tables)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {table.name: table for table in self._tables}


def load(
    storage: Storage,
    tables: Iterable[Any],
    *,
    ckpt_id: str = "ckpt_1",
    concurrency: int = 2,
    download_dir: WorkDir | None = None,
    **conf: Any,
) -> int:
    """Load tables by what a ``load_conf`` says and return the number of rows."""
    live = LiveState(Tables(tables), None, extra_registry(), io_registry(), 0, 1)
    source = LocatedCheckpoint(parse_load_conf(conf or None), storage, locate(storage, ckpt_id))
    how = {"concurrency": concurrency, "download_dir": download_dir, "rng": False, "meetings": Meetings()}
    with opened([source], live.needs) as sources:
        report = loading.load(live, sources, Problems(), **how)
    return sum(report.rows_taken.values())


def parts_of(storage: Storage, ckpt_id: str = "ckpt_1") -> list[Part]:
    return [part for catalog in OpenLink.of(storage, locate(storage, ckpt_id)).catalogs for part in catalog.parts]


def rows_of(table: Any) -> dict[str, bytes]:
    """Return ids and slots in the order of the ids, as bytes."""
    order = torch.argsort(table.ids())
    columns = {"id": table.ids(), "embedding": table.embeddings(), **table.slots}
    return {
        name: column[order].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, column in columns.items()
    }


class Forge:
    """Changes a checkpoint on disk and makes all of its checksums right again."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    @property
    def manifest(self) -> dict[str, Any]:
        values = json.loads(self.path(layout.MANIFEST).read_text())
        del values["manifest_xxh3"]
        return values

    @property
    def parts(self) -> list[str]:
        return [file["name"] for file in self.manifest["files"] if layout.is_part(file["name"])]

    def path(self, name: str) -> Path:
        return self.directory / name

    def edit_manifest(self, edit: Callable[[dict[str, Any]], Any]) -> None:
        values = self.manifest
        edit(values)
        self.write_manifest(values)

    def write_manifest(self, values: Mapping[str, Any]) -> None:
        self.path(layout.MANIFEST).write_bytes(sealed(json.dumps(values).encode()))

    def write(self, name: str, data: bytes) -> None:
        """Replace a file and what the manifest says of it."""
        self.path(name).write_bytes(data)

        def edit(values):
            for file in values["files"]:
                if file["name"] == name:
                    file["bytes"] = len(data)
                    if "xxh3" in file:
                        file["xxh3"] = f"{xxhash.xxh3_64_intdigest(data):016x}"

        self.edit_manifest(edit)

    def save(self, name: str, state: Any) -> None:
        """Replace a ``.pt`` file by a pickled object, whatever it is."""
        path = self.directory.parent / "forged.pt"
        torch.save(state, path)
        self.write(name, path.read_bytes())
        path.unlink()

    def save_model(self, state: Mapping[str, Any]) -> None:
        """Replace ``model.pt`` and its index by those of a state."""
        manifest = self.manifest
        shards, storage = len(manifest["shards"]), open_storage(str(self.directory.parent))
        names = (layout.MODEL, layout.dense_index(0, shards))
        for name in names:
            self.path(name).unlink(missing_ok=True)
        attempt = {"save_id": manifest["save_id"], "shard": 0, "shards": shards}
        written = save_tensors(state, [], storage, self.directory.name, **attempt)
        manifest["files"] = [file for file in manifest["files"] if file["name"] not in names]
        manifest["files"] += [{"name": f.name, "bytes": f.n_bytes, "xxh3": f"{f.xxh3:016x}"} for f in written]
        manifest["names"]["dense"] = list(state)
        self.write_manifest(manifest)

    def edit_catalog(self, edit: Callable[[dict[str, Any]], Any], shard: int = 0) -> None:
        name = self.manifest["shards"][shard]["catalog"]
        values = json.loads(self.path(name).read_text())
        edit(values)
        self.write(name, json.dumps(values).encode())

    def edit_part(
        self, edit: Callable[[pa.RecordBatch], pa.RecordBatch], name: str | None = None, *, rows: bool = True
    ) -> None:
        """Replace every batch of a part, in file and catalog; the manifest's rows follow where ``rows`` is true."""
        name = name or self.parts[0]
        with pa.ipc.open_file(pa.BufferReader(self.path(name).read_bytes())) as reader:
            batches = [edit(reader.get_batch(i)) for i in range(reader.num_record_batches)]
        with pa.OSFile(str(self.path(name)), "wb") as file, pa.ipc.new_file(file, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        self.write(name, self.path(name).read_bytes())
        shard = next(n for n, of in enumerate(self.manifest["shards"]) if layout.is_part_of(name, of["catalog"]))
        edited = self.path(name).read_bytes()
        self.edit_catalog(lambda values: _describe_batches(values, name, edited, batches), shard)
        catalog = json.loads(self.path(self.manifest["shards"][shard]["catalog"]).read_text())
        self.edit_manifest(lambda values: values["shards"][shard].update(_ids_of(catalog)))
        if rows:
            total = sum(batch.num_rows for batch in batches)
            self.edit_manifest(lambda values: values["tables"][0].update(rows=total))


def sealed(data: bytes) -> bytes:
    """Return the bytes of a JSON object with the seal of a manifest."""
    body = data.rstrip().removesuffix(b"}").rstrip()
    return body + b',\n  "manifest_xxh3": "%016x"\n}\n' % xxhash.xxh3_64_intdigest(body)


def _describe_batches(values: dict[str, Any], name: str, data: bytes, batches: list[pa.RecordBatch]) -> None:
    part = next(part for part in values["parts"] if part["file"] == name)
    part |= {"bytes": len(data), "frame": f"{_frame(data):016x}"}
    for entry, batch in zip(part["batches"], batches, strict=True):
        entry["rows"] = batch.num_rows
        if "id" in batch.schema.names and batch.schema.field("id").type == pa.int64() and batch.num_rows:
            entry["ids"] = [pc.min(batch.column("id")).as_py(), pc.max(batch.column("id")).as_py()]
        for column in entry["xxh3"]:
            if column in batch.schema.names:
                entry["xxh3"][column] = f"{_digest(batch.column(column)):016x}"


def _ids_of(catalog: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of the ids of a shard."""
    ids: dict[str, list[int]] = {}
    for part in (part for part in catalog["parts"] if part.get("holds", "rows") == "rows"):
        for batch in part["batches"]:
            both = [*ids.get(part["tables"][batch["table"]], []), *batch["ids"]]
            ids[part["tables"][batch["table"]]] = [min(both), max(both)]
    return {"ids": ids}


def _frame(data: bytes) -> int:
    """Return the checksum of all bytes of a part that are no column values."""
    whole, frame, done = pa.py_buffer(data), xxhash.xxh3_64(), 0
    with pa.ipc.open_file(whole) as reader:
        for number in range(reader.num_record_batches):
            for column in reader.get_batch(number).columns:
                try:
                    values = column_buffer(column)
                except (AttributeError, ValueError, TypeError, NotImplementedError, pa.ArrowException):
                    return 0  # no column of the format has such a type
                frame.update(data[done : values.address - whole.address])
                done = values.address - whole.address + values.size
    frame.update(data[done:])
    return frame.intdigest()


def _digest(array: pa.Array) -> int:
    try:
        return xxhash.xxh3_64_intdigest(column_buffer(array))
    except (AttributeError, ValueError, TypeError, NotImplementedError, pa.ArrowException):
        return 0  # no column of the format has such a type
