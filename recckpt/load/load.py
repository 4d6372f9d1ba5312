"""The top level of a load: plan, read small state, load state that objects may refuse, then tables, then the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recckpt.dense.data_loaders import load_rng
from recckpt.errors import RecckptError, StateMismatchError
from recckpt.format.names import GLOBAL_STEP, ID, slot_name
from recckpt.format.tables import TableEntry
from recckpt.live.tables import RowOptimizers
from recckpt.load.converted import TableTensors, TensorRows
from recckpt.load.dense_and_registered import ModelLoad, OtherState, read_other_state
from recckpt.load.hyper_parameters import HyperParameters
from recckpt.load.live_state import LiveState, check_live, check_memory
from recckpt.load.open_source import OpenSource
from recckpt.load.plan import RESIZE, plan_load, regroups
from recckpt.load.problems import Problems
from recckpt.load.report import DECAY_STAYS, LoadPlan, LoadReport, Planned
from recckpt.parallel.ranks import Meetings
from recckpt.policies.row_filter import RowFilter
from recckpt.sparse.files.filler import Filler, OtherRows, Ranges
from recckpt.sparse.files.link_pass import LinkLoad
from recckpt.sparse.files.loader import Loaded, load_tables
from recckpt.sparse.table.row_table import RowTable
from recckpt.storage.transfers import WorkDir
from recckpt.text import Progress
from recckpt.types import EMBEDDING


def row_loads(
    live: LiveState,
    items: Sequence[Planned],
    sources: Iterable[tuple[OpenSource, TensorRows]],
    step: int | None,
    *,
    download_dir: WorkDir | None,
    concurrency: int,
) -> tuple[list[LinkLoad], list[OtherRows]]:
    """Return the loads that fill the tables, in the order of the bank: rows of links, link by link; rows of tensors.

    ``sources``: each with its dense tensors that fill tables. ``step``: the global step that the run takes over.
    """
    fresh: dict[str, set[str]] = {}  # slots of each table that no source has
    for item in items:
        if item.offer is None and item.name.is_slot:
            fresh.setdefault(item.name.table, set()).add(item.name.slot)
    links, others = list[LinkLoad](), list[OtherRows]()
    for number, (source, tensors) in enumerate(sources):
        slots = [item for item in items if item.offer == number and item.name.is_slot]
        tables = {entry.name: entry for entry in source.at.checkpoint.manifest.tables}
        fillers = _fillers(live, slots, source, {**tensors.entries, **tables}, step=step, fresh=fresh)
        of_links = [filler for filler in fillers if filler.entry.name in tables]
        links += source.rows(number, of_links, download_dir, concurrency)
        others += [OtherRows(one, partial(tensors.read, one)) for one in fillers if one.entry.name not in tables]
    return links, others


def _fillers(
    live: LiveState,
    items: Iterable[Planned],
    source: OpenSource,
    entries: Mapping[str, TableEntry],
    *,
    step: int | None,
    fresh: Mapping[str, Collection[str]],
) -> list[Filler]:
    slots: dict[tuple[str, str], dict[str, str]] = {}
    ranges: dict[str, dict[str, tuple[Ranges, Ranges]]] = {}
    for item in items:
        table, slot = item.source.rsplit("@", 1)
        slots.setdefault((item.name.table, table), {})[item.name.slot] = slot
        here = live.inventory.get(item.name)
        if here is not None and regroups(item.thing, here):
            ranges.setdefault(item.name.table, {})[item.name.slot] = item.thing.columns, here.columns
    fillers, entry = [], source.at.entry
    for (name, there), pairs in slots.items():
        columns: Mapping[str, str] = {slot: other for slot, other in pairs.items() if slot != ID}
        target = live.targets[name]
        if isinstance(target.table, RowTable):  # a store may have other columns than the slots that it shows
            columns = target.table.store.filled_by(columns)
        filler = Filler(
            target=target,
            entry=entries[there],
            slots=columns,
            with_rows=ID in pairs,
            clear=entry.hashtable_clear,
            where=entry.where,
            is_update=there in source.updates,
            ages=target.ages(source.at.checkpoint.manifest, step, entries[there].clock),
            ranges=ranges.get(name, {}),
            skips_outside=entry.out_of_range == "skip" or entry.action(slot_name(name, EMBEDDING)) == RESIZE,
            fresh=frozenset(fresh.get(name, ())),
            drops=entry.zch == "drop",
        )
        fillers.append(filler)
    return fillers


def plan(live: LiveState, sources: Sequence[OpenSource], problems: Problems) -> LoadPlan:
    """Decide what is loaded from where, as :func:`recckpt.load.plan.plan_load`. Reads no rows and changes nothing."""
    located = [source.at for source in sources]
    check, inventory = partial(check_live, live, located), live.inventory_beside(located)
    planned = plan_load(inventory, [source.offer(inventory) for source in sources], problems, check)
    check_memory(live, planned, sources)
    return planned


@torch.inference_mode(mode=False)  # tensors made here are trained later, even if the caller is in that mode
def load(
    live: LiveState,
    sources: Sequence[OpenSource],
    problems: Problems,
    *,
    concurrency: int,
    download_dir: WorkDir | None,
    rng: bool,
    meetings: Meetings,
) -> LoadReport:
    """Fill live state. State that does not fit is refused before anything changes. Collective.

    ``sources`` are in the order of the bank; a name comes from the last source that has it. ``problems`` were found
    earlier. Files that cannot be memory-mapped are first copied to ``download_dir``; with None they are read in place.
    ``rng`` restores the random generators from the last source, if the same number of ranks wrote it.

    Raises:
        LoadConfError, StateMismatchError: as :func:`plan`.
        CorruptCheckpointError: a file is damaged.
        CheckpointRemovedError: a checkpoint was removed before it was read; loading its successor undoes partial
            changes.
        PartlyLoadedError: reading failed after tables that had rows began to change.
    """
    begin = time.perf_counter()
    planned = plan(live, sources, problems)
    tensors = [TensorRows(live, planned.items, source, number) for number, source in enumerate(sources)]
    items: Sequence[Planned] = planned.items
    for rows in tensors:
        items = rows.settled(items)
    tables = [
        TableTensors(live, items, source, number, download_dir=download_dir, concurrency=concurrency)
        for number, source in enumerate(sources)
    ]
    other = read_other_state(live, items, sources, tensors, tables, rng=rng)
    planned = replace(planned, items=tuple(items), warnings=(*planned.warnings, *other.notes))
    for source in sources:
        source.states.clear()  # the objects that receive them own them
    steps = [item.offer for item in items if item.name.group == GLOBAL_STEP and item.offer is not None]
    step = sources[steps[-1]].at.checkpoint.manifest.step if steps else None
    pairs = zip(sources, tensors, strict=True)
    links, others = row_loads(live, items, pairs, step, download_dir=download_dir, concurrency=concurrency)
    what = sources[0].at.checkpoint.ckpt_id if len(sources) == 1 else f"{len(sources)} checkpoints"
    n_bytes = sum(link.n_bytes for link in links) + sum(rows.n_bytes for rows in others)
    progress = Progress(f"loading {what}", n_bytes, has_bar=live.shard == 0)
    settings = HyperParameters(live, kept=any(source.at.entry.keeps_settings for source in sources))
    fill = partial(load_tables, links, concurrency=concurrency, meetings=meetings, others=others)
    loaded = _apply(live, other, fill, progress)
    _finish(live, planned, sources, settings)
    n_bytes = loaded.bytes_read + sum(each.bytes_read for each in tables) + sum(each.bytes_read for each in sources)
    report = _report(live, planned, replace(loaded, bytes_read=n_bytes), step, time.perf_counter() - begin)
    if live.shard == 0:
        (report if live.shards == 1 else planned).log_summary()  # with several ranks, each knows only its own rows
    return report


def _report(live: LiveState, planned: LoadPlan, loaded: Loaded, step: int | None, seconds: float) -> LoadReport:
    items, rows_taken = [], {**loaded.rows_taken}
    for item in planned.items:
        name, there = item.name, item.thing
        if item.offer is not None and name.is_slot and there.rows:
            rows = loaded.slot_rows.get((name.table, name.slot), 0)
            there = replace(there, rows=rows, n_bytes=there.n_bytes * rows // there.rows)
            items.append(replace(item, thing=there))
            continue
        items.append(item)
        if item.offer is not None and item.table and not name.is_slot:
            rows_taken[name.text] = min(there.rows, *live.inventory[name].shape[:1])
    return LoadReport(
        tuple(items),
        planned.sources,
        planned.warnings,
        rows_taken=rows_taken,
        rows_filtered=loaded.rows_filtered,
        bytes_read=loaded.bytes_read,
        seconds=seconds,
        global_step=step,
    )


def _finish(live: LiveState, planned: LoadPlan, sources: Sequence[OpenSource], settings: HyperParameters) -> None:
    objects = {item.name.text for item in planned.taken if item.name.is_settings or item.name.is_object}
    akin = {
        item.name.text: item.conversion
        for item in planned.taken
        if item.name.is_settings and DECAY_STAYS in item.conversion
    }
    settings.after_load(" and ".join(planned.sources), objects, akin, with_log=live.shard == 0)
    offers: dict[str, set[int]] = {}  # a table keeps its counts if they and the rows come from one checkpoint
    for item in planned.items:
        if item.offer is not None and item.name.slot == ID:
            offers.setdefault(item.name.table, set()).add(item.offer)
    entries = [source.at.entry for source in sources]
    whole = {n for n, entry in enumerate(entries) if entry.hashtable_clear and entry.where == RowFilter()}
    for target in live.targets.values():
        target.forget_admitted(offers, whole)
    if any(entry.is_own for entry in entries):
        nn.Module.zero_grad(live.model)  # gradients of steps that a run went back from, as those of tables are gone


def _apply(live: LiveState, other: OtherState, fill: Callable[..., Loaded], progress: Progress) -> Loaded:
    model = ModelLoad(live, other.dense)
    with ExitStack() as undone_on_error:  # objects that can refuse their state come first
        undone_on_error.enter_context(_optimizer_loaded(live.row_optimizers, other.sparse_optim))
        registries = ((live.extra, other.extra), (live.io_state, other.io_state))
        rests = [undone_on_error.enter_context(registry.loaded(states)) for registry, states in registries]

        def give_what_may_be_refused() -> None:
            if model.may_be_refused:
                undone_on_error.enter_context(model.loaded())
            for give_rest in rests:
                give_rest()

        with progress:
            loaded = fill(advance=progress.advance, when_checked=give_what_may_be_refused)
            progress.add_rows(sum(loaded.rows_taken.values()))
        if not model.may_be_refused:
            model.load()
    if other.generators:
        load_rng(other.generators)
    return loaded


@contextmanager
def _optimizer_loaded(optimizer: Optimizer | RowOptimizers | None, state: Mapping[str, Any] | None) -> Iterator[None]:
    """Load the sparse optimizer's scalars; undo the load if the ``with`` block fails."""
    if optimizer is None or state is None:
        yield
        return
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(dict(state))
    except RecckptError:
        raise
    except Exception as error:
        refusal = f"{type(optimizer).__qualname__} refused it: {type(error).__name__}: {error}"
        raise StateMismatchError("the state of the sparse optimizer", remedy=refusal) from error
    try:
        yield
    except BaseException:
        optimizer.load_state_dict(before)
        raise
