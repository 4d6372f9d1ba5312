"""The saver: takes the state of a model and writes it, now or while training goes on; and loads it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.registered import extra_registry, io_registry
from recckpt.format.manifest import Manifest
from recckpt.live.tables import LiveTables
from recckpt.load.loader import Loader
from recckpt.load.loads import Loads
from recckpt.near.options import Near, check_near
from recckpt.near.tier import NearTier
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.near_at_takeover import VOIDED
from recckpt.parallel.ranks import DEFAULT_TIMEOUT_SEC, RanksNow
from recckpt.policies.deltas import Deltas
from recckpt.policies.keep import Keep
from recckpt.save import arguments
from recckpt.save.background_save import SaveHandle, SaveRunner
from recckpt.save.choice import parse_choice
from recckpt.save.counted_run import CountedRun
from recckpt.save.deletion import Deletion
from recckpt.save.delta_base import changes_of
from recckpt.save.forgetting import Forgetting
from recckpt.save.job import Destination, Job, Live, OnSave, State
from recckpt.save.near_saves import NearSaves
from recckpt.save.registration import Registration
from recckpt.save.reports import span_of
from recckpt.save.save import save
from recckpt.save.save_info import SaveInfo
from recckpt.save.sparse_saver import SparseSaver
from recckpt.save.trainers import Trainers
from recckpt.storage.transfers import VISIBLE_SEC, transfers_of, uploads_of
from recckpt.text import plural, shown


class Saver(Registration, Loads):
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
        timeout_sec: how long a rank waits for the others: at least what the slowest writes longer than the fastest.
        min_free_bytes: a save that would leave less room, by an estimate, is refused; where the storage knows its room.
        max_uploads: how many files one host sends to the output dir at once, over all its ranks; None: one a thread.
        max_upload_rate: how many bytes a second it sends there, over all its ranks, such as ``"200 MB"``.
        work_dir: a directory on this host where a save writes its files first; training copies nothing aside any more
            once they are there, though they still have to go up. Empty but while a save or load is at work.
        pre_download: whether a load first copies what it reads of an object store to ``work_dir``, else to ``TMPDIR``.
        visible_sec: how long ranks look for files of others, which NFS may show late; at most half of ``timeout_sec``.
        on_save: called with the :class:`recckpt.SaveInfo` of each save, once rotation is over, or once it has failed
            (``info.error``), in the thread of the save; what it raises is logged and fails nothing.
        deltas: whether saves write only what has changed: False, True or a :class:`recckpt.Deltas`; see docs/deltas.md.
        save_slots: patterns of the slots that are saved beside embeddings, such as ``"*@count"``; ``"!..."`` leaves out
            what matches; ``[]`` saves embeddings alone, None all slots. See docs/save.md, also of the next two.
        save_where: table or pattern -> conditions of the rows that are saved, as ``where`` of a ``load_conf``.
        store: slot or pattern -> a narrower dtype in which it is stored, such as ``{"*@*exp_avg*": "bfloat16"}``.
        progress: whether saves and loads of more than two seconds show a bar, on a terminal or in a notebook.
        run: what metrics call this job (``recckpt.run``); None for the last name in ``output_dir``.
        tables: what :func:`recckpt.live.live_tables` has found in the model; None leaves its embeddings dense.
        near: a :class:`recckpt.Near`: where near saves go, which a restore prefers to older checkpoints;
            needs ``deltas``. A manager with ``near_interval`` makes them; see docs/near.md.

    Raises:
        TypeError, ValueError: an argument is invalid, two tables share a name, ``sparse_optim`` trains other tables, or
            ``output_dir`` is the directory of a checkpoint.
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
        max_upload_rate: int | str | None = None,
        work_dir: str | os.PathLike[str] | None = None,
        pre_download: bool = False,
        visible_sec: float = VISIBLE_SEC,
        on_save: OnSave | None = None,
        deltas: bool | Deltas = False,
        save_slots: Sequence[str] | None = None,
        save_where: Mapping[str, Any] | None = None,
        store: Mapping[str, Any] | None = None,
        progress: bool = True,
        run: str | None = None,
        tables: LiveTables | None = None,
        near: Near | None = None,
    ) -> None:
        super().__init__()
        arguments.check_options(max_keep, concurrency, timeout_sec, min_free_bytes, on_save, progress=progress)
        changes, choice = changes_of(deltas), parse_choice(save_slots, save_where, store)
        check_near(near, has_deltas=changes is not None)
        uploads = uploads_of(output_dir, max_uploads, max_upload_rate, timeout_sec)
        transfers = transfers_of(
            uploads, work_dir=work_dir, pre_download=pre_download, visible_sec=visible_sec, timeout_sec=timeout_sec
        )
        choice.check_dtypes(arguments.check_parts(model, sparse_optim))
        live = arguments.live_tables_of(model, tables)
        storage, name = arguments.output_dir_of(output_dir, run)  # late: it makes the output dir
        self.model, self.sparse_optim, self.storage, self.max_keep = model, sparse_optim, storage, max_keep
        extra = extra_registry(arguments.form_of_registered(model, live))
        self._extra, self._io_state = extra, io_registry()
        self.trainers = Trainers(model, sparse_optim, extra, choice, live)
        self._live = Live(model, sparse_optim, extra, self._io_state, choice, self.trainers, live)
        tier = None if near is None else NearTier(near, storage, concurrency)
        writers = Fence(storage, self.made_at, near=tier or VOIDED), transfers, SparseSaver(concurrency)
        self._to = Destination(storage, *writers, concurrency, min_free_bytes, on_save, changes, progress, near=tier)
        self.forgetting, self.deletion, self.counted_run = Forgetting(self._to), Deletion(self._to), CountedRun()
        of_loads = model, sparse_optim, extra, self._io_state, storage, concurrency, transfers.download_dir
        on_whole_restore = changes.on_whole_restore if changes else None
        self.loader = Loader(*of_loads, progress, name, self.forgetting.before_load, on_whole_restore, live)
        self._runner, self.ranks, self._tables = SaveRunner(), RanksNow(timeout_sec), arguments.tables_in(model)
        self.near_saves = None if tier is None else NearSaves(self._live, self._to, tier, self._runner, self.loader)

    def __setattr__(self, name: str, value: Any) -> None:
        arguments.check_change(vars(self), name, value)
        super().__setattr__(name, value)

    @shown
    def __repr__(self) -> str:
        what = f"of {type(self.model).__name__} with {plural(len(self._tables), 'table')}"
        deltas = ", deltas" if self._to.changes else ""
        return f"{what}, output_dir={self.output_dir!r}, max_keep={self.max_keep!r}{deltas}, {self._runner}"

    @property
    def output_dir(self) -> str:
        """Where checkpoints go."""
        return self.storage.url

    def save(
        self,
        ckpt_id: str,
        shard_id: int | None = None,
        shard_num: int | None = None,
        *,
        step: int | None = None,
        state: State = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        sync_func: Callable[[], Any] | None = None,
    ) -> Manifest:
        """Write, commit and rotate, once the save before is over; return the manifest. Collective among several ranks.

        On ranks other than 0 the manifest lists the files of that rank alone.

        Args:
            ckpt_id: name of the checkpoint.
            shard_id: number of this rank; None for that of the process group, else of the environment (RANK), else 0.
            shard_num: number of ranks; None as above (WORLD_SIZE), else 1.
            step: global step, kept for ``CheckpointManager.restore``; None for that of the manager, if there is one.
            state: numbers, strings, and lists and dicts of these, for readers without torch, such as metrics.
            overwrite: supersede a committed checkpoint of this id.
            ephemeral: the checkpoint goes as soon as a newer one is committed, and does not count for ``max_keep``.
            sync_func: called by every rank once the checkpoint is committed, such as a barrier of your own.

        Raises:
            ValueError: the id or the step cannot be one, or something in the state could not be loaded back, or several
                ranks own the same ids of a table; names it, nothing was written.
            CheckpointExistsError: the id is committed and ``overwrite`` is false.
            SaveFailedError: a rank failed, or is missing; nothing was committed, where the message does not say
                otherwise. Where a rank is missing, so is it for all saves and restores to come: restart the job.
            CommitNotDurableError: committed, but the storage failed before that was surely durable.
            WriterFencedError: another process has taken the output dir over by saving to it.
            Exception: that of an earlier save in the background, if it was not raised yet; this one is not begun then.
        """
        info = SaveInfo(ckpt_id, step, ephemeral=ephemeral)
        manifest = self._save(info, shard_id, shard_num, state, overwrite).wait()
        if sync_func is not None:
            sync_func()
        return manifest

    def save_async(
        self,
        ckpt_id: str,
        shard_id: int | None = None,
        shard_num: int | None = None,
        *,
        step: int | None = None,
        state: State = None,
        overwrite: bool = False,
        ephemeral: bool = False,
    ) -> SaveHandle:
        """As :meth:`save`, but return as soon as training may go on; what it changes from then on is not saved.

        What goes wrong from then on is raised by ``wait()`` of the handle, else by the next save or :meth:`close`.
        """
        info = SaveInfo(ckpt_id, step, ephemeral=ephemeral, background=True)
        return self._save(info, shard_id, shard_num, state, overwrite)

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for the save that is under way, if there is one, and say whether it is over; for a near save too.

        Args:
            timeout_sec: how long to wait; 0 only looks, None waits until the end.

        Raises:
            RecckptError: the save failed, and its error was not raised yet.
        """
        with self._turn():
            if timeout_sec is None and self.near_saves is not None:
                self.near_saves.settle()  # first: it raises nothing
            return self._runner.settle(timeout_sec)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        self._check_process()
        return self._runner.is_running

    def close(self) -> None:
        """As :meth:`settle`, and end a compaction in the background; the saver may go on being used."""
        with closing(self._to.offers):
            self.settle()

    def _turn(self) -> AbstractContextManager[Any]:
        """Return the lock of the saver and its manager; refuse a fork, and a caller that might wait for itself."""
        lock = super()._turn()
        self._runner.check_caller()
        arguments.check_moment(self._tables)
        return lock

    def _save(
        self, info: SaveInfo, shard_id: int | None, shard_num: int | None, state: State, overwrite: bool
    ) -> SaveHandle:
        arguments.check_save(info.ckpt_id, info.step, overwrite=overwrite, ephemeral=info.ephemeral)
        self._tables = arguments.tables_in(self.model)  # there may be new ones
        with self._turn(), self._runner.one_save():
            step, state = self.counted_run.step_and_state(info.step, state)
            info.note_step(step)
            ranks = info.raising(self.ranks.of(shard_id, shard_num))
            options = self.loader.is_resumed, self.max_keep, span_of(info, ranks, self.loader.run, self.storage)
            job = Job(info, ranks, state, overwrite, *options, self.counted_run.prefix)
            return save(self._live, job, self._to, self._runner)
