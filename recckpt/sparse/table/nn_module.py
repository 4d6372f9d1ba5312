"""How a table behaves as an ``nn.Module``: in state dicts, on devices, when copied and when pickled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recckpt import types
from recckpt.sparse.table.checks import checked_device
from recckpt.sparse.table.gradients import Gradients
from recckpt.sparse.table.initializers import Initializer
from recckpt.sparse.table.row_store import RowStore

if TYPE_CHECKING:
    from typing_extensions import Self


_PROBES = count()


class TableModule(nn.Module):
    """A module whose state is a store of rows, and which stands in state dicts as itself."""

    name: str
    dtype: torch.dtype
    initializer: Initializer
    _store: RowStore
    _gradients: Gradients

    @property
    def device(self) -> torch.device:
        """Where the slots live."""
        return self._store.device

    def __getattr__(self, name: str) -> Any:
        """Return the table for its own name, under which it stands in state dicts: torch walks along their keys."""
        if name in self.__dict__.get("name", "").split("."):
            return self
        return super().__getattr__(name)

    def _copy_rows_of(self, other: types.HashTable) -> None:
        """Become a copy of ``other``; where it does not fit, raise ValueError before anything changes."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + self.name] = self

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

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Follow ``model.to(device)``; the dtype stays, since it is part of the table's identity."""
        probe = torch.full((4,), next(_PROBES) % 100 + 1, dtype=self.dtype, device=self.device)  # unlike the last one
        moved = fn(probe)
        if moved.dtype != self.dtype:
            raise TypeError(
                f"table {self.name!r} keeps its dtype {self.dtype}, cannot become {moved.dtype}: make the "
                "table with dtype=..., and convert the dense modules one by one"
            )
        checked_device(self.name, moved.device)
        if not torch.equal(moved.cpu(), probe.cpu()):
            raise ValueError(
                f"table {self.name!r}: to_empty() would leave its rows without values: call it on the dense modules "
                "one by one, and table.to(device) here"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if moved.device != self.device:
            self._store = self._store.to(moved.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        own = {
            "_store": self._store.to(self.device),
            "_gradients": Gradients(),
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
