"""The rows of a hash table of another library, as far as recckpt knows them: what it exports."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.format.distinct import repeated
from recckpt.live.library_types import LibraryExport, LibraryTable
from recckpt.sparse.table.checks import check_slot_name, spec_of
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.exported_rows import ExportedRows, ExportedStore, RowsOfMoment
from recckpt.sparse.table.mark_set import HasMarkSets
from recckpt.sparse.table.observers import Observers
from recckpt.sparse.table.store import in_order
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec

Int64s = npt.NDArray[np.int64]
_ID = SlotSpec("id", "int64", ())
_CPU = torch.device("cpu")
_NO_ROWS = np.empty(0, np.int64)


class LibraryStore(ExportedStore):
    """What a library exports of a table, checked; and who wants to know which ids went.

    Args:
        library: the table.

    Raises:
        LiveTableError: its slots cannot be saved; says all that is wrong.
    """

    def __init__(self, library: LibraryTable) -> None:
        self.lock = threading.RLock()
        self._library, self._observers = library, Observers()
        self._slots = in_order(library.slots())
        wrong = [slot.name for slot in self._slots if slot.dtype not in ITEM_BYTES or 0 in slot.shape]
        names = [slot.name for slot in self._slots]
        if wrong or EMBEDDING not in names or len({*names}) < len(names):
            raise LiveTableError(
                f"table {library.name!r}: found the slots {', '.join(f'{s.name} {s.kind}' for s in self._slots)}, "
                f"expected {EMBEDDING!r} among them, each once, with values of a dtype out of {', '.join(ITEM_BYTES)}"
            )
        for name in {*names} - {EMBEDDING}:
            check_slot_name(library.name, name)

    def __len__(self) -> int:
        return len(self._library)

    @property
    def ids(self) -> Column:
        """A column without rows."""
        return Column(_ID, _CPU)

    @property
    def columns(self) -> Mapping[str, Column]:
        """Columns without rows, by the names of slots."""
        return {slot.name: Column(slot, _CPU) for slot in self._slots}

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """The same."""
        return self.columns

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> ExportedRows:
        """Return all rows, which are yet to be exported."""
        kept = tuple(slot for slot in self._slots if slots is None or slot.name in slots)
        return ExportedRows(name, len(self), kept, lambda: self.export(None, slots))

    def track(self, marks: HasMarkSets) -> None:
        """Note in these marks which ids went."""
        with self.lock:
            self._observers.track(marks)

    def replaced(self) -> None:
        """Let marks take all rows for changed."""
        with self.lock:
            self._observers.replaced()

    def export(self, since: int | None, slots: Collection[str] | None = None) -> RowsOfMoment:
        """Return all rows, or those that were written since an epoch.

        Raises:
            LiveTableError: the library has exported something that is not the rows of a table. Marks take all rows for
                changed then, as whenever an export fails: what it has read and cleared may be lost.
        """
        with self.lock:
            try:
                exported = self._library.export(since)
                gone = exported.gone.detach().cpu().numpy().astype(np.int64, copy=False)
                for some in self._observers.mark_sets() if len(gone) else ():
                    some.erase(gone, _NO_ROWS, len(self))
                return self._checked(exported, since, slots)
            except BaseException:
                self._observers.replaced()
                raise

    def _checked(self, exported: LibraryExport, since: int | None, slots: Collection[str] | None) -> RowsOfMoment:
        """Return what was exported, in one piece of memory of the CPU.

        Raises:
            LiveTableError: it does not fit.
        """
        kept = [slot for slot in self._slots if slots is None or slot.name in slots]
        pieces: dict[str, list[Tensor]] = {name: [] for name in ("id", *(slot.name for slot in kept))}
        for of_batch, values in exported.rows:
            self._check_batch(of_batch, values)
            for name, column in pieces.items():
                column.append((of_batch if name == "id" else values[name]).detach().to(_CPU))
        joined = {slot.name: torch.cat([_no_rows(slot), *pieces[slot.name]]) for slot in (_ID, *kept)}
        ids = joined["id"].numpy()
        if len(twice := repeated(ids)):
            raise LiveTableError(f"table {self._library.name!r}: found the id {twice[0]} twice, expected each id once")
        if since is None and len(ids) != len(self):
            raise LiveTableError(
                f"table {self._library.name!r}: found {len(ids)} ids in its export, expected {len(self)}, as many as "
                "len() of it says"
            )
        return RowsOfMoment(ids, {slot.name: Column.over(slot, joined[slot.name]) for slot in kept}, exported.epoch)

    def _check_batch(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        expected = {"id": "int64", **{slot.name: slot.kind for slot in self._slots}}
        tensors = {"id": ids, **values}
        found = {name: spec_of(name, tensor).kind for name, tensor in tensors.items()}
        if found != expected or any(len(tensor) != len(ids) for tensor in values.values()):
            forms = ", ".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items())
            text = ", ".join(f"{name} {kind}" for name, kind in expected.items())
            raise LiveTableError(f"table {self._library.name!r}: found a batch of {forms}, expected {text} of each row")


def _no_rows(slot: SlotSpec) -> Tensor:
    return torch.empty(0, *slot.shape, dtype=getattr(torch, slot.dtype), device="cpu")
