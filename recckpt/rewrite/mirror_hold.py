"""A mirror's hold on the output dir that it writes, by a note there: of two mirrors, the later one continues."""

from __future__ import annotations

import os
import secrets
import socket

from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.format.codec import time_now
from recckpt.output_dir.claims import claimed_epochs, last_takeover
from recckpt.output_dir.notes import MirrorNote, mirror_note, put_mirror_note
from recckpt.storage import Storage

_ELSEWHERE = "mirror to another output dir"


class NoMirrorError(RecckptError):
    """A place is not, or no longer, a mirror of the run, and does not become one without a user's action."""


class MirrorHold:
    """The right of one process to write to the mirror ``to``. Not thread-safe."""

    def __init__(self, run: Storage, to: Storage) -> None:
        self._run, self._to = run, to
        self._note = MirrorNote(run.url, "", secrets.token_hex(16), socket.gethostname(), os.getpid(), time_now())

    def look(self) -> None:
        """Check, without writing, that the output dir is empty or a mirror of this run. Raises NoMirrorError if not."""
        # The id of the run, also if the source is itself a mirror; "" for a run that no writer has taken over.
        copied = mirror_note(self._run)
        self._note = self._note.but(run=last_takeover(self._run).run if copied is None else copied.run)
        there, url = mirror_note(self._to), self._to.url
        if there is None:
            found = self._first_found()
            if found:
                raise NoMirrorError(
                    f"{url}: found {found}, which no mirror has written, expected an empty place or a mirror of "
                    f"{self._run.url}; {_ELSEWHERE}, or move away what is there"
                )
        elif there.run != self._note.run and (there.run or there.url != self._run.url):
            raise NoMirrorError(
                f"{url} is a mirror of {there.url}, and not of the run that is now in {self._run.url} (its first "
                f"claim differs); {_ELSEWHERE}"
            )
        self._refuse_writers()

    def take(self) -> bool:
        """Note that this process mirrors from now on, so that others stop; return whether the note is new."""
        before = mirror_note(self._to)
        if before == self._note:
            return False
        put_mirror_note(self._to, self._note)
        try:
            self._refuse_writers()  # again, because a writer that did not see the note may have claimed the place
        except NoMirrorError:
            if before is None:
                self._to.remove(layout.MIRROR)
            raise
        return True

    def check(self) -> None:
        """Raise RecckptError if another process now mirrors, NoMirrorError if the note is gone."""
        now = mirror_note(self._to)
        if now is None:
            raise NoMirrorError(f"{self._to.url} is no mirror any more: {layout.MIRROR} is gone; {_ELSEWHERE}")
        if now.nonce != self._note.nonce:
            raise RecckptError(
                f"{self._to.url}: another `recckpt mirror`, process {now.pid} on {now.host} since {now.time}, writes "
                "to this mirror; this pass writes nothing more there"
            )

    def _refuse_writers(self) -> None:
        epochs = claimed_epochs(self._to)
        if epochs:
            raise NoMirrorError(
                f"{self._to.url}: found {layout.claim(epochs[-1])}: a saver has claimed this place, so it is not a "
                f"mirror, and stays unchanged: {_ELSEWHERE}"
            )

    def _first_found(self) -> str:
        """Return the name of a file or directory in the place; "" if it is empty, or has only files from before a note.

        Files are listed only if there are no directories: then there are few.
        """
        directories = [name for name in self._to.list_dirs() if name != layout.OWN_DIR]
        if directories:
            return f"{directories[0]}/"
        names = (name for name in self._to.list_files("") if not layout.is_temporary(name))
        return next((name for name in names if "/" not in name or name.startswith(f"{layout.OWN_DIR}/")), "")
