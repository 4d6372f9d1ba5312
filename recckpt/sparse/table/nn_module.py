"""How a table behaves for torch: as a module without dense parameters, in state dicts, on devices, and when copied."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from recckpt import types
from recckpt.format.buckets import N_BUCKETS, Slice
from recckpt.sparse.table.checks import checked_device, checked_move, checked_shape, dtype_name
from recckpt.sparse.table.gradients import Gradients
from recckpt.sparse.table.initializers import InitializerLike, as_initializer
from recckpt.sparse.table.opaque import opaque, refuse_export
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.sharing import NotShared, Sharing
from recckpt.text import quoted, size
from recckpt.types import EMBEDDING, SlotSpec, check_table_name

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]
log = logging.getLogger("recckpt")


class WarnedOf:
    """What a table has warned of."""

    def __init__(self) -> None:
        self._subjects: frozenset[str] = frozenset()

    def once(self, table: str, subject: str, text: str) -> None:
        """Warn of a subject, the first time only."""
        if subject not in self._subjects:
            self._subjects |= {subject}
            log.warning("table %r: %s", table, text)


class GradientTaker:
    """The one optimizer to which the gradients of a table go: the last that was made for it."""

    def __init__(self) -> None:
        self._mark: object = None

    def take_over(self, mark: object) -> None:
        """Let gradients go to the optimizer of this mark from now on."""
        self._mark = mark

    def has(self, mark: object) -> bool:
        """Say whether they go to the optimizer of this mark."""
        return self._mark is mark


class TableModule(nn.Module):
    """A module whose state is a store of rows: it stands in state dicts as itself, and has no dense parameters.

    Attributes:
        name: in checkpoints.
        store: the rows, and the one door through which they change.
        pending_gradients: of the rows, which wait for the optimizer.
        trained_by: the optimizer that takes them.
        sharing: what the ranks that share the table agree on.
        anchor: empty, and the input of torch's graph from which the rows come. It never has a gradient: those of the
            rows are kept by id. A walk over the parameters of a model finds it under the name of the table; rows are
            frozen and thawed by it.
        is_trained: False for an average, and for a table of counts, which belongs to another one.
    """

    padding_id: int | None = None  # stands for no id
    is_trained = True
    sharing: Sharing = NotShared()
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
        self.store = RowStore(checked_device(name, device))
        self.store.add_column(spec)
        self.pending_gradients = Gradients()
        self.trained_by = GradientTaker()
        self.warned_of = WarnedOf()
        anchor_dtype = dtype if dtype.is_floating_point else torch.float32  # others cannot require a gradient
        with torch.inference_mode(False):  # a table that is made there can be trained later
            self.anchor = nn.Parameter(torch.empty(0, dtype=anchor_dtype, device=self.device))

    @property
    def requires_grad(self) -> bool:
        """Whether the rows are trained; False for a frozen table, which training leaves as it is.

        Set it, call ``requires_grad_`` of the table or of a model around it, or set that of all its parameters.
        """
        return self._parameters["anchor"].requires_grad  # type: ignore[union-attr]  # a tenth of the time of self.anchor

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.anchor.requires_grad_(requires_grad)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the anchor, but not where ``recurse`` is False.

        So FSDP asks each module for what it is to manage, and would wait for a gradient of the anchor. A walk from a
        module above does not call this, and finds it.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the anchor."""
        return (parameter for _, parameter in super().named_parameters(recurse=recurse))

    @property
    def device(self) -> torch.device:
        """Where the slots live."""
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
        return f"{quoted(self.name)}, {rows}{padding}, slots={len(self.store.columns) - 1}, {size(self.store.nbytes)}"

    def __repr__(self) -> str:
        return super().__repr__() if "store" in vars(self) else object.__repr__(self)  # half made

    def _fqn_modifiers(self) -> dict[str, str]:
        """Lead ``torch.distributed.checkpoint``, which walks along the keys of state dicts, back to own tables."""
        return dict.fromkeys((parts[0] for parts in self._keys()), "_by_key")

    @property
    def _by_key(self) -> _ByKey:
        return _ByKey(self._keys())

    def _keys(self) -> dict[tuple[str, ...], TableModule]:
        """Return the own tables by what the walk has left to go: once here, the names of others go on from this one."""
        names = {table.name.removeprefix(f"{self.name}."): table for table in self._own_tables()}
        return {tuple(name.split(".")): table for name, table in names.items()}

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        """Become a copy of ``other``; where it does not fit, raise ValueError before anything changes."""
        raise NotImplementedError

    def _own_tables(self) -> list[TableModule]:
        """Return what stands in state dicts: this table, and one that belongs to it."""
        return [self]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        refuse_export()  # the old torch.onnx.export detaches all that is in a state dict, before it calls the model
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
        """Follow ``model.to(device)``; the dtype stays, since it is part of the table's identity."""
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
            "pending_gradients": self.pending_gradients.twin(),
            "initializer": self.initializer,
        }
        rest = {name: value for name, value in self.__dict__.items() if name not in own}
        twin.__dict__.update(copy.deepcopy(rest, memo), **own)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"table {self.name!r} cannot be pickled, nor a model or state dict that holds it: save it with "
            "recckpt.Saver(model, output_dir=...).save(ckpt_id), in a trainer by a callback of recckpt.integrations, "
            "or split its state dict with recckpt.split_sparse_dense_state_dict and pickle the dense half"
        )

    @property
    @opaque
    def grad(self) -> Tensor | None:
        """The gradients that the optimizer takes next: one row for each different id, float32 or float64.

        Changes in place count, which is how scalers and clipping work. None where there was no backward pass; a row of
        zeros where it reached no id. Set to None, they are forgotten.
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
            expected = "none, for no backward pass reached it" if present is None else str(tuple(present.shape))
            raise ValueError(f"gradients of table {self.name!r}: found shape {tuple(grad.shape)}, expected {expected}")
        elif grad is not present:
            present.copy_(grad)

    @opaque
    def take_gradients(self) -> tuple[Int64s, Tensor] | None:
        """Return (rows, summed gradients) of all backward passes since the last call, and forget them.

        The rows are all different; None where there was no backward pass.
        """
        with self.store.lock:
            taken = self.pending_gradients.of_rows(self.store)
            if taken is None:
                return None
            taken.used[0] = 1
            return taken.rows, taken.grads

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the backward passes so far."""
        super().zero_grad(set_to_none)
        self.pending_gradients.clear(set_to_none)


def erase_rows(table: TableModule, ids: Int64s) -> int:
    """Drop rows, and the gradients that wait for them: an id that comes back has nothing to do with these."""
    with table.store.lock:
        n_rows = table.store.erase(ids)
        if n_rows:
            table.pending_gradients.forget(ids, table.store)
    return n_rows


class _ByKey:
    """Answers to the parts of the names of tables, one after another, of which the last gives the table."""

    def __init__(self, tables: Mapping[tuple[str, ...], TableModule]) -> None:
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        left = {parts[1:]: table for parts, table in self._tables.items() if parts[:1] == (name,)}
        if not left:
            raise AttributeError(f"no table has {name!r} next in its name, only {sorted(self._tables)}")
        return left[()] if () in left else _ByKey(left)
