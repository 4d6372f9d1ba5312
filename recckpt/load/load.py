"""The hallway of a load: plan, read what is small, give it to those who may refuse it, fill the tables, the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from recckpt.dense.state_copy import load_rng
from recckpt.load.dense_and_registered import OtherState, read_other_state
from recckpt.load.live_state import Target
from recckpt.load.matching import Planned
from recckpt.load.model_bank import plan_load
from recckpt.load.optimizer_scalars import optimizer_loaded
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.selection import GLOBAL_STEP, ID, Name
from recckpt.load.source import Source, open_files
from recckpt.sparse.files.loader import CheckpointLoad, Loaded, load_tables
from recckpt.sparse.files.table_fill import TableLoad
from recckpt.sparse.split import load_dense
from recckpt.sparse.table.table import HashTable as OurTable
from recckpt.storage.transfers import WorkDir
from recckpt.text import Progress
from recckpt.types import EMBEDDING, HashTable


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

    def check(items: Sequence[Planned], found: Problems) -> None:
        _check_shards(target, sources, items, found)
        _check_foreign(target, sources, items, found)

    return plan_load(target.inventory(), sources, problems, check)


def load(
    target: Target,
    sources: Sequence[Source],
    *,
    concurrency: int,
    download_dir: WorkDir | None = None,
    rng: bool = False,
    problems: Problems | None = None,
) -> LoadReport:
    """Fill live state; whatever does not fit is refused before anything changes.

    Args:
        target: what to fill.
        sources: as in :func:`plan`.
        concurrency: number of reader threads.
        download_dir: where to copy files that cannot be mapped, before they are read; None reads them where they lie.
        rng: whether to restore the random generators from the last source, if as many ranks wrote it.
        problems: as in :func:`plan`.

    Raises:
        LoadConfError, StateMismatchError: as in :func:`plan`.
        CorruptCheckpointError: a file is damaged.
        CheckpointRemovedError: its writer removed a checkpoint before it was read; loading the one that is there by
            now makes up for what has been changed.
        PartlyLoadedError: reading failed after tables that had rows began to change.
    """
    begin = time.perf_counter()
    with ExitStack() as held:  # until the end: the writer of a checkpoint may remove it meanwhile
        for source in sources:
            held.callback(source.release)
        open_files(sources, target.needs())
        planned = plan(target, sources, problems)
        by_source = [[item for item in planned.items if item.offer == number] for number in range(len(sources))]
        tables, live = target.state()
        other = read_other_state(target, live, planned.items, by_source, sources, rng=rng)
        loaded = _apply(target, tables, other, by_source, sources, concurrency=concurrency, download_dir=download_dir)
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
    if target.shard == 0:
        report.log_summary()
    return report


def _apply(
    target: Target,
    tables: Mapping[str, HashTable],
    other: OtherState,
    by_source: Sequence[Sequence[Planned]],
    sources: Sequence[Source],
    *,
    concurrency: int,
    download_dir: WorkDir | None,
) -> Loaded:
    """Change the live state; return what was loaded into tables."""
    with ExitStack() as undone_on_error:  # what can refuse its state goes first
        undone_on_error.enter_context(optimizer_loaded(target.sparse_optim, other.sparse_optim))
        registries = ((target.extra, other.extra), (target.io_state, other.io_state))
        rests = [undone_on_error.enter_context(registry.loaded(states)) for registry, states in registries]
        loaded = _fill_tables(
            by_source,
            sources,
            tables,
            lambda: [give_rest() for give_rest in rests],
            concurrency=concurrency,
            download_dir=download_dir,
        )
        if other.dense:
            load_dense(target.model, other.dense)
    if other.generators:
        load_rng(other.generators)
    return loaded


def _fill_tables(
    by_source: Sequence[Sequence[Planned]],
    sources: Sequence[Source],
    tables: Mapping[str, HashTable],
    when_checked: Callable[[], object],
    *,
    concurrency: int,
    download_dir: WorkDir | None,
) -> Loaded:
    loads = []
    for items, source in zip(by_source, sources, strict=True):
        chosen = _table_loads(items, source, tables)
        loads.append(CheckpointLoad(chosen, source.parts if chosen else [], source.files, source.checkpoint.directory))
        if download_dir is not None:
            source.files.fetch(loads[-1].wanted_files(), download_dir, concurrency)
    what = sources[0].checkpoint.ckpt_id if len(sources) == 1 else f"{len(sources)} checkpoints"
    with Progress(f"loading {what}", sum(load.n_bytes for load in loads)) as progress:
        loaded = load_tables(loads, concurrency=concurrency, advance=progress.advance, when_checked=when_checked)
        progress.n_rows = sum(loaded.rows_taken.values())
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
                problems.misfit(source.entry, f"io state {item.name.text}", found, expected)
        if item.name.group in ("extra", "dense_opt") and item.offer is not None:
            _check_own_state(target, sources[item.offer], item, problems)


def _check_own_state(target: Target, source: Source, item: Planned, problems: Problems) -> None:
    """A state that each rank has saved of its own goes to as many ranks again; one of a single rank goes to all."""
    registry = target.extra
    name, there = (text.rpartition("@")[2] if item.name.parameter else text for text in (item.name.text, item.source))
    is_for_all = there not in source.extras_of_ranks or source.shards == 1 or registry.gathers(name)
    if is_for_all or (registry.is_of_ranks(name) and source.shards == target.shards):
        return
    what = f"states of {target.shards} ranks" if registry.is_of_ranks(name) else "one for all ranks"
    hint = "" if registry.is_of_ranks(name) else "register it with per_rank=True, or "
    expected = f"{what}: {hint}leave it out with 'exclude': [{name!r}]"
    problems.misfit(source.entry, name, f"states of {source.shards} ranks, one each", expected)


def _check_foreign(target: Target, sources: Sequence[Source], items: Iterable[Planned], problems: Problems) -> None:
    """A table that is not ours has no way to take anything but whole rows, as they are."""
    items = list(items)
    for name in (name for name, table in target.state()[0].items() if not isinstance(table, OurTable)):
        taken = {item.name.slot: item for item in items if item.name.table == name and item.offer is not None}
        from_one = len({(item.offer, item.source.rsplit("@", 1)[0]) for item in taken.values()}) == 1
        whole = {ID, EMBEDDING} <= taken.keys() and not any(item.conversion for item in taken.values())
        if taken and not (from_one and whole):
            expected = "ids and embeddings of one table, unconverted: the table is no recckpt.HashTable"
            found = f"only {', '.join(sorted(taken))}, or converted"
            for number in sorted({item.offer for item in taken.values() if item.offer is not None}):
                problems.misfit(sources[number].entry, name, found, expected)


def _global_step(by_source: Sequence[Sequence[Planned]], sources: Sequence[Source]) -> int | None:
    name = Name(GLOBAL_STEP, GLOBAL_STEP)
    steps = [
        s.checkpoint.manifest.step for items, s in zip(by_source, sources, strict=True) for i in items if i.name == name
    ]
    return steps[-1] if steps else None
