"""What callers of ``live_tables`` may give, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch.optim import Optimizer

from recckpt.errors import LiveTableError
from recckpt.live.found import FoundTable
from recckpt.live.library_types import LibraryTable
from recckpt.types import LiveTable, is_list, positive_int


def listed_optimizers(optimizers: Any) -> list[Optimizer]:
    """Return optimizers, of which there may be one alone, as a list.

    Raises:
        TypeError: there is something else among them.
    """
    listed = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for one in listed:
        if not isinstance(one, Optimizer):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"a {type(one).__name__}"
            raise TypeError(f"optimizers must be optimizers of torch, found {what}")
    return listed


def check_options(min_rows: Any, names: Any, exclude: Any, audit: Any, adapters: Any) -> None:
    """Refuse arguments that are not what they can be.

    Raises:
        TypeError, ValueError: one is not.
    """
    positive_int("min_rows", min_rows)
    if names is not None and not (isinstance(names, Mapping) and all(isinstance(path, str) for path in names)):
        raise TypeError(f"names must be a dict, path of a module -> name of its table, found {names!r:.200}")
    if not (is_list(exclude) or isinstance(exclude, Set)) or not all(isinstance(path, str) for path in exclude):
        raise TypeError(f"exclude must be a list of paths of modules, found {exclude!r:.200}")
    if type(audit) is not int or audit < 0:
        raise ValueError(f"audit must be an int of at least 0, found {audit!r}")
    if not is_list(adapters):
        raise TypeError(f"adapters must be a list of tables, found a {type(adapters).__name__}")
    for adapter in adapters:
        if not isinstance(adapter, LiveTable | LibraryTable):
            raise TypeError(
                "adapters must be tables as recckpt.types.LiveTable or recckpt.live.LibraryTable, found a "
                f"{type(adapter).__name__}"
            )


def check_names(tables: Sequence[FoundTable], libraries: Sequence[LibraryTable]) -> None:
    """Refuse a name that two tables have.

    Raises:
        LiveTableError: there is one.
    """
    names = [*(table.live.name for table in tables), *(library.name for library in libraries)]
    if twice := sorted(name for name in {*names} if names.count(name) > 1):
        raise LiveTableError(f"two tables are named {twice[0]!r}: give the hash table of a library another name")
