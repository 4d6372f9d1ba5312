"""The ids of the rows of a TorchRec table: their places, or, under ZCH, the raw ids that were given these places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.convert.row_checks import int64_ids
from recckpt.convert.source import Int64s, SourceTensor
from recckpt.errors import ConversionError
from recckpt.format.distinct import distinct

_RAW, _PLACES, _HASHED = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_hash_zch_identities"
_FREE = np.iinfo(np.int64).max  # in place of the raw id of a place that has none


@dataclass(frozen=True)
class PlacedIds:
    """The id of each place of a matrix; None for the places themselves."""

    n_places: int
    ids: Int64s | None = None

    @property
    def n_rows(self) -> int:
        """How many places have an id."""
        return self.n_places if self.ids is None else int((self.ids != _FREE).sum())

    def between(self, begin: int, end: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the ids of places [begin, end), and a mask of those that have one."""
        if self.ids is None:
            return np.arange(begin, end, dtype=np.int64), np.ones(end - begin, np.bool_)
        kept = self.ids[begin:end] != _FREE
        return self.ids[begin:end][kept], kept


def row_ids(table: str, n_places: int, tensors: Mapping[str, SourceTensor], url: str) -> PlacedIds:
    """Return the ids of a table; takes 8 bytes a row under ZCH.

    Raises:
        ConversionError: the remap of ZCH is damaged, or of a kind that is not read.
    """
    module, where = f"_managed_collision_modules.{table}.", f"table {table!r}, its ZCH"
    own = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if f".{module}" in f".{name}"}
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
    raw, places = raw[raw != _FREE], places[raw != _FREE]
    if len(places) and not 0 <= places.min() <= places.max() < n_places:
        found = f"places from {places.min()} to {places.max()}"
        raise ConversionError(url, where, found=found, expected=f"places in a matrix of {n_places} rows")
    if len(distinct(places)) < len(places):
        raise ConversionError(url, where, found="two ids in one place", expected="each in its own")
    ids = np.full(n_places, _FREE, np.int64)
    ids[places] = raw
    return PlacedIds(n_places, ids)
