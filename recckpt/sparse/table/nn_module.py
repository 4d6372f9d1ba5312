"""Makes a table a torch module: without dense parameters, in state dicts, moved between devices, copied.

Also has what look-ups and optimizers share: initial values, padding, waiting gradients.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recckpt import types
from recckpt.format.buckets import N_BUCKETS, Slice
from recckpt.policies.evict import Mask, first_rows
from recckpt.sparse.table.checks import (
    check_owned,
    checked_device,
    checked_move,
    checked_shape,
    dtype_name,
    opaque,
    refuse_export,
)
from recckpt.sparse.table.gradients import Gradients
from recckpt.sparse.table.initializers import FromRow, InitializerLike, as_initializer
from recckpt.sparse.table.row_store import RowStore, Take
from recckpt.text import quoted, size
from recckpt.text.foreign_words import write_instead
from recckpt.types import EMBEDDING, SlotSpec, check_table_name

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]
log = logging.getLogger("recckpt")


_AVERAGING = {  # modules whose classes copy a model to average its parameters
    "torch.optim.swa_utils",
    "lightning.pytorch.callbacks.stochastic_weight_avg",
    "lightning.pytorch.callbacks.weight_averaging",
    "pytorch_lightning.callbacks.stochastic_weight_avg",
    "pytorch_lightning.callbacks.weight_averaging",
}
_NOTED = "recckpt: noted that a model is copied"  # key in the memo of a deep copy
_ROWS_STAY = (
    "was copied with a model in training mode, and loops over parameters() do not reach the rows of the copy: for a "
    "target network call copy.load_state_dict(model.state_dict()); for averages of the rows use "
    "recckpt.averages.RowAverage(model, decay)"
)


class Sharing:
    """What the ranks of a shared table must agree on; this class is for one rank. Collective, except ``exposed``."""

    n_ranks = 1

    def numbers(self, what: str, number: int, problem: Exception | None = None) -> list[int]:
        if problem is not None:
            raise problem
        return [number]

    def first_rows(self, by: npt.NDArray[Any], ids: Int64s, n: int) -> Mask:
        """Return which rows of this rank are among the first ``n`` rows of all ranks, ordered by ``by`` and id."""
        return first_rows(by, ids, n)

    def refuse(self, table: Any, error: Exception, admit: bool | None) -> NoReturn:
        """Raise the error of wrong arguments, so that ranks that wait for this rank's look-up get it, too."""
        raise error

    def exposed(self, grads: Tensor, name: str) -> Tensor:
        """Return the gradients of the table ``name`` in the form that scalers and clipping should see."""
        return grads


class Follows(Protocol):
    """An object that a table notifies of the ids that ``insert`` adds, and that are erased or evicted."""

    def note_inserted(self, ids: Int64s) -> None:
        """Note the ids that ``insert`` is about to add; ids that training adds are not reported."""

    def note_erased(self, ids: Int64s) -> None:
        """Note the ids whose rows are dropped; the ids of ``clear()`` and of loads are not reported."""


class TableModule(nn.Module):
    """A module whose state is a store of rows: state dicts hold the module itself, and it has no dense parameters.

    Attributes:
        name: the table's name in checkpoints.
        store: the rows, which only methods of the store change.
        pending_gradients: gradients of rows that wait for the optimizer.
        trained_by: the mark of the optimizer that uses the gradients: the last one made for this table.
        sharing: agreements between the ranks that share the table.
        warned_of: subjects of the warnings that were already logged.
        anchor: an empty parameter, the input of torch's graph for look-ups. Its gradient is never set, because
            gradients of rows are kept by id. Loops over the parameters of a model find the anchor under the name of the
            table; its ``requires_grad`` applies to the rows.
        followers: objects that are notified of changes; a copy of the table has none.
        is_trained: False for an average, and for a table of counts that belongs to another table.
    """

    padding_id: int | None = None  # an id that stands for "no id"
    is_trained = True
    _is_replica = False  # torch reads this at each zero_grad, and a missing attribute takes long to look up
    sharing: Sharing = Sharing()
    anchor: nn.Parameter

    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        *,
        name: str,
        dtype: torch.dtype,
        device: str | torch.device,
        initializer: InitializerLike | None,
        slice: Slice | None,
    ) -> None:
        super().__init__()
        self.name = check_table_name(name)
        self.dtype = dtype
        self.slice = slice or Slice(0, N_BUCKETS)
        self.seed = xxhash.xxh3_64_intdigest(name.encode("utf-8"))
        spec = SlotSpec(EMBEDDING, dtype_name(dtype), checked_shape(embedding_shape))
        self.initializer = as_initializer(initializer, dtype, spec.shape)
        if isinstance(self.initializer, FromRow) and self.slice != Slice(0, N_BUCKETS):
            raise ValueError(f"table {name!r}: FromRow needs the rows of all ids, but they are on several ranks")
        self.store = RowStore(checked_device(name, device))
        self.store.add_column(spec)
        self.pending_gradients = Gradients()
        self.followers: list[weakref.ref[Follows]] = []
        self.trained_by = object()  # a mark that no optimizer has
        self.warned_of: set[str] = set()
        anchor_dtype = dtype if dtype.is_floating_point else torch.float32  # integers cannot require a gradient
        with torch.inference_mode(False):  # a table made in inference mode can be trained later
            self.anchor = nn.Parameter(torch.empty(0, dtype=anchor_dtype, device=self.device))

    @property
    def requires_grad(self) -> bool:
        """Whether the rows are trained; False for a frozen table, which training does not change.

        Set this attribute, or call ``requires_grad_`` of the table or of a model that contains the table.
        """
        return self._parameters["anchor"].requires_grad  # type: ignore[union-attr]  # 10 times as fast as self.anchor

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.anchor.requires_grad_(requires_grad)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the anchor, unless ``recurse`` is False.

        With ``recurse=False``, FSDP asks each module for the parameters it should manage, and would wait for a gradient
        of the anchor. A loop over an outer module's parameters does not call this method, and finds the anchor.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the anchor."""
        return (parameter for _, parameter in super().named_parameters(recurse=recurse))

    @property
    def device(self) -> torch.device:
        """The device of the slots."""
        return self.store.device

    @property
    def embedding_shape(self) -> tuple[int, ...]:
        """The shape of one embedding."""
        return self.spec.shape

    @property
    def spec(self) -> SlotSpec:
        """The embedding as a slot."""
        return self.store.columns[EMBEDDING].spec

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of this table."""
        dtype = str(self.dtype).removeprefix("torch.")
        rows = f"rows={len(self.store)}, shape={self.embedding_shape}, dtype={dtype}"
        padding = "" if self.padding_id is None else f", padding_id={self.padding_id}"
        return (
            f"{quoted(self.name)}, {rows}{padding}, slots={len(self.store.columns) - 1}, {size(self.store.rows.nbytes)}"
        )

    def _train_by(self, mark: object) -> None:
        self.trained_by = mark

    def __repr__(self) -> str:
        return super().__repr__() if "store" in vars(self) else object.__repr__(self)  # still in the constructor

    def _fqn_modifiers(self) -> dict[str, str]:
        """Let ``torch.distributed.checkpoint``, which resolves names part by part, find the tables of this module."""
        return dict.fromkeys((parts[0] for parts in self._keys()), "_by_key")

    @property
    def _by_key(self) -> _ByKey:
        return _ByKey(self._keys())

    def _keys(self) -> dict[tuple[str, ...], TableModule]:
        """Map each table's name, without this module's prefix and split at dots, to the table."""
        names = {table.name.removeprefix(f"{self.name}."): table for table in self._own_tables()}
        return {tuple(name.split(".")): table for name, table in names.items()}

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        """Replace the rows by copies of those of ``other``. Raises ValueError before anything changes."""
        raise NotImplementedError

    def _own_tables(self) -> list[TableModule]:
        return [self]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        refuse_export()  # the old torch.onnx.export detaches every value of a state dict before it calls the model
        destination.update({prefix + table.name: table for table in self._own_tables()})

    def _load_from_state_dict(  # noqa: PLR0917  # torch's signature
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {prefix + table.name: table for table in self._own_tables()}
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name not in own and strict]
        for key, table in own.items():
            if key not in state_dict:
                missing_keys += [key] * strict
            elif not types.is_hashtable(state_dict[key]):
                error_msgs.append(f"{key!r}: found {type(state_dict[key]).__name__}, expected a hashtable")
            elif state_dict[key] is not table:
                try:
                    table._copy_rows_of(state_dict[key])
                except ValueError as error:
                    error_msgs.append(f"{key!r}: {error}")

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the rows for ``model.to(device)``; keep the dtype, which is part of the table's identity."""
        device = checked_move(self.name, self.dtype, self.device, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if device != self.device:
            self.store = self.store.to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        own = {
            "store": self.store.to(self.device),
            "pending_gradients": Gradients(keeps_squares=self.pending_gradients.keeps_squares),
            "initializer": self.initializer,
        }
        rest = {name: value for name, value in self.__dict__.items() if name not in own}
        twin.__dict__.update(copy.deepcopy(rest, memo), **own)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"table {self.name!r} cannot be pickled, nor a model or state dict that contains it: save it with "
            "recckpt.Saver(model, output_dir=...).save(ckpt_id), in a trainer with a callback of recckpt.integrations, "
            "or split its state dict with recckpt.recis.split_sparse_dense_state_dict and pickle the dense half"
        )

    @property
    @opaque
    def grad(self) -> Tensor | None:
        """The gradients that the optimizer uses next: one row for each distinct id, float32 or float64.

        In-place changes affect the next step; scalers and clipping rely on that. None if there was no backward pass; a
        single row of zeros if the backward pass reached no id. Setting None drops the gradients.
        """
        values = self.pending_gradients.values(self.store)
        if values is None:
            return None
        return self.sharing.exposed(values if len(values) else values.new_zeros(1, *self.embedding_shape), self.name)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        present = self.grad
        if grad is None:
            self.pending_gradients.clear()
        elif present is None or grad.shape != present.shape:
            expected = "none, because no backward pass reached it" if present is None else str(tuple(present.shape))
            raise ValueError(f"gradients of table {self.name!r}: found shape {tuple(grad.shape)}, expected {expected}")
        elif grad is not present:
            present.copy_(grad)

    @opaque
    def take_gradients(self) -> tuple[Int64s, Tensor] | None:
        """Return (distinct rows, summed gradients) of all backward passes since the last call, and drop them.

        Return None if there was no backward pass.
        """
        with self.store.lock:
            taken = self.pending_gradients.of_rows(self.store)
            if taken is None:
                return None
            taken.used[0] = 1
            return taken.rows, taken.grads

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the backward passes so far."""
        super().zero_grad(set_to_none)
        self.pending_gradients.clear(set_to_none)


def warn_once(table: TableModule, subject: str, text: str) -> None:
    if subject not in table.warned_of:
        table.warned_of.add(subject)
        log.warning("table %r: %s", table.name, text)


def erase_rows(table: TableModule, ids: Int64s) -> int:
    """Drop rows and their waiting gradients; return how many rows were dropped."""
    with table.store.lock:
        n_rows = table.store.erase(ids)
        if n_rows:
            table.pending_gradients.forget(ids, table.store)
            for reference in table.followers:
                if (follower := reference()) is not None:
                    follower.note_erased(ids)
    return n_rows


def first_embeddings(table: TableModule, new_ids: Int64s) -> Tensor:
    """Return the initial embeddings of distinct new ids. Raises ValueError for an id outside the table's slice."""
    check_owned(table.name, table.slice, new_ids)
    initializer = table.initializer
    values = initializer.values(new_ids, table.seed, table.spec)
    if isinstance(initializer, FromRow):
        read = table.store.read
        others, rows = table.store.look_up(
            initializer.fallbacks(new_ids), lambda columns, at: (read(columns, at, 0), at)
        )
        values[torch.from_numpy(rows >= 0)] = others[torch.from_numpy(rows >= 0)].to(values.device)
    return values


def embedding_reader(table: TableModule) -> Take[Tensor]:
    """Return a function that copies the embeddings of rows; row -1 gives the embedding of an unseen id."""
    read, unseen = table.store.read, table.initializer.unseen
    return lambda columns, rows: read(columns, rows, unseen)


def padding_row(table: TableModule) -> Tensor:
    """Return the embedding of the padding id, shape (1, *embedding_shape), which is never trained.

    The values are zeros unless the id has a row: taken over from an ``nn.Embedding``, inserted or loaded.
    """
    read = table.store.read
    return table.store.look_up(np.array([table.padding_id], np.int64), lambda columns, rows: read(columns, rows, 0.0))


def add_gradients(table: TableModule, ids: Int64s, grads: Tensor) -> None:
    """Add the gradients of a backward pass; ids may repeat.

    An average, or a table that was frozen after the look-up, ignores them, as a frozen parameter would.
    """
    if not (table.requires_grad and table.is_trained):
        return
    if grads.shape[1:] != table.spec.shape:
        raise ValueError(
            f"table {table.name!r}: found gradients of shape {tuple(grads.shape[1:])}, expected "
            f"{table.embedding_shape}: the table was resized after the look-up; look the ids up again"
        )
    table.pending_gradients.add(ids, grads, table.store)


def check_copy(table: TableModule, memo: dict[Any, Any]) -> None:
    """Refuse a copy made to average parameters, which would not average the rows. Warn once of a copy in training mode.

    Raises:
        ValueError: the copy is for an average; the message names the averaging class, and its replacement.
    """
    if not (table.is_trained and table.requires_grad):
        return
    averaging, frame = "", sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _AVERAGING and "self" in frame.f_locals:
            averaging = type(frame.f_locals["self"]).__name__  # ends with the outermost one, which the user has made
        frame = frame.f_back  # type: ignore[assignment]  # None above the first
    if averaging:
        raise ValueError(
            f"{averaging} averages parameters, and the rows of table {table.name!r} are not: the rows would stay as "
            f"they are now, under averaged layers{write_instead('AveragedModel')}"
        )
    if not table.training or _NOTED in memo:
        return
    for copied in memo.values():
        if isinstance(copied, nn.Module) and not isinstance(copied, TableModule):  # none if just a state dict is copied
            memo[_NOTED] = True  # so that only one table warns
            warn_once(table, "copy", _ROWS_STAY)
            return


class _ByKey:
    """Resolves names of tables part by part; resolving the last part returns the table."""

    def __init__(self, tables: Mapping[tuple[str, ...], TableModule]) -> None:
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        left = {parts[1:]: table for parts, table in self._tables.items() if parts[:1] == (name,)}
        if not left:
            raise AttributeError(f"no table has {name!r} next in its name, only {sorted(self._tables)}")
        return left[()] if () in left else _ByKey(left)


def _leave_anchors_out(init: Callable[..., None]) -> Callable[..., None]:
    """Make DistributedDataParallel ignore the anchors.

    It collects all parameters before it asks modules which to ignore, and asks the outermost module only. Tables may be
    on the CPU beside layers on a GPU, and a model with only anchors as parameters would crash it.
    """

    @functools.wraps(init)
    def leaving_out(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        anchors = {id(each.anchor) for each in module.modules() if isinstance(each, TableModule)}
        if anchors:
            names = {name for name, parameter in module.named_parameters() if id(parameter) in anchors}
            others: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            self._set_params_and_buffers_to_ignore_for_model(module, names.union(others))  # type: ignore[no-untyped-call]
        init(self, module, *args, **kwargs)

    return leaving_out


DistributedDataParallel.__init__ = _leave_anchors_out(DistributedDataParallel.__init__)  # type: ignore[method-assign]
