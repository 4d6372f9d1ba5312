"""The newest checkpoint read once, and every byte of it checked (no torch here)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointRemovedError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.inspect.report.damage import damage_text
from recckpt.inspect.report.result import TableHealth
from recckpt.inspect.report.row_counts import TakenAt
from recckpt.inspect.report.tables import read_tables
from recckpt.inspect.verify_checkpoint import Checkup
from recckpt.output_dir.checkpoint_dir import has_manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.policies.evict import EVENT_TIME
from recckpt.storage import Storage
from recckpt.text import Progress


def read_newest(storage: Storage, checkpoint: Checkpoint, threads: int) -> tuple[list[TableHealth], list[str]]:
    """Return how the tables of a checkpoint are, and what is wrong with its files that hold no rows.

    Raises:
        CheckpointRemovedError: its writer removed it meanwhile, and the storage is not a local file system.
    """
    manifest, directory = checkpoint.manifest, checkpoint.directory
    opened = OpenChain.open(storage, checkpoint)
    n_bytes = sum(table.rows * table.row_bytes for table in manifest.tables)
    n_bytes += sum(file.n_bytes for file in manifest.files if not layout.has_rows(file.name))
    with Progress(f"reading {manifest.ckpt_id}", n_bytes) as progress:
        progress.add_rows(manifest.rows)
        tables = read_tables(opened, _clock(manifest), threads, progress.advance)
        damage = _check_others(storage, directory, threads, progress.advance)
    if (damage or any(table.damage for table in tables)) and not has_manifest(storage, directory):
        raise CheckpointRemovedError(storage.url_of(directory))
    return tables, damage


def _check_others(storage: Storage, directory: str, threads: int, advance: Callable[[int], object]) -> list[str]:
    """Return what is wrong with the files that hold no rows: the model, registered objects, positions."""
    look = Checkup(storage, directory)
    jobs = list(look.check_files(advance)) if look.manifest is not None else []
    found = [error for errors in run_all(lambda job: list(job()), jobs, threads) for error in errors]
    own = f"{directory}/"
    return [damage_text(error) for error in [*look.errors, *found] if not layout.has_rows(error.path.removeprefix(own))]


def _clock(manifest: Manifest) -> TakenAt:
    """Return when a checkpoint was taken, by the time of its events where its run has one."""
    event_time = manifest.state.get(EVENT_TIME)
    try:
        if isinstance(event_time, int | float):
            return TakenAt(manifest.step, float(event_time))
        written = datetime.fromisoformat(manifest.time.replace("Z", "+00:00"))  # Python 3.10 does not know Z
        return TakenAt(manifest.step, written.timestamp() if written.tzinfo is not None else None)
    except (ValueError, OverflowError):
        return TakenAt(manifest.step, None)
