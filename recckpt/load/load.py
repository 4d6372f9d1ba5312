"""The hallway of a load: plan, read what is small, give it to those who may refuse it, fill the tables, the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

from recckpt.dense.state_copy import load_rng
from recckpt.errors import RecckptError, StateMismatchError
from recckpt.format.names import GLOBAL_STEP, ID
from recckpt.live.load_around import load_around
from recckpt.live.optimizers import RowOptimizers
from recckpt.load.dense_and_registered import OtherState, read_other_state
from recckpt.load.hyper_parameters import HyperParameters
from recckpt.load.live_state import LiveState, check_live
from recckpt.load.open_source import OpenSource
from recckpt.load.plan import plan_load
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport, Planned
from recckpt.load.row_loads import Into, RowLoads, row_loads
from recckpt.load.table_tensors import Converted, TableTensors
from recckpt.load.tensor_rows import settled, tensor_rows
from recckpt.parallel.meetings import Meetings
from recckpt.sparse.files.loader import Loaded, load_tables
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.sparse.files.table_target import LoadTarget
from recckpt.storage.transfers import WorkDir
from recckpt.text import Progress

Fill = Callable[[Callable[[], object]], Loaded]  # tables; is given what to call once all bytes are checked


def plan(live: LiveState, sources: Sequence[OpenSource], problems: Problems) -> LoadPlan:
    """Decide what is loaded from where, as :func:`recckpt.load.plan.plan_load`; reads no rows and changes nothing."""
    located = [source.at for source in sources]
    check, inventory = partial(check_live, live, located), live.inventory_beside(located)
    return plan_load(inventory, [source.offer(inventory) for source in sources], problems, check)


def load(
    live: LiveState,
    sources: Sequence[OpenSource],
    problems: Problems,
    *,
    concurrency: int,
    download_dir: WorkDir | None,
    rng: bool,
    meetings: Meetings,
    has_bar: bool = True,
) -> LoadReport:
    """Fill live state; whatever does not fit is refused before anything changes. Collective.

    Args:
        live: what to fill.
        sources: checkpoints that are open for it, in the order of the bank; of those that have a name, the last counts.
        problems: what is wrong with the bank already.
        concurrency: number of reader threads.
        download_dir: where to copy files that cannot be mapped, before they are read; None reads them where they lie.
        rng: whether to restore the random generators from the last source, if as many ranks wrote it.
        meetings: where this rank meets those that load with it.
        has_bar: whether to show a bar where it takes long.

    Raises:
        LoadConfError, StateMismatchError: as :func:`plan`.
        CorruptCheckpointError: a file is damaged.
        CheckpointRemovedError: its writer removed a checkpoint before it was read; loading the one that is there by
            now makes up for what has been changed.
        PartlyLoadedError: reading failed after tables that had rows began to change.
    """
    begin = time.perf_counter()
    planned = plan(live, sources, problems)
    tensors = tensor_rows(live, planned.items, sources)
    planned = replace(planned, items=settled(planned.items, tensors))
    tables = [
        TableTensors(live, planned.items, source, number, download_dir=download_dir, concurrency=concurrency)
        for number, source in enumerate(sources)
    ]
    other = read_other_state(live, planned.items, sources, Converted(tensors, tables), rng=rng)
    for source in sources:
        source.forget_states()
    to = Into(live.targets, _global_step(planned.items, sources), _fresh_slots(planned.items), live.inventory)
    rows = row_loads(to, planned.items, zip(sources, tensors, strict=True), download_dir, concurrency)
    what = sources[0].at.checkpoint.ckpt_id if len(sources) == 1 else f"{len(sources)} checkpoints"
    progress = Progress(f"loading {what}", rows.n_bytes, has_bar=has_bar and live.shard == 0)
    settings = HyperParameters(live, kept=any(source.at.entry.keeps_settings for source in sources))
    loaded = _apply(live, other, rows, partial(_fill_tables, rows, progress, concurrency, meetings))
    others = {item.name.text for item in planned.items if item.name.is_settings and item.is_of_other_class}
    settings.after_load(" and ".join(planned.sources), other.extra, others, with_log=live.shard == 0)
    _forget_admitted(live.targets.values(), planned.items, sources)
    report = _report(planned, loaded, sources, time.perf_counter() - begin)
    if live.shard == 0:
        (report if live.shards == 1 else planned).log_summary()  # of several ranks, each knows its own rows alone
    return report


def _report(planned: LoadPlan, loaded: Loaded, sources: Sequence[OpenSource], seconds: float) -> LoadReport:
    return LoadReport(
        tuple(_as_taken(item, loaded) for item in planned.items),
        planned.sources,
        planned.warnings,
        rows_taken=loaded.rows_taken,
        rows_filtered=loaded.rows_filtered,
        bytes_read=loaded.bytes_read + sum(source.bytes_read for source in sources),
        seconds=seconds,
        global_step=_global_step(planned.items, sources),
    )


def _as_taken(item: Planned, loaded: Loaded) -> Planned:
    """Return an item with as many rows as were taken: a slice, a filter or the rows of the table may leave some out."""
    there = item.thing
    if item.offer is None or not item.name.is_slot or not there.rows:
        return item
    rows = loaded.slot_rows.get((item.name.table, item.name.slot), 0)
    return replace(item, thing=replace(there, rows=rows, n_bytes=there.n_bytes * rows // there.rows))


def _apply(live: LiveState, other: OtherState, rows: RowLoads, fill: Fill) -> Loaded:
    """Change the live state; return what was loaded into tables."""
    with ExitStack() as undone_on_error:  # what can refuse its state goes first
        undone_on_error.enter_context(_optimizer_loaded(live.row_optimizers, other.sparse_optim))
        registries = ((live.extra, other.extra), (live.io_state, other.io_state))
        rests = [undone_on_error.enter_context(registry.loaded(states)) for registry, states in registries]
        loaded = fill(lambda: [give_rest() for give_rest in rests])
        for load in (load for link in rows.links for load in link.tables):
            load.take_history()
        if other.dense:
            load_around(live.model, other.dense, live.live_tables.collections)
    if other.generators:
        load_rng(other.generators)
    return loaded


def _forget_admitted(targets: Iterable[LoadTarget], items: Iterable[Planned], sources: Sequence[OpenSource]) -> None:
    """Drop the counts of ids that have rows now, unless rows and counts are those of one checkpoint."""
    offers: dict[str, set[int]] = {}
    for item in items:
        if item.offer is not None and item.name.is_slot and item.name.slot == ID:
            offers.setdefault(item.name.table, set()).add(item.offer)
    entries = [source.at.entry for source in sources]
    whole = {n for n, entry in enumerate(entries) if entry.hashtable_clear and entry.where == RowFilter()}
    for target in targets:
        target.forget_admitted(offers, whole)


@contextmanager
def _optimizer_loaded(optimizer: Optimizer | RowOptimizers | None, state: Mapping[str, Any] | None) -> Iterator[None]:
    """Load the sparse optimizer's scalars, and undo it if the block fails."""
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


def _fill_tables(
    rows: RowLoads,
    progress: Progress,
    concurrency: int,
    meetings: Meetings,
    when_checked: Callable[[], object],
) -> Loaded:
    with progress:
        loaded = load_tables(
            rows.links,
            concurrency=concurrency,
            advance=progress.advance,
            when_checked=when_checked,
            meetings=meetings,
            others=rows.others,
        )
        progress.add_rows(sum(loaded.rows_taken.values()))
    return loaded


def _fresh_slots(items: Iterable[Planned]) -> Mapping[str, frozenset[str]]:
    """Return the slots of each table that nothing gives."""
    fresh: dict[str, set[str]] = {}
    for item in items:
        if item.offer is None and item.name.is_slot:
            fresh.setdefault(item.name.table, set()).add(item.name.slot)
    return {table: frozenset(slots) for table, slots in fresh.items()}


def _global_step(items: Iterable[Planned], sources: Sequence[OpenSource]) -> int | None:
    steps = [item.offer for item in items if item.name.group == GLOBAL_STEP and item.offer is not None]
    return sources[steps[-1]].at.checkpoint.manifest.step if steps else None
