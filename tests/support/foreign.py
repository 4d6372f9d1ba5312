"""A table that is not ours."""

from collections.abc import Mapping

import torch
from torch import Tensor


class ForeignTable:
    """The least that fits the protocol: a dict of rows in the order of insertion."""

    def __init__(self, name: str, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        self.name = name
        self._ids, self._embeddings, self._slots = ids, embeddings, dict(slots or {})

    def ids(self) -> Tensor:
        return self._ids

    def embeddings(self) -> Tensor:
        return self._embeddings

    @property
    def slots(self) -> Mapping[str, Tensor]:
        return self._slots

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        rows = {id_: (-1, row) for row, id_ in enumerate(self._ids.tolist())}
        rows |= {id_: (0, row) for row, id_ in enumerate(ids.tolist())}  # the last of equal ids wins
        at = torch.tensor([row if new < 0 else row + len(self._ids) for new, row in rows.values()], dtype=torch.int64)
        self._ids = torch.cat([self._ids, ids])[at]
        self._embeddings = torch.cat([self._embeddings, embeddings])[at]
        for name, values in self._slots.items():
            added = (slots or {}).get(name, values.new_zeros(len(ids), *values.shape[1:]))
            self._slots[name] = torch.cat([values, added])[at]

    def clear(self) -> None:
        self._ids, self._embeddings = self._ids[:0], self._embeddings[:0]
        self._slots = {name: values[:0] for name, values in self._slots.items()}

    def __len__(self) -> int:
        return len(self._ids)
