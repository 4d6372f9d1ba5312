"""The saver: captures the state of a model, saves it in the foreground or beside training, and loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.data_loaders import position_of
from recckpt.dense.optimizers import updater
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.format import layout
from recckpt.format.manifest import Manifest, StateValue
from recckpt.format.names import GLOBAL_STEP
from recckpt.live.tables import LiveTables
from recckpt.load.loader import Loader, Loads
from recckpt.output_dir.fence import VOIDED, Fence
from recckpt.output_dir.forget_requests import seen_by
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.ranks import RanksNow
from recckpt.policies.deltas import Deltas
from recckpt.policies.keep import Keep, as_keep
from recckpt.policies.options import Choose, Near, Transfers
from recckpt.save import arguments
from recckpt.save.background import SaveHandle, SaveRunner
from recckpt.save.choice import choice_of
from recckpt.save.deltas import Changes, changes_of
from recckpt.save.forgetting import Removal
from recckpt.save.job import Destination, Job, Live, OnSave, SparseSaver, State
from recckpt.save.save import save, span_of
from recckpt.save.save_info import SaveInfo
from recckpt.save.trainers import Trainers
from recckpt.text import plural, shown
from recckpt.text.foreign_words import answers_by, unknown_attribute
from recckpt.types import SavableTable

if TYPE_CHECKING:
    from recckpt.near.saves import NearSaves
    from recckpt.near.tier import NearTier

Counted = tuple[int | None, Mapping[str, StateValue]]  # the step of a run, and what else its manager counts


class CountedRun:
    """The run's step and the manager's other counts, which each save stores; empty without a manager.

    ``prefix`` is the prefix of the manager's checkpoint ids.
    """

    def __init__(self) -> None:
        self._now: Callable[[], Counted] = lambda: (None, {})
        self.prefix = layout.STEP_PREFIX

    @property
    def step(self) -> int | None:
        return self._now()[0]

    def follow(self, now: Callable[[], Counted], prefix: str) -> None:
        """Read step and state from a manager from now on. The last manager made for a saver is the one used."""
        self._now, self.prefix = now, prefix

    def step_and_state(
        self, step: int | None, state: Mapping[str, StateValue] | None
    ) -> tuple[int | None, Mapping[str, StateValue] | None]:
        """Return the step and state of a save; a save of the run's own step also gets the manager's counts.

        ``step`` None means the run's step. ValueError if an entry of the caller differs from a count of the manager.
        """
        now, counted = self._now()
        if step not in (None, now) or not isinstance(state, Mapping | None):  # other types are refused later
            return step, state
        own = state or {}
        name = next((name for name in counted if name in own and own[name] != counted[name]), None)
        if name is not None:
            raise ValueError(
                f"state[{name!r}]: found {own[name]!r}, but the manager counts {counted[name]!r}: use another name"
            )
        return now, {**counted, **own}


OnWhole = Callable[[Checkpoint, Iterable[SavableTable]], object]  # called with the restored checkpoint and the tables


class Saver(Loads):
    """Saves and loads a model: its tables, its dense state and the registered objects.

    The state is read from the model at each save. Thread-safe: saves and loads of several threads are serialized. A
    saver belongs to its process: a forked child makes its own, or gets :class:`recckpt.errors.ForkedError`.

    Args:
        model: any module; tables are found in its ``state_dict()``. DistributedDataParallel, DataParallel and
            ``torch.compile`` wrappers are looked through, so names are always those of the model itself.
        sparse_optim: the optimizer of the tables; its slots are saved with them, its scalars in ``extra.pt``.
        output_dir: a path or any fsspec URL; created if it is missing, and immediately checked to be writable.
        max_keep: how many checkpoints to keep, or a policy of :mod:`recckpt.policies.keep`; None keeps all.
        concurrency: threads that read and write tables.
        deltas: whether saves write only what has changed: False, True or a :class:`recckpt.Deltas`; see docs/deltas.md.
        near: a :class:`recckpt.Near`: when a manager makes near saves, and where; a restore prefers them to
            older checkpoints. Needs ``deltas``. See docs/near.md.
        tables: the live tables from :func:`recckpt.live.live_tables`; None leaves the model's embeddings dense.
        choose: a :class:`recckpt.policies.Choose`: which slots and rows of tables are saved, in which dtypes; None for
            all of them, unchanged.
        transfers: a :class:`recckpt.policies.Transfers`: how files are sent, and how long ranks wait for each other.
        on_save: called with the :class:`recckpt.SaveInfo` of each save, after rotation, or after it has failed
            (``info.error``), in the thread of the save; its exceptions are logged and fail nothing.
        run: name of this job in metrics (``recckpt.run``); None for the path or URL of ``output_dir``.

    Attributes:
        model, sparse_optim, max_keep: the arguments.

    Raises:
        TypeError, ValueError: an argument is invalid, two tables share a name, ``sparse_optim`` trains other tables, or
            ``output_dir`` is the directory of a checkpoint.
        OSError: the output dir cannot be written.
    """

    @answers_by("Saver(model, sparse_optim, output_dir='runs/clicks', max_keep=3)")
    def __init__(
        self,
        model: nn.Module,
        sparse_optim: Optimizer | None = None,
        output_dir: str = "./",
        max_keep: int | Keep | None = 1,
        concurrency: int = 4,
        *,
        deltas: bool | Deltas = False,
        near: Near | None = None,
        tables: LiveTables | None = None,
        choose: Choose | None = None,
        transfers: Transfers | None = None,
        on_save: OnSave | None = None,
        run: str | None = None,
    ) -> None:
        from recckpt.rewrite import requests  # a guest, imported on demand

        super().__init__()
        transfers = arguments.checked_options(max_keep, concurrency, on_save, transfers)
        changes, choice = changes_of(deltas), choice_of(choose)
        arguments.check_near(near, has_deltas=changes is not None)
        transport = arguments.transport_of(transfers, output_dir)
        choice.check(arguments.check_parts(model, sparse_optim), of_store=True)  # slots may be added until a save
        live = arguments.live_tables_of(model, tables)
        storage, name = arguments.output_dir_of(output_dir, run)  # last, because this call creates the output dir
        self.model, self.sparse_optim, self.storage, self.max_keep = model, sparse_optim, storage, max_keep
        self._extra, self._io_state = extra_registry(arguments.form_of_registered(model, live)), io_registry()
        self.trainers = Trainers(model, sparse_optim and updater(sparse_optim), self._extra, choice, live)
        self._live = Live(model, sparse_optim, self._extra, self._io_state, choice, self.trainers, live)
        tier: NearTier | None = None
        if near is not None:
            from recckpt.near.tier import NearTier

            tier = NearTier(near, storage, concurrency)
        fence = Fence(storage, self.made_at, near=tier or VOIDED, seen_before=lambda: seen_by(model.modules(), storage))
        writers, room = (fence, transport, SparseSaver(concurrency)), transfers.min_free_bytes
        to = Destination(storage, *writers, concurrency, room, on_save, changes, requests)
        self._to = _with_guests(to, tier)
        self.removal, self.counted_run = Removal(self._to), CountedRun()
        self.loader = self._loader(name, live, _counting_from(changes, tier))
        self._runner, self.ranks = SaveRunner(), RanksNow(transfers.timeout_sec)
        self._tables = arguments.tables_in(model)
        self.near_saves: NearSaves | None = None
        if tier is not None:
            from recckpt.near.saves import NearSaves

            self.near_saves = NearSaves(self._live, self._to, tier, self._runner, self.loader)

    def _loader(self, name: str, live: LiveTables, on_whole: OnWhole | None) -> Loader:
        to, objects = self._to, (self.model, self.sparse_optim, self._extra, self._io_state)
        of_loads = *objects, to.storage, to.concurrency, to.transport.download_dir
        return Loader(*of_loads, name, self.removal.before_load, on_whole, live, self.trainers.look_anew)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in {"model", "sparse_optim", "storage"} and name in vars(self):
            raise AttributeError(f"the {name} of a saver cannot be replaced: make another Saver")
        if name == "max_keep":
            as_keep(value)
        super().__setattr__(name, value)

    @shown
    def __repr__(self) -> str:
        what = f"of {type(self.model).__name__} with {plural(len(self._tables), 'table')}"
        deltas = ", deltas" if self._to.changes else ""
        return f"{what}, output_dir={self.output_dir!r}, max_keep={self.max_keep!r}{deltas}, {self._runner}"

    @property
    def output_dir(self) -> str:
        """The path or URL to which checkpoints are written."""
        return self.storage.url

    def register_for_checkpointing(self, name: str, obj: Any, *, per_rank: bool = False) -> None:
        """Save an object beside the model, such as a dense optimizer or a scheduler.

        Args:
            name: unique name.
            obj: has ``state_dict`` and ``load_state_dict``, or is a plain value. A tensor, array, list, dict or
                set is loaded in place; other loaded values are returned by :meth:`get_extra_data`.
            per_rank: whether each rank saves and restores its own state, on the same number of ranks; else the state
                of rank 0 is saved for all. All ranks save a ``ZeroRedundancyOptimizer``, for any number of ranks.

        Raises:
            ValueError: the name or the object cannot be registered; the message gives the reason.
        """
        arguments.check_registered(name, obj, self.sparse_optim)
        with self._turn():
            self._io_state.check_new(name, obj)
            self._extra.add(name, obj, per_rank=per_rank)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset, one state per rank.

        Args:
            name: unique name.
            obj: has ``dump_io_state`` and ``load_io_state``, or ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: as for :meth:`register_for_checkpointing`.
        """
        with self._turn():
            self._extra.check_new(name, obj)
            self._io_state.add(name, obj)
            position_of(obj)

    def get_extra_data(self, name: str) -> Any:
        """Return the object registered under a name, else the state loaded under it, else None with a warning.

        A plain value is as loaded. ``"global_step"``: the manager's step; before its first step, that of the last load.
        """
        is_step = name == GLOBAL_STEP and name not in self._extra
        step = self.counted_run.step or self.loader.loaded_step if is_step else None
        return self._extra.get(name) if step is None else step

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
        """Write, commit and rotate, after any running save; return the manifest. Collective among several ranks.

        On ranks other than 0 the manifest lists only the files of that rank.

        Args:
            ckpt_id: name of the checkpoint.
            shard_id: number of this rank; None: from the process group, else from the environment (RANK), else 0.
            shard_num: number of ranks; None: from the process group, else from the environment (WORLD_SIZE), else 1.
            step: global step, kept for ``CheckpointManager.restore``; None for the manager's step, if there is one.
            state: numbers, strings, and lists and dicts of these, for readers without torch, such as metrics.
            overwrite: supersede a committed checkpoint of this id.
            ephemeral: remove the checkpoint once a newer one is committed; it does not count for ``max_keep``.
            sync_func: called by every rank once the checkpoint is committed, such as a barrier of your own.

        Raises:
            ValueError: the id or step is invalid, some state could not be loaded back, or several ranks own the same
                ids of a table; the message names it, and nothing was written.
            CheckpointExistsError: the id is committed and ``overwrite`` is false.
            SaveFailedError: a rank failed, or is missing; nothing was committed unless the message says so.
                If a rank is missing, later saves and restores fail too: restart the job.
            CommitNotDurableError: the save was committed, but the storage failed before the commit was surely durable.
            WriterFencedError: another process has taken the output dir over by saving to it.
            Exception: the error of an earlier background save, if not raised yet; then this save does not begin.
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
        """Like :meth:`save`, but return as soon as training may continue; later changes are not saved.

        Later errors are raised by ``wait()`` of the handle, else by the next save or :meth:`close`.
        """
        info = SaveInfo(ckpt_id, step, ephemeral=ephemeral, background=True)
        return self._save(info, shard_id, shard_num, state, overwrite)

    def _note_end(self, step: int) -> None:
        self._to.timeline.add_end(self._to.storage, self._to.fence, step)

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for a running save, near saves included; return whether it has ended.

        Args:
            timeout_sec: how long to wait; 0 does not wait, None waits until the end.

        Raises:
            RecckptError: the save failed, and its error has not been raised yet.
        """
        with self._turn():
            if timeout_sec is None and self.near_saves is not None:
                self.near_saves.settle()  # first, because near saves raise nothing here
            return self._runner.settle(timeout_sec)

    @property
    def is_saving(self) -> bool:
        """Whether a save is running."""
        self._check_process()
        return self._runner.is_running

    def close(self) -> None:
        """Like :meth:`settle`, and end a background compaction; the saver can still be used afterwards."""
        try:
            self.settle()
        finally:
            self._to.end_compactions()

    def _turn(self) -> AbstractContextManager[Any]:
        """Return the lock of the saver and its manager; refuse forks, and callers that would wait for themselves."""
        lock = super()._turn()
        self._runner.check_caller()
        arguments.check_moment(self._tables)
        return lock

    def _save(
        self, info: SaveInfo, shard_id: int | None, shard_num: int | None, state: State, overwrite: bool
    ) -> SaveHandle:
        arguments.check_save(info.ckpt_id, info.step, overwrite=overwrite, ephemeral=info.ephemeral)
        self._tables = arguments.tables_in(self.model)  # tables may have been added
        with self._turn(), self._runner.one_save():
            step, state = self.counted_run.step_and_state(info.step, state)
            info.note(step=step)
            ranks = info.raising(self.ranks.of(shard_id, shard_num))
            options = self.loader.is_resumed, self.max_keep, span_of(info, ranks, self.loader.run, self.storage)
            job = Job(info, ranks, state, overwrite, *options, self.counted_run.prefix)
            return save(self._live, job, self._to, self._runner)


# Guests are imported on demand.


def _with_guests(to: Destination, tier: NearTier | None) -> Destination:
    to = replace(to, guests=(tier,) if tier else ())
    if not (to.changes and to.changes.policy.compact):
        return to
    from recckpt.rewrite.compaction import BackgroundCompactor

    return replace(to, compactors=(BackgroundCompactor(),))


def _counting_from(changes: Changes | None, tier: NearTier | None) -> OnWhole | None:
    """Return a function that makes later deltas start from a restored checkpoint."""
    if changes is None:
        return None
    if tier is None:
        return changes.on_whole_restore
    from recckpt.near.changes import count_from

    return partial(count_from, changes)
