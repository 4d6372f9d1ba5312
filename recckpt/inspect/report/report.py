"""A look at a run: its output dir, its timeline, and the rows of its newest checkpoint (no torch here)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.inspect.find import is_checkpoint
from recckpt.inspect.open_checkpoint import OpenCheckpoint
from recckpt.inspect.repair import unfinished
from recckpt.inspect.report.health import findings_of
from recckpt.inspect.report.result import CheckpointSize, Leftover, RunReport, TableHealth
from recckpt.inspect.report.row_counts import Clock
from recckpt.inspect.report.tables import read_tables
from recckpt.inspect.report.timeline import saves_of
from recckpt.output_dir.claims import last_takeover
from recckpt.output_dir.index_file import NOTE, is_of_recis
from recckpt.output_dir.listing import Checkpoint, Listing, look_around
from recckpt.output_dir.open_files import until_whole
from recckpt.output_dir.rotation import pinned_ids
from recckpt.policies.evict import EVENT_TIME
from recckpt.storage import Storage, open_storage
from recckpt.text import Progress

_THREADS = 8


def report(path: str | os.PathLike[str], *, deep: bool = True, threads: int | None = None) -> RunReport:
    """Look at a run, and say how it is: its checkpoints, its saves, its tables, and what of these is unhealthy.

    The rows of the newest checkpoint are read once, in bounded memory, and every byte of them is checked; what is
    damaged is said, and left out of the figures. Of all other files, that they are there with their sizes is checked;
    :func:`recckpt.inspect.verify.verify` reads everything. Nothing is written. Imports no torch.

    Args:
        path: an output dir; any fsspec URL.
        deep: False reads no rows.
        threads: number of files to read at once; None for 8. Locally at most one a core.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``threads`` is not an int of at least 1, or no storage takes the path.
        CheckpointNotFoundError: there is nothing of a run, or the path is that of a checkpoint itself.
        CheckpointRemovedError: its writer removed the newest while it was read, again and again.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"expected the path or URL of an output dir, found {path!r}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is an int of at least 1, found {threads!r}")
    storage = open_storage(os.fspath(path))

    def look(listing: Listing) -> RunReport:
        return _report(storage, listing, storage.threads(threads or _THREADS) if deep else 0)

    return until_whole(lambda: look_around(storage), look)


def _report(storage: Storage, listing: Listing, threads: int) -> RunReport:
    """Say how a run is, with so many threads that read rows."""
    leftovers = list(_leftovers(storage, listing))
    saves = saves_of(storage)
    if listing.is_empty and not listing.unreadable and not saves:
        _refuse(storage, leftovers)
    pinned = pinned_ids(storage)
    checkpoints = [_size(checkpoint, checkpoint.ckpt_id in pinned) for checkpoint in listing.current]
    newest = listing.current[-1] if listing.committed else None
    tables = _tables(storage, newest, threads) if newest is not None else []
    findings = findings_of(storage.url, checkpoints, leftovers, saves, tables)
    return RunReport(
        storage.url,
        tuple(findings),
        tuple(checkpoints),
        tuple(leftovers),
        tuple(saves),
        newest.ckpt_id if newest is not None else None,
        tuple(tables),
    )


def _refuse(storage: Storage, leftovers: list[Leftover]) -> None:
    """Raise CheckpointNotFoundError where there is nothing of a run, not even what a save left that died."""
    if is_checkpoint(storage.url):
        raise CheckpointNotFoundError(f"{storage.url}: is a checkpoint itself, expected an output dir; name its parent")
    if not leftovers:
        note = f"; {NOTE}" if is_of_recis(storage) else ""
        raise CheckpointNotFoundError(f"{storage.url}: {storage.why_empty() or 'found no committed checkpoint'}{note}")


def _leftovers(storage: Storage, listing: Listing) -> Iterator[Leftover]:
    for directory, damage in listing.damaged.items():
        yield Leftover(directory, "damaged", str(damage), False)
    for directory, error in listing.unreadable.items():
        yield Leftover(directory, "unreadable", str(error), False)
    for directory, reason in listing.fenced.items():
        yield Leftover(directory, "fenced", reason, True)
    try:
        alive = last_takeover(storage).epoch
    except CorruptCheckpointError:  # which the listing has among the damaged
        alive = 0
    for directory in listing.uncommitted:
        names = storage.list_files(directory)
        if not any(map(layout.is_ours, names)):
            continue
        if layout.is_offer_dir(directory):
            yield Leftover(directory, "unfinished", "an offer that is not adopted", False)
        else:
            yield Leftover(directory, "unfinished", *unfinished(storage, directory, alive, names))


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
        chain_bytes=sum(link.manifest.n_bytes for link in checkpoint.links),
        full_bytes=checkpoint.links[-1].manifest.n_bytes,
        ephemeral=manifest.ephemeral,
        pinned=is_pinned,
        tables={table.name: table.rows for table in manifest.tables},
    )


def _tables(storage: Storage, newest: Checkpoint, threads: int) -> list[TableHealth]:
    tables = newest.manifest.tables
    if not threads:
        return [TableHealth(table.name, table.rows, table.row_bytes) for table in tables]
    opened = OpenCheckpoint(storage, newest).opened()
    with Progress(f"reading the tables of {newest.ckpt_id}", sum(t.rows * t.row_bytes for t in tables)) as progress:
        progress.n_rows = newest.manifest.rows
        return read_tables(opened, _clock(newest.manifest), threads, progress.advance)


def _clock(manifest: Manifest) -> Clock:
    """Return when a checkpoint was taken, by the time of its events where its run has one."""
    event_time = manifest.state.get(EVENT_TIME)
    try:
        if isinstance(event_time, int | float):
            return Clock(manifest.step, float(event_time))
        written = datetime.fromisoformat(manifest.time.replace("Z", "+00:00"))  # Python 3.10 does not know Z
        return Clock(manifest.step, written.timestamp() if written.tzinfo is not None else None)
    except (ValueError, OverflowError):
        return Clock(manifest.step, None)
