"""FBGEMM's ``SplitTableBatchedEmbeddingBagsCodegen`` as live tables: optimizers, hooks and tables.

For the proven optimizers, a step changes only rows that were looked up, as tests with random models show bit for bit on
the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.attached import FINGERPRINTS, Candidate, FoundTable, is_a
from recckpt.live.find import Search
from recckpt.live.writes import WeakDoor, is_capturing, wait_for_devices
from recckpt.sparse.split import unwrapped, wrappers_in
from recckpt.types import EMBEDDING, Box, Door

_ADAGRAD, _ROWWISE_ADAGRAD = "exact_adagrad", "exact_row_wise_adagrad"
_PROVEN = frozenset({"exact_sgd", _ADAGRAD, _ROWWISE_ADAGRAD})
_SLOTS: Mapping[str, Sequence[str]] = {  # in the order of the kernel's states
    "exact_sgd": (),
    _ADAGRAD: ("sparse_adagrad_sum",),
    _ROWWISE_ADAGRAD: ("sparse_rowwise_adagrad_sum",),
    "ema_in_place_row_wise_adagrad": ("sparse_rowwise_adagrad_sum",),
    "adam": ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"),
    "partial_row_wise_adam": ("sparse_partial_rowwise_adam_exp_avg", "sparse_partial_rowwise_adam_exp_avg_sq"),
    "lamb": ("sparse_lamb_exp_avg", "sparse_lamb_exp_avg_sq"),
    "partial_row_wise_lamb": ("sparse_partial_rowwise_lamb_exp_avg", "sparse_partial_rowwise_lamb_exp_avg_sq"),
    "lars_sgd": ("sparse_lars_sgd_momentum",),
}
_PREV_ITER, _ROW_COUNTER = "sparse_fbgemm_prev_iter", "sparse_fbgemm_row_counter"
_SETTINGS = ("eps", "weight_decay")  # besides the learning rate; and betas for optimizers with moments
# The rate of the next backward pass; the owner's optimizer may have got another rate since its last step.
_KERNEL_LR = "kernel_lr"
_WITH_BETAS = ("adam", "lamb")
# Methods other than backward passes that may change any row without reporting which.
_WRITERS = ("ema_inplace", "ensemble_and_swap", "init_embedding_weights_uniform")
_RESET = "reset_embedding_weight_momentum"  # resets rows for new ids, which the caller writes next
# Class names for ``is_a``: kernels with tables in memory; with tables on an SSD or in a key-value store; with rows in
# their own hash tables.
KERNEL = "fbgemm_gpu.split_table_batched_embeddings_ops_training", "SplitTableBatchedEmbeddingBagsCodegen"
OTHER_KERNEL = "fbgemm_gpu.tbe.ssd.training", "SSDTableBatchedEmbeddingBags"
HASHED_KERNEL = (
    "dynamicemb.batched_dynamicemb_tables",
    "BatchedDynamicEmbeddingTables",
    "BatchedDynamicEmbeddingTablesV2",
)
IN_MEMORY = "plan it with the compute kernel FUSED or FUSED_UVM_CACHING, whose tables are in memory"
BY_DUMP = (
    "dump it by DynamicEmbDump beside each checkpoint, which recckpt import --from dynamicemb reads, or return a table "
    "of your own (recckpt.types.SavableTable) from the state dict"
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MEMORY = tuple(
    f"{state}_{place}"
    for state in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for place in ("dev", "host", "uvm")
)


def slots_and_reason(kernel: Any) -> tuple[Sequence[str], str | None]:
    """Return a kernel's slots in the order of ``split_optimizer_states()``, and why a step may change other rows.

    The reason is None if a step provably changes only rows that were looked up. LiveTableError if the states cannot be
    saved by rows.
    """
    kind = str(kernel.optimizer.value)
    if kind not in _SLOTS:
        raise LiveTableError(
            f"its optimizer is {kind!r}, whose states recckpt does not know: use one of {', '.join(_SLOTS)}"
        )
    slots = list(_SLOTS[kind])
    has_counter = kernel._used_rowwise_adagrad_with_counter
    has_decay = kernel._used_rowwise_adagrad_with_global_weight_decay
    if has_counter or has_decay:
        slots.append(_PREV_ITER)
    if has_counter or (kind == "adam" and kernel.use_rowwise_bias_correction):
        slots.append(_ROW_COUNTER)
    if kind in _PROVEN and not has_decay:
        return slots, None
    what = f"{kind} with global weight decay" if has_decay else kind
    return slots, f"{what} is not proven to change only rows that were looked up"


class KernelHooks:
    """The hooks of one kernel, for all its tables; hooks never raise.

    The hooks read which rows a backward pass will change from the autograd node that writes them, just before it does.
    So forward passes without a backward pass send no notifications, and the kernel has checked the ids. ``is_proven``:
    a pass changes only rows that were looked up.
    """

    def __init__(self, kernel: Any, *, is_proven: bool) -> None:
        self._kernel, self._is_proven = kernel, is_proven
        self._doors: dict[int, WeakDoor] = {}
        self._removers: list[Callable[[], object]] = []
        self.was_written = True  # whether since the cache's last write-back; at first unknown

    def attach(self, table: int, door: Door) -> Callable[[], object]:
        """Notify of changes to a table's rows; return a function that ends the notifications."""
        if not self._doors:
            self._install()
        self._doors[table] = WeakDoor(door)
        return partial(self._detach, table)

    def after_forward(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Make the autograd node that will write the rows notify of them first."""
        node = getattr(output, "grad_fn", None)
        if node is None or not self._doors:
            return
        inputs: list[Any] = [args[at] if at < len(args) else kwargs.get(name) for at, name in _ARGUMENTS]
        node.register_prehook(partial(self.before_backward, *inputs))

    def before_backward(
        self, indices: Tensor, offsets: Tensor, sizes: Sequence[Sequence[int]] | None, *gradients: Any
    ) -> None:
        """Notify of the rows that these inputs look up; ``sizes``: batch sizes by feature and rank, or None."""
        self.was_written = True
        try:
            if not self._is_proven or is_capturing():
                self.announce_all()
                return
            for table, rows in self._rows(indices, offsets, sizes):
                self._doors[table].announce(rows)
        except Exception as error:
            self._fail(error)

    def before_reset(
        self, pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
    ) -> None:
        """Notify of the rows about to be reset; arguments of :meth:`reset_embedding_weight_momentum`."""
        self.was_written = True
        try:
            bounds, tables = pruned_indices_offsets.tolist(), logical_table_ids.tolist()
            for table, begin, end in zip(tables, bounds[:-1], bounds[1:], strict=True):
                if table in self._doors and begin < end:
                    self._doors[table].announce(pruned_indices[begin:end])
        except Exception as error:
            self._fail(error)

    def announce_all(self, *args: Any, **kwargs: Any) -> None:
        self.was_written = True
        for door in self._doors.values():
            door.announce_all()

    def replaced(self, *args: Any, **kwargs: Any) -> None:
        for door in self._doors.values():
            door.replaced()

    def note_written_back(self) -> None:
        self.was_written = False

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelHooks:
        return KernelHooks(None, is_proven=True)  # sends no notifications

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(KernelHooks, None, is_proven=True), ()

    def _fail(self, error: Exception) -> None:
        first, *others = self._doors.values()
        first.failed(error)  # one table is enough: all tables of the kernel are in the same save
        for door in others:
            door.replaced()

    def _rows(
        self, indices: Tensor, offsets: Tensor, sizes: Sequence[Sequence[int]] | None
    ) -> Iterator[tuple[int, Tensor]]:
        tables = self._kernel.feature_table_map
        indices, offsets = indices.detach().cpu(), offsets.cpu()  # once for all features: each copy waits for a device
        if sizes is None:
            size = (len(offsets) - 1) // len(tables)
            bounds = offsets[:: max(size, 1)].tolist() if size else [0] * (len(tables) + 1)
        else:
            bounds = offsets[torch.tensor([0, *accumulate(map(sum, sizes))], device="cpu")].tolist()
        for table, begin, end in zip(tables, bounds[:-1], bounds[1:], strict=True):
            if table in self._doors and begin < end:
                yield table, _looked_up(indices[begin:end], self._kernel.embedding_specs[table][0])

    def _install(self) -> None:
        kernel, self.was_written = self._kernel, True
        handles = [
            kernel.register_forward_hook(self.after_forward, with_kwargs=True),
            kernel.register_load_state_dict_pre_hook(self.announce_all),
        ]
        calls: dict[str, Callable[..., object]] = dict.fromkeys(_WRITERS, self.announce_all)
        calls[_RESET] = self.before_reset
        own = {name: announce for name, announce in calls.items() if callable(getattr(kernel, name, None))}
        self._removers = [handle.remove for handle in handles]
        self._removers += [announce_calls(kernel, name, announce) for name, announce in own.items()]

    def _detach(self, table: int) -> None:
        self._doors.pop(table, None)
        if not self._doors:
            for remove in self._removers:
                remove()
            self._removers = []


_ARGUMENTS = ((0, "indices"), (1, "offsets"), (4, "batch_size_per_feature_per_rank"))  # arguments of a kernel's forward


class _Announced:
    """Replaces a method of one object, and passes the arguments of each call to a function before the call.

    In a copy of the object, or after unpickling, the method is the plain one.
    """

    def __init__(self, obj: object, name: str, announce: Callable[..., object]) -> None:
        self._obj, self._name, self._announce = obj, name, announce

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._announce(*args, **kwargs)
        return getattr(type(self._obj), self._name)(self._obj, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(getattr(type(self._obj), self._name), memo.get(id(self._obj), self._obj))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._obj, self._name)


def announce_calls(obj: Any, name: str, announce: Callable[..., object]) -> Callable[[], object]:
    """Call ``announce`` before each call of a method, with its arguments; return a function that stops this."""
    announced = _Announced(obj, name, announce)
    vars(obj)[name] = announced

    def end() -> None:
        if vars(obj).get(name) is announced:
            del vars(obj)[name]

    return end


def _looked_up(ids: Tensor, n_rows: int) -> Tensor:
    """Return the rows looked up: for an id out of range, the kernel uses row 0 (``BoundsCheckMode.WARNING``)."""
    if int(ids.min()) >= 0 and int(ids.max()) < n_rows:
        return ids
    return torch.where((ids >= 0) & (ids < n_rows), ids, 0)


class Kernel:
    """A fused kernel with all its tables, which share one step count, one learning rate, and hooks.

    ``owner`` is TorchRec's module whose fused optimizer sets the learning rate at each step. LiveTableError says why
    the kernel's tables cannot be saved by rows.
    """

    def __init__(self, module: Any, owner: Any = None) -> None:
        self.module, self.owner = module, owner
        self._group: Any = None if owner is None else next(iter(owner.fused_optimizer.param_groups))
        self.slots, self.reason = slots_and_reason(module)
        self.hooks = KernelHooks(module, is_proven=self.reason is None)
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
        memory = (getattr(self.module, name, None) for name in _MEMORY)
        places = tuple(0 if tensor is None else tensor.data_ptr() for tensor in memory)
        if self._split is None or self._split[0] != places:
            weights = self.module.split_embedding_weights()
            states = self.module.split_optimizer_states() if self.slots else [()] * len(weights)
            tables: list[Mapping[str, Tensor]] = [
                {EMBEDDING: weight.detach(), **dict(zip(self.slots, own, strict=True))}
                for weight, own in zip(weights, states, strict=True)
            ]
            self._split = places, tables
        return self._split[1][table]

    @property
    def step(self) -> int:
        return int(self.module.iter)

    @property
    def settings(self) -> dict[str, Any]:
        kind, arguments = str(self.module.optimizer.value), self.module.optimizer_args
        kernel_rate = float(self.module.get_learning_rate())
        settings: dict[str, Any] = {"lr": kernel_rate}
        if self._group is not None:
            settings = {"lr": float(self._group["lr"]), _KERNEL_LR: kernel_rate}
        if any(part in kind for part in _WITH_BETAS):
            settings["betas"] = (float(arguments.beta1), float(arguments.beta2))
        names = [name for name in _SETTINGS if name != "eps" or "sgd" not in kind]
        return settings | {name: float(getattr(arguments, name)) for name in names}

    def prepare(self) -> None:
        """Write back rows that are newer in a cache; one call serves all tables until training writes again.

        A row that the cache evicts later is unchanged, or a notification of its change was sent.
        """
        if self.hooks.was_written and self.module.lxu_cache_weights.numel():
            # A stream that prefetches rows also changes the cache, so nothing else may run during the write-back.
            wait_for_devices([self.module.lxu_cache_weights])
            self.module.flush()
            wait_for_devices([self.module.lxu_cache_weights])
        self.hooks.note_written_back()

    def resume(self, step: int | None, settings: Mapping[str, Any]) -> None:
        """Set step and learning rates, and make caches reread rows whose memory was written directly."""
        if step is not None:
            self.module.iter.fill_(step)
            self.module.iter_cpu.fill_(step)  # the kernel copies it from the other counter only at its first step
        if "lr" in settings:
            rate = float(settings["lr"])
            self.module.set_learning_rate(float(settings.get(_KERNEL_LR, rate)))
            if self._group is not None:
                self._group["lr"] = rate
        if not self.hooks.was_written:  # else the cache has rows that no load has written since, and must keep them
            self.module.reset_cache_states()


class FbgemmTable:
    """One table of a kernel, or this rank's part of one.

    A load sets steps and learning rate; other settings of the kernel, such as ``eps``, stay unchanged.
    """

    def __init__(self, name: str, kernel: Kernel, table: int, box: Box, n_rows: int) -> None:
        self.name, self.n_rows = name, n_rows
        self._kernel, self._table, self._box = kernel, table, box

    @property
    def reason(self) -> str | None:
        return self._kernel.reason

    def box(self) -> Box:
        return self._box

    def prepare(self) -> None:
        self._check_there()
        self._kernel.prepare()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return weights and optimizer states in the kernel's memory; LiveTableError if the weights are stashed."""
        self._check_there()
        return self._kernel.tensors(self._table)

    def attach(self, door: Door) -> Callable[[], object]:
        return self._kernel.hooks.attach(self._table, door)

    def scalars(self) -> Mapping[str, int | float]:
        return {"step": self._kernel.step}

    def settings(self) -> Mapping[str, Any]:
        return self._kernel.settings

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        self._kernel.resume(int(scalars["step"]) if "step" in scalars else None, settings)

    def _check_there(self) -> None:
        module: Any = self._kernel.module
        weights = getattr(module, "weights_dev", None)
        if weights is None or not weights.numel():
            return
        is_freed = weights.device.type != "meta" and not weights.untyped_storage().nbytes()
        if is_freed or weights.device.type != module.current_device.type:
            raise LiveTableError(
                f"table {self.name!r}: its weights are stashed in the memory of the host, expected them on "
                f"{module.current_device}: save and load between steps, or call "
                "MemoryStashingManager.restore_embedding_weights() before"
            )


def kernel_tables(search: Search) -> Iterator[Candidate]:
    """Yield the tables of FBGEMM kernels that are modules of the model; record why other tables stay dense."""
    wrappers, left = wrappers_in(search.model), search.left
    for at, module in search.model.named_modules():
        path = unwrapped(at, wrappers)
        if is_a(module, *OTHER_KERNEL):
            left[path] = (
                f"a {type(module).__name__} keeps its rows on an SSD or in a store, not in tensors: {IN_MEMORY}"
            )
        if is_a(module, *HASHED_KERNEL):
            left[path] = f"a {type(module).__name__} keeps its rows in hash tables, which state dicts omit: {BY_DUMP}"
            search.missing.add(path)
        if not is_a(module, *KERNEL):
            continue
        try:
            kernel = Kernel(module)
        except LiveTableError as error:
            left[path] = str(error)
            continue
        # All tables or none, decided by the largest, because their rows are one tensor of the state dict.
        of_kernel: Any = module
        sizes = [rows for rows, *_ in of_kernel.embedding_specs]
        keys = tuple(f"{path}.{key}" if path else key for key in module.state_dict())
        paths = [f"{path}.{number}" if path else str(number) for number in range(len(sizes))]
        for number, (name, of_table) in enumerate(zip(of_kernel.table_names or paths, paths, strict=True)):
            make = partial(_kernel_table, kernel, number, of_table, keys)
            yield Candidate(of_table, name, max(sizes), make, together=path)


def _kernel_table(kernel: Kernel, number: int, path: str, keys: tuple[str, ...], name: str) -> FoundTable:
    n_rows = int(kernel.module.embedding_specs[number][0])
    live = FbgemmTable(name, kernel, number, Box((0, n_rows)), n_rows)
    kind, marks = type(kernel.module).__name__, FINGERPRINTS if live.reason else "backward"
    return FoundTable(
        live,
        path,
        kind,
        keys,
        lambda: tuple(kernel.module.parameters()),
        marks,
        is_announced=True,
        why=live.reason,
        is_tensor=False,
    )
