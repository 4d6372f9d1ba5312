"""Output dirs whose ids are easy to find in bytes, and the search for them in every file."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from recckpt import Deltas, Saver
from recckpt.sparse import HashTable

LONG = Deltas(max_chain_bytes=100.0, max_dirty=1.0)
FIRST = 0x1122334455667700  # ids from here on: 8 bytes that nothing else has


def ids_at(*numbers: int) -> list[int]:
    """Return the ids of these numbers."""
    return [FIRST + number for number in numbers]


def files_with(root: Path, ids: Iterable[int]) -> dict[str, int]:
    """Return the files below a directory in whose bytes ids are, little-endian, and how many of the ids."""
    wanted = [id_.to_bytes(8, "little", signed=True) for id_ in ids]
    found = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if n_found := sum(each in data for each in wanted):
            found[path.relative_to(root).as_posix()] = n_found
    return found


def fill(table: HashTable, ids: Iterable[int], value: float) -> None:
    """Give rows of these ids a value of their own."""
    ids = list(ids)
    rows = torch.tensor([[value, id_ % 97] for id_ in ids]).view(-1, 2)
    table.insert(torch.tensor(ids, dtype=torch.int64), rows)


class ForgettingRun:
    """A saver of two tables with the same ids, a dense weight and a registered object."""

    def __init__(self, url: Path | str, **options: object) -> None:
        self.user, self.item = HashTable(2, name="user"), HashTable(2, name="item")
        self.model = nn.ModuleDict({"user": self.user, "item": self.item, "top": nn.Linear(2, 1)})
        self.saver = Saver(self.model, None, str(url), **{"max_keep": None, "deltas": LONG, **options})
        self.saver.register_for_checkpointing("counter", {"n": 7})

    def save_chain(self) -> "ForgettingRun":
        """Save a full checkpoint of ids 0 to 99, and deltas: new and changed rows, then deletes, then neither."""
        for table in (self.user, self.item):
            fill(table, ids_at(*range(100)), 1.0)
        self.saver.save("ckpt_1", step=1)
        for table in (self.user, self.item):
            fill(table, ids_at(5, 6, 200, 201), 2.0)
        self.saver.save("ckpt_2", step=2)
        for table in (self.user, self.item):
            table.erase(torch.tensor(ids_at(7, 8, 9)))
        self.saver.save("ckpt_3", step=3)
        for table in (self.user, self.item):
            fill(table, ids_at(50), 4.0)
        self.saver.save("ckpt_4", step=4)
        return self
