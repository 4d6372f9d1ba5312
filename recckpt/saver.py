"""The saver: what of a model goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt import layout
from recckpt import load as loading
from recckpt import save as saving
from recckpt.dense.named_optimizer import NamedOptimizer
from recckpt.fence import Fence
from recckpt.group import Group, group_of, world_size
from recckpt.inventory import list_inventory
from recckpt.io_state import extra_registry, io_registry
from recckpt.listing import locate, locate_path, newest, open_checkpoint
from recckpt.load_conf import parse_load_conf
from recckpt.manifest import Manifest, Scalar
from recckpt.plan_report import LoadPlan, LoadReport
from recckpt.problems import Problems
from recckpt.removal import until_whole
from recckpt.sources import Source, located_bank
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.saver import SparseSaver
from recckpt.split import split_sparse_dense_state_dict, unwrap
from recckpt.stage import stage
from recckpt.storage import Storage, open_storage
from recckpt.target import Target


class Saver:
    """Saves and loads a model: its tables, its dense state and what is registered beside them.

    The state is read from the model at each save. Not thread-safe.

    Args:
        model: any module; tables are found in its ``state_dict()``. DistributedDataParallel, DataParallel and
            ``torch.compile`` wrappers are looked through, so names are always those of the model itself.
        sparse_optim: the optimizer of the tables; its slots are saved with them, its scalars in ``extra.pt``.
        output_dir: a path or any fsspec URL; made if it is missing, and tried for writing at once.
        max_keep: how many checkpoints to keep; None keeps all.
        concurrency: threads that read and write tables.

    Raises:
        ValueError: a number is not one, or two tables share a name.
        OSError: the output dir cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        sparse_optim: Optimizer | None = None,
        output_dir: str = "./",
        max_keep: int | None = 1,
        concurrency: int = 4,
    ) -> None:
        split_sparse_dense_state_dict(unwrap(model).state_dict())
        self.model, self.sparse_optim = model, sparse_optim
        self.max_keep = None if max_keep is None else positive_int("max_keep", max_keep)
        self._concurrency = positive_int("concurrency", concurrency)
        self._extra, self._io_state = extra_registry(self._named), io_registry()
        self._sparse_saver = SparseSaver(self._concurrency)
        self._groups: dict[tuple[int, int], Group] = {}
        self.storage: Storage = open_storage(str(output_dir))
        self.storage.prepare()
        self._fence = Fence(self.storage)

    @property
    def output_dir(self) -> str:
        """Where checkpoints go."""
        return self.storage.url

    def register_for_checkpointing(self, name: str, obj: Any) -> None:
        """Save an object beside the model, such as a dense optimizer or a scheduler.

        Args:
            name: unique name.
            obj: has ``state_dict`` and ``load_state_dict``, or is a plain value (see :meth:`get_extra_data`).

        Raises:
            ValueError: the name is taken, or the value could not be loaded back.
        """
        self._extra.add(name, obj)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset, one state a shard.

        Args:
            name: unique name.
            obj: has ``dump_io_state`` and ``load_io_state``, or ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: the name is taken, or the object has neither pair of methods.
        """
        self._io_state.add(name, obj)

    def get_extra_data(self, name: str) -> Any:
        """Return what is registered under a name: a plain value as it was last loaded, or the object.

        A name that is not registered gives the state that was last loaded for it.

        Raises:
            KeyError: neither.
        """
        return self._extra.get(name)

    def save(
        self,
        ckpt_id: str,
        shard_id: int = 0,
        shard_num: int = 1,
        *,
        step: int | None = None,
        state: Mapping[str, Scalar] | None = None,
        overwrite: bool = False,
    ) -> Manifest:
        """Write, commit and rotate. Collective when ``shard_num`` is more than 1.

        Args:
            ckpt_id: name of the checkpoint.
            shard_id: number of this rank.
            shard_num: number of ranks.
            step: global step, kept for ``CheckpointManager.restore``.
            state: numbers and strings for readers without torch, such as metrics.
            overwrite: supersede a committed checkpoint of this id.

        Returns:
            The manifest of the committed checkpoint.

        Raises:
            ValueError: the id is none, or something in the state could not be loaded back; names it, nothing was
                written.
            CheckpointExistsError: the id is committed and ``overwrite`` is false.
            SaveFailedError: a rank failed; nothing was committed.
            CommitNotDurableError: committed, but the storage failed before that was surely durable.
            WriterFencedError: another process has taken the output dir over by saving to it.
        """
        layout.encode_id(ckpt_id)
        group = self.group(shard_id, shard_num)
        staged = saving.stage_on_all_ranks(
            lambda: stage(self.model, self.sparse_optim, self._extra, self._io_state, step=step, state=state),
            ckpt_id,
            group,
        )
        return saving.save(
            staged,
            ckpt_id,
            storage=self.storage,
            fence=self._fence,
            group=group,
            sparse_saver=self._sparse_saver,
            max_keep=self.max_keep,
            overwrite=overwrite,
        )

    def load(
        self,
        ckpt_path: str | None = None,
        ckpt_id: str | None = None,
        load_conf: Mapping[str, Any] | None = None,
        shard_id: int = 0,
        direct_path: bool = False,
    ) -> LoadReport:
        """Load a checkpoint into the model and what is registered.

        Args:
            ckpt_path: an output dir, or a checkpoint itself; None for the own output dir.
            ckpt_id: which checkpoint in it; None for the newest.
            load_conf: what to take: an entry of a bank without ``path``; None for everything.
            shard_id: number of this rank, whose dataset positions are taken.
            direct_path: ``ckpt_path`` is a checkpoint itself, and nothing else will do.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
            LoadConfError: ``load_conf`` asks for something that does not exist.
            StateMismatchError: the state does not fit the model; nothing has been changed.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError: time and again its writer removed it before it was read.
            PartlyLoadedError: reading failed when tables that had rows had been changed.
        """
        entry = parse_load_conf(load_conf)
        if direct_path and (ckpt_path is None or ckpt_id is not None):
            raise ValueError("direct_path=True needs ckpt_path, the checkpoint itself, and no ckpt_id")

        def find() -> Source:
            if direct_path:
                storage, checkpoint = open_checkpoint(str(ckpt_path))
            elif ckpt_id is not None:
                storage = self.storage if ckpt_path is None else open_storage(str(ckpt_path))
                checkpoint = locate(storage, ckpt_id)
            elif ckpt_path is not None:
                storage, checkpoint = locate_path(str(ckpt_path))
            else:
                storage, checkpoint = self.storage, newest(self.storage)
            return Source(replace(entry, is_own=storage.url == self.storage.url), storage, checkpoint)

        return until_whole(find, lambda source: self.load_sources([source], shard_id=shard_id))

    def load_by_config(self, bank: Mapping[str, Any] | Sequence[Mapping[str, Any]], shard_id: int = 0) -> LoadReport:
        """Load what a model bank says: entries with a ``path``, of which the last that offers a name counts.

        Args:
            bank: a list of entries, or one entry; see docs/warm-start.md.
            shard_id: number of this rank.

        Raises:
            LoadConfError: keys, names or paths that do not exist; all of them.
            StateMismatchError: state that does not fit the model; all of it. Nothing has been changed.
            CheckpointNotFoundError: a path holds no committed checkpoint.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError, PartlyLoadedError: as :meth:`load`.
        """
        entries = [bank] if isinstance(bank, Mapping) else bank
        return until_whole(
            lambda: located_bank(entries),
            lambda found: self.load_sources(found[0], shard_id=shard_id, problems=found[1]),
        )

    def plan(self, bank: Mapping[str, Any] | Sequence[Mapping[str, Any]], shard_id: int = 0) -> LoadPlan:
        """Say what :meth:`load_by_config` would do; reads no rows and changes nothing.

        Raises:
            LoadConfError, StateMismatchError, CheckpointNotFoundError: as it would.
        """
        entries = [bank] if isinstance(bank, Mapping) else bank
        return until_whole(
            lambda: located_bank(entries), lambda found: loading.plan(self.target(shard_id), found[0], found[1])
        )

    def names(self) -> list[str]:
        """Return the names that can be loaded, one a line with group, dtype and shape, for ``recckpt plan``."""
        return list_inventory(self.target().inventory())

    def load_sources(
        self,
        sources: Sequence[Source],
        *,
        shard_id: int = 0,
        shard_num: int | None = None,
        rng: bool = False,
        problems: Problems | None = None,
    ) -> LoadReport:
        """Load from checkpoints that have been located; what every load and restore comes down to."""
        target = self.target(shard_id, shard_num)
        return loading.load(target, sources, concurrency=self._concurrency, rng=rng, problems=problems)

    def target(self, shard_id: int = 0, shard_num: int | None = None) -> Target:
        """Return what a load fills."""
        shards = world_size() if shard_num is None else shard_num
        return Target(self.model, self.sparse_optim, self._extra, self._io_state, shard_id, shards)

    def group(self, shard_id: int, shard_num: int) -> Group:
        """Return the ranks that save and restore together. Collective the first time, where there are several."""
        key = shard_id, shard_num
        if key not in self._groups:
            self._groups[key] = group_of(shard_id, shard_num)
        return self._groups[key]

    def _named(self, obj: Any) -> Any:
        """Return what stands for a registered object: dense optimizers keep their state by parameter name."""
        is_sparse = obj is self.sparse_optim or isinstance(obj, SparseOptimizer)
        if isinstance(obj, Optimizer) and not is_sparse:
            return NamedOptimizer(obj, lambda: unwrap(self.model).named_parameters())
        return obj


def positive_int(name: str, value: Any) -> int:
    """Return ``value``, or raise ValueError where it is not an int of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, found {value!r}")
    return value
