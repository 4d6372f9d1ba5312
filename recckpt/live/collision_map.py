"""The map of TorchRec's managed collision: which raw id has which row; read from its buffers, which 1.8 has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.keyed_types import IdMap
from recckpt.sparse.files.owners import IdBlock

_EMPTY = torch.iinfo(torch.int64).max  # in place of a raw id
_ROW = "zch_row"  # slots are part of the format
_IDS, _ROWS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
_MODULE, _CLASS = "torchrec.modules.mc_modules", "MCHManagedCollisionModule"


class CollisionMap:
    """The map of one module of managed collision. Its rows are those of the shard of this rank, the last is nobody's.

    Args:
        module: a ``MCHManagedCollisionModule``.

    Raises:
        LiveTableError: it is another module, whose map lies elsewhere.
    """

    def __init__(self, module: Any) -> None:
        if (type(module).__module__, type(module).__name__) != (_MODULE, _CLASS):
            raise LiveTableError(
                f"its ids are remapped by a {type(module).__name__}, whose map recckpt does not read: table and map "
                f"are saved as dense tensors, whole each time; remap them by {_CLASS} to save them by raw id"
            )
        self._module = module
        self._meta = {
            f"zch_{info.metadata_name}": f"_mch_{info.metadata_name}"
            for info in module._eviction_policy.metadata_info
            if info.is_mch_metadata
        }

    @property
    def first(self) -> int:
        """The first row of the shard, of those of all ranks."""
        return int(self._module._output_global_offset)

    @property
    def n_rows(self) -> int:
        """How many rows the shard has."""
        return int(self._module._zch_size)

    @property
    def fallback(self) -> int:
        """The row of the shard that all ids without a row share."""
        return self.n_rows - 1

    @property
    def n_shards(self) -> int:
        """Over how many ranks the table is divided, each of which has a map of its own."""
        return len(self._segments) - 1

    @property
    def looked_up(self) -> IdBlock:
        """The raw ids that TorchRec looks up on this rank: those of its part of the input, others in turn.

        As ``fbgemm::block_bucketize_sparse_features``, by which TorchRec sends them there.
        """
        n_shards, size = self.n_shards, int(self._module._input_hash_size)
        return IdBlock(self._segments.index(self.first), n_shards, -(-size // n_shards))

    @property
    def _segments(self) -> list[int]:
        """The first row of each shard, and the end of the last."""
        return [row for row in self._buffer("_output_segments_tensor").tolist() if row >= 0]

    @property
    def buffers(self) -> Sequence[str]:
        """The buffers that are made anew from what is saved."""
        return _IDS, _ROWS, "_output_segments_tensor", *self._meta.values()

    @property
    def id_bytes(self) -> int:
        """Bytes that are copied of each id at a save."""
        return 16 + 8 * len(self._meta)

    def check(self) -> None:
        """Make sure that the last row is nobody's, as rows are counted here.

        Raises:
            LiveTableError: it is not.
        """
        last = int(getattr(self._module, _ROWS)[-1]) - self.first
        if last != self.fallback or int(getattr(self._module, _IDS)[-1]) != _EMPTY:
            raise LiveTableError(
                f"found row {last} at the end of {_ROWS}, expected {self.fallback}, which no id has: the buffers of "
                "the module were written by something else than itself; load a checkpoint, which writes them anew"
            )

    def read(self) -> IdMap:
        """Return the ids of now, with their rows of the shard."""
        ids = self._buffer(_IDS)
        n_ids = int(torch.searchsorted(ids, torch.tensor([_EMPTY], device=ids.device)))
        rows = self._buffer(_ROWS)[:n_ids].clone()
        meta = {slot: self._buffer(name)[:n_ids].clone() for slot, name in self._meta.items()}
        return IdMap(ids[:n_ids].clone(), rows - self.first, {_ROW: rows, **meta})

    def free(self) -> Tensor:
        """Return the rows that no id has, in ascending order; not the one that is nobody's."""
        is_free = torch.ones(self.n_rows, dtype=torch.bool, device="cpu")
        is_free[self.read().rows.cpu()] = False
        is_free[self.fallback] = False
        return is_free.nonzero().flatten()

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return the rows for ids, in ascending order: those that they had where all of them have one here.

        Raises:
            LiveTableError: there are more ids than rows, and none is to be dropped.
        """
        rows = meta[_ROW] - self.first
        is_here = bool(((rows >= 0) & (rows < self.fallback)).all())
        if is_here and len(torch.unique(rows)) == len(rows):
            return rows
        if len(ids) > self.fallback and not drops:
            raise LiveTableError(
                f"found {len(ids)} ids for the rows {self.first} to {self.first + self.fallback - 1}, expected at most "
                f"{self.fallback}: make zch_size larger, or keep those that count most by 'zch': 'drop' in load_conf"
            )
        places = torch.full_like(ids, -1)
        worth = next((meta[slot] for slot in ("zch_counts", "zch_last_access_iter") if slot in meta), ids)
        kept = torch.argsort(worth, descending=True, stable=True)[: self.fallback].sort().values
        places[kept] = torch.arange(len(kept), device="cpu")
        return places

    def write(self, id_map: IdMap) -> None:
        """Make these the ids; what was looked up since the last eviction is forgotten, as by a load of TorchRec's."""
        module, n_ids, device = self._module, len(id_map.ids), self._buffer(_IDS).device
        is_free = torch.ones(self.n_rows, dtype=torch.bool, device="cpu")
        is_free[id_map.rows] = False
        rows = torch.cat([id_map.rows, is_free.nonzero().flatten()])  # the last one is nobody's
        values = {_IDS: (id_map.ids, _EMPTY), _ROWS: (rows + self.first, 0)}
        values |= {name: (id_map.meta[slot], 0) for slot, name in self._meta.items()}
        with torch.no_grad():
            for name, (tensor, rest) in values.items():
                buffer = self._buffer(name)
                buffer[: len(tensor)] = tensor.to(device)
                buffer[len(tensor) :] = rest
            accesses = id_map.meta.get("zch_last_access_iter")
            newest = 0 if accesses is None or not n_ids else accesses.max()
            module._current_iter_tensor.clamp_(min=int(newest))  # an id of another run was not looked up later than now
        module._current_iter = -1  # it is read from the tensor then
        module._current_history_buffer_offset, module._evicted = 0, False

    def _buffer(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self._module, name)
        return tensor.detach()
