"""Checkpoints of sharded tensors made without ranks: what each of them would write, cut from whole tensors."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from recckpt.dense.saver import save_tensors
from recckpt.dense.sharded import OwnChunk
from recckpt.format import layout
from recckpt.storage import open_storage
from support.forge import Forge, filled, save_tables

Box = tuple[Sequence[int], Sequence[int]]  # where it begins, and its sizes


def chunk_of(name: str, whole: Tensor, box: Box | None = None, of: str = "model") -> OwnChunk:
    """Return what a rank has that owns a box of a tensor, or all of it."""
    offsets, sizes = box or ((0,) * whole.dim(), whole.shape)
    place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
    dtype = str(whole.dtype).removeprefix("torch.")
    return OwnChunk(of, name, dtype, tuple(whole.shape), tuple(offsets), whole[place] if place else whole)


def save_chunked(root: Path, *shards: Iterable[OwnChunk], model: Mapping[str, Any] | None = None) -> Forge:
    """Commit ``ckpt_1`` with a table, with the chunks of each shard, and with a ``model.pt`` where it is given."""
    storage = open_storage(str(root))
    storage.prepare()
    manifest = save_tables(storage, *([filled("t", [number])] for number in range(len(shards))))
    forge = Forge(root / "ckpt_1")
    entries, names = [], dict.fromkeys(model or ())
    for number, chunks in enumerate(map(list, shards)):
        attempt = {"save_id": manifest.save_id, "shard": number, "shards": len(shards)}
        entries += save_tensors(None if number else model, chunks, storage, "ckpt_1", **attempt)
        names |= dict.fromkeys(chunk.name for chunk in chunks if chunk.of == "model")
    new = [{"name": entry.name, "bytes": entry.n_bytes, "xxh3": f"{entry.xxh3:016x}"} for entry in entries]
    forge.edit_manifest(lambda values: (values["files"].extend(new), values["names"].update(dense=list(names))))
    return forge


def edit_index(forge: Forge, edit: Callable[[dict[str, Any]], Any], shard: int = 0) -> None:
    """Change the index of a shard, and make the checksums right again."""
    name = layout.dense_index(shard, len(forge.manifest["shards"]))
    values = json.loads(forge.path(name).read_text())
    edit(values)
    forge.write(name, json.dumps(values).encode())
