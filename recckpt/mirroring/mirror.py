"""``recckpt.mirror``: an output dir copied to another store, region or host, and kept up with the run."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from recckpt.errors import CheckpointNotFoundError, RecckptError
from recckpt.format import layout
from recckpt.mirroring import files_beside
from recckpt.mirroring.copying import CheckpointCopier
from recckpt.mirroring.damage import damaged_below
from recckpt.mirroring.hold import MirrorHold, origin_of
from recckpt.mirroring.one_pass import OnePass
from recckpt.mirroring.selection import check_same
from recckpt.output_dir.checkpoint_dir import Manifests, refuse_checkpoint
from recckpt.output_dir.forget_requests import check_none_pending, requests
from recckpt.output_dir.known_mirrors import KnownMirror, note_mirror
from recckpt.output_dir.listing import Listing, list_checkpoints, look_around
from recckpt.output_dir.why_nothing import why_nothing
from recckpt.policies.keep import Keep, as_keep
from recckpt.storage import open_storage
from recckpt.storage.upload_rate import UploadRate
from recckpt.text import escaped
from recckpt.types import byte_count, positive_int

log = logging.getLogger("recckpt")

THREADS = 4


@dataclass(frozen=True)
class Mirrored:
    """What one pass of a mirror did.

    Attributes:
        url: the mirror.
        copied: directories of the checkpoints that are new there, in the order in which they were committed.
        removed: directories of those that went.
        n_bytes: how many bytes of files were copied.
        newest: id of the newest checkpoint of the run that belongs there, None where there is none.
        damaged: directory in the run -> what is wrong with it, so that it was not copied.
        left_out: directory in the run -> that of a damaged one which it stands on, so that it was not copied.
    """

    url: str
    copied: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    n_bytes: int = 0
    newest: str | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What was not copied, and why: a line for each checkpoint."""
        damaged = [f"{escaped(name)} is damaged, and not copied: {why}" for name, why in self.damaged.items()]
        above = [f"{escaped(name)} stands on {escaped(of)}, and is not copied" for name, of in self.left_out.items()]
        return damaged + above


def mirror(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    keep: int | Keep | None = None,
    max_upload_rate: int | str | None = None,
    threads: int = THREADS,
) -> Mirrored:
    """Copy what is new in an output dir to another one, and remove there what does not belong there any more.

    Checkpoints are copied byte for byte, those that others stand on first, each manifest after all files, and every
    file is checked against its checksums on the way: whatever interrupts it, all that readers see in ``to`` is whole.
    Calling it again goes on, and copies nothing that is there. The run goes on meanwhile. ``to`` is an output dir:
    readers, restores and warm starts take it as it is. Who saves there takes it over, and it is no mirror any more.

    Args:
        run: an output dir, a mirror too; a path or any fsspec URL.
        to: an empty place, or a mirror of this run.
        keep: what belongs in the mirror, of the checkpoints that are in the run or in the mirror: so many of the
            newest, or a policy as of ``Saver(max_keep=)``. None for what the run has.
        max_upload_rate: bytes a second, over all processes of this host that write to ``to``; a text such as "50 MB".
        threads: files to copy at once; locally at most one a core.

    Returns:
        What was done. Damaged checkpoints of the run, and what stands on them, are logged, named in it, and not copied.

    Raises:
        CheckpointNotFoundError: there is no checkpoint in the run.
        WriterFencedError: somebody saves to ``to``, or another mirror has taken it over.
        RecckptError: ``to`` is something else than a mirror of this run; or ids are yet to be forgotten in the run, or
            were forgotten in ``to`` alone.
        CheckpointRemovedError: the run removed what was being copied, four times in a row.
        ValueError: an argument is invalid, or the two places are in one another.
        OSError: a storage failed.
    """
    done = Mirror(run, to, keep=keep, max_upload_rate=max_upload_rate, threads=threads).update()
    for problem in done.problems:
        log.error("%s: %s", run, problem)
    return done


class Mirror:
    """A mirror of a run, for one pass after another; arguments as of :func:`mirror`. Not thread-safe."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        to: str | os.PathLike[str],
        *,
        keep: int | Keep | None = None,
        max_upload_rate: int | str | None = None,
        threads: int = THREADS,
    ) -> None:
        self._keep = None if keep is None else as_keep(keep)
        positive_int("threads", threads)
        self._run, self._to = open_storage(os.fspath(run)), open_storage(os.fspath(to))
        _check_apart(self._run.url, self._to.url)
        url = self._to.url
        rate = None if max_upload_rate is None else UploadRate(byte_count("max_upload_rate", max_upload_rate), url)
        self._hold = MirrorHold(self._to)
        self._copier = CheckpointCopier(self._run, self._to, self._hold, threads, rate)
        self._known, self._known_there = Manifests(), Manifests()
        self._is_prepared = False

    def update(self) -> Mirrored:
        """Make one pass; errors as of :func:`mirror`."""
        check_none_pending(self._run, "wait for whoever forgets, or run `recckpt forget DIR` first, which ends it")
        before = frozenset(requests(self._to))  # first: whoever mirrors at the same time brings later ones
        forgotten = frozenset(requests(self._run))  # before the run is read: later ones may not be in what is read
        run, there = self._look()
        origin = origin_of(self._run, run)
        if not self._is_prepared:
            refuse_checkpoint(self._to)
        self._hold.look(origin, there)
        check_same(run, there, self._to.url)
        if not before <= forgotten:
            raise RecckptError(
                f"{self._to.url}: found that ids were forgotten there which {self._run.url} may still have, so a pass "
                "would bring them back; let that forget first: where it is a mirror, by a pass over it"
            )
        if not self._is_prepared:
            self._to.prepare()
            self._is_prepared = True
        self._hold.take(origin)
        self._note(before & forgotten)  # before anything is copied: a forgetting from now on knows of the mirror
        this = OnePass(self._copier, self._look, self._keep, is_forgotten=not forgotten <= before)
        newest = this.bring(run, there)
        removed = this.remove()
        self._hold.check()
        files_beside.mark_forgotten(self._to, forgotten - before)
        files_beside.copy_informative(self._run, self._to)
        files_beside.copy_pins(self._run, self._to, this.there.ckpt_ids)
        files_beside.replace_other(self._to, layout.INDEX_FILE, layout.encode_index(this.there.ckpt_ids))
        self._hold.check()  # whoever took it over meanwhile was not in the way, and there is no mirror any more
        self._note(forgotten)
        wrong = {**this.run.damaged, **this.run.unreadable, **this.damaged}
        damaged = {name: str(error) for name, error in wrong.items() if not damaged_below(name, wrong)}
        return Mirrored(self._to.url, tuple(this.copied), tuple(removed), this.n_bytes, newest, damaged, this.left_out)

    def _look(self) -> tuple[Listing, Listing]:
        """Return what the run has, and what the mirror has."""
        run = look_around(self._run, self._known)
        if run.is_empty:
            for error in run.unreadable.values():
                raise error
            raise CheckpointNotFoundError(f"{self._run.url}: {why_nothing(self._run)}")
        return run, list_checkpoints(self._to, self._known_there)

    def _note(self, forgotten: frozenset[str]) -> None:
        """Note the mirror in the run, so that a forgetting there knows of it."""
        host = "" if "://" in self._to.url else socket.gethostname()
        try:
            note_mirror(self._run, KnownMirror(self._run.url, self._to.url, host, forgotten))
        except OSError as error:
            log.warning(
                "%s: the mirror %s cannot be noted there, so a forgetting does not know of it: %s",
                self._run.url,
                self._to.url,
                error,
            )


def _check_apart(run: str, to: str) -> None:
    """Raise ValueError where one of two places is in the other."""
    places = [url if "://" in url else os.path.realpath(url) for url in (run, to)]
    first, second = (f"{place.rstrip('/')}/" for place in places)
    if first.startswith(second) or second.startswith(first):
        raise ValueError(f"a mirror is apart from its run, found {to!r} for a mirror of {run!r}")
