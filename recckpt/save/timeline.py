"""What the saves of one saver leave in the timeline of its output dir."""

from __future__ import annotations

import logging
from threading import Lock

from recckpt.errors import RecckptError, WriterFencedError
from recckpt.output_dir import timeline
from recckpt.output_dir.fence import Fence
from recckpt.save.near_tally import NearTally
from recckpt.save.save_info import SaveInfo
from recckpt.storage import Storage
from recckpt.storage.retry import is_transient

log = logging.getLogger("recckpt")

_MOST = 100  # lines that wait to be written; the oldest go


class Timeline:
    """The lines of one saver, of which those that could not be written wait for the next.

    One thread at a time adds; any may keep a line meanwhile, as a near save does that has failed.

    Attributes:
        near: what became of the near saves of the saver; the line of a checkpoint says of those before it.
    """

    def __init__(self) -> None:
        self.near = NearTally()
        self._waiting: list[str] = []
        self._changing = Lock()

    def add(self, storage: Storage, info: SaveInfo) -> None:
        """Write the line of a save that is committed.

        Raises:
            OSError: the storage failed; the next line brings it along.
        """
        self._wait(info.to_json(self.near.take(info.step)))
        self._write(storage)

    def keep(self, info: SaveInfo) -> None:
        """Let a line wait for the next one, which brings it along: that of a near save that has failed."""
        self._wait(info.to_json())

    def add_failure(self, storage: Storage, fence: Fence, info: SaveInfo) -> None:
        """Write the line of a save that has failed, if this process holds the output dir; whatever comes of it.

        Where the network has failed, it is not asked once more, for minutes, before training learns of the error.
        """
        if isinstance(info.error, WriterFencedError):
            return
        self._wait(info.to_json())
        if not fence.epoch or (info.error is not None and is_transient(info.error)):
            return
        try:
            fence.check()
            self._write(storage)
        except (RecckptError, OSError) as error:
            log.debug("%s: the failure of %r is not in the timeline yet: %s", storage.url, info.ckpt_id, error)

    def _wait(self, line: str) -> None:
        with self._changing:
            self._waiting = [*self._waiting, line][-_MOST:]

    def _write(self, storage: Storage) -> None:
        written = self._waiting
        timeline.append(storage, written)
        with self._changing:
            self._waiting = [line for line in self._waiting if line not in written]
