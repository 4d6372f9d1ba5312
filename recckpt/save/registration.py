"""What a saver saves beside a model, as users register it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from recckpt.dense.registered import Registry
from recckpt.parallel.one_process import OneProcess
from recckpt.save import arguments


class Registration(OneProcess):
    """The half of a saver that objects and datasets, and a manager, are registered with."""

    sparse_optim: Optimizer | None
    _extra: Registry
    _io_state: Registry

    def register_for_checkpointing(self, name: str, obj: Any, *, per_rank: bool = False) -> None:
        """Save an object beside the model, such as a dense optimizer or a scheduler.

        Args:
            name: unique name.
            obj: has ``state_dict`` and ``load_state_dict``, or is a plain value. A tensor, an array, a list, dict or
                set is loaded in place; of another value :meth:`get_extra_data` gives what was loaded.
            per_rank: whether each rank saves and gets back a state of its own, on the same number of ranks; else that
                of rank 0 is saved, for all. A ``ZeroRedundancyOptimizer`` is saved by all ranks, for any number.

        Raises:
            ValueError: the name or the object cannot be registered; says why.
        """
        arguments.check_registered(name, obj, self.sparse_optim)
        with self._turn():
            self._io_state.check_new(name, obj)
            self._extra.add(name, obj, per_rank=per_rank)

    def register_io_state(self, name: str, obj: Any) -> None:
        """Save the position of a dataset, one state a shard.

        Args:
            name: unique name.
            obj: has ``dump_io_state`` and ``load_io_state``, or ``state_dict`` and ``load_state_dict``.

        Raises:
            ValueError: as :meth:`register_for_checkpointing`.
        """
        with self._turn():
            self._extra.check_new(name, obj)
            self._io_state.add(name, obj)

    def get_extra_data(self, name: str) -> Any:
        """Return the object of a name, a plain value as last loaded; else the state last loaded, or None and warn."""
        return self._extra.get(name)
