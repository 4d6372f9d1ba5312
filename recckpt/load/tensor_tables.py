"""Offers dense tensors of a checkpoint as live tables, and tables as dense tensors. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import ID, Name, slot_name, state_name
from recckpt.live.optimizer_slots import AKIN_LINEAGE, PREFIXES, are_own, key_of
from recckpt.load.inventory import PLAIN, Inventory, LoadCandidate, Thing
from recckpt.types import EMBEDDING

_WITHOUT_SLOTS = "sparse_sgd"  # keeps no state per row
_WEIGHT = ".weight"
_STATE = re.compile(r".*\['state'\]\['(?P<key>[^']+)'\]\['(?:[^']*\.)?(?P<state>[^'.]+)'\]")
_COLLECTIONS = ("embedding_bags", "embeddings")  # attributes in which TorchRec's collections keep their tables


def with_tensors_as_tables(model: Inventory, offer: LoadCandidate) -> LoadCandidate:
    """Return a candidate in which dense tensors that are live tables in the model become tables.

    These tables have the names of the tensors. Their slots are the tensor's state in a registered optimizer, if the
    optimizer that trains the table has the same class.
    """
    there: dict[Name, Thing] = {}
    taken: set[str] = set()
    for name in (name for name in model if name.slot == ID):
        tensor = _tensor_of(name, model[name].tied, offer)
        if tensor is not None:
            there |= _things(tensor, name.table, model, offer)
            taken |= {tensor, *offer.inventory[Name("dense", tensor)].tied}
    if not taken:
        return offer
    if any(thing.optimizer for thing in there.values()):
        there.setdefault(Name("sparse_opt", SPARSE_OPTIM), Thing(PLAIN))
    gone = {Name("dense", tensor) for tensor in taken}
    trained: dict[str, set[str]] = {}
    for state in (name for name in offer.inventory if name.parameter):
        trained.setdefault(state.optimizer, set()).add(state.parameter)
        if state.parameter in taken:
            gone.add(state)
    gone |= {Name("dense_opt", optimizer) for optimizer, parameters in trained.items() if parameters <= taken}
    kept = {name: thing for name, thing in offer.inventory.items() if name in model or name not in gone}
    return replace(offer, inventory={**there, **kept})


def names_of_table(table: str, renamed: str, tied: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a live table may have as a dense tensor; ``renamed`` is its name in the checkpoint."""
    return tuple(tied) if renamed == table else (renamed, f"{renamed}{_WEIGHT}") if tied else ()


def with_tables_as_tensors(model: Inventory, offer: LoadCandidate) -> LoadCandidate:
    """Return a candidate in which tables that are dense tensors of as many rows in the model become dense tensors.

    Their states and settings become states and settings of the registered optimizers that train the tensors here.
    """
    there: dict[Name, Thing] = {}
    gone: dict[str, bool] = {}  # table -> whether an optimizer here uses its slots
    for name, thing in model.items():
        table = _table_of(name, thing, model, offer)
        if table is not None:
            as_tensor = _as_tensor(name, table, model, offer)
            gone[table] = gone.get(table, False) or any(one.parameter for one in as_tensor)  # a tied tensor comes twice
            there |= as_tensor
    kept = {
        name: thing
        for name, thing in offer.inventory.items()
        if name.table not in gone or (name.slot not in (ID, EMBEDDING) and not gone[name.table])
    }
    # A registered optimizer lists all that it trains, including parameters whose state is in the rows of a table.
    return replace(offer, inventory={**kept, **there}) if gone else offer


def tables_of_tensor(text: str) -> tuple[str, ...]:
    """Return the names that a dense tensor may have as a table: its path or, for TorchRec, the path's last part."""
    path = text.removesuffix(_WEIGHT)
    above, _, last = path.rpartition(".")
    return (path, last) if above.rpartition(".")[2] in _COLLECTIONS else (path,)


def _table_of(name: Name, thing: Thing, model: Inventory, offer: LoadCandidate) -> str | None:
    if name.group != "dense" or thing.dtype == PLAIN or len(thing.shape) < 2:
        return None
    try:
        texts = [offer.entry.renames.source(Name("dense", one)) for one in (name.text, *thing.tied)]
    except ValueError:
        return None
    if Name("dense", texts[0]) in offer.inventory:
        return None
    for table in (table for text in texts for table in tables_of_tensor(text)):
        rows = offer.inventory.get(slot_name(table, EMBEDDING))
        if rows is None or rows.tensor or slot_name(table, ID) in model:
            continue
        if thing.is_embedding or rows.rows == thing.shape[0]:
            return table
    return None


def _as_tensor(name: Name, table: str, model: Inventory, offer: LoadCandidate) -> dict[Name, Thing]:
    renames, inventory = offer.entry.renames, offer.inventory
    text, rows = renames.source(name), inventory[slot_name(table, EMBEDDING)]
    slots = [one.slot for one in inventory if one.table == table and one.group == "sparse_opt"]
    things = {Name("dense", text): Thing(rows.dtype, (rows.rows, *rows.shape), rows.rows, rows.n_bytes, table=table)}
    for state in (one for one in model if one.parameter == name.text):
        lineage = model[Name("dense_opt", state.optimizer)].lineage
        kind, there = next(iter(lineage), ""), renames.source(Name("dense_opt", state.optimizer))
        if any(key_of(kind, slot) for slot in slots) if slots else PREFIXES.get(kind) == _WITHOUT_SLOTS:
            things[state_name(text, there)] = Thing(PLAIN, table=table)
            settings = Name("dense_opt", there)
            if settings not in inventory and Name("sparse_opt", SPARSE_OPTIM) in inventory:
                of_rows = lineage if are_own(kind, filter(partial(key_of, kind), slots)) else AKIN_LINEAGE[kind]
                things[settings] = Thing(PLAIN, lineage=of_rows, table=table)
    return things


def _tensor_of(name: Name, tied: Sequence[str], offer: LoadCandidate) -> str | None:
    try:
        renamed = offer.entry.renames.source(name).rpartition("@")[0]
    except ValueError:  # several rules apply, which is refused elsewhere
        return None
    names = names_of_table(name.table, renamed, tied)
    if any(slot_name(table, ID) in offer.inventory for table in (renamed, *names)):
        return None
    tensors = ((tensor, offer.inventory.get(Name("dense", tensor), Thing(PLAIN))) for tensor in names)
    return next((tensor for tensor, thing in tensors if thing.dtype != PLAIN and len(thing.shape) > 1), None)


def _things(tensor: str, table: str, model: Inventory, offer: LoadCandidate) -> dict[Name, Thing]:
    inventory = offer.inventory
    saved = inventory[Name("dense", tensor)]
    n_rows, *shape = saved.shape
    slots = [name.slot for name in model if name.table == table and name.group == "sparse_opt"]
    optimizer, kind = next(_trainers(tensor, slots, inventory), ("", ""))
    lineage = (kind,) if optimizer else ()
    things = {
        slot_name(tensor, ID): Thing("int64", (), n_rows, tensor=tensor, optimizer=optimizer, lineage=lineage),
        slot_name(tensor, EMBEDDING): Thing(saved.dtype, tuple(shape), n_rows, saved.n_bytes, tensor=tensor),
    }
    for slot in slots if optimizer else ():
        if key_of(kind, slot):
            things[slot_name(tensor, slot)] = Thing("", (), n_rows, tensor=tensor, optimizer=optimizer)
    if optimizer:
        return things
    # The only state of a tensor in a fused optimizer of TorchRec, if it has the name of Adagrad's sums.
    matches = [(match, one) for one in offer.sharded if (match := _STATE.fullmatch(one.name))]
    states = [(match["state"], one) for match, one in matches if f".{match['key']}".endswith(f".{tensor}")]
    if len(states) == 1 and states[0][0] in ("momentum1", "sum"):
        state, shapes = states[0][1], {"sparse_adagrad_sum": saved.shape, "sparse_rowwise_adagrad_sum": saved.shape[:1]}
        for slot in (slot for slot in slots if shapes.get(slot) == state.shape):
            thing = Thing(state.dtype, state.shape[1:], n_rows, state.nbytes, tensor=tensor, state=state.name)
            things[slot_name(tensor, slot)] = thing
    return things


def _trainers(tensor: str, slots: Sequence[str], inventory: Inventory) -> Iterator[tuple[str, str]]:
    names = {tensor, *inventory[Name("dense", tensor)].tied}
    for state in (name for name in inventory if name.parameter in names):
        kind = next(iter(inventory.get(Name("dense_opt", state.optimizer), Thing()).lineage), "")
        if any(key_of(kind, slot) for slot in slots) if slots else PREFIXES.get(kind) == _WITHOUT_SLOTS:
            yield state.optimizer, kind
