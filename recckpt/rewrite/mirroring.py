"""``recckpt.rewrite.mirror``: copies an output dir to another store, region or host, and keeps the copy up to date."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from recckpt.errors import (
    CheckpointNotFoundError,
    CheckpointRemovedError,
    CorruptCheckpointError,
    FormatVersionError,
    RecckptError,
)
from recckpt.format import layout
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Manifests, refuse_checkpoint
from recckpt.output_dir.forget_requests import check_none_pending, requests
from recckpt.output_dir.index_file import why_nothing
from recckpt.output_dir.listing import Listing, list_checkpoints, look_around
from recckpt.policies.keep import Keep, as_keep
from recckpt.rewrite.mirror_copies import CheckpointCopier, copy_informative, copy_pins, mark_forgotten, replace_other
from recckpt.rewrite.mirror_hold import MirrorHold
from recckpt.rewrite.mirror_selection import Selection, check_same, damaged_below, going, select
from recckpt.storage import open_storage
from recckpt.text import Progress, escaped, plural
from recckpt.types import positive_int

log = logging.getLogger("recckpt")
_TRIES = 4  # attempts to copy from a run that removes checkpoints at the same time
Look = Callable[[], tuple[Listing, Listing]]  # lists the run and the mirror
THREADS = 4


class OnePass:
    """One pass over a run, by the process that holds the mirror. ``look`` lists both again, for ``run`` and ``there``.

    Attributes:
        copied: directories of the copied checkpoints.
        n_bytes: bytes of the copied files.
        damaged: directory in the run -> damage found while copying.
    """

    run = there = Listing((), {}, {})

    def __init__(self, copier: CheckpointCopier, look: Look, keep: Keep | None, *, is_forgotten: bool) -> None:
        self._copier, self._look, self._keep, self._is_forgotten = copier, look, keep, is_forgotten
        self._selection = Selection((), frozenset(), None, {})
        self.copied: list[str] = []
        self.n_bytes = 0
        self.damaged: dict[str, CorruptCheckpointError] = {}

    def bring(self, run: Listing, there: Listing) -> str | None:
        """Copy missing checkpoints, skipping damaged ones; return the id of the newest that belongs in the mirror."""
        self.run, self.there = run, there
        n_left = _TRIES
        self._select()
        while self._selection.missing:
            try:
                self._copy_missing()
            except CheckpointRemovedError as error:
                n_left -= 1
                if n_left == 0:
                    raise
                log.info("%s; looking again", error)
            self.run, self.there = self._look()
            self._select()
            for checkpoint in self._selection.missing:
                if checkpoint.directory in self.copied:
                    self._copier.hold.check()  # if another pass has removed the copy, raise that error instead
                    problem = "it was copied, but readers do not find it; check the storage"
                    raise OSError(errno.EIO, problem, self._copier.to.url_of(checkpoint.directory))
        newest = self._selection.newest
        return newest.ckpt_id if newest else None

    @property
    def left_out(self) -> Mapping[str, str]:
        """Checkpoints that the mirror lacks because a parent is damaged: directory -> directory of that parent."""
        return self._selection.left_out

    def remove(self) -> list[str]:
        """Remove what does not belong in the mirror; return the directories of removed checkpoints.

        Raises:
            RecckptError: a file that may hold ids forgotten in the run could not be removed.
        """
        copier, stay, removed = self._copier, self._selection.stay, []
        for checkpoint in going(self.there, stay, has_all=self._is_forgotten):
            copier.hold.check()
            if rotation.remove(copier.to, checkpoint, rotation.THREADS):
                removed.append(checkpoint.directory)
        for directory in self._unfinished():
            copier.hold.check()
            copier.to.remove(layout.join(directory, layout.MANIFEST))  # present if the manifest is damaged
            rotation.remove_leftover(copier.to, directory, rotation.THREADS)
            if directory in self.there.damaged:  # others were never checkpoints
                removed.append(directory)
        if self._is_forgotten:
            self._check_gone()
        if removed:
            self.there = self._look()[1]
        return removed

    def _select(self) -> None:
        run, to = self._copier.run, self._copier.to
        self._selection = select(
            self.run,
            self.there,
            keep=self._keep,
            pinned=rotation.pinned_ids(run) | rotation.pinned_ids(to),
            damaged=self.damaged,
            is_forgotten=self._is_forgotten,
            now=datetime.now(timezone.utc),
        )

    def _copy_missing(self) -> None:
        """Copy checkpoint after checkpoint, until one is damaged; then the caller must select again."""
        missing = self._selection.missing
        total = sum(checkpoint.manifest.n_bytes for checkpoint in missing)
        with Progress(f"mirroring {plural(len(missing), 'checkpoint')}", total) as progress:
            for checkpoint in missing:
                try:
                    self.n_bytes += self._copier.copy(checkpoint, progress.advance)
                except CorruptCheckpointError as error:
                    self.damaged[checkpoint.directory] = error
                    return
                self.copied.append(checkpoint.directory)
                progress.add_rows(checkpoint.manifest.rows)

    def _unfinished(self) -> Iterator[str]:
        """Yield unfinished copies that do not belong there; after a forgetting, damaged checkpoints too."""
        broken = self.there.damaged.keys() - {c.directory for c in self.there.lost} if self._is_forgotten else set()
        for directory in {*self.there.uncommitted, *broken} & {*self.there.directories} - self._selection.stay:
            names = self._copier.to.list_files(directory)
            if layout.INTENT in names:
                yield directory

    def _check_gone(self) -> None:
        """Raise if a directory that does not belong there has parts left, which may hold forgotten ids."""
        to = self._copier.to
        to.sync_dir("")
        for directory in set(self.there.directories) - self._selection.stay:
            left = [name for name in to.list_files(directory) if layout.may_have_rows(name)]
            if left:
                raise RecckptError(
                    f"{to.url_of(directory)}: found {left[0]}, which could not be removed and may hold ids that were "
                    "forgotten in the run; remove it, and mirror again"
                )


@dataclass(frozen=True)
class Mirrored:
    """The outcome of one pass of a mirror.

    Attributes:
        url: the mirror.
        copied: directories of new checkpoints, in the order in which they were committed.
        removed: directories of removed checkpoints.
        n_bytes: bytes of the copied files.
        newest: id of the run's newest checkpoint that belongs in the mirror; None without any.
        damaged: directory in the run that was not copied -> its damage.
        left_out: directory in the run that was not copied -> directory of its damaged parent.
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
        """One line per checkpoint that was not copied, with the reason."""
        damaged = [f"{escaped(name)} is damaged, and not copied: {why}" for name, why in self.damaged.items()]
        above = [f"{escaped(name)} builds on {escaped(of)}, and is not copied" for name, of in self.left_out.items()]
        return damaged + above


def mirror(
    run: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    keep: int | Keep | None = None,
    threads: int = THREADS,
) -> Mirrored:
    """Copy what is new in an output dir to another one, and remove from the copy what no longer belongs there.

    Checkpoints are copied byte for byte, parents first, each manifest after all other files, and every file is compared
    with its checksums: even after an interruption, everything that readers see in ``to`` is whole. A repeated call
    continues, and copies only what is missing. The run may continue meanwhile. ``to`` can be read, and warm-started
    from, like any output dir; no other process may save there.

    Args:
        run: an output dir, or itself a mirror; a path or any fsspec URL.
        to: an empty place, or a mirror of this run.
        keep: which checkpoints of the run or the mirror belong in the mirror: the number of the newest, or a policy
            as of ``Saver(max_keep=)``. None for those that the run has.
        threads: number of files to copy at once; on local disks at most one per core.

    Returns:
        What was done. Damaged checkpoints of the run, and deltas on them, are not copied; they are logged and listed.

    Raises:
        CheckpointNotFoundError: there is no checkpoint in the run.
        RecckptError: ``to`` is not a mirror of this run, or another pass over it has begun; or a request to forget ids
            is pending in the run, or ids were forgotten only in ``to``.
        CheckpointRemovedError: the run removed a checkpoint while it was copied, four times in a row.
        ValueError: an argument is invalid, or one place is inside the other.
        OSError: a storage failed.
    """
    done = Mirror(run, to, keep=keep, threads=threads).update()
    for problem in done.problems:
        log.error("%s: %s", run, problem)
    return done


class Mirror:
    """A mirror of a run, for several passes; arguments as for :func:`mirror`. Not thread-safe."""

    def __init__(
        self,
        run: str | os.PathLike[str],
        to: str | os.PathLike[str],
        *,
        keep: int | Keep | None = None,
        threads: int = THREADS,
    ) -> None:
        self._keep = None if keep is None else as_keep(keep)
        positive_int("threads", threads)
        self._run, self._to = open_storage(os.fspath(run)), open_storage(os.fspath(to))
        places = [each.url if "://" in each.url else os.path.realpath(each.url) for each in (self._run, self._to)]
        first, second = (f"{place.rstrip('/')}/" for place in places)
        if first.startswith(second) or second.startswith(first):
            what = f"found {self._to.url!r} for a mirror of {self._run.url!r}"
            raise ValueError(f"a mirror must be outside its run, {what}")
        self._hold = MirrorHold(self._run, self._to)
        self._copier = CheckpointCopier(self._run, self._to, self._hold, threads)
        self._known, self._known_there = Manifests(), Manifests()
        self._is_prepared = False

    def update(self) -> Mirrored:
        """Make one pass. Raises the errors of :func:`mirror`."""
        check_none_pending(self._run, "wait until it is done, or run `recckpt forget DIR` first, which completes it")
        before = frozenset(requests(self._to))  # read first: a concurrent pass may add later ones
        forgotten = frozenset(requests(self._run))  # read before the run is listed, which may not reflect later ones
        run = self._look_at_run()
        if not self._is_prepared:
            refuse_checkpoint(self._to)
        self._hold.look()
        if not before <= forgotten:
            raise RecckptError(
                f"{self._to.url}: ids were forgotten in this mirror that {self._run.url} may still have, and a pass "
                "would bring them back: forget them in the run first, or, if it is a mirror itself, mirror to it first"
            )
        if not self._is_prepared:
            self._to.prepare()
            self._is_prepared = True
        if self._hold.take():
            run = self._look_at_run()  # list again, so that what another pass has copied is not removed
        there = list_checkpoints(self._to, self._known_there)  # after no other pass writes there
        check_same(run, there, self._to.url)
        this = OnePass(self._copier, self._look, self._keep, is_forgotten=not forgotten <= before)
        newest = this.bring(run, there)
        removed = this.remove()
        self._hold.check()
        mark_forgotten(self._to, forgotten - before)
        copy_informative(self._run, self._to)
        copy_pins(self._run, self._to, this.there.ckpt_ids)
        replace_other(self._to, layout.INDEX_FILE, layout.encode_index(this.there.ckpt_ids))
        self._hold.check()  # raises an error that names the other process, if one has taken over
        wrong = {**this.run.damaged, **this.run.unreadable, **this.damaged}
        damaged = {name: str(error) for name, error in wrong.items() if not damaged_below(name, wrong)}
        return Mirrored(self._to.url, tuple(this.copied), tuple(removed), this.n_bytes, newest, damaged, this.left_out)

    def _look(self) -> tuple[Listing, Listing]:
        return self._look_at_run(), list_checkpoints(self._to, self._known_there)

    def _look_at_run(self) -> Listing:
        run = look_around(self._run, self._known)
        for problem in run.damaged.values():
            if isinstance(problem, FormatVersionError):  # this version cannot know what such a checkpoint holds
                raise problem
        if run.is_empty:
            for error in run.unreadable.values():
                raise error
            raise CheckpointNotFoundError(f"{self._run.url}: {why_nothing(self._run)}")
        return run
