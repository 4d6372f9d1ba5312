"""The ids of the rows of a TorchRec table: their places, or the ids that ZCH has given these places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from recckpt.convert.row_checks import int64_ids
from recckpt.convert.source import Int64s, SourceTensor
from recckpt.errors import ConversionError
from recckpt.format.distinct import distinct

_RAW, _PLACES, _HASHED = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"
_COUNTERS = "_mch_"  # how the names of what an eviction policy keeps of each id begin
_FREE = np.iinfo(np.int64).max  # in place of the raw id of a place that has none


@dataclass(frozen=True)
class PlacedIds:
    """The id of each place of a matrix.

    Attributes:
        n_places: rows of the matrix.
        ids: None for the places themselves.
        has_free: whether places may have no id.
        counters: slot -> what ZCH keeps of each place that has an id.
    """

    n_places: int
    ids: Int64s | None = None
    has_free: bool = False
    counters: Mapping[str, Int64s] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """How many places have an id."""
        return int((self.ids != _FREE).sum()) if self.ids is not None and self.has_free else self.n_places

    def between(self, begin: int, end: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the ids of places [begin, end), and a mask of those that have one."""
        ids = np.arange(begin, end, dtype=np.int64) if self.ids is None else self.ids[begin:end]
        kept = ids != _FREE if self.has_free else np.ones(end - begin, np.bool_)
        return ids[kept], kept


def listed_ids(table: str, n_places: int, tensor: SourceTensor, url: str) -> PlacedIds:
    """Return the ids of a table behind a key-value store, which lie beside the rows; takes 8 bytes a row.

    Raises:
        ConversionError: there is not one for each row.
    """
    where = f"table {table!r}, its weight_id"
    if tensor.shape not in ((n_places,), (n_places, 1)):
        found, expected = f"ids of shape {tensor.shape}", f"one for each of {n_places} rows"
        raise ConversionError(url, where, found=found, expected=expected)
    return PlacedIds(n_places, int64_ids(tensor.whole().reshape(-1), url, where))


def row_ids(table: str, n_places: int, own: Mapping[str, SourceTensor], url: str) -> PlacedIds:
    """Return the ids of a table, of whose ZCH ``own`` is the state; takes 8 bytes a row under ZCH.

    Raises:
        ConversionError: the remap of ZCH is damaged, or of a kind that is not read.
    """
    where = f"table {table!r}, its ZCH"
    if _HASHED in own:
        remedy = "export its ids and rows with TorchRec, and import these"
        raise ConversionError(url, where, found="multi-probe hashing", expected="a sorted remap", remedy=remedy)
    if _RAW not in own:
        return PlacedIds(n_places)
    if _PLACES not in own:
        raise ConversionError(url, where, found=f"{_RAW} alone", expected=f"{_PLACES} beside it")
    raw = int64_ids(own[_RAW].whole(), url, where)
    places = int64_ids(own[_PLACES].whole(), url, where)
    if len(raw) != len(places):
        found = f"{len(raw)} raw ids and {len(places)} places"
        raise ConversionError(url, where, found=found, expected="as many of both")
    has_id = raw != _FREE
    raw, places = raw[has_id], places[has_id]
    if len(places) and not 0 <= places.min() <= places.max() < n_places:
        found = f"places from {places.min()} to {places.max()}"
        raise ConversionError(url, where, found=found, expected=f"places in a matrix of {n_places} rows")
    if len(distinct(places)) < len(places):
        raise ConversionError(url, where, found="two ids in one place", expected="each in its own")
    ids = np.full(n_places, _FREE, np.int64)
    ids[places] = raw
    counters = {
        f"zch_{name.removeprefix(_COUNTERS)}": _placed(own[name].whole()[has_id], places, n_places)
        for name in counters_in(own)
    }
    return PlacedIds(n_places, ids, has_free=True, counters=counters)


def counters_in(own: Mapping[str, SourceTensor]) -> list[str]:
    """Return what the state of ZCH has of each id beside its place: the counters of its eviction policy."""
    n_ids = own[_RAW].shape if _RAW in own else None
    others = (name for name in own if name.startswith(_COUNTERS) and name not in (_RAW, _PLACES))
    return [name for name in others if own[name].dtype == "int64" and own[name].shape == n_ids]


def _placed(values: Int64s, places: Int64s, n_places: int) -> Int64s:
    of_places = np.zeros(n_places, np.int64)
    of_places[places] = values
    return of_places
