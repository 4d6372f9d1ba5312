"""The loads of a saver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recckpt.load.conf import Bank
from recckpt.load.loader import Loader
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.parallel.one_process import OneProcess


class Loads(OneProcess):
    """The half of a saver that loads, and says what a load would do."""

    loader: Loader

    def load(
        self,
        ckpt_path: str | None = None,
        ckpt_id: str | None = None,
        load_conf: Mapping[str, Any] | None = None,
        shard_id: int | None = None,
        direct_path: bool = False,
    ) -> LoadReport:
        """Load a checkpoint into the model and what is registered.

        Args:
            ckpt_path: an id of the own output dir, an output dir, or a checkpoint itself; None for the own output dir.
            ckpt_id: which checkpoint in it; None for the newest.
            load_conf: what to take: an entry of a bank without ``path``; None for everything.
            shard_id: number of this rank, whose dataset positions are taken; None as in :meth:`save`.
            direct_path: ``ckpt_path`` is a checkpoint itself, and nothing else will do; None loads nothing.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            LoadConfError, StateMismatchError: what is asked for does not exist or does not fit; nothing has changed.
            CorruptCheckpointError, CheckpointRemovedError: a file is damaged, or was removed before it was read.
            PartlyLoadedError: reading failed when tables that had rows had been changed.
        """
        with self._turn():
            return self.loader.load(ckpt_path, ckpt_id, load_conf, shard_id, direct_path)

    def load_by_config(
        self, bank: Bank, conf: Mapping[str, Any] | None = None, *, shard_id: int | None = None
    ) -> LoadReport:
        """Load what a model bank says: entries with a ``path``, of which the last that offers a name counts.

        Args:
            bank: a list of entries, or one entry, or the path of one; see docs/load.md. None loads nothing.
            conf: the rest of the entry, where ``bank`` is a path.
            shard_id: number of this rank; None as in :meth:`save`.

        Raises:
            Exception: as :meth:`load`; LoadConfError and StateMismatchError name all that is wrong.
        """
        with self._turn():
            return self.loader.load_bank(bank, conf, shard_id)

    def plan(self, bank: Bank, conf: Mapping[str, Any] | None = None, *, shard_id: int | None = None) -> LoadPlan:
        """Say what :meth:`load_by_config` would do, or raise as it would; reads no rows and changes nothing."""
        with self._turn():
            return self.loader.plan(bank, conf, shard_id)

    def names(self) -> list[str]:
        """Return the names that can be loaded, for ``recckpt plan``, each in a line with what is known of it."""
        with self._turn():
            return self.loader.names()
