"""Reports of a save: to the timeline, to OpenTelemetry, and to the caller's ``on_save``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from recckpt.parallel.ranks import Ranks
from recckpt.save.job import Destination, Job
from recckpt.save.save_info import SaveInfo
from recckpt.storage import Storage
from recckpt.telemetry import Operation

log = logging.getLogger("recckpt")


def span_of(info: SaveInfo, ranks: Ranks, run: str, storage: Storage) -> Operation:
    """Return the span of a save that begins; rank 0 reports for all."""
    attributes: dict[str, str | int] = {"id": info.ckpt_id}
    if info.step is not None:
        attributes["step"] = info.step
    return Operation("save", attributes, run=run, retries=lambda: storage.n_retries, is_reported=ranks.rank == 0)


def report_saved(job: Job, to: Destination) -> None:
    """Report a save that is committed, and is in the timeline already."""
    info = job.info
    written = {"save.bytes": info.n_bytes, "save.rows": info.n_upserts}
    state = {"chain.length": info.n_links, "last_save.time": time.time(), **_free(to.storage)}
    attributes = {**_attributes(info), "bytes": info.n_bytes, "rows": info.n_rows}
    job.span.end(attributes=attributes, measured={"save.pause": info.max_blocked_sec, **written, **state})
    _call_on_save(to, info)


@contextmanager
def failure_reported(job: Job, to: Destination) -> Iterator[None]:
    """Report the error that leaves the block."""
    try:
        yield
    except Exception as error:
        info = job.info
        info.note_failure(error)
        job.span.end(error, attributes=_attributes(info), measured={"save.pause": info.max_blocked_sec})
        if job.ranks.rank == 0:
            to.timeline.add_failure(to.storage, to.fence, info)
        _call_on_save(to, info)
        raise


def _free(storage: Storage) -> dict[str, float]:
    """Return the room that is left, nothing where the storage does not know it without a request."""
    with suppress(OSError):
        free = storage.free_bytes() if storage.asking_is_free else None
        return {} if free is None else {"storage.free": free}
    return {}


def _attributes(info: SaveInfo) -> dict[str, str | int]:
    flags = {"background": info.background, "ephemeral": info.ephemeral}
    return {"kind": info.kind, "links": info.n_links, **flags}


def _call_on_save(to: Destination, info: SaveInfo) -> None:
    if to.on_save is not None:
        try:
            to.on_save(info)
        except Exception:
            how = "is saved, but" if info.error is None else "has failed, and"
            log.exception("%s %s on_save=%r failed", info.ckpt_id, how, to.on_save)
