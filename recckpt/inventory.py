"""What a checkpoint has to offer, by name: found without reading rows, and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recckpt import layout
from recckpt.dense.torch_file import TorchFile
from recckpt.errors import LoadConfError
from recckpt.listing import Checkpoint
from recckpt.load_plan import Inventory, Thing
from recckpt.names import GLOBAL_STEP, GROUPS, ID, SPARSE_OPTIM, Name, slot_name
from recckpt.storage import Storage
from recckpt.types import SlotSpec

_WRAPPED = "module."


def checkpoint_inventory(checkpoint: Checkpoint, storage: Storage, model_dense: Iterable[str]) -> Inventory:
    """Return the names that a checkpoint has.

    Args:
        checkpoint: which.
        storage: where it lies.
        model_dense: names of the model's tensors, for :func:`dense_prefix`.

    Raises:
        CorruptCheckpointError: ``model.pt`` is damaged.
    """
    manifest = checkpoint.manifest
    things: dict[Name, Thing] = {}
    for table in manifest.tables:
        for slot in (SlotSpec(ID, "int64", ()), *table.slots):
            thing = Thing(slot.dtype, slot.shape, table.rows, table.rows * slot.row_bytes)
            things[slot_name(table.name, slot.name)] = thing
    dense = _dense_things(checkpoint, storage)
    strip, add = dense_prefix(dense, model_dense)
    things |= {Name("dense", add + name.removeprefix(strip)): thing for name, thing in dense.items()}
    for group, names in manifest.names.items():
        for name in names:
            things[Name("sparse_opt" if (group, name) == ("extra", SPARSE_OPTIM) else group, name)] = Thing()
    if manifest.step is not None:
        things[Name(GLOBAL_STEP, GLOBAL_STEP)] = Thing()
    return things


def dense_prefix(found: Iterable[str], model: Iterable[str]) -> tuple[str, str]:
    """Return the prefix to strip from names in a file, and the one to add, where one side alone was wrapped by DDP."""
    found, model = set(found), set(model)
    if not found or not model or found & model:
        return "", ""
    if all(name.startswith(_WRAPPED) for name in found):
        return _WRAPPED, ""
    return "", _WRAPPED if all(name.startswith(_WRAPPED) for name in model) else ""


def listed_inventory(lines: Iterable[str]) -> Inventory:
    """Return the names of a model from a list, as ``Saver.names`` makes it.

    Args:
        lines: one name a line; behind a tab each may follow its group, dtype and shape.

    Raises:
        LoadConfError: a group that does not exist, or a shape that is none.
    """
    things: dict[Name, Thing] = {}
    for line in lines:
        text, group, dtype, shape = [*line.rstrip("\n").split("\t"), "", "", ""][:4]
        if not text:
            continue
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
        f"{name.text}\t{name.group}\t{thing.dtype}\t{','.join(map(str, thing.shape))}".rstrip("\t")
        for name, thing in sorted(inventory.items())
    ]


def _dense_things(checkpoint: Checkpoint, storage: Storage) -> Mapping[str, Thing]:
    if checkpoint.manifest.file(layout.MODEL) is None:
        return {}
    path = layout.join(checkpoint.directory, layout.MODEL)
    with storage.open(path) as file:
        tensors = TorchFile(file, path)
        things = {n: Thing(tensors.dtype(n), tensors.shape(n), 0, tensors.nbytes(n)) for n in tensors.names()}
        return things | dict.fromkeys(tensors.values(), Thing())
