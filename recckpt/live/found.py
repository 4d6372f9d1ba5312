"""What looking for live tables finds: candidates, and the tables that they become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.optimizer_class import updater
from recckpt.text import nearest
from recckpt.types import LiveTable

FINGERPRINTS = "fingerprints"  # of all rows, at each save
OWN = "own"


@dataclass(frozen=True)
class FoundTable:
    """A live table of a model.

    Attributes:
        live: the table.
        path: of its module.
        kind: of module.
        keys: of its weight in the state dict of the model.
        weights: returns the parameters that are its rows by now.
        marks: how its changes are known: ``"gradient"`` by the optimizer's step, ``"backward"`` by that of a kernel, or
            ``OWN`` by what an adapter of somebody else announces, or ``FINGERPRINTS`` by looking at all rows at a save.
        is_announced: whether all that changes rows is announced; otherwise training waits while they are copied.
        optimizer: that trains it; None where it is frozen, or updates itself.
        why: why that is not the best; None where it is.
        is_tensor: whether the keys are of the tensor of its rows, and not of one around it, or of pieces.
        collection: of TorchRec, of which the table is one, spread over ranks; None where it is of none.
        tensors: names under which a checkpoint without live tables has its rows, as one dense tensor.
        companions: tables of rows that lie in the same memory.
    """

    live: LiveTable
    path: str
    kind: str
    keys: tuple[str, ...]
    weights: Callable[[], tuple[Tensor, ...]]
    marks: str
    is_announced: bool
    optimizer: Optimizer | None = None
    why: str | None = None
    is_tensor: bool = True
    collection: nn.Module | None = None
    tensors: tuple[str, ...] = ()
    companions: tuple[FoundTable, ...] = ()

    @property
    def keys_in_collection(self) -> set[str]:
        """The keys of the weights in the state dict of the collection, without those of what maps their ids."""
        return {".".join(key.rsplit(".", 3)[-3:]) for key in self.keys if key.startswith(f"{self.path}.")}

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Say whether the table has the states that an optimizer keeps of its weights."""
        return self.is_announced if self.optimizer is None else updater(optimizer) is self.optimizer


@dataclass(frozen=True)
class Candidate:
    """What may become a live table.

    Attributes:
        path: of its module, by which ``names`` and ``exclude`` mean it.
        name: of the table, where ``names`` gives no other.
        n_rows: that it has over all ranks.
        make: makes the table of this name; raises LiveTableError where it is to stay dense.
        together: path of the module whose tables are one tensor, so that all of them are live, or none.
    """

    path: str
    name: str
    n_rows: int
    make: Callable[[str], FoundTable]
    together: str | None = None


def with_marks(tables: Sequence[FoundTable], marks: str | Mapping[str, str]) -> list[FoundTable]:
    """Return the tables with the marks that are wanted for them.

    Raises:
        TypeError, ValueError: it is not a kind of marks, or a name is not one of a table.
    """
    if not isinstance(marks, str | Mapping):
        expected = f"'auto' or {FINGERPRINTS!r}, or a dict, name of a table -> one of them"
        raise TypeError(f"marks must be {expected}, found {marks!r:.200}")
    by_name = dict.fromkeys((table.live.name for table in tables), marks) if isinstance(marks, str) else dict(marks)
    names = [table.live.name for table in tables]
    for name, kind in by_name.items():
        if name not in names:
            raise ValueError(f"marks: {name!r} is not a live table{nearest(name, names)}")
        if kind not in ("auto", FINGERPRINTS):
            raise ValueError(f"marks: found {kind!r}, expected 'auto' or {FINGERPRINTS!r}")
    printed = {name for name, kind in by_name.items() if kind == FINGERPRINTS}
    return [replace(table, marks=FINGERPRINTS) if table.live.name in printed else table for table in tables]
