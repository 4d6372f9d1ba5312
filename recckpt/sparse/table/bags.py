"""Replaces ``nn.Embedding`` and ``nn.EmbeddingBag`` by tables: takes over their rows, and pools bags of ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from recckpt.format.buckets import distinct
from recckpt.sparse.table.checks import check_has_values, check_proxy, checked_padding, flat_ids
from recckpt.sparse.table.nn_module import TableModule

Embedding = nn.Embedding | nn.EmbeddingBag
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
Mode = Literal["sum", "mean", "max"]


def ids_of_embedding(module: Any, name: str, ids: Tensor | None) -> tuple[Tensor, int | None]:
    """Return a module's ids (default: 0 to n - 1) and its padding id; refuse options that a table does not support."""
    if not isinstance(module, Embedding):
        raise TypeError(f"table {name!r}: found a {type(module).__name__}, expected an nn.Embedding or nn.EmbeddingBag")
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            value = f"{option}={getattr(module, option)!r}"
            raise ValueError(f"table {name!r}: found {value}, which no table supports: keep this module as it is")
    _check_plain(module, name)
    n_rows = len(module.weight)
    numbers = torch.arange(n_rows, device="cpu") if ids is None else torch.from_numpy(flat_ids(ids).copy())
    n_different = len(distinct(numbers.numpy()))
    if len(numbers) != n_rows or n_different != len(numbers):
        counts = f"{len(numbers)} ids, {n_different} of them different"
        raise ValueError(f"table {name!r}: found {counts}, expected {n_rows} distinct ids, one for each row")
    padding = module.padding_idx
    return numbers, None if padding is None else int(numbers[padding])


def _check_plain(module: Embedding, name: str) -> None:
    """Refuse a module whose behaviour was changed (own forward, hooks, parametrizations), which a table cannot copy."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    hooks = [hook for hook in _HOOKS if getattr(module, hook, None) or getattr(module.weight, hook, None)]
    extra = ""
    if type(module).forward is not kind.forward or "forward" in vars(module):
        extra = f"{type(module).__name__} with a forward of its own"
    elif hooks:
        extra = f"hooks ({', '.join(hook.strip('_') for hook in hooks)})"
    elif getattr(module, "parametrizations", None):
        extra = "parametrizations"
    if extra:
        raise ValueError(f"table {name!r}: found {extra}, which no table supports: keep this module as it is")


def rows_of_nested(table: str, what: str, nested: Any) -> tuple[Tensor, Tensor]:
    """Return the values of all rows of a nested tensor, without gaps, and the length of each row.

    Raises ValueError for a layout other than torch.jagged and for invalid offsets, because torch checks neither.
    """
    if nested.layout != torch.jagged:
        raise ValueError(f"table {table!r}: found nested {what} of {nested.layout}, expected layout=torch.jagged")
    if nested.dim() != 2:
        raise ValueError(f"table {table!r}: found nested {what} of {nested.dim()} dimensions, expected 2: (bags, ids)")
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    starts, has_holes = offsets[:-1], lengths is not None
    lengths = lengths if has_holes else offsets.diff()
    ends = starts + lengths
    is_inside = bool(((starts >= 0) & (lengths >= 0) & (ends <= len(values))).all())
    if not is_inside or (not has_holes and (int(offsets[0]), int(offsets[-1])) != (0, len(values))):
        raise ValueError(
            f"table {table!r}: found {len(values)} values and offsets {offsets[:3].tolist()}...{offsets[-3:].tolist()} "
            f"in nested {what}, expected ascending offsets from 0 to {len(values)}: pass lengths too if values lie "
            "outside all rows, or cut such values off"
        )
    if has_holes:
        firsts = starts - (lengths.cumsum(0) - lengths)  # by how much gaps shift each row
        places = torch.arange(int(lengths.sum()), device=values.device) + firsts.repeat_interleave(lengths)
        values = values[places]
    return values, lengths


def weights_alike(table: str, nested: Tensor, lengths: Tensor) -> Tensor:
    values, own_lengths = rows_of_nested(table, "weights", nested)
    own, expected = own_lengths.tolist(), lengths.tolist()
    if own != expected:
        row = next((row for row, pair in enumerate(zip(own, expected, strict=False)) if len({*pair}) > 1), None)
        what = f"{len(own)} rows of weights, expected {len(expected)}"
        if row is not None:
            what = f"{own[row]} weights in row {row}, expected {expected[row]}"
        raise ValueError(f"table {table!r}: found {what}, one for each id")
    return values


@dataclass(frozen=True)
class Bags:
    ids: Tensor  # int64
    offsets: Tensor  # int64, on the device of the ids
    weights: Tensor | None


def bags_of(
    table: TableModule,
    ids: Any,
    weights: Any,
    padding_id: int | None,
    *,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    include_last_offset: bool = False,
) -> Bags:
    """Return bags of ids without padding ids; a bag may be empty. ``offsets`` and ``lengths`` exclude each other."""
    bags = _bags_of(table.name, ids, weights, offsets, lengths, include_last_offset=include_last_offset)
    padding_id = table.padding_id if padding_id is None else checked_padding(table.name, padding_id)
    if padding_id is None:
        return bags
    kept = bags.ids != padding_id
    n_before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    own_weights = None if bags.weights is None else bags.weights[kept.to(bags.weights.device)]
    return Bags(bags.ids[kept], n_before[bags.offsets], own_weights)


def check_mode(table: TableModule, mode: Mode, weights: Tensor | None) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"table {table.name!r}: found mode={mode!r}, expected one of {', '.join(get_args(Mode))}")
    if not table.dtype.is_floating_point:
        raise ValueError(f"table {table.name!r} of {table.dtype} cannot be pooled: look up its rows and pool them")
    if weights is not None and mode != "sum":
        raise ValueError(f"table {table.name!r}: found weights and mode={mode!r}, expected mode='sum' with weights")
    if weights is not None and weights.dtype != table.dtype:
        raise ValueError(
            f"table {table.name!r}: found weights of {weights.dtype}, expected {table.dtype}, the dtype of the table"
        )


def pool(rows: Tensor, bags: Bags, mode: Mode) -> Tensor:
    if not len(bags.offsets):  # torch makes no graph for an empty batch
        return rows[:0]
    numbers = torch.arange(len(rows), device=rows.device)
    weights = None if bags.weights is None else bags.weights.to(rows.device)
    offsets = bags.offsets.to(rows.device)
    out = functional.embedding_bag(numbers, rows.flatten(1), offsets, mode=mode, per_sample_weights=weights)
    return out.view(-1, *rows.shape[1:])


def _bags_of(
    table: str, ids: Any, weights: Any, offsets: Tensor | None, lengths: Tensor | None, *, include_last_offset: bool
) -> Bags:
    named = [name for name, values in (("offsets", offsets), ("lengths", lengths)) if values is not None]
    if include_last_offset and offsets is None:
        raise ValueError(f"table {table!r}: found include_last_offset without offsets, expected both or neither")
    if not isinstance(ids, Tensor) or ids.is_nested:
        if named:
            raise ValueError(f"table {table!r}: found {' and '.join(named)} with ragged ids, which have their own")
        return _of_ragged(table, ids, weights)
    flat = _checked_ids(table, ids).reshape(-1)
    if ids.dim() == 2 and not named:
        starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    elif ids.dim() != 1 or len(named) != 1:
        kind = f"ids of shape {tuple(ids.shape)} with {' and '.join(named) or 'neither offsets nor lengths'}"
        raise ValueError(f"table {table!r}: found {kind}, expected ids of two dimensions, or of one with either")
    elif lengths is not None:
        starts = _starts(table, lengths, len(flat))
    else:
        starts = _checked_offsets(table, offsets, len(flat), include_last_offset=include_last_offset)
    return Bags(flat, starts.to(flat.device), _checked_weights(table, weights, tuple(ids.shape)))


def _of_ragged(table: str, ids: Any, weights: Any) -> Bags:
    is_tensor = isinstance(ids, Tensor)
    check_proxy(ids)
    if not is_tensor and hasattr(ids, "keys"):
        raise TypeError(
            f"table {table!r}: found a {type(ids).__name__} of several features, expected a single feature: "
            f"ids[{table!r}]; EmbeddingCollection.bag takes all features"
        )
    if not is_tensor and not all(callable(getattr(ids, name, None)) for name in ("values", "lengths", "offsets")):
        raise TypeError(
            f"table {table!r}: found ids of {type(ids).__name__}, expected an int64 or int32 tensor, or an object with "
            "values(), lengths() and offsets(); convert lists with torch.as_tensor, strings with hash_ids"
        )
    values, lengths = rows_of_nested(table, "ids", ids) if is_tensor else (ids.values(), ids.lengths())
    flat = _checked_ids(table, values)
    if flat.dim() != 1:
        raise ValueError(f"table {table!r}: found values() of shape {tuple(flat.shape)}, expected one dimension")
    starts = _starts(table, lengths, len(flat))
    if weights is None and not is_tensor:
        weights = getattr(ids, "weights_or_none", lambda: None)()
    elif isinstance(weights, Tensor) and weights.is_nested:
        weights = weights_alike(table, weights, lengths)
    return Bags(flat, starts, _checked_weights(table, weights, tuple(flat.shape)))


def _checked_ids(table: str, ids: Tensor) -> Tensor:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"table {table!r}: found ids of {ids.dtype}, expected int64 or int32")
    check_has_values(ids)
    return ids.long()


def _starts(table: str, values: Any, n_ids: int) -> Tensor:
    lengths = _counts(table, "lengths", values)
    if bool((lengths < 0).any()) or int(lengths.sum()) != n_ids:
        raise ValueError(
            f"table {table!r}: found lengths {lengths[:3].tolist()}... with the sum {int(lengths.sum())}, expected "
            f"lengths of at least 0 with the sum {n_ids}, the number of ids"
        )
    return lengths.cumsum(0) - lengths


def _checked_offsets(table: str, offsets: Tensor | None, n_ids: int, *, include_last_offset: bool) -> Tensor:
    starts = _counts(table, "offsets", offsets)
    bounds = torch.cat([starts, starts.new_full((1,), n_ids)])
    good = bool((bounds.diff() >= 0).all()) and int(bounds[0]) == 0
    if not good or (include_last_offset and int(starts[-1:].sum()) != n_ids):
        last = f"; the last {n_ids}" if include_last_offset else ""
        raise ValueError(
            f"table {table!r}: found offsets {starts[:3].tolist()}...{starts[-3:].tolist()}, expected ascending ones "
            f"from 0, and at most {n_ids}, the number of ids{last}"
        )
    return starts[:-1] if include_last_offset else starts


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
        raise ValueError(f"table {table!r}: found weights of {kind}, expected a tensor of {shape}, as the ids have")
    return weights.reshape(-1)
