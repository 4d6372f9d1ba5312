"""The files of one collection of a dump of dynamicemb, as of one rank, which any number of ranks loads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from recckpt.convert.dynamicemb_files import (
    ADAGRAD,
    ADAM,
    KEYS,
    ROWWISE,
    SCORES,
    SETTINGS,
    SLOTS,
    STATES,
    VALUES,
    file_of,
)
from recckpt.convert.source import Array, LeftOut
from recckpt.convert.target_files import TargetFiles, file_name
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format import layout
from recckpt.format.dtypes import widened
from recckpt.text import Progress
from recckpt.types import EMBEDDING, SlotSpec

ALL_SLOTS, INCREMENTS, DTYPES = True, False, ()  # its values are float32
_FLOATS = ("float32", "float16", "bfloat16")
_COUNT, _SCORE = "count", "score"
_SETTINGS = {  # kind of an optimizer -> names of its settings there -> here
    ADAM: {"lr": "lr", "eps": "eps"},
    ADAGRAD: {"lr": "lr", "eps": "eps", "initial_accumulator_value": "initial_accumulator_value"},
    ROWWISE: {"lr": "lr", "eps": "eps", "initial_accumulator_value": "initial_accumulator_value"},
}


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write keys, values, scores, and the states of optimizers that both have, with their settings."""
    left = export.no_dense("a dump of dynamicemb is for rows; use dcp")
    needs_state = any(_kind_of(table) for table in export.tables)
    scalars = export.state(layout.EXTRA).get(layout.SPARSE_OPTIM, {}) if needs_state else {}
    for table in export.tables:
        name = file_name(table.name)
        settings = _settings_of(table, scalars, left)
        kept = _kept(table, bool(settings), left)
        if _score_slot(kept) == _COUNT:
            settings |= {"evict_strategy": "EvictStrategy.KLfu"}
        _write_table(kept, name, settings.get("opt_type", ""), files, progress)
        if settings:
            files.put_json(settings, f"{name}{SETTINGS}")
    return left


def _write_table(table: TableView, name: str, kind: str, files: TargetFiles, progress: Progress) -> None:
    places = {slot.name: number for number, slot in enumerate(table.slots)}
    score = _score_slot(table)
    items = {VALUES: (EMBEDDING,), STATES: SLOTS.get(kind, ()), SCORES: (score,) if score else ()}
    with ExitStack() as stack:
        made = [KEYS, *(item for item, slots in items.items() if slots)]
        sinks = {item: stack.enter_context(files.create(file_of(name, item))) for item in made}
        for rows in table.rows():
            sinks[KEYS].write(rows.ids.tobytes())
            for item in made[1:]:
                parts = [_numbers(rows.columns[places[slot]], table.slots[places[slot]]) for slot in items[item]]
                sinks[item].write(np.concatenate(parts, axis=1).tobytes())
            progress.advance(rows.ids.nbytes + sum(column.nbytes for column in rows.columns))
            progress.add_rows(len(rows.ids))


def _numbers(column: Array, slot: SlotSpec) -> Array:
    """Return a column as a dump has it: float32, or scores as int64, of two dimensions."""
    values = widened(column) if slot.dtype == "bfloat16" else column
    return values.astype(np.float32 if slot.dtype in _FLOATS else np.int64).reshape(len(column), -1)


def _kind_of(table: TableView) -> str:
    """Return the kind of the optimizer of which a table has all slots, in float32; empty where there is none."""
    dtypes = {slot.name: slot.dtype for slot in table.slots}
    kinds = (kind for kind, slots in SLOTS.items() if all(dtypes.get(slot) == "float32" for slot in slots))
    return next(kinds, "")


def _settings_of(table: TableView, scalars: Mapping[str, Any], left: list[LeftOut]) -> dict[str, Any]:
    """Return the settings of the optimizer as a dump has them; empty where its states cannot go there."""
    kind = _kind_of(table)
    if not kind:
        return {}
    groups = (group for group in scalars.get("param_groups", ()) if table.name in group["tables"])
    group: Mapping[str, Any] = next(groups, {})
    lacking = [here for here in _SETTINGS[kind].values() if here not in group]
    if lacking:
        why = f"need {', '.join(lacking)} of the optimizer beside them, which the checkpoint does not have"
        left.append(LeftOut(f"table {table.name}, optimizer states", why))
        return {}
    settings = {"opt_type": kind, **{there: float(group[here]) for there, here in _SETTINGS[kind].items()}}
    if kind == ADAM:
        beta1, beta2 = group["betas"]
        step = scalars.get("state", {}).get(table.name, {}).get("step", 0)
        settings |= {"iters": int(step), "beta1": float(beta1), "beta2": float(beta2), "weight_decay": 0.0}
    return settings


def _kept(table: TableView, has_states: bool, left: list[LeftOut]) -> TableView:
    """Return a table with the slots that a dump has a place for; ConversionError for vectors that it cannot hold."""
    vectors = {slot.name: slot for slot in table.slots}.get(EMBEDDING)
    if vectors is None or vectors.dtype not in _FLOATS or len(vectors.shape) != 1:
        found = "no vectors" if vectors is None else f"vectors of {vectors.dtype} {vectors.shape}"
        expected = f"one dimension of {', '.join(_FLOATS)}"
        raise ConversionError(f"table {table.name!r}", f"slot {EMBEDDING!r}", found=found, expected=expected)
    of_optimizer = SLOTS.get(_kind_of(table), ())
    names = {EMBEDDING, _score_slot(table), *(of_optimizer if has_states else ())}
    others = [slot.name for slot in table.stored if slot.name not in {*names, *of_optimizer}]
    left += [LeftOut(f"table {table.name}, slot {name}", "has no place in a dump of dynamicemb") for name in others]
    return replace(table, stored=tuple(slot for slot in table.stored if slot.name in names))


def _score_slot(table: TableView) -> str:
    """Return the slot whose values are scores there: those of an import, or counts; empty where there is none."""
    dtypes = {slot.name: slot.dtype for slot in table.slots}
    return next((name for name in (_SCORE, _COUNT) if dtypes.get(name) == "int64"), "")
