"""FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen`` as live tables, one for each table of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.devices import wait_for_devices
from recckpt.live.fbgemm_hooks import KernelHooks, announce_calls
from recckpt.live.fbgemm_rules import reason_of, settings_of, slots_of
from recckpt.live.kinds import is_a
from recckpt.types import EMBEDDING, Box, Door

_MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
_OTHERS = "fbgemm_gpu.tbe.ssd.training"
IN_MEMORY = "plan it with the compute kernel FUSED or FUSED_UVM_CACHING, whose tables lie in memory"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MEMORY = tuple(
    f"{state}_{place}"
    for state in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for place in ("dev", "host", "uvm")
)


def is_kernel(module: object) -> bool:
    """Say whether a module is a fused kernel of FBGEMM that holds its tables in memory."""
    return is_a(module, _MODULE, "SplitTableBatchedEmbeddingBagsCodegen")


def is_other_kernel(module: object) -> bool:
    """Say whether a module is a kernel of FBGEMM that keeps its tables elsewhere: on an SSD, or as keys and values."""
    return is_a(module, _OTHERS, "SSDTableBatchedEmbeddingBags")


class Kernel:
    """A fused kernel with all of its tables: it has one step, one learning rate, and one set of hooks.

    Args:
        module: the kernel.
        group: the parameter group from which its owner sets the learning rate at each step; None if it has no owner.

    Raises:
        LiveTableError: its tables cannot be saved by rows; says why.
    """

    def __init__(self, module: Any, group: dict[str, Any] | None = None) -> None:
        self.module, self._group = module, group
        self.slots, self.reason = slots_of(module), reason_of(module)
        self._hooks = KernelHooks(module, is_proven=self.reason is None)
        self._split: tuple[tuple[int, ...], list[Mapping[str, Tensor]]] | None = None
        wrong = sorted(
            {str(weight.dtype) for weight in module.split_embedding_weights() if weight.dtype not in _FLOATS}
        )
        if wrong:
            raise LiveTableError(
                f"its weights are {', '.join(wrong)}, expected floats that are trained as they are saved: make it with "
                "weights of FP32, FP16 or BF16"
            )

    def tensors(self, table: int) -> Mapping[str, Tensor]:
        """Return the slots of a table, as they lie now."""
        memory = (getattr(self.module, name, None) for name in _MEMORY)
        places = tuple(0 if tensor is None else tensor.data_ptr() for tensor in memory)
        if self._split is None or self._split[0] != places:
            self._split = places, self._tensors()
        return self._split[1][table]

    def _tensors(self) -> list[Mapping[str, Tensor]]:
        weights = self.module.split_embedding_weights()
        states = self.module.split_optimizer_states() if self.slots else [()] * len(weights)
        return [
            {EMBEDDING: weight.detach(), **dict(zip(self.slots, own, strict=True))}
            for weight, own in zip(weights, states, strict=True)
        ]

    @property
    def step(self) -> int:
        """How many training steps it has counted."""
        return int(self.module.iter)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its optimizer."""
        return settings_of(self.module)

    def attach(self, table: int, door: Door) -> Callable[[], object]:
        """Announce what is about to change in a table."""
        return self._hooks.attach(table, door)

    def announce_calls(self, obj: Any, name: str) -> Callable[[], object]:
        """Announce all rows of all tables before each call of a method of its owner."""
        return announce_calls(obj, name, self._hooks.announce_all)

    def note_replaced(self, obj: Any, name: str) -> Callable[[], object]:
        """Take all rows of all tables for others at each call of a method of its owner, which has written them."""
        return announce_calls(obj, name, self._hooks.replaced)

    @property
    def is_stashed(self) -> bool:
        """Whether the weights, or their memory, are not where they are trained."""
        weights = getattr(self.module, "weights_dev", None)
        if weights is None or not weights.numel():
            return False
        is_freed = weights.device.type != "meta" and not weights.untyped_storage().nbytes()
        return is_freed or weights.device.type != self.module.current_device.type

    def prepare(self) -> None:
        """Write back the rows that are newer in a cache, once for all tables until training writes the next.

        What evicts a row of the cache later writes one that was announced before it changed, or one that is the same.
        """
        if self._hooks.was_written and self._has_cache:
            # A stream that fetches rows ahead changes the cache too, so nothing else runs while it is written back.
            wait_for_devices([self.module.lxu_cache_weights])
            self.module.flush()
            wait_for_devices([self.module.lxu_cache_weights])
        self._hooks.note_written_back()

    @property
    def _has_cache(self) -> bool:
        return bool(self.module.lxu_cache_weights.numel())

    def resume(self, step: int | None, rate: float | None) -> None:
        """Take over steps and the learning rate, and let caches read anew the rows that were written beneath them."""
        if step is not None:
            self.module.iter.fill_(step)
            self.module.iter_cpu.fill_(step)  # the kernel takes it from the other at its first step only
        if rate is not None:
            self.module.set_learning_rate(rate)
            if self._group is not None:
                self._group["lr"] = rate
        if not self._hooks.was_written:  # else the cache has what no load has written since, and must not lose it
            self.module.reset_cache_states()


class FbgemmTable:
    """One table of a kernel, or the part of one that is on this rank.

    Settings travel with checkpoints; a load takes over the steps and the learning rate. What else the kernel was made
    with, such as ``eps``, stays.

    Args:
        name: in checkpoints.
        kernel: the kernel.
        table: its number there.
        box: which rows these are.
        n_rows: of the table over all ranks.
    """

    def __init__(self, name: str, kernel: Kernel, table: int, box: Box, n_rows: int) -> None:
        self.name, self.n_rows = name, n_rows
        self._kernel, self._table, self._box = kernel, table, box

    @property
    def reason(self) -> str | None:
        """Why rows may change that were not looked up; None where it is proven that none do."""
        return self._kernel.reason

    def box(self) -> Box:
        """Return the rows of this rank."""
        return self._box

    def prepare(self) -> None:
        """Write caches back.

        Raises:
            LiveTableError: the weights lie elsewhere for now.
        """
        self._check_there()
        self._kernel.prepare()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights and states of the optimizer, as they lie in the kernel.

        Raises:
            LiveTableError: the weights lie elsewhere for now.
        """
        self._check_there()
        return self._kernel.tensors(self._table)

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce what backward passes, loads and the kernel's own methods are about to change."""
        return self._kernel.attach(self._table, door)

    def scalars(self) -> Mapping[str, int | float]:
        """Return the steps, which a kernel counts for all its tables."""
        return {"step": self._kernel.step}

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the optimizer."""
        return self._kernel.settings

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Take over the steps and the learning rate."""
        step = int(scalars["step"]) if "step" in scalars else None
        self._kernel.resume(step, float(settings["lr"]) if "lr" in settings else None)

    def _check_there(self) -> None:
        if self._kernel.is_stashed:
            raise LiveTableError(
                f"table {self.name!r}: its weights are stashed in the memory of the host, expected them on "
                f"{self._kernel.module.current_device}: save and load between steps, or call "
                "MemoryStashingManager.restore_embedding_weights() before"
            )
