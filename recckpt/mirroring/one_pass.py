"""One pass of a mirror: what is missing is brought, and only then what does not belong there goes."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError, RecckptError
from recckpt.format import layout
from recckpt.mirroring.copying import CheckpointCopier
from recckpt.mirroring.selection import Selection, going, select
from recckpt.output_dir import rotation
from recckpt.output_dir.listing import Listing
from recckpt.policies.keep import Keep
from recckpt.text import Progress, plural

log = logging.getLogger("recckpt")

_TRIES = 4  # looks at a run that removes checkpoints while they are copied

Look = Callable[[], tuple[Listing, Listing]]  # at the run and at the mirror


class OnePass:
    """One pass over a run; the mirror is held.

    Args:
        copier: copies checkpoints of the run into the mirror.
        look: returns what the run has, and what the mirror has.
        keep: what belongs in the mirror; None for what the run has.
        is_forgotten: whether ids were forgotten in the run since the last pass.

    Attributes:
        run, there: what the run and the mirror had when they were last listed.
        copied: directories of the checkpoints that were copied.
        n_bytes: bytes of the files that were copied.
        damaged: directories of the run -> what turned out to be wrong in them.
    """

    run = there = Listing((), {}, {})

    def __init__(self, copier: CheckpointCopier, look: Look, keep: Keep | None, *, is_forgotten: bool) -> None:
        self._copier, self._look, self._keep, self._is_forgotten = copier, look, keep, is_forgotten
        self._selection = Selection((), frozenset(), None, {})
        self.copied: list[str] = []
        self.n_bytes = 0
        self.damaged: dict[str, CorruptCheckpointError] = {}

    def bring(self, run: Listing, there: Listing) -> str | None:
        """Copy what is missing, passing over what is damaged; return the id of the newest that belongs there."""
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
            self._check_copied()
        newest = self._selection.newest
        return newest.ckpt_id if newest else None

    @property
    def left_out(self) -> Mapping[str, str]:
        """What the mirror lacks since it stands on what is damaged: directory -> that of the damaged one."""
        return self._selection.left_out

    def remove(self) -> list[str]:
        """Remove what does not belong there; return the directories of those that were checkpoints.

        Raises:
            RecckptError: something could not be removed that may hold ids which were forgotten in the run.
        """
        copier, stay, removed = self._copier, self._selection.stay, []
        for checkpoint in going(self.there, stay, has_all=self._is_forgotten):
            copier.hold.check()
            if rotation.remove(copier.to, checkpoint, rotation.THREADS):
                removed.append(checkpoint.directory)
        for directory in self._unfinished():
            copier.hold.check()
            copier.to.remove(layout.join(directory, layout.MANIFEST))  # of one whose manifest is damaged
            rotation.remove_leftover(copier.to, directory, rotation.THREADS)
            if directory in self.there.damaged:  # others never were
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

    def _check_copied(self) -> None:
        """Raise OSError where a checkpoint that was copied is not in the mirror: to copy it again would not end."""
        for checkpoint in self._selection.missing:
            if checkpoint.directory in self.copied:
                problem = "it was copied, and is not there for readers; check the storage"
                raise OSError(errno.EIO, problem, self._copier.to.url_of(checkpoint.directory))

    def _copy_missing(self) -> None:
        """Copy checkpoint after checkpoint, until one is damaged: then others belong in the mirror."""
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
        """Yield what copies have begun and what does not belong there; after a forgetting, damaged ones too."""
        broken = self.there.damaged.keys() - {c.directory for c in self.there.lost} if self._is_forgotten else set()
        for directory in {*self.there.uncommitted, *broken} & {*self.there.directories} - self._selection.stay:
            names = self._copier.to.list_files(directory)
            if layout.INTENT in names or layout.OFFER in names:
                yield directory

    def _check_gone(self) -> None:
        """Raise where a directory that does not belong there has parts left, which may hold what was forgotten."""
        to = self._copier.to
        to.sync_dir("")
        for directory in set(self.there.directories) - self._selection.stay:
            left = [name for name in to.list_files(directory) if layout.may_have_rows(name)]
            if left:
                raise RecckptError(
                    f"{to.url_of(directory)}: found {left[0]}, which could not be removed and may hold ids that were "
                    "forgotten in the run; remove it, and mirror again"
                )
