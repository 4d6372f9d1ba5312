"""What a checkpoint has to offer, by name: found without reading rows, and without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable

from recckpt.dense.stored_shards import ShardReader, check_apart
from recckpt.dense.torch_file import TorchFile
from recckpt.errors import LoadConfError
from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.tensor_index import MODEL
from recckpt.load.resolve import PLAIN, Inventory, Thing
from recckpt.load.selection import GLOBAL_STEP, GROUPS, ID, Name, slot_name
from recckpt.output_dir.listing import Checkpoint
from recckpt.storage.base import Files
from recckpt.text import escaped
from recckpt.types import SlotSpec

_WRAPPED = "module."


def checkpoint_inventory(
    checkpoint: Checkpoint, storage: Files, model_dense: Iterable[str], shards: ShardReader | None = None
) -> Inventory:
    """Return the names that a checkpoint has.

    Args:
        checkpoint: which.
        storage: where it lies.
        model_dense: names of the model's tensors, for :func:`dense_prefix`.
        shards: its sharded tensors; None where they are to be looked up.

    Raises:
        CorruptCheckpointError: ``model.pt`` is damaged, or what tells of the sharded tensors.
    """
    manifest = checkpoint.manifest
    things: dict[Name, Thing] = {}
    for table in manifest.tables:
        for slot in (SlotSpec(ID, "int64", ()), *table.slots):
            thing = Thing(slot.dtype, slot.shape, table.rows, table.rows * slot.row_bytes)
            things[slot_name(table.name, slot.name)] = thing
    shards = shards or ShardReader(storage, checkpoint.directory, manifest)
    dense, sharded = _names_in(checkpoint, storage, layout.MODEL), _sharded_names(shards)
    check_apart(dense, sharded, layout.join(checkpoint.directory, layout.MODEL))
    dense |= sharded
    strip, add = dense_prefix(dense, model_dense)
    things |= {Name("dense", add + name.removeprefix(strip)): thing for name, thing in dense.items()}
    things |= dict.fromkeys(registered_names(checkpoint, storage), Thing(PLAIN))
    if manifest.step is not None:
        things[Name(GLOBAL_STEP, GLOBAL_STEP)] = Thing(PLAIN)
    return things


def registered_names(checkpoint: Checkpoint, storage: Files) -> list[Name]:
    """Return the names of registered objects, and of the sparse optimizer's scalars, whose state a checkpoint has.

    Raises:
        CorruptCheckpointError: the manifest does not tell, and the file that does is damaged.
    """
    found = []
    for group, file in (("extra", layout.EXTRA), ("io_state", layout.io_state(0))):
        names = checkpoint.manifest.names.get(group)
        for name in _names_in(checkpoint, storage, file) if names is None else names:
            found.append(Name("sparse_opt" if (group, name) == ("extra", SPARSE_OPTIM) else group, name))
    return found


def dense_prefix(found: Iterable[str], model: Iterable[str]) -> tuple[str, str]:
    """Return the prefix to strip from names in a file, and the one to add, where one side alone was wrapped by DDP."""
    found, model = set(found), set(model)
    if found & model:
        return "", ""
    if found and all(name.startswith(_WRAPPED) for name in found):
        return (_WRAPPED, "") if {name.removeprefix(_WRAPPED) for name in found} & model else ("", "")
    return "", _WRAPPED if {_WRAPPED + name for name in found} & model else ""


def listed_inventory(lines: Iterable[str]) -> Inventory:
    """Return the names of a model from a list, as ``Saver.names`` makes it.

    Args:
        lines: one name a line, as a JSON string where it begins with ``"``; behind a tab each may follow its group,
            dtype and shape.

    Raises:
        LoadConfError: a group that does not exist, a shape that is none, or a string that does not end.
    """
    things: dict[Name, Thing] = {}
    for line in lines:
        text, group, dtype, shape = [*line.rstrip("\r\n").split("\t"), "", "", ""][:4]
        if not text:
            continue
        text = _unescaped(text)
        if group not in ("", *GROUPS):
            raise LoadConfError([f"model names: {text!r} is of no group {group!r}; groups are {', '.join(GROUPS)}"])
        try:
            sizes = tuple(int(size) for size in shape.split(",") if size)
        except ValueError as error:
            raise LoadConfError([f"model names: {text!r} has no shape {shape!r}; write 3,4"]) from error
        if "@" in text and group in ("", "sparse", "sparse_opt"):
            things[slot_name(*text.rsplit("@", 1))] = Thing(dtype, sizes)
        else:
            things[Name(group or "dense", text)] = Thing(dtype, sizes)
    return things


def list_inventory(inventory: Inventory) -> list[str]:
    """Return the lines that :func:`listed_inventory` reads."""
    return [
        f"{escaped(name.text)}\t{name.group}\t{thing.dtype}\t{','.join(map(str, thing.shape))}".rstrip("\t")
        for name, thing in sorted(inventory.items())
    ]


def _unescaped(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise LoadConfError([f"model names: {text} is no JSON string: {error}"]) from error


def _sharded_names(shards: ShardReader) -> dict[str, Thing]:
    return {t.name: Thing(t.dtype, t.shape, 0, t.nbytes) for t in shards.tensors.values() if t.of == MODEL}


def _names_in(checkpoint: Checkpoint, storage: Files, name: str) -> dict[str, Thing]:
    """Return what a ``.pt`` file holds; nothing where the checkpoint has no such file."""
    if checkpoint.manifest.file(name) is None:
        return {}
    path = layout.join(checkpoint.directory, name)
    with storage.open(path) as content:
        file = TorchFile(content, path)
        things = {n: Thing(file.dtype(n), file.shape(n), 0, file.nbytes(n)) for n in file.names()}
        return things | dict.fromkeys(file.values(), Thing(PLAIN))
