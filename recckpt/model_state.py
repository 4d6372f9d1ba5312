"""The state that is saved and loaded: a model, its sparse optimizer and what is registered beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.dense.optimizers import NamedOptimizer, ZeroOptimizer, is_zero
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.errors import CheckpointNotFoundError
from recckpt.load import load as loading
from recckpt.load.conf import Bank, as_bank, parse_load_conf
from recckpt.load.inventory import list_inventory
from recckpt.load.live_state import LiveState
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, LoadReport
from recckpt.load.source import OpenSource, Source, locate_bank, opened
from recckpt.output_dir.at_path import locate_path, open_checkpoint
from recckpt.output_dir.listing import Checkpoint, list_checkpoints, locate, newest
from recckpt.output_dir.open_files import until_whole
from recckpt.parallel.one_process import OneProcess
from recckpt.parallel.process_group import this_rank
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.split import parameters_of, state_of
from recckpt.storage import Storage, open_storage
from recckpt.storage.transfers import WorkDir
from recckpt.types import HashTable, positive_int


class ModelState(OneProcess):
    """A model and its companions, and how checkpoints are loaded into them; :class:`recckpt.Saver` adds saving.

    Raises:
        TypeError: the model or the optimizer is none.
        ValueError: a number is not one, or two tables share a name, or the optimizer is that of dense parameters, or
            of tables that the model does not have.
        OSError: the output dir cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        sparse_optim: Optimizer | None,
        output_dir: str,
        concurrency: int,
        download_dir: WorkDir | None,
    ) -> None:
        super().__init__()
        _check_parts(model, sparse_optim)
        tables = state_of(model)[0]
        if isinstance(sparse_optim, SparseOptimizer):
            _check_trained(sparse_optim, tables)
        self.model, self.sparse_optim = model, sparse_optim
        self._is_resumed = False  # whether a checkpoint of the own output dir was loaded
        self._download_dir = download_dir
        self._concurrency = positive_int("concurrency", concurrency)
        self._extra, self._io_state = extra_registry(self._named), io_registry()
        self.storage: Storage = open_storage(
            os.fspath(output_dir) if isinstance(output_dir, os.PathLike) else output_dir
        )
        self.storage.prepare()

    @property
    def output_dir(self) -> str:
        """Where checkpoints go."""
        return self.storage.url

    def register_for_checkpointing(self, name: str, obj: Any, *, per_rank: bool = False) -> None:
        """Save an object beside the model, such as a dense optimizer or a scheduler.

        Args:
            name: unique name.
            obj: has ``state_dict`` and ``load_state_dict``, or is a plain value. A tensor, an array, a list, dict or
                set is loaded in place; of another value :meth:`get_extra_data` gives what was loaded.
            per_rank: whether each rank saves and gets back a state of its own, on the same number of ranks; else that
                of rank 0 is saved, for all. A ``ZeroRedundancyOptimizer`` is saved by all ranks, for any number.

        Raises:
            ValueError: the name is taken, or the value could not be loaded back, or a dense optimizer is to have an
                ``@`` in its name.
        """
        if "@" in name and isinstance(self._named(obj), NamedOptimizer):
            raise ValueError(f"register_for_checkpointing: a dense optimizer has no '@' in its name, found {name!r}")
        with self._turn():
            self._extra.add(name, obj, per_rank=per_rank)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset, one state a shard.

        Args:
            name: unique name.
            obj: has ``dump_io_state`` and ``load_io_state``, or ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: the name is taken, or the object has neither pair of methods.
        """
        with self._turn():
            self._io_state.add(name, obj)

    def get_extra_data(self, name: str) -> Any:
        """Return what is registered under a name: a plain value as it was last loaded, or the object.

        A name that is not registered gives the state that was last loaded for it; where there is none, None and a
        warning with the nearest name.
        """
        return self._extra.get(name)

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
            ckpt_path: the id of a checkpoint of the own output dir, as ``save`` takes it; else an output dir, or a
                checkpoint itself; None for the own output dir.
            ckpt_id: which checkpoint in it; None for the newest.
            load_conf: what to take: an entry of a bank without ``path``; None for everything.
            shard_id: number of this rank, whose dataset positions are taken; None for that of the process group,
                else of the environment (RANK), else 0.
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
                storage, checkpoint = self._at(open_checkpoint, str(ckpt_path))
            elif ckpt_id is not None:
                storage = self.storage if ckpt_path is None else open_storage(str(ckpt_path))
                checkpoint = locate(storage, ckpt_id)
            elif ckpt_path is not None:
                storage, checkpoint = self._found(str(ckpt_path))
            else:
                storage, checkpoint = self.storage, newest(self.storage)
            return Source(replace(entry, is_own=storage.url == self.storage.url), storage, checkpoint)

        with self._turn():
            return until_whole(find, lambda source: self._load_from([source], Problems(), shard_id))

    def load_by_config(
        self, bank: Bank, conf: Mapping[str, Any] | None = None, *, shard_id: int | None = None
    ) -> LoadReport:
        """Load what a model bank says: entries with a ``path``, of which the last that offers a name counts.

        Args:
            bank: a list of entries, or one entry, or the path of one; see docs/warm-start.md.
            conf: the rest of the entry, where ``bank`` is a path.
            shard_id: number of this rank; None as in :meth:`load`.

        Raises:
            LoadConfError: keys, names or paths that do not exist; all of them.
            StateMismatchError: state that does not fit the model; all of it. Nothing has been changed.
            CheckpointNotFoundError: a path holds no committed checkpoint.
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError, PartlyLoadedError: as :meth:`load`.
        """
        entries = as_bank(bank, conf)
        with self._turn():
            return until_whole(lambda: locate_bank(entries), lambda found: self._load_from(*found, shard_id))

    def plan(self, bank: Bank, conf: Mapping[str, Any] | None = None, *, shard_id: int | None = None) -> LoadPlan:
        """Say what :meth:`load_by_config` would do; reads no rows and changes nothing.

        Raises:
            LoadConfError, StateMismatchError, CheckpointNotFoundError: as it would.
        """
        entries = as_bank(bank, conf)

        def plan(found: tuple[list[Source], Problems]) -> LoadPlan:
            with opened(found[0]) as sources:
                return loading.plan(self.live_state(shard_id), sources, found[1])

        with self._turn():
            return until_whole(lambda: locate_bank(entries), plan)

    def names(self) -> list[str]:
        """Return the names that can be loaded, one a line with group, dtype and shape, for ``recckpt plan``."""
        with self._turn():
            return list_inventory(self.live_state().inventory)

    def _load_from(self, sources: Sequence[Source], problems: Problems, shard_id: int | None) -> LoadReport:
        live = self.live_state(shard_id)
        with opened(sources, live.needs) as open_sources:
            return self.load_sources(live, open_sources, problems)

    def load_sources(
        self, live: LiveState, sources: Sequence[OpenSource], problems: Problems, *, rng: bool = False
    ) -> LoadReport:
        """Load from checkpoints that are open; what every load and restore comes down to."""
        with self._turn():
            self._is_resumed = self._is_resumed or any(source.at.entry.is_own for source in sources)
            return loading.load(
                live,
                sources,
                problems,
                concurrency=self._concurrency,
                download_dir=self._download_dir,
                rng=rng,
            )

    def live_state(self, shard_id: int | None = None, shard_num: int | None = None) -> LiveState:
        """Return what a load fills, as it is now."""
        shard, shards = this_rank(shard_id, shard_num)
        return LiveState(self.model, self.sparse_optim, self._extra, self._io_state, shard, shards)

    def _found(self, word: str) -> tuple[Storage, Checkpoint]:
        """Return the checkpoint that a word means: an id of the own output dir goes before a path."""
        try:
            return self.storage, locate(self.storage, word)
        except (OSError, ValueError) as error:  # not an id, or not one of ours
            own = error
        try:
            return locate_path(word)
        except CheckpointNotFoundError as error:
            raise CheckpointNotFoundError(f"{error}; nor is it a checkpoint of the own output dir: {own}") from error

    def _at(self, locate: Callable[[str], tuple[Storage, Checkpoint]], path: str) -> tuple[Storage, Checkpoint]:
        """Return what is at a path; where there is nothing, look whether it is an id that ``save`` was given."""
        try:
            return locate(path)
        except CheckpointNotFoundError as error:
            try:
                is_id = list_checkpoints(self.storage).find(path) is not None
            except OSError:
                is_id = False
            if not is_id:
                raise
            hint = f"the own output dir has a checkpoint {path!r}: load(ckpt_id={path!r}) takes it"
            raise CheckpointNotFoundError(f"{error}; {hint}") from error

    def _named(self, obj: Any) -> Any:
        """Return what stands for a registered object: dense optimizers keep their state by parameter name."""
        is_sparse = obj is self.sparse_optim or isinstance(obj, SparseOptimizer)
        if isinstance(obj, Optimizer) and not is_sparse:
            wrapper = ZeroOptimizer if is_zero(obj) else NamedOptimizer
            return wrapper(obj, lambda: parameters_of(self.model))
        return obj


def _check_parts(model: object, sparse_optim: object) -> None:
    """Refuse what a save or load would only stumble over, or leave out."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found a {type(model).__name__}")
    if sparse_optim is None:
        return
    if not isinstance(sparse_optim, Optimizer):
        raise TypeError(f"sparse_optim must be an optimizer of tables or None, found a {type(sparse_optim).__name__}")
    trained = {id(parameter) for group in sparse_optim.param_groups for parameter in group["params"]}
    name = next((name for name, parameter in model.named_parameters() if id(parameter) in trained), None)
    if name is not None:
        raise ValueError(
            f"sparse_optim must be an optimizer of tables, found {type(sparse_optim).__name__} of the dense parameter "
            f"{name!r}; save it by register_for_checkpointing"
        )


def _check_trained(sparse_optim: SparseOptimizer, tables: Mapping[str, HashTable]) -> None:
    """Refuse an optimizer of tables that would not be saved, since the model does not have them."""
    others = [name for name, table in sparse_optim.tables.items() if tables.get(name) is not table]
    if others:
        raise ValueError(
            f"sparse_optim trains tables that are not in the model: {', '.join(map(repr, others))}; the model has "
            f"{sorted(tables)}{', and others of the same name' if set(others) & set(tables) else ''}: make them "
            "attributes of its modules, and give the optimizer those of this model"
        )
