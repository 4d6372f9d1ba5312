"""The names in a model and in a checkpoint, with what is known of each. Reads no rows. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from recckpt.dense.tensors import StoredTensor
from recckpt.errors import LoadConfError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.manifest import Lineage, Unsaved
from recckpt.format.names import GLOBAL_STEP, GROUPS, ID, Name, slot_name, state_name
from recckpt.format.tables import Reduced
from recckpt.load.conf import Entry
from recckpt.output_dir.listing import Checkpoint
from recckpt.text import escaped
from recckpt.types import EMBEDDING, SlotSpec

PLAIN = "plain data"  # in place of a dtype: state that is not a tensor
_COLUMNS = "columns "  # prefix of the ranges of a slot
_EMBEDDING = "embedding weight"  # marks the dense tensor of an embedding
_SCHEDULE = "schedule"  # marks a registered object that is a schedule
_WRAPPED, _COMPILED = "module.", "_orig_mod"  # prefixes that DistributedDataParallel and torch.compile put into names
_N_AVERAGED = "n_averaged"  # buffer of AveragedModel, which adds the same prefix as DistributedDataParallel


@dataclass(frozen=True)
class Thing:
    dtype: str = ""  # dtype of a slot or tensor, or PLAIN; "" if unknown or irrelevant
    shape: tuple[int, ...] = ()  # shape of a tensor, or of one row of a slot
    rows: int = 0  # rows of the table; 0 for anything but a slot or a table's rows as a tensor
    n_bytes: int = 0  # bytes to read; 0 if unknown
    tied: tuple[str, ...] = ()  # other names of a tensor in the checkpoint, or of the parameter with this state;
    # for a slot of a live table: names that the dense tensor with its rows may have in a checkpoint
    lineage: Lineage = ()  # class of a dense optimizer; () if unknown
    tensor: str = ""  # for a slot: the model's name for the dense tensor with these rows; "" in a table
    table: str = ""  # for a dense tensor and its optimizer states: the table that has them in the checkpoint
    state: str = ""  # for a slot: the sharded tensor with its values
    optimizer: str = ""  # the registered optimizer with the states of these rows, and their step
    columns: tuple[tuple[int, int], ...] = ()  # ranges with one value each in a slot; () without
    is_embedding: bool = False  # whether a dense tensor is the weight of an embedding, which may get more rows
    is_schedule: bool = False  # whether a registered object changes learning rates over time

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" if self.dtype not in ("", PLAIN) else self.dtype or "state"


Inventory = Mapping[Name, Thing]


@dataclass(frozen=True)
class LoadCandidate:
    """The names in a checkpoint, and the entry of a bank that asks for some of them."""

    entry: Entry  # entry of the bank
    label: str  # the checkpoint's path
    inventory: Inventory
    reduced: Mapping[str, Reduced] = field(default_factory=dict)  # tables that were not saved whole
    unsaved: Unsaved = field(default_factory=Unsaved)
    sharded: Collection[StoredTensor] = ()  # sharded tensors outside the model, such as TorchRec's optimizer states


def checkpoint_inventory(
    checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor], model_dense: Iterable[str]
) -> Inventory:
    """Return the names in a checkpoint. Its ``tensors`` get the model's names."""
    manifest = checkpoint.manifest
    things: dict[Name, Thing] = {}
    for table in manifest.tables:
        dtypes = table.reduced.dtypes if table.reduced is not None else {}
        for slot in (SlotSpec(ID, "int64", ()), *table.slots):
            dtype = dtypes.get(slot.name, slot.dtype)  # the dtype in the table; the file has a narrower one
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
    states = [text.rpartition("@") for text in manifest.names.dense_opt]
    optimizers = {name for _, _, name in states}
    names = [state_name(here.get(parameter, parameter), name) for parameter, _, name in states]
    for each in registered_names(checkpoint):
        names.append(Name("dense_opt", each.text) if each.group == "extra" and each.text in optimizers else each)
    lineages = manifest.training.optimizers
    things |= {name: Thing(PLAIN, lineage=lineages.get(name.text, ())) for name in names}
    if manifest.step is not None:
        things[Name(GLOBAL_STEP, GLOBAL_STEP)] = Thing(PLAIN)
    return things


def registered_names(checkpoint: Checkpoint) -> list[Name]:
    names = checkpoint.manifest.names
    extra = [Name("sparse_opt" if name == SPARSE_OPTIM else "extra", name) for name in names.extra]
    extra += [Name("extra", name) for name in names.extra_of_ranks]
    return [*extra, *(Name("io_state", name) for name in names.io_state)]


def names_here(saved: Iterable[str], model: Iterable[str]) -> dict[str, str]:
    """Return saved name -> the model's name; ignores wrappers that only one side had."""
    saved, model = list(saved), {*model}
    plain = {name: ".".join(part for part in name.split(".") if part != _COMPILED) for name in saved}
    if len({*plain.values()}) < len(plain) or any(_COMPILED in name.split(".") for name in model):
        plain = {name: name for name in saved}
    there, model = {*plain.values()} - {_N_AVERAGED}, model - {_N_AVERAGED}
    if there & model or not there:
        return plain
    if all(name.startswith(_WRAPPED) for name in there):
        is_wrapped = bool({name.removeprefix(_WRAPPED) for name in there} & model)
        return {name: text.removeprefix(_WRAPPED) for name, text in plain.items()} if is_wrapped else plain
    is_wrapped_here = bool({_WRAPPED + name for name in there} & model)
    return {name: _WRAPPED + text for name, text in plain.items()} if is_wrapped_here else plain


def listed_inventory(lines: Iterable[str]) -> Inventory:
    """Return the names of a model from a list, as ``Saver.names`` makes it.

    A line is a name and optional tab-separated fields: group, dtype, shape, and then

    - for a tied parameter: its other names;
    - for a dense optimizer: the names of its classes;
    - for a slot: the names of its dense tensor, and its ranges of columns as ``columns 0:4,4:8``;
    - for a registered object that makes learning rates: ``schedule``;
    - for the weight of an embedding: ``embedding weight``, as the last field.

    Names that begin with ``"`` are JSON strings.

    Raises:
        LoadConfError: an unknown group, an invalid shape, or a string without its end.
    """
    things: dict[Name, Thing] = {}
    for line in lines:
        text, group, dtype, shape, *others = [*line.rstrip("\r\n").split("\t"), "", "", ""]
        if not text:
            continue
        text = _unescaped(text)
        if group not in ("", *GROUPS):
            raise LoadConfError([f"model names: {text!r} has unknown group {group!r}; groups are {', '.join(GROUPS)}"])
        try:
            sizes = tuple(int(size) for size in shape.split(",") if size)
        except ValueError as error:
            raise LoadConfError([f"model names: {text!r} has the invalid shape {shape!r}; write 3,4"]) from error
        is_slot = "@" in text and group in ("", "sparse", "sparse_opt")
        name = slot_name(*text.rsplit("@", 1)) if is_slot else Name(group or "dense", text)
        texts = tuple(_unescaped(other) for other in others if other)
        ranges = [text for text in texts if name.is_slot and text.startswith(_COLUMNS)]
        tied, lineage = ((), texts) if name.is_settings else (tuple(text for text in texts if text not in ranges), ())
        spans = [span.split(":") for text in ranges for span in text.removeprefix(_COLUMNS).split(",")]
        if not all(len(span) == 2 and all(map(str.isdecimal, span)) for span in spans):
            raise LoadConfError([f"model names: {ranges[0]!r} are not ranges of columns; write columns 0:4,4:8"])
        columns = tuple((int(begin), int(end)) for begin, end in spans)
        is_schedule = name.group == "extra" and _SCHEDULE in texts
        tied = () if is_schedule else tied
        thing = Thing(dtype, sizes, tied=tied, lineage=lineage, columns=columns, is_schedule=is_schedule)
        is_embedding = name.group == "dense" and tied[-1:] == (_EMBEDDING,)
        things[name] = replace(thing, tied=tied[:-1], is_embedding=True) if is_embedding else thing
    return things


def list_inventory(inventory: Inventory) -> list[str]:
    return [
        "\t".join(
            (escaped(name.text), name.group, thing.dtype, ",".join(map(str, thing.shape)), *map(escaped, others))
        ).rstrip("\t")
        for name, thing in sorted(inventory.items())
        for spans in [",".join(f"{begin}:{end}" for begin, end in thing.columns)]
        for marks in [
            [_COLUMNS + spans] if spans else [_SCHEDULE] if thing.is_schedule else [_EMBEDDING] * thing.is_embedding
        ]
        for others in [thing.lineage or [*thing.tied, *marks]]
    ]


def _unescaped(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise LoadConfError([f"model names: {text} is not a JSON string: {error}"]) from error
