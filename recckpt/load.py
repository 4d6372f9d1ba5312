"""The hallway of a load: plan, read what is small, fill the tables, then the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from recckpt import layout
from recckpt.io_state import load_rng
from recckpt.load_plan import Planned, Problems, resolve
from recckpt.names import GLOBAL_STEP, ID, SPARSE_OPTIM, Name
from recckpt.plan_report import LoadPlan, LoadReport
from recckpt.progress import Progress
from recckpt.sparse.filler import TableLoad
from recckpt.sparse.loader import Loaded, load_tables
from recckpt.sparse.shards import read_parts
from recckpt.sparse_optim_state import merged_optimizer_state, optimizer_loaded
from recckpt.split import unwrap
from recckpt.target import Source, Target
from recckpt.types import HashTable

log = logging.getLogger("recckpt")

_REMEDY = "pass load_conf={'strict': False} to load what fits by name, or say in 'on_mismatch' what to do"


def plan(target: Target, sources: Sequence[Source], problems: Problems | None = None) -> LoadPlan:
    """Decide what is loaded from where; reads no rows and changes nothing.

    Args:
        target: what is to be filled.
        sources: checkpoints in the order of the bank; of those that have a name, the last one counts.
        problems: what the caller has found wrong already.

    Raises:
        LoadConfError: names or keys that do not exist; all of them, and all that does not fit beside them.
        StateMismatchError: where there is nothing but state that does not fit.
    """
    problems = problems or Problems()
    model = target.inventory()
    items = resolve(model, [source.offer(model) for source in sources], problems)
    items = [_checked_optimizer(target, sources, item) for item in items]
    _check_shards(target, sources, items, problems)
    problems.raise_if_any(" and ".join(source.checkpoint.ckpt_id for source in sources) or "the bank", _REMEDY)
    return LoadPlan(tuple(items), tuple(source.label for source in sources), tuple(problems.warnings))


def load(
    target: Target,
    sources: Sequence[Source],
    *,
    concurrency: int,
    rng: bool = False,
    problems: Problems | None = None,
) -> LoadReport:
    """Fill live state; whatever does not fit is refused before anything changes.

    Args:
        target: what to fill.
        sources: as in :func:`plan`.
        concurrency: number of reader threads.
        rng: whether to restore the random generators from the last source, if as many ranks wrote it.
        problems: as in :func:`plan`.

    Raises:
        LoadConfError, StateMismatchError: as in :func:`plan`.
        CorruptCheckpointError: a file is damaged.
    """
    begin = time.perf_counter()
    planned = plan(target, sources, problems)
    by_source = [[item for item in planned.items if item.offer == number] for number in range(len(sources))]
    tables, live = target.state()
    dense = _dense_state(by_source, sources, live)
    extra = _extra_state(by_source, sources)
    io_state = _io_state(target, by_source, sources)
    optim_state = merged_optimizer_state(target.sparse_optim, planned.items, sources)
    generators = _generators(target, sources) if rng else {}

    with ExitStack() as undone_on_error:  # what can refuse its state goes first
        undone_on_error.enter_context(optimizer_loaded(target.sparse_optim, optim_state))
        undone_on_error.enter_context(target.extra.loaded(extra))
        loaded = _fill_tables(by_source, sources, tables, concurrency)
    if dense:
        unwrap(target.model).load_state_dict(dense, strict=False)
    target.io_state.load(io_state)  # a dataset that is moved may not find back, so it is the last to be
    if generators:
        load_rng(generators)
    report = LoadReport(
        planned.items,
        planned.sources,
        planned.warnings,
        rows_taken=loaded.rows_taken,
        rows_filtered=loaded.rows_filtered,
        bytes_read=loaded.bytes_read + sum(source.bytes_read for source in sources),
        seconds=time.perf_counter() - begin,
        global_step=_global_step(by_source, sources),
    )
    report.log_summary()
    return report


def _fill_tables(
    by_source: Sequence[Sequence[Planned]], sources: Sequence[Source], tables: Mapping[str, HashTable], concurrency: int
) -> Loaded:
    """Fill the tables source by source: first those that bring rows, then slots for rows that are there."""
    loads = [_table_loads(items, source, tables) for items, source in zip(by_source, sources, strict=True)]
    parts = [read_parts(source.checkpoint, source.storage) if loads[i] else [] for i, source in enumerate(sources)]
    loaded = Loaded()
    for with_rows in (True, False):
        for source, some, its_parts in zip(sources, loads, parts, strict=True):
            chosen = [load for load in some if load.with_rows == with_rows]
            n_bytes = sum(load.n_bytes for load in chosen)
            if chosen:
                with Progress(f"loading {source.checkpoint.ckpt_id}", n_bytes) as progress:
                    found = load_tables(
                        chosen,
                        its_parts,
                        source.storage,
                        source.checkpoint.directory,
                        concurrency=concurrency,
                        advance=progress.advance,
                    )
                    progress.n_rows = sum(found.rows_taken.values())
                loaded = loaded + found
    return loaded


def _table_loads(items: Iterable[Planned], source: Source, tables: Mapping[str, HashTable]) -> list[TableLoad]:
    """Gather the slots that come from one table of one checkpoint, whose ids are then read once."""
    slots: dict[tuple[str, str], dict[str, str]] = {}
    for item in items:
        if item.name.is_slot:
            table, slot = item.source.rsplit("@", 1)
            slots.setdefault((item.name.table, table), {})[item.name.slot] = slot
    entries = {entry.name: entry for entry in source.checkpoint.manifest.tables}
    return [
        TableLoad(
            table=tables[name],
            entry=entries[there],
            slots={slot: other for slot, other in pairs.items() if slot != ID},
            with_rows=ID in pairs,
            clear=source.entry.hashtable_clear,
            where=source.entry.where,
        )
        for (name, there), pairs in slots.items()
    ]


def _dense_state(
    by_source: Sequence[Sequence[Planned]], sources: Sequence[Source], live: Mapping[str, Any]
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for items, source in zip(by_source, sources, strict=True):
        wanted = [item for item in items if item.name.group == "dense"]
        found = source.dense(live) if wanted else {}
        state |= {item.name.text: _converted(found[item.source], live[item.name.text]) for item in wanted}
    return state


def _converted(found: Any, live: Any) -> Any:
    """Bring a tensor to the dtype and last dimension of the live one, which pads it."""
    if not isinstance(found, torch.Tensor) or not isinstance(live, torch.Tensor):
        return found
    found = found.to(live.dtype)
    if found.shape == live.shape:
        return found
    padded, width = live.detach().clone().cpu(), min(found.shape[-1], live.shape[-1])
    padded[..., :width] = found[..., :width]
    return padded


def _extra_state(by_source: Sequence[Sequence[Planned]], sources: Sequence[Source]) -> dict[str, Any]:
    return {
        item.name.text: source.state(layout.EXTRA)[item.source]
        for items, source in zip(by_source, sources, strict=True)
        for item in items
        if item.name.group == "extra"
    }


def _io_state(target: Target, by_source: Sequence[Sequence[Planned]], sources: Sequence[Source]) -> dict[str, Any]:
    states = {}
    for items, source in zip(by_source, sources, strict=True):
        for item in (item for item in items if item.name.group == "io_state"):
            if source.shards == target.shards:
                states[item.name.text] = source.state(layout.io_state(target.shard))[item.source]
            else:
                all_states = [source.state(layout.io_state(shard))[item.source] for shard in range(source.shards)]
                merge = target.io_state.get(item.name.text).merge_io_state
                states[item.name.text] = merge(all_states, target.shard, target.shards)
    return states


def _check_shards(target: Target, sources: Sequence[Source], items: Iterable[Planned], problems: Problems) -> None:
    for item in items:
        if item.name.group == "io_state" and item.offer is not None:
            source = sources[item.offer]
            can_merge = callable(getattr(target.io_state.get(item.name.text), "merge_io_state", None))
            if source.shards != target.shards and not can_merge:
                found = f"the positions of {source.shards} shards"
                expected = (
                    f"{target.shards}: give the object merge_io_state(states, index, count), or leave it out with "
                    "'exclude': ['io_state']"
                )
                problems.mismatched[f"io state {item.name.text}"] = (found, expected)


def _checked_optimizer(target: Target, sources: Sequence[Source], item: Planned) -> Planned:
    """Leave out the scalars of another sparse optimizer."""
    if item.name.text != SPARSE_OPTIM or item.name.is_slot or item.offer is None:
        return item
    saved = list(sources[item.offer].state(layout.EXTRA)[item.source].get("slots", []))
    live = list(getattr(target.sparse_optim, "slot_names", saved))
    if saved == live:
        return item
    return Planned(item.name, reason=f"saved by an optimizer with slots {saved}, this one has {live}")


def _generators(target: Target, sources: Sequence[Source]) -> Mapping[str, Any]:
    source = sources[-1]
    return source.state(layout.rng(target.shard)) if source.shards == target.shards else {}


def _global_step(by_source: Sequence[Sequence[Planned]], sources: Sequence[Source]) -> int | None:
    name = Name(GLOBAL_STEP, GLOBAL_STEP)
    steps = [
        s.checkpoint.manifest.step for items, s in zip(by_source, sources, strict=True) for i in items if i.name == name
    ]
    return steps[-1] if steps else None
