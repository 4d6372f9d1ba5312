"""Bags: rows of several ids pooled into one, as ``nn.EmbeddingBag`` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from recckpt.sparse.table.checks import checked_padding
from recckpt.sparse.table.nested import NestedRows, rows_of_nested, weights_alike
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.opaque import check_has_values, check_proxy

Mode = Literal["sum", "mean", "max"]


@dataclass(frozen=True)
class Bags:
    """Ids in one dimension, where the bags of them begin, and what their rows are multiplied with."""

    ids: Tensor  # int64
    offsets: Tensor  # int64, on the device of the ids
    weights: Tensor | None

    def without(self, padding_id: int | None) -> Bags:
        """Return the bags without an id that stands for none; a bag may be empty then."""
        if padding_id is None:
            return self
        kept = self.ids != padding_id
        n_before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        weights = None if self.weights is None else self.weights[kept.to(self.weights.device)]
        return Bags(self.ids[kept], n_before[self.offsets], weights)


@dataclass(frozen=True)
class Ends:
    """The ways to say where bags end, of which at most one is used; ragged ids need none."""

    offsets: Tensor | None = None
    lengths: Tensor | None = None
    include_last_offset: bool = False


def bags_of(table: TableModule, ids: Any, ends: Ends, weights: Any, padding_id: int | None) -> Bags:
    """Return bags of ids by one of the ways to say where they end, without those of padding.

    Raises:
        TypeError, ValueError: the ids, the ends, the weights or the padding are not such.
    """
    bags = _bags_of(table.name, ids, ends, weights)
    return bags.without(table.padding_id if padding_id is None else checked_padding(table.name, padding_id))


def check_mode(table: TableModule, mode: Mode, weights: Tensor | None) -> None:
    """Refuse what cannot be pooled."""
    if mode not in get_args(Mode):
        raise ValueError(f"table {table.name!r}: found mode={mode!r}, expected one of {', '.join(get_args(Mode))}")
    if not table.dtype.is_floating_point:
        raise ValueError(f"table {table.name!r} of {table.dtype} cannot be pooled: look its rows up, and pool them")
    if weights is not None and mode != "sum":
        raise ValueError(f"table {table.name!r}: found weights and mode={mode!r}, expected mode='sum' with weights")
    if weights is not None and weights.dtype != table.dtype:
        raise ValueError(
            f"table {table.name!r}: found weights of {weights.dtype}, expected {table.dtype}, the dtype of the table"
        )


def pool(rows: Tensor, bags: Bags, mode: Mode) -> Tensor:
    """Return the pooled rows of the ids, shape (bags, *embedding_shape)."""
    if not len(bags.offsets):  # of which torch makes no graph
        return rows[:0]
    numbers = torch.arange(len(rows), device=rows.device)
    weights = None if bags.weights is None else bags.weights.to(rows.device)
    offsets = bags.offsets.to(rows.device)
    out = functional.embedding_bag(numbers, rows.flatten(1), offsets, mode=mode, per_sample_weights=weights)
    return out.view(-1, *rows.shape[1:])


def _bags_of(table: str, ids: Any, ends: Ends, weights: Any) -> Bags:
    """Return bags by one of the ways to say where they end."""
    named = [name for name in ("offsets", "lengths") if getattr(ends, name) is not None]
    if ends.include_last_offset and ends.offsets is None:
        raise ValueError(f"table {table!r}: found include_last_offset without offsets, expected it with them only")
    if not isinstance(ids, Tensor) or ids.is_nested:
        if named:
            raise ValueError(f"table {table!r}: found {' and '.join(named)} with ragged ids, expected those alone")
        return _of_ragged(table, ids, weights)
    flat = _checked_ids(table, ids).reshape(-1)
    if ids.dim() == 2 and not named:
        starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    elif ids.dim() != 1 or len(named) != 1:
        kind = f"ids of shape {tuple(ids.shape)} with {' and '.join(named) or 'neither offsets nor lengths'}"
        raise ValueError(f"table {table!r}: found {kind}, expected two dimensions alone, or one with either of them")
    elif ends.lengths is not None:
        starts = _starts(table, ends.lengths, len(flat))
    else:
        starts = _checked_offsets(table, ends, len(flat))
    return Bags(flat, starts.to(flat.device), _checked_weights(table, weights, tuple(ids.shape)))


def _of_ragged(table: str, ids: Any, weights: Any) -> Bags:
    """Return the bags of an object that knows its own, a nested tensor or one of TorchRec's."""
    is_tensor = isinstance(ids, Tensor)
    check_proxy(ids)
    if not is_tensor and hasattr(ids, "keys"):
        raise TypeError(
            f"table {table!r}: found a {type(ids).__name__} of several features, expected one of them: ids[{table!r}]; "
            "EmbeddingCollection.bag takes it whole"
        )
    if not is_tensor and not all(callable(getattr(ids, name, None)) for name in ("values", "lengths", "offsets")):
        raise TypeError(
            f"table {table!r}: found ids of {type(ids).__name__}, expected an int64 or int32 tensor, or an object with "
            "values(), lengths() and offsets(); convert lists with torch.as_tensor, strings with hash_ids"
        )
    rows = rows_of_nested(table, "ids", ids) if is_tensor else NestedRows(ids.values(), ids.lengths())
    flat = _checked_ids(table, rows.values)
    if flat.dim() != 1:
        raise ValueError(f"table {table!r}: found values() of shape {tuple(flat.shape)}, expected one dimension")
    starts = _starts(table, rows.lengths, len(flat))
    if weights is None and not is_tensor:
        weights = getattr(ids, "weights_or_none", lambda: None)()
    elif isinstance(weights, Tensor) and weights.is_nested:
        weights = weights_alike(table, weights, rows.lengths)
    return Bags(flat, starts, _checked_weights(table, weights, tuple(flat.shape)))


def _checked_ids(table: str, ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"table {table!r}: found ids of {ids.dtype}, expected int64 or int32")
    check_has_values(ids)
    return ids.long()


def _starts(table: str, values: Any, n_ids: int) -> Tensor:
    """Return where bags of these lengths begin."""
    lengths = _counts(table, "lengths", values)
    if bool((lengths < 0).any()) or int(lengths.sum()) != n_ids:
        raise ValueError(
            f"table {table!r}: found lengths {lengths[:3].tolist()}..., {int(lengths.sum())} in all, expected {n_ids} "
            "in all, as many as there are ids, and none below 0"
        )
    return lengths.cumsum(0) - lengths


def _checked_offsets(table: str, ends: Ends, n_ids: int) -> Tensor:
    starts = _counts(table, "offsets", ends.offsets)
    bounds = torch.cat([starts, starts.new_full((1,), n_ids)])
    good = bool((bounds.diff() >= 0).all()) and int(bounds[0]) == 0
    if not good or (ends.include_last_offset and int(starts[-1:].sum()) != n_ids):
        last = f"; the last {n_ids}" if ends.include_last_offset else ""
        raise ValueError(
            f"table {table!r}: found offsets {starts[:3].tolist()}...{starts[-3:].tolist()}, expected the first 0, "
            f"each at least the one before, and at most {n_ids}, as many as there are ids{last}"
        )
    return starts[:-1] if ends.include_last_offset else starts


def _counts(table: str, name: str, values: Any) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 1 or values.dtype not in (torch.int64, torch.int32):
        is_tensor = isinstance(values, Tensor)
        kind = f"{values.dtype} {tuple(values.shape)}" if is_tensor else type(values).__name__
        expected = "an int64 or int32 tensor of one dimension"
        raise ValueError(f"table {table!r}: found {name} of {kind}, expected {expected}")
    return values.long()


def _checked_weights(table: str, weights: Any, shape: tuple[int, ...]) -> Tensor | None:
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or tuple(weights.shape) != shape:
        kind = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"table {table!r}: found weights of {kind}, expected a tensor of {shape}, as the ids")
    return weights.reshape(-1)
