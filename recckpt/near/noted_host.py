"""What an output dir knows of one host with near saves of it: that there may be some, and what they lack by now."""

from __future__ import annotations

import logging
import socket
from collections.abc import Set as AbstractSet
from dataclasses import replace

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.near.near_dir import NearDir
from recckpt.output_dir.near_hosts import NearHost, note_near_host, noted_host
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


class NotedHost:
    """The note of this host in an output dir, which one rank of the host writes. Not thread-safe."""

    def __init__(self, storage: Storage, near_dir: NearDir) -> None:
        self._storage, self._dir = storage, near_dir
        self._note: NearHost | None = None
        self._epoch = 0  # in which it was noted: an output dir that is made anew has lost it

    def note(self, epoch: int) -> None:
        """Note the host before there are rows on it, once an epoch.

        Raises:
            OSError: the near dir or the output dir does not let that be done.
        """
        if self._note is None or self._epoch != epoch:
            own = NearHost(self._dir.host(), socket.gethostname(), self._dir.path, self._forgotten())
            note_near_host(self._storage, own)
            self._note, self._epoch = own, epoch

    def note_forgotten(self, forgotten: AbstractSet[str]) -> None:
        """Note the requests to forget ids of which no near save on this host has any more; a failure is logged.

        Does nothing where the host is not noted.
        """
        try:
            before = self._note or noted_host(self._storage, self._dir.host())
            if before is not None and not forgotten <= before.forgotten:
                self._note = replace(before, forgotten=before.forgotten | forgotten)
                note_near_host(self._storage, self._note)
        except (OSError, CorruptCheckpointError, FormatVersionError) as error:
            self._note = None
            log.warning("%s: cannot note there what was forgotten on this host: %s", self._storage.url, error)

    def _forgotten(self) -> frozenset[str]:
        try:
            before = noted_host(self._storage, self._dir.host())
        except (CorruptCheckpointError, FormatVersionError) as error:
            log.warning("%s: the note of this host is written anew: %s", self._storage.url, error)
            return frozenset()
        return frozenset() if before is None else before.forgotten
