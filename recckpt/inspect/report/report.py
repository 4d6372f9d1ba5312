"""A look at a run: its output dir, its timeline, and the rows of its newest checkpoint (no torch here)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.inspect.find import is_checkpoint
from recckpt.inspect.repair import unfinished
from recckpt.inspect.report.damage import damage_text
from recckpt.inspect.report.health import findings_of
from recckpt.inspect.report.intervals import advice_of
from recckpt.inspect.report.near import near_health
from recckpt.inspect.report.newest import read_newest
from recckpt.inspect.report.result import ChainCost, CheckpointSize, TableHealth, UnusableDirectory
from recckpt.inspect.report.run_report import RunReport
from recckpt.inspect.save_times import SaveTimes, saves_of
from recckpt.inspect.watch.history import History
from recckpt.inspect.watch.near import NearNow, near_now
from recckpt.near.here import counting_here
from recckpt.near.options import Near
from recckpt.output_dir.claims import NO_TAKEOVER, last_takeover
from recckpt.output_dir.first_whole import first_whole
from recckpt.output_dir.listing import Checkpoint, Listing, look_around
from recckpt.output_dir.rotation import pinned_ids
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.storage import Storage, open_storage
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

    The newest checkpoint is read once, in bounded memory, and every byte of its files is checked; what is damaged is
    said, and left out of the figures. Of older ones, that their files are there with their sizes is checked. Nothing is
    written. Imports no torch.

    Args:
        path: an output dir; any fsspec URL.
        deep: False reads no files of checkpoints but manifests.
        threads: number of files to read at once; None for 8. Locally at most one a core.
        overdue_sec: the age of the newest checkpoint from which on a missing save is a problem; None for 3 times the
            usual, which is a warning, since the run may have ended, and a problem to a look without ``deep``.
        failures_per_day: how often the run fails, for ``advice`` on how often to save; None for none.
        near: where near saves lie on this host, the path of ``Near``, for ``near_now``; None for what is known without.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``threads`` is not an int of at least 1, ``overdue_sec`` or ``failures_per_day`` not a number above
            0, ``near`` no directory of a host, or no storage takes the path.
        CheckpointNotFoundError: there is nothing of a run, or the path is that of a checkpoint itself.
        CheckpointRemovedError: its writer removed the newest while it was read, again and again.
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

    def look(listing: Listing) -> RunReport:
        run, now = _report(storage, listing, storage.threads(threads or _THREADS) if deep else 0), _now()
        findings = tuple(findings_of(run, now, overdue_sec))
        advice = None if failures_per_day is None else advice_of(run.saves, failures_per_day)
        here = None if near_dir is None else _near_now(storage, listing, near_dir, run.saves, now)
        return replace(run, findings=findings, advice=advice, near=near_health(run.saves), near_now=here)

    return first_whole(lambda: look_around(storage), look)


def _report(storage: Storage, listing: Listing, threads: int) -> RunReport:
    """Return what there is, with so many threads that read rows; findings are not made yet."""
    leftovers = list(_leftovers(storage, listing))
    saves = saves_of(storage)
    if listing.is_empty and not listing.unreadable and not saves:
        _refuse(storage, leftovers)
    pinned = pinned_ids(storage)
    newest = listing.current[-1] if listing.committed else None
    tables, damage = list[TableHealth](), list[str]()
    if newest is not None and threads:
        tables, damage = read_newest(storage, newest, threads)
    elif newest is not None:
        tables = [TableHealth(table.name, table.rows, table.row_bytes) for table in newest.manifest.tables]
    return RunReport(
        url=storage.url,
        findings=(),
        checkpoints=tuple(_size(checkpoint, checkpoint.ckpt_id in pinned) for checkpoint in listing.current),
        leftovers=tuple(leftovers),
        saves=tuple(saves),
        newest=newest.ckpt_id if newest is not None else None,
        damage=tuple(damage),
        tables=tuple(tables),
        deep=bool(threads),
        chains=tuple(_chains(listing)),
        lacks=tuple(newest.manifest.training.unsaved.descriptions) if newest is not None else (),
    )


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _near_now(storage: Storage, listing: Listing, near: Near, saves: Sequence[SaveTimes], now: datetime) -> NearNow:
    """Return what near saves of this host would give back now."""
    try:
        here = counting_here(storage, listing, near)
    except (CorruptCheckpointError, FormatVersionError):  # which is among what is damaged in the listing
        here = []
    newest = listing.current[-1] if listing.committed else None
    return near_now(here, newest, History.of_committed(saves), now)


def _refuse(storage: Storage, leftovers: list[UnusableDirectory]) -> None:
    """Raise CheckpointNotFoundError where there is nothing of a run, not even what a save left that died."""
    if is_checkpoint(storage.url):
        raise CheckpointNotFoundError(f"{storage.url}: is a checkpoint itself, expected an output dir; name its parent")
    if not leftovers:
        raise CheckpointNotFoundError(f"{storage.url}: {why_nothing(storage)}")


def _leftovers(storage: Storage, listing: Listing) -> Iterator[UnusableDirectory]:
    for directory, damage in listing.damaged.items():
        what = "newer" if isinstance(damage, FormatVersionError) else "damaged"
        yield UnusableDirectory(directory, what, damage_text(damage), False)
    for directory, error in listing.unreadable.items():
        yield UnusableDirectory(directory, "unreadable", str(error), False)
    for directory, reason in listing.fenced.items():
        yield UnusableDirectory(directory, "fenced", reason, True)
    try:
        last = last_takeover(storage)
    except CorruptCheckpointError:  # which the listing has among the damaged
        last = NO_TAKEOVER
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if not any(map(layout.is_ours, names)):
            continue
        if layout.is_offer_dir(directory):
            yield UnusableDirectory(directory, "unfinished", "an offer that is not adopted", False)
        else:
            yield UnusableDirectory(directory, "unfinished", *unfinished(storage, directory, last, names))


def _chains(listing: Listing) -> Iterator[ChainCost]:
    """Yield what each chain costs; a link that several checkpoints are read from is kept once."""
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
    """Return the bytes that a restore reads: of the links below only those of files with rows."""
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
