"""The hashtable embedding: an ``nn.Module`` that grows a row for every id it is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor, nn

from recckpt import types
from recckpt.sparse.autograd import Gradients, lookup_with_grad
from recckpt.sparse.buckets import Slice
from recckpt.sparse.initializers import InitializerLike, as_initializer
from recckpt.sparse.store import RowStore
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec, check_table_name

Int64s = npt.NDArray[np.int64]

_RESERVED_SLOTS = frozenset({EMBEDDING, "id", "table", "op"})  # columns of the format


class HashTable(nn.Module):
    """A growing map from int64 ids to embeddings of one shape, with optimizer slots.

    Every int64 value is a legal id. In ``state_dict()`` the table stands as itself, under its name: such a
    state dict can be deep-copied (which copies the rows) and given to ``load_state_dict``; it is written to
    disk by :class:`recckpt.Saver`, not by pickle. Not thread-safe, not collective.

    Args:
        embedding_shape: shape of one embedding, such as ``(64,)``; an int is short for one dimension.
        name: name in checkpoints, unique in a model, up to 1,024 bytes of UTF-8.
        dtype: float32, float16, bfloat16, float64, or an integer type.
        device: where the slots live; ids and index are always on the CPU.
        initializer: gives new rows their values: None for zeros, one of
            :mod:`recckpt.sparse.initializers`, or a callable like those of ``torch.nn.init``.
        slice: part of the id space that this table may hold; None for all of it.

    Raises:
        ValueError: the name, shape or dtype is not one that a table can have.
    """

    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        initializer: InitializerLike | None = None,
        slice: Slice | None = None,
    ) -> None:
        super().__init__()
        self.name = check_table_name(name)
        self.embedding_shape = _checked_shape(embedding_shape)
        self.dtype = dtype
        self.slice = slice or Slice(0, 65536)
        self.seed = xxhash.xxh3_64_intdigest(name.encode("utf-8"))
        self._spec = SlotSpec(EMBEDDING, _dtype_name(dtype), self.embedding_shape)
        self.initializer = as_initializer(initializer, dtype)
        self._store = RowStore(torch.device(device))
        self._store.add_column(self._spec)
        self._gradients = Gradients()

    @property
    def store(self) -> RowStore:
        """The rows, and the one door through which they change."""
        return self._store

    @property
    def device(self) -> torch.device:
        """Where the slots live."""
        return self._store.device

    @property
    def nbytes(self) -> int:
        """Bytes that the table holds: index, ids and slots, room for growth included."""
        return self._store.nbytes

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The optimizer slots by name; reading one copies its rows, in the order of :meth:`ids`."""
        return _Slots(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows of this table."""
        return f"{self.name!r}, rows={len(self)}, shape={self.embedding_shape}, dtype={self._spec.dtype}"

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ``ids``.

        In training mode unseen ids are inserted with the initializer. In eval mode nothing is inserted and
        an unseen id reads the initializer's constant, or zeros where the initializer is random.

        Args:
            ids: int64, any shape.

        Returns:
            Tensor of shape ``ids.shape + embedding_shape``, differentiable; the gradients of an id that
            occurs several times add up.

        Raises:
            ValueError: an unseen id lies outside the slice of this table.
        """
        flat = _flat_ids(ids)
        rows = self._add(flat) if self.training else self._store.find(flat)
        if torch.is_grad_enabled() and self.dtype.is_floating_point:
            out = lookup_with_grad(self._read, self._gradients, flat, rows, self._store.generation)
        else:
            out = self._read(rows)
        return out.view(*ids.shape, *self.embedding_shape)

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set the rows of ``ids``, adding those that are new; the last of equal ids wins.

        Args:
            ids: int64, shape (n,).
            embeddings: shape (n, *embedding_shape), the table's dtype.
            slots: slot name -> (n, *slot_shape). Slots that are not named keep their values, and start at
                their initial value in new rows.

        Raises:
            ValueError: a shape, dtype or slot name does not fit; an id lies outside the slice. Nothing has
                been changed then.
        """
        flat = _flat_ids(ids)
        values = {EMBEDDING: embeddings, **(slots or {})}
        for name, tensor in values.items():
            self._check_values(name, tensor, len(flat))
        self._check_owned(flat)
        first = len(self)
        rows, _ = self._store.add(flat)
        self._store.initialize(first, len(self), without=frozenset(values))
        last = _last_occurrence(rows)
        if last is not None:
            rows = rows[last]
            values = {name: tensor[torch.from_numpy(last)] for name, tensor in values.items()}
        self._store.write(rows, values)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (embeddings, found) without inserting; unseen ids read as in eval mode.

        Returns:
            Embeddings of shape ``ids.shape + embedding_shape``, and a bool mask of ``ids.shape``.
        """
        rows = self._store.find(_flat_ids(ids))
        found = torch.from_numpy(rows >= 0).to(ids.device).view(ids.shape)
        return self._read(rows).view(*ids.shape, *self.embedding_shape), found

    def erase(self, ids: Tensor) -> int:
        """Drop the rows of ``ids``, ignoring those that are absent, and return how many were dropped."""
        return self._store.erase(_flat_ids(ids))

    def clear(self) -> None:
        """Drop all rows and pending gradients."""
        self._store.clear()
        self._gradients.clear()

    def reserve(self, n_rows: int) -> None:
        """Make room for ``n_rows`` rows in all, so that inserting them allocates nothing."""
        self._store.reserve(n_rows)

    def ids(self) -> Tensor:
        """Return a copy of the ids, int64, shape (rows,), on the CPU."""
        return self._store.ids.to_tensor(len(self))

    def embeddings(self) -> Tensor:
        """Return a copy of the embeddings, shape (rows, *embedding_shape), in the order of :meth:`ids`."""
        return self._store.columns[EMBEDDING].to_tensor(len(self))

    def add_slot(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, initial: float = 0.0
    ) -> None:
        """Declare a slot whose rows start at ``initial``; declaring the same slot again keeps its rows.

        Raises:
            ValueError: the name is taken, or the slot exists with another shape or dtype.
        """
        if not name or name in _RESERVED_SLOTS or "@" in name:
            raise ValueError(f"table {self.name!r}: a slot cannot be named {name!r}; choose another name")
        spec = SlotSpec(name, _dtype_name(dtype), _checked_shape(shape, scalar=True))
        present = self._store.columns.get(name)
        if present is None:
            self._store.add_column(spec, initial)
        elif present.spec != spec:
            raise ValueError(
                f"table {self.name!r} has slot {name!r} of {present.spec.dtype} {present.spec.shape}, "
                f"cannot also be {spec.dtype} {spec.shape}; use another slot name"
            )

    def take_gradients(self) -> tuple[Int64s, Tensor] | None:
        """Return (rows, summed gradients) of all backward passes since the last call, and forget them.

        The rows are all different; None where there was no backward pass.
        """
        return self._gradients.take(self._store)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the backward passes so far."""
        super().zero_grad(set_to_none)
        self._gradients.clear()

    def _add(self, ids: Int64s) -> Int64s:
        """Return the rows of ``ids``, after giving the unseen ones theirs."""
        if not self.slice.is_everything:
            self._check_owned(ids)
        first = len(self)
        rows, new_ids = self._store.add(ids)
        if len(new_ids):
            self._store.initialize(first, len(self), without=frozenset({EMBEDDING}))
            values = self.initializer.values(new_ids, self.seed, self._spec)
            self._store.columns[EMBEDDING].write(first, values)
        return rows

    def _read(self, rows: Int64s) -> Tensor:
        """Return a copy of the embeddings of ``rows``; row -1 reads as an unseen id."""
        column = self._store.columns[EMBEDDING]
        unseen = np.flatnonzero(rows < 0)
        if len(unseen) == 0:
            return column.gather(rows)
        out = torch.full(
            (len(rows), *self.embedding_shape), self.initializer.unseen, dtype=self.dtype, device=self.device
        )
        seen = np.flatnonzero(rows >= 0)
        out[torch.from_numpy(seen).to(self.device)] = column.gather(rows[seen])
        return out

    def _check_owned(self, ids: Int64s) -> None:
        strangers = ids[~self.slice.owns(ids)]
        if len(strangers):
            raise ValueError(
                f"table {self.name!r} holds {self.slice} only; {len(strangers)} of {len(ids)} ids lie outside, "
                f"the first is {strangers[0]}: send ids to the rank that owns them"
            )

    def _check_values(self, name: str, tensor: Tensor, n_rows: int) -> None:
        column = self._store.columns.get(name)
        if column is None:
            known = sorted(set(self._store.columns) - {EMBEDDING})
            raise ValueError(f"table {self.name!r} has no slot {name!r}; it has {known}: declare it with add_slot")
        expected = (n_rows, *column.spec.shape)
        if tuple(tensor.shape) != expected or tensor.dtype != column.dtype:
            raise ValueError(
                f"table {self.name!r}, {name!r}: found {tensor.dtype} {tuple(tensor.shape)}, expected "
                f"{column.dtype} {expected}"
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + self.name] = self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + self.name
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name != key and strict]
        if key not in state_dict:
            missing_keys += [key] * strict
        elif not types.is_hashtable(state_dict[key]):
            error_msgs.append(f"{key!r}: found {type(state_dict[key]).__name__}, expected a hashtable")
        elif state_dict[key] is not self:
            try:
                self._copy_rows_of(state_dict[key])
            except ValueError as error:
                error_msgs.append(f"{key!r}: {error}")

    def _copy_rows_of(self, other: types.HashTable) -> None:
        ids, embeddings, slots = other.ids(), other.embeddings(), dict(other.slots)
        self._check_values(EMBEDDING, embeddings, len(ids))
        for name, tensor in slots.items():
            self.add_slot(name, tensor.shape[1:], tensor.dtype)
        self.clear()
        self.insert(ids, embeddings, slots)

    def _apply(self, fn: Any, recurse: bool = True) -> HashTable:
        """Follow ``model.to(device)``; the dtype stays, since it is part of the table's identity."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if probe.dtype != self.dtype:
            raise TypeError(
                f"table {self.name!r} keeps its dtype {self.dtype}, cannot become {probe.dtype}: make the table "
                "with dtype=..., and convert the dense modules one by one"
            )
        super()._apply(fn, recurse)
        if probe.device != self.device:
            self._store = self._store.to(probe.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HashTable:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            twin.__dict__[name] = dict(self.__dict__[name])
        twin._store = self._store.to(self.device)
        twin._gradients = Gradients()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"table {self.name!r} cannot be pickled, nor a model or state dict that holds it: save it with "
            "recckpt.Saver(model, output_dir=...).save(ckpt_id), or split its state dict with "
            "recckpt.split_sparse_dense_state_dict and pickle the dense half"
        )


class _Slots(Mapping[str, Tensor]):
    """The optimizer slots of a store; each look-up copies the live rows."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Tensor:
        if name == EMBEDDING:
            raise KeyError(name)
        return self._store.columns[name].to_tensor(len(self._store))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._store.columns if name != EMBEDDING)

    def __len__(self) -> int:
        return len(self._store.columns) - 1


def _flat_ids(ids: Tensor) -> Int64s:
    if ids.dtype != torch.int64:
        raise ValueError(f"ids must be int64, found {ids.dtype}; convert them with ids.long()")
    flat: Int64s = ids.detach().reshape(-1).cpu().contiguous().numpy()
    return flat


def _last_occurrence(rows: Int64s) -> Int64s | None:
    """Return the position of the last of each group of equal rows, None where all are different."""
    _, last = np.unique(rows[::-1], return_index=True)
    if len(last) == len(rows):
        return None
    positions: Int64s = np.sort(len(rows) - 1 - last)
    return positions


def _checked_shape(shape: int | Sequence[int], scalar: bool = False) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if (not sizes and not scalar) or math.prod(sizes) < 1 or any(size < 1 for size in sizes):
        raise ValueError(f"a shape needs dimensions of at least 1, found {sizes}")
    return sizes


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"a slot cannot be {dtype}; choose one of {', '.join(ITEM_BYTES)}")
    return name
