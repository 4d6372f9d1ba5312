"""The saver: takes the state of a model and writes it, now or while training goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Literal, overload

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.rank_digests import RankDigests
from recckpt.dense.state_copy import DenseBuffers
from recckpt.format.manifest import Manifest, Scalar
from recckpt.model_state import ModelState
from recckpt.parallel.process_group import DEFAULT_TIMEOUT_SEC, this_rank
from recckpt.parallel.ranks import Ranks, ranks_of
from recckpt.policies.keep import Keep, as_keep
from recckpt.save.background_save import OnSave, SaveHandle, SaveRunner
from recckpt.save.preflight import check_moment, check_name, check_owners, check_rooms
from recckpt.save.save_info import SaveInfo
from recckpt.save.stage import Staged, estimated_bytes, stage
from recckpt.storage.transfers import VISIBLE_SEC, transfers_of
from recckpt.types import positive_number

log = logging.getLogger("recckpt")


class Saver(ModelState):
    """Saves and loads a model: its tables, its dense state and what is registered beside them.

    The state is read from the model at each save. Thread-safe: saves and loads of several threads follow each other. It
    belongs to the process that made it: a forked child makes its own, or gets :class:`recckpt.errors.ForkedError`.

    Args:
        model: any module; tables are found in its ``state_dict()``. DistributedDataParallel, DataParallel and
            ``torch.compile`` wrappers are looked through, so names are always those of the model itself.
        sparse_optim: the optimizer of the tables; its slots are saved with them, its scalars in ``extra.pt``.
        output_dir: a path or any fsspec URL; made if it is missing, and tried for writing at once.
        max_keep: how many checkpoints to keep, or a policy of :mod:`recckpt.policies.keep`; None keeps all.
        concurrency: threads that read and write tables.
        timeout_sec: how long a rank waits for the others, at each of the places where they agree: at least as long as
            the slowest rank writes longer than the fastest.
        min_free_bytes: a save that would leave less room, by an estimate, is refused; where the storage knows its room.
        max_uploads: how many files one host sends to the output dir at once, over all its ranks; None: one a thread.
        work_dir: a directory on this host where a save writes its files first; training copies nothing aside any more
            once they are there, though they still have to go up. Empty but while a save or load is at work.
        pre_download: whether a load first copies what it needs of files that cannot be mapped where they lie, such as
            those of an object store: to ``work_dir``, else to the temporary directory.
        visible_sec: how long ranks look for what others have written, which a network file system may show late; at
            most half of ``timeout_sec``.
        on_save: called with the :class:`recckpt.SaveInfo` of each save that is committed, once rotation is over,
            in the thread of the save; what it raises is logged and fails nothing.

    Raises:
        TypeError: the model, the optimizer or ``on_save`` is none.
        ValueError: a number is not one, or two tables share a name, or the optimizer is that of dense parameters, or
            of tables that the model does not have.
        OSError: the output dir cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        sparse_optim: Optimizer | None = None,
        output_dir: str = "./",
        max_keep: int | Keep | None = 1,
        concurrency: int = 4,
        *,
        timeout_sec: float = DEFAULT_TIMEOUT_SEC,
        min_free_bytes: int = 0,
        max_uploads: int | None = None,
        work_dir: str | os.PathLike[str] | None = None,
        pre_download: bool = False,
        visible_sec: float = VISIBLE_SEC,
        on_save: OnSave | None = None,
    ) -> None:
        as_keep(max_keep)
        if type(min_free_bytes) is not int or min_free_bytes < 0:
            raise ValueError(f"min_free_bytes must be an int of at least 0, found {min_free_bytes!r}")
        if on_save is not None and not callable(on_save):
            raise TypeError(f"on_save must be a callable (SaveInfo) -> None, or None, found {on_save!r}")
        self._timeout_sec = positive_number("timeout_sec", timeout_sec)
        self._transfers = transfers_of(
            output_dir,
            max_uploads=max_uploads,
            work_dir=work_dir,
            pre_download=pre_download,
            visible_sec=visible_sec,
            timeout_sec=self._timeout_sec,
        )
        super().__init__(  # last: it makes the output dir
            model, sparse_optim, output_dir, concurrency, self._transfers.download_dir
        )
        self.max_keep, self._min_free_bytes = max_keep, min_free_bytes
        self._ranks: dict[tuple[int, int], Ranks] = {}
        self._buffers = DenseBuffers()
        self._digests = RankDigests()
        self._step_now: Callable[[], int | None] = lambda: None
        self._runner = SaveRunner(self.storage, self._transfers, self._concurrency, on_save, self.made_at)

    @overload
    def save(
        self,
        ckpt_id: str,
        shard_id: int | None = None,
        shard_num: int | None = None,
        *,
        step: int | None = None,
        state: Mapping[str, Scalar] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        blocking: Literal[True] = True,
    ) -> Manifest: ...
    @overload
    def save(
        self,
        ckpt_id: str,
        shard_id: int | None = None,
        shard_num: int | None = None,
        *,
        step: int | None = None,
        state: Mapping[str, Scalar] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        blocking: Literal[False],
    ) -> SaveHandle: ...
    @overload
    def save(
        self,
        ckpt_id: str,
        shard_id: int | None = None,
        shard_num: int | None = None,
        *,
        step: int | None = None,
        state: Mapping[str, Scalar] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        blocking: bool,
    ) -> Manifest | SaveHandle: ...
    def save(
        self,
        ckpt_id: str,
        shard_id: int | None = None,
        shard_num: int | None = None,
        *,
        step: int | None = None,
        state: Mapping[str, Scalar] | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        blocking: bool = True,
    ) -> Manifest | SaveHandle:
        """Write, commit and rotate. Collective where there are several ranks: all of them call it.

        A save that is under way is waited for first.

        Args:
            ckpt_id: name of the checkpoint.
            shard_id: number of this rank; None for that of the process group, else of the environment (RANK), else 0.
            shard_num: number of ranks; None as above (WORLD_SIZE), else 1.
            step: global step, kept for ``CheckpointManager.restore``; None for that of the manager, if there is one.
            state: numbers and strings for readers without torch, such as metrics.
            overwrite: supersede a committed checkpoint of this id.
            ephemeral: the checkpoint goes as soon as a newer one is committed, and does not count for ``max_keep``.
            blocking: False returns as soon as training may go on; what it changes from then on is not in the
                checkpoint.

        Returns:
            The manifest of the committed checkpoint, or the handle of a save that is under way.

        Raises:
            ValueError: the id or the step cannot be one, or something in the state could not be loaded back, or several
                ranks own the same ids of a table; names it, nothing was written.
            CheckpointExistsError: the id is committed and ``overwrite`` is false.
            SaveFailedError: a rank failed, or is missing; nothing was committed, where the message does not say
                otherwise. Where a rank is missing, so is it for all saves and restores to come: restart the job.
            CommitNotDurableError: committed, but the storage failed before that was surely durable.
            WriterFencedError: another process has taken the output dir over by saving to it.
            The error of an earlier save in the background that nobody has been told of; this one is not begun then.
        """
        check_name(ckpt_id, step)
        check_moment(self.model)
        with self._turn(), self._runner.one_save():
            step = self._step_now() if step is None else step
            info = SaveInfo(ckpt_id, step, ephemeral=ephemeral, background=not blocking)
            ranks = info.telling(self.ranks(shard_id, shard_num))
            take = partial(self._take, info, ranks, state)
            handle = self._runner.start(
                take, info, ranks, max_keep=self.max_keep, overwrite=overwrite, resumed=self._is_resumed
            )
            return handle.wait() if blocking else handle

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the save that is under way, if there is one, and say whether none is any more.

        Args:
            timeout_sec: how long to wait; 0 only looks, None waits until the end.

        Raises:
            SaveFailedError, WriterFencedError, CommitNotDurableError: it failed, and nobody has been told yet.
        """
        with self._turn():
            return self._runner.settle(timeout_sec)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        self._check_process()
        return self._runner.is_running

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a rank is known to be missing, so that nothing collective can be done any more."""
        return any(ranks.has_lost for ranks in self._ranks.values())

    def close(self) -> None:
        """Wait for the save that is under way and raise its error; the saver may go on being used.

        Raises:
            SaveFailedError, WriterFencedError, CommitNotDurableError: as :meth:`settle`.
        """
        self.settle()

    def __enter__(self) -> Saver:
        self._check_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)  # what is being raised already goes first

    def ranks(self, shard_id: int | None = None, shard_num: int | None = None) -> Ranks:
        """Return the ranks that save and restore together, by the process group as it is now. Not collective.

        Raises:
            ValueError: the numbers do not fit each other.
        """
        with self._turn():
            key = this_rank(shard_id, shard_num)
            if key not in self._ranks or self._ranks[key].is_over:
                self._ranks[key] = ranks_of(*key, self._timeout_sec)
            return self._ranks[key]

    def count_steps_by(self, step_now: Callable[[], int | None]) -> None:
        """Give saves by hand the step that ``step_now`` says, where they name none; a manager does this.

        Args:
            step_now: returns the global step; None where nobody counts.
        """
        self._step_now = step_now

    def check_caller(self) -> None:
        """Do nothing where this thread and process may use the saver.

        Raises:
            ForkedError: this is a forked child of the process that made it.
            RuntimeError: this is the thread of the save that is under way, which would wait for itself.
        """
        self._check_process()
        if self._runner.is_this_thread:
            raise RuntimeError(
                "on_save is part of the save that it is called from, and cannot wait for it: save, load and step in "
                "the thread that trains"
            )

    def _turn(self) -> AbstractContextManager[Any]:
        self.check_caller()
        return super()._turn()

    def _take(self, info: SaveInfo, ranks: Ranks, state: Mapping[str, Scalar] | None) -> Staged:
        """Refuse what cannot be saved, and stage the rest. Collective."""
        check_owners(self.model, ranks)  # first: it fails on all ranks or on none
        n_bytes = estimated_bytes(self.model, ranks.rank)
        check_rooms(self.storage, self._transfers.work_dir, n_bytes, self._min_free_bytes, ranks)
        with info.timed("stage"):
            return stage(
                self.model,
                self.sparse_optim,
                self._extra,
                self._io_state,
                step=info.step,
                state=state,
                buffers=self._buffers if info.background else None,
                rank=ranks.rank,
                digest=self._digests.begin() if ranks.size > 1 else None,
            )
