"""How a table behaves for torch: in state dicts, on devices, when copied, in a backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt import types
from recckpt.sparse.table.anchor import AnchoredModule, captured
from recckpt.sparse.table.checks import checked_move
from recckpt.sparse.table.gradients import Gradients, RowGradients
from recckpt.sparse.table.initializers import Initializer
from recckpt.sparse.table.opaque import opaque, refuse_export
from recckpt.sparse.table.row_store import RowStore
from recckpt.text import quoted, size
from recckpt.types import EMBEDDING, SlotSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]
Give = Callable[[Int64s, Tensor], object]
Read = Callable[[], tuple[Tensor, Int64s | None]]


class TableModule(AnchoredModule):
    """A module whose state is a store of rows, which stands in state dicts as itself and whose rows have gradients."""

    name: str
    dtype: torch.dtype
    padding_id: int | None = None  # whose row is not trained, and is in no bag
    trained_by: object = None  # the mark of the optimizer that was made for it last, and gets its gradients
    initializer: Initializer
    _store: RowStore
    _gradients: Gradients

    @property
    def device(self) -> torch.device:
        """Where the slots live."""
        return self._store.device

    @property
    def embedding_shape(self) -> tuple[int, ...]:
        """The shape of one embedding."""
        return self._spec.shape

    @property
    def _spec(self) -> SlotSpec:
        """The embedding as a slot."""
        return self._store.columns[EMBEDDING].spec

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of this table."""
        dtype = str(self.dtype).removeprefix("torch.")
        rows = f"rows={len(self._store)}, shape={self.embedding_shape}, dtype={dtype}"
        return f"{quoted(self.name)}, {rows}, slots={len(self._store.columns) - 1}, {size(self._store.nbytes)}"

    def __repr__(self) -> str:
        return super().__repr__() if "_store" in vars(self) else object.__repr__(self)  # half made

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
            self._store = self._store.to(device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        own = {
            "_store": self._store.to(self.device),
            "_gradients": self._gradients.twin(),
            "initializer": self.initializer,
        }
        rest = {name: value for name, value in self.__dict__.items() if name not in own}
        twin.__dict__.update(copy.deepcopy(rest, memo), **own)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"table {self.name!r} cannot be pickled, nor a model or state dict that holds it: save it with "
            "recckpt.Saver(model, output_dir=...).save(ckpt_id), or split its state dict with "
            "recckpt.split_sparse_dense_state_dict and pickle the dense half"
        )

    @opaque
    def add_gradients(self, ids: Int64s, grads: Tensor) -> None:
        """Add what a backward pass gave for ``ids``, of which some may be equal, shape (n, *embedding_shape).

        As of a parameter, nothing is added that was frozen since the look-up.
        """
        if not self.requires_grad:
            return
        if self.padding_id is not None:
            kept = np.flatnonzero(ids != self.padding_id)
            ids, grads = ids[kept], grads[torch.from_numpy(kept).to(grads.device)]
        if grads.shape[1:] != self.embedding_shape:
            raise ValueError(
                f"table {self.name!r}: found gradients of shape {tuple(grads.shape[1:])}, expected "
                f"{self.embedding_shape}: it was resized since it was looked up; look it up again"
            )
        self._gradients.add(ids, grads, self._store)

    @property
    @opaque
    def grad(self) -> Tensor | None:
        """The gradients that the optimizer takes next: one row for each different id, float32 or float64.

        Changes in place count, which is how scalers and clipping work. None where there was no backward pass; a row of
        zeros where it reached no id. Set to None, they are forgotten.
        """
        values = self._gradients.values(self._store)
        if values is None:
            return None
        return self._exposed(values if len(values) else values.new_zeros(1, *self.embedding_shape))

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        present = self.grad
        if grad is None:
            self._gradients.clear()
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
        with self._store.lock:
            taken = self.row_gradients()
            if taken is None:
                return None
            taken.used[0] = 1
            return taken.rows, taken.grads

    def row_gradients(self) -> RowGradients | None:
        """Return what :meth:`take_gradients` would, and keep them until they are marked as used."""
        return self._gradients.of_rows(self._store)

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the backward passes so far."""
        super().zero_grad(set_to_none)
        self._gradients.clear(set_to_none)

    def _erase(self, ids: Int64s) -> int:
        """Drop rows, and the gradients that wait for them: an id that comes back has nothing to do with these."""
        with self._store.lock:
            n_rows = self._store.erase(ids)
            if n_rows:
                self._gradients.forget(ids, self._store)
        return n_rows

    def _exposed(self, grads: Tensor) -> Tensor:
        """Return gradients as scalers and clipping are to see them."""
        return grads


class _ByKey:
    """Answers to the parts of the names of tables, one after another, of which the last gives the table."""

    def __init__(self, tables: Mapping[tuple[str, ...], TableModule]) -> None:
        self._tables = tables

    def __getattr__(self, name: str) -> Any:
        left = {parts[1:]: table for parts, table in self._tables.items() if parts[:1] == (name,)}
        if not left:
            raise AttributeError(f"no table has {name!r} next in its name, only {sorted(self._tables)}")
        return left[()] if () in left else _ByKey(left)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, read: Read, give: Give, ids: Int64s) -> Tensor:
        rows, held = read()
        ctx.give, ctx.ids, ctx.held = give, ids, held
        return rows

    @staticmethod
    @opaque
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_anchor = captured(ctx.next_functions[0][0])
        if of_anchor is None:
            ctx.give(*of_held(ctx.ids, grad, ctx.held))
        return of_anchor, None, None, None


def of_held(ids: Int64s, grads: Tensor, held: Int64s | None) -> tuple[Int64s, Tensor]:
    """Return the ids that have rows, which are ``held``, and their gradients; None for all."""
    return (ids, grads) if held is None else (ids[held], grads.index_select(0, torch.from_numpy(held).to(grads.device)))


def lookup_with_grad(anchor: Tensor, read: Read, give: Give, ids: Int64s) -> Tensor:
    """Return the embeddings of ``ids``, which ``read`` gives, and where those are that have rows; None for all.

    A backward pass through the embeddings gives the gradients of those to ``give``, if ``anchor`` requires a gradient.
    """
    out: Tensor = _Lookup.apply(anchor, read, give, ids)  # type: ignore[no-untyped-call]
    return out
