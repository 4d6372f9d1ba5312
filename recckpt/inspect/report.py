"""``recckpt.report``: the health of a run from its output dir, its timeline, and rows of the newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointNotFoundError, CheckpointRemovedError
from recckpt.format import layout
from recckpt.format.codec import time_of
from recckpt.format.manifest import Manifest
from recckpt.inspect.find import refuse_checkpoint
from recckpt.inspect.repair import known_takeover, unfinished
from recckpt.inspect.report_health import advice_of, findings_of, near_health
from recckpt.inspect.report_page import RunReport
from recckpt.inspect.report_result import ChainCost, CheckpointSize, TableHealth, UnusableDirectory
from recckpt.inspect.report_rows import Clock, damage_text, read_chain, read_parts
from recckpt.inspect.save_times import History, history_of, saves_of, timeline_of
from recckpt.inspect.status import near_now
from recckpt.inspect.verify_checkpoint import Checkup, run_step
from recckpt.inspect.watch import near_saves_of
from recckpt.output_dir.checkpoint_dir import has_manifest, state_of
from recckpt.output_dir.index_file import why_nothing
from recckpt.output_dir.listing import Checkpoint, Listing, look_around
from recckpt.output_dir.open_files import first_whole
from recckpt.output_dir.rotation import pinned_ids
from recckpt.policies.evict import EVENT_TIME
from recckpt.policies.options import Near
from recckpt.storage import Storage, open_storage
from recckpt.text import Progress
from recckpt.types import positive_number

_THREADS = 8


def report(
    path: str | os.PathLike[str],
    *,
    deep: bool = True,
    threads: int | None = None,
    overdue_sec: float | None = None,
    failures_per_day: float | None = None,
    near: str | os.PathLike[str] | None = None,
) -> RunReport:
    """Look at a run and return its checkpoints, saves and tables, with a finding for each that is unhealthy.

    Reads the newest checkpoint once, in bounded memory, and checks every byte of its files; damage is reported and left
    out of the statistics. Of older checkpoints, only the existence and size of the files is checked. Writes nothing.
    Imports no torch.

    Args:
        path: an output dir; any fsspec URL.
        deep: False reads only the manifests of checkpoints, no other files.
        threads: number of files to read concurrently; None for 8. Locally at most one per core.
        overdue_sec: the age of the newest checkpoint above which a missing save is a problem. None for 3 times the
            usual interval; a missing save is then a warning, because the run may have ended, or, with ``deep=False``, a
            problem.
        failures_per_day: how often the run fails, to compute ``advice`` on how often to save; None for no advice.
        near: the directory of near saves on this host, as in ``Near``, to fill ``near_now``; None leaves it empty.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``threads`` is not an int of at least 1, ``overdue_sec`` or ``failures_per_day`` not a number above
            0, ``near`` is not a directory on this host, or no storage supports the path.
        CheckpointNotFoundError: there is nothing of a run, or ``path`` is a checkpoint.
        CheckpointRemovedError: the writer removed the newest checkpoint during each of several reads.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"expected the path or URL of an output dir, found {path!r}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is an int of at least 1, found {threads!r}")
    if overdue_sec is not None:
        positive_number("overdue_sec", overdue_sec)
    if failures_per_day is not None:
        positive_number("failures_per_day", failures_per_day)
    storage = open_storage(os.fspath(path))
    near_dir = None if near is None else Near(near)
    n_threads = storage.threads(threads or _THREADS) if deep else 0

    def look(listing: Listing) -> RunReport:
        run, now = _report(storage, listing, n_threads), datetime.now(timezone.utc)
        findings = tuple(findings_of(run, now, overdue_sec))
        advice = None if failures_per_day is None else advice_of(run.saves, failures_per_day)
        here, newest = near_saves_of(storage, listing, near_dir), listing.current[-1] if listing.committed else None
        in_near = None if here is None else near_now(here, newest, History.of_committed(run.saves), now)
        return replace(run, findings=findings, advice=advice, near=near_health(run.saves), near_now=in_near)

    return first_whole(lambda: look_around(storage), look)


def _report(storage: Storage, listing: Listing, threads: int) -> RunReport:
    """Return the report without findings; ``threads`` threads read rows.

    Raises:
        CheckpointNotFoundError: the directory has nothing of a run, not even the leftovers of a dead save.
    """
    lines = timeline_of(storage)
    leftovers, saves = tuple(_leftovers(storage, listing)), tuple(saves_of(lines))
    if listing.is_empty and not listing.unreadable and not saves:
        refuse_checkpoint(storage.url)
        if not leftovers:
            raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")
    pinned = pinned_ids(storage)
    newest = listing.current[-1] if listing.committed else None
    tables, damage = list[TableHealth](), list[str]()
    if newest is not None and threads:
        tables, damage = _read_newest(storage, newest, threads)
    elif newest is not None:
        tables = [TableHealth(table.name, table.rows, table.row_bytes) for table in newest.manifest.tables]
    return RunReport(
        url=storage.url,
        findings=(),
        checkpoints=tuple(_size(checkpoint, checkpoint.ckpt_id in pinned) for checkpoint in listing.current),
        leftovers=leftovers,
        saves=saves,
        ended=history_of(lines).ended,
        newest=newest.ckpt_id if newest is not None else None,
        damage=tuple(damage),
        tables=tuple(tables),
        deep=bool(threads),
        chains=tuple(_chains(listing)),
        lacks=tuple(newest.manifest.training.unsaved.descriptions) if newest is not None else (),
    )


def _read_newest(storage: Storage, checkpoint: Checkpoint, threads: int) -> tuple[list[TableHealth], list[str]]:
    manifest, directory = checkpoint.manifest, checkpoint.directory
    opened, look = OpenChain.open(storage, checkpoint), Checkup(storage, directory)
    n_bytes = sum(table.rows * table.row_bytes for table in manifest.tables)
    n_bytes += sum(file.n_bytes for file in manifest.files if not layout.has_rows(file.name))
    with Progress(f"reading {manifest.ckpt_id}", n_bytes) as progress:
        progress.add_rows(manifest.rows)
        looks = [look] if look.manifest is not None else []
        run_step(Checkup.check_files, looks, threads, progress.advance)
        others = [each for each in look.errors if not layout.has_rows(each.path.removeprefix(f"{directory}/"))]
        if looks and len(opened.links) == 1:
            tables = read_parts(look, opened.links[0].files, _clock(manifest), threads, progress.advance)
        else:
            tables = list(read_chain(opened, _clock(manifest), threads, progress.advance))
    if (others or any(table.damage for table in tables)) and not has_manifest(storage, directory):
        raise CheckpointRemovedError(storage.url_of(directory))
    return tables, list(map(damage_text, others))


def _clock(manifest: Manifest) -> Clock:
    event_time, written = manifest.state.get(EVENT_TIME), time_of(manifest.time)
    try:
        if isinstance(event_time, int | float):
            return manifest.step, float(event_time)
        return manifest.step, None if written is None else written.timestamp()
    except OverflowError:
        return manifest.step, None


def _leftovers(storage: Storage, listing: Listing) -> Iterator[UnusableDirectory]:
    for directory, damage in listing.damaged.items():
        yield UnusableDirectory(directory, state_of(damage), damage_text(damage), False)
    for directory, error in listing.unreadable.items():
        yield UnusableDirectory(directory, "unreadable", str(error), False)
    for directory, reason in listing.fenced.items():
        yield UnusableDirectory(directory, "fenced", reason, True)
    last = known_takeover(storage)
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if not any(map(layout.is_ours, names)):
            continue
        yield UnusableDirectory(directory, "unfinished", *unfinished(storage, directory, last, names))


def _chains(listing: Listing) -> Iterator[ChainCost]:
    families: dict[str, list[Checkpoint]] = {}
    for checkpoint in listing.current:
        families.setdefault(checkpoint.links[-1].directory, []).append(checkpoint)
    for family in families.values():
        links = {link.directory: link.manifest for checkpoint in family for link in checkpoint.links}
        newest, base = family[-1], family[-1].links[-1]
        yield ChainCost(
            base=base.ckpt_id,
            newest=newest.ckpt_id,
            n_deltas=sum(manifest.kind == "delta" for manifest in links.values()),
            kept_bytes=sum(manifest.n_bytes for manifest in links.values()),
            base_bytes=base.manifest.n_bytes,
            read_bytes=_read_bytes(newest),
            n_links=len(newest.links),
        )


def _read_bytes(checkpoint: Checkpoint) -> int:
    """Return how many bytes a restore reads: all own files, and the files with rows of base checkpoints."""
    rows_below = [file for link in checkpoint.below for file in link.manifest.files if layout.has_rows(file.name)]
    return checkpoint.manifest.n_bytes + sum(file.n_bytes for file in rows_below)


def _size(checkpoint: Checkpoint, is_pinned: bool) -> CheckpointSize:
    manifest = checkpoint.manifest
    return CheckpointSize(
        ckpt_id=manifest.ckpt_id,
        directory=checkpoint.directory,
        step=manifest.step,
        kind=manifest.kind,
        time=manifest.time,
        rows=manifest.rows,
        n_bytes=manifest.n_bytes,
        links=tuple(link.ckpt_id for link in checkpoint.links),
        chain_bytes=_read_bytes(checkpoint),
        full_bytes=checkpoint.links[-1].manifest.n_bytes,
        ephemeral=manifest.ephemeral,
        pinned=is_pinned,
        tables={table.name: table.rows for table in manifest.tables},
    )
