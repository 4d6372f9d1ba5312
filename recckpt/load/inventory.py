"""What a model and a checkpoint have, by name: found without reading rows, and without torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from recckpt.dense.tensors import StoredTensor
from recckpt.errors import LoadConfError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import GLOBAL_STEP, GROUPS, ID, Name, slot_name, state_name
from recckpt.format.reduced import Reduced
from recckpt.format.training import Lineage, Unsaved
from recckpt.load.conf import Entry
from recckpt.output_dir.listing import Checkpoint
from recckpt.text import escaped
from recckpt.types import EMBEDDING, SlotSpec

PLAIN = "plain data"  # in place of a dtype: state that is not a tensor
_COLUMNS = "columns "  # before the ranges of a slot
_WRAPPED, _COMPILED = "module.", "_orig_mod"  # what DistributedDataParallel and torch.compile put into names
_N_AVERAGED = "n_averaged"  # of AveragedModel, which wraps as DistributedDataParallel does


@dataclass(frozen=True)
class Thing:
    """What is known of a name without reading it."""

    dtype: str = ""  # of a slot or tensor, or PLAIN; "" where it is not known or does not matter
    shape: tuple[int, ...] = ()  # of one row of a slot, or of a tensor
    rows: int = 0  # of the table; 0 for what is not a slot
    n_bytes: int = 0  # to read, 0 where that is not known
    tied: tuple[str, ...] = ()  # other names of a tensor there, or of the parameter whose optimizer state this is;
    # of a slot of a live table the names of the dense tensor that has its rows in a checkpoint without live tables
    lineage: Lineage = ()  # of the class of a dense optimizer; () where that is not known
    tensor: str = ""  # of a slot: the dense tensor whose rows these are, by its name in the model; "" in a table
    table: str = ""  # of a dense tensor, and its states in optimizers: the table that has them there
    state: str = ""  # of a slot: the sharded tensor beside the model that has it
    optimizer: str = ""  # the registered optimizer that has the states of these rows, and their step
    columns: tuple[tuple[int, int], ...] = ()  # ranges of them with one value each in a slot; () where they have none

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" if self.dtype not in ("", PLAIN) else self.dtype or "state"


Inventory = Mapping[Name, Thing]


@dataclass(frozen=True)
class LoadCandidate:
    """What a checkpoint has, and what an entry asks for of it."""

    entry: Entry  # of the model bank
    label: str  # the checkpoint's path
    inventory: Inventory  # its names
    reduced: Mapping[str, Reduced] = field(default_factory=dict)  # of tables that were not saved as they were
    unsaved: Unsaved = field(default_factory=Unsaved)  # what it should have and lacks
    sharded: Collection[StoredTensor] = ()  # sharded tensors beside the model, as of TorchRec's optimizers

    @property
    def called(self) -> str:
        """What messages call it: the entry of a bank, and where it is."""
        return f"{self.entry.label} ({self.label})" if self.entry.path else self.label


def checkpoint_inventory(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], model_dense: Iterable[str]
) -> Inventory:
    """Return the names that a checkpoint has, its ``tensors`` by the names that the model has for them."""
    manifest = checkpoint.manifest
    things: dict[Name, Thing] = {}
    for table in manifest.tables:
        dtypes = table.reduced.dtypes if table.reduced is not None else {}
        for slot in (SlotSpec(ID, "int64", ()), *table.slots):
            dtype = dtypes.get(slot.name, slot.dtype)  # of the table, which stored it narrower
            columns = table.live.columns if table.live is not None and slot.name not in (ID, EMBEDDING) else ()
            of_ranges = columns if slot.shape == (len(columns),) else ()
            thing = Thing(dtype, slot.shape, table.rows, table.rows * slot.row_bytes, columns=of_ranges)
            things[slot_name(table.name, slot.name)] = thing
    dense = dict.fromkeys(manifest.names.dense, Thing(PLAIN))
    here = names_here(dense, model_dense)
    tied: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault((tensor.place, tensor.shape), []).append(here[name])
    for name, tensor in tensors.items():
        others = tuple(other for other in tied[tensor.place, tensor.shape] if other != here[name])
        dense[name] = Thing(tensor.dtype, tensor.shape, 0, tensor.nbytes, others)
    things |= {Name("dense", here[name]): thing for name, thing in dense.items()}
    things |= _registered(checkpoint, here)
    if manifest.step is not None:
        things[Name(GLOBAL_STEP, GLOBAL_STEP)] = Thing(PLAIN)
    return things


def reduced_tables(checkpoint: Checkpoint) -> dict[str, Reduced]:
    """Return what was left out of the tables that were not saved as they were."""
    return {table.name: table.reduced for table in checkpoint.manifest.tables if table.reduced is not None}


def registered_names(checkpoint: Checkpoint) -> list[Name]:
    """Return the names of registered objects, and of the sparse optimizer's scalars, whose state a checkpoint has."""
    names = checkpoint.manifest.names
    extra = [Name("sparse_opt" if name == SPARSE_OPTIM else "extra", name) for name in names.extra]
    extra += [Name("extra", name) for name in names.extra_of_ranks]
    return [*extra, *(Name("io_state", name) for name in names.io_state)]


def _registered(checkpoint: Checkpoint, here: Mapping[str, str]) -> dict[Name, Thing]:
    """Return the registered objects; of dense optimizers their parameters, under the names that the model has."""
    states = [text.rpartition("@") for text in checkpoint.manifest.names.dense_opt]
    optimizers = {name for _, _, name in states}
    names = [state_name(here.get(parameter, parameter), name) for parameter, _, name in states]
    for name in registered_names(checkpoint):
        names.append(Name("dense_opt", name.text) if name.group == "extra" and name.text in optimizers else name)
    lineages = checkpoint.manifest.training.optimizers
    return {name: Thing(PLAIN, lineage=lineages.get(name.text, ())) for name in names}


def names_here(saved: Iterable[str], model: Iterable[str]) -> dict[str, str]:
    """Return what the model calls each name in a checkpoint: wrappers that one side alone had are looked through."""
    saved, model = list(saved), list(model)
    plain = {name: ".".join(part for part in name.split(".") if part != _COMPILED) for name in saved}
    if len({*plain.values()}) < len(plain) or any(_COMPILED in name.split(".") for name in model):
        plain = {name: name for name in saved}
    strip, add = dense_prefix(plain.values(), model)
    return {name: add + plain[name].removeprefix(strip) for name in saved}


def dense_prefix(saved: Iterable[str], model: Iterable[str]) -> tuple[str, str]:
    """Return the prefix to strip from names in a file, and the one to add, where one side alone was wrapped."""
    saved, model = {*saved} - {_N_AVERAGED}, {*model} - {_N_AVERAGED}
    if saved & model:
        return "", ""
    if saved and all(name.startswith(_WRAPPED) for name in saved):
        return (_WRAPPED, "") if {name.removeprefix(_WRAPPED) for name in saved} & model else ("", "")
    return "", _WRAPPED if {_WRAPPED + name for name in saved} & model else ""


def listed_inventory(lines: Iterable[str]) -> Inventory:
    """Return the names of a model from a list, as ``Saver.names`` makes it.

    A line is one name; group, dtype, shape and the other names of a tied parameter, or of a dense optimizer the names
    of its classes, or of a slot the names of its dense tensor and its ranges of columns, as ``columns 0:4,4:8``, may
    follow it, behind tabs. Names that begin with ``"`` are JSON strings.

    Raises:
        LoadConfError: a group that does not exist, a shape that is not one, or a string that does not end.
    """
    things: dict[Name, Thing] = {}
    for line in lines:
        text, group, dtype, shape, *others = [*line.rstrip("\r\n").split("\t"), "", "", ""]
        if not text:
            continue
        text = _unescaped(text)
        if group not in ("", *GROUPS):
            raise LoadConfError([f"model names: {text!r} is of no group {group!r}; groups are {', '.join(GROUPS)}"])
        try:
            sizes = tuple(int(size) for size in shape.split(",") if size)
        except ValueError as error:
            raise LoadConfError([f"model names: {text!r} has no shape {shape!r}; write 3,4"]) from error
        is_slot = "@" in text and group in ("", "sparse", "sparse_opt")
        name = slot_name(*text.rsplit("@", 1)) if is_slot else Name(group or "dense", text)
        texts = tuple(_unescaped(other) for other in others if other)
        ranges = [text for text in texts if name.is_slot and text.startswith(_COLUMNS)]
        tied, lineage = ((), texts) if name.is_settings else (tuple(text for text in texts if text not in ranges), ())
        columns = tuple(pair for text in ranges for pair in _columns(text))
        things[name] = Thing(dtype, sizes, tied=tied, lineage=lineage, columns=columns)
    return things


def list_inventory(inventory: Inventory) -> list[str]:
    """Return the lines that :func:`listed_inventory` reads."""
    return [
        "\t".join(
            (escaped(name.text), name.group, thing.dtype, ",".join(map(str, thing.shape)), *map(escaped, others))
        ).rstrip("\t")
        for name, thing in sorted(inventory.items())
        for spans in [",".join(f"{begin}:{end}" for begin, end in thing.columns)]
        for others in [thing.lineage or [*thing.tied, *([_COLUMNS + spans] if spans else [])]]
    ]


def _columns(text: str) -> Iterator[tuple[int, int]]:
    for span in text.removeprefix(_COLUMNS).split(","):
        begin, _, end = span.partition(":")
        if not (begin.isdecimal() and end.isdecimal()):
            raise LoadConfError([f"model names: {text!r} has no ranges of columns; write columns 0:4,4:8"])
        yield int(begin), int(end)


def _unescaped(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise LoadConfError([f"model names: {text} is not a JSON string: {error}"]) from error
