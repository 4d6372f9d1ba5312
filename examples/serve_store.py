"""Keep a key-value store at the newest checkpoint of a run: by what changed, with deletes, wherever it was stopped.

redis-server --save "" &
python examples/train_ctr.py --deltas --save-interval 100 --steps 100000 --output-dir runs/clicks &
python examples/serve_store.py runs/clicks &
python examples/serve_store.py --get item 17

Any server that speaks Redis's protocol will do, such as Valkey (pip install redis). It imports no torch. A table is a
hash, id -> float32 values of the row. What is begun is noted first, and what is applied last: what was stopped between
the two is applied once more, which changes nothing, or, where the run has gone back behind it, written anew. A table
that is replaced is written beside the old one, which answers until then.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import redis

import recckpt
from recckpt.inspect import RowChanges

NOTES = "recckpt:notes"  # "applied" and "begun": names of checkpoints; "tables": the names of those that are served


class RowStore:
    """The rows of tables in a key-value server."""

    def __init__(self, url: str) -> None:
        self._server = redis.Redis.from_url(url)

    @property
    def applied(self) -> str | None:
        """The name of the checkpoint that the store is at; None where it is empty."""
        return self._noted("applied")

    def apply(self, checkpoint: recckpt.CheckpointReader) -> int:
        """Bring the store to a checkpoint, and return how many rows were written."""
        begun, n_rows = self._noted("begun"), 0
        went_back = begun is not None and checkpoint.changes_since(begun).is_whole  # rows of it may be in the store
        changes = checkpoint.changes_since(None if went_back else self.applied)
        served = (self._noted("tables") or "").split("\n")
        self._note(begun=checkpoint.manifest.name, tables="\n".join(dict.fromkeys([*served, *checkpoint.tables()])))
        for change in changes.tables.values():
            n_rows += self._replace(change) if change.replaced else self._update(change)
        for table in set(served) - {*checkpoint.tables()}:
            self._server.delete(_key(table))
        self._note(applied=checkpoint.manifest.name, tables="\n".join(checkpoint.tables()))
        return n_rows

    def look_up(self, table: str, ids: Sequence[int], dim: int) -> tuple[npt.NDArray[np.float32], list[bool]]:
        """Return a row for each id, zeros where there is none, and which there are."""
        found: list[Any] = self._server.hmget(_key(table), list(map(str, ids)))
        rows = [np.zeros(dim, np.float32) if row is None else np.frombuffer(row, np.float32) for row in found]
        return np.stack(rows), [row is not None for row in found]

    def _noted(self, what: str) -> str | None:
        note: Any = self._server.hget(NOTES, what)
        return None if note is None else str(note, "utf-8")

    def _note(self, **notes: str) -> None:
        mapping: Any = notes
        self._server.hset(NOTES, mapping=mapping)

    def _update(self, change: RowChanges) -> int:
        for ids in change.deletes():
            if len(ids):
                self._server.hdel(_key(change.name), *map(str, ids.tolist()))
        return self._write(change, _key(change.name))

    def _replace(self, change: RowChanges) -> int:
        """Write all rows beside those that are there, and put them in their place in one step."""
        beside = f"{_key(change.name)}:next"
        self._server.delete(beside)  # of one that was stopped
        n_rows = self._write(change, beside)
        if n_rows:
            self._server.rename(beside, _key(change.name))
        else:
            self._server.delete(_key(change.name))
        return n_rows

    def _write(self, change: RowChanges, key: str) -> int:
        n_rows = 0
        for ids, values in change.values("embedding"):
            vectors = values.astype(np.float32)
            rows: Any = dict(zip(map(str, ids.tolist()), map(bytes, vectors), strict=True))
            if rows:
                self._server.hset(key, mapping=rows)
            n_rows += len(rows)
        return n_rows


def _key(table: str) -> str:
    return f"recckpt:table:{table}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/clicks", help="output dir; a path or URL")
    parser.add_argument("--store", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--timeout-sec", type=float, help="end when no checkpoint has come for so long")
    parser.add_argument("--get", nargs=2, metavar=("TABLE", "ID"), help="print a row of the store, and end")
    args = parser.parse_args()
    store = RowStore(args.store)
    if args.get:
        table, id_ = args.get
        print(store.look_up(table, [int(id_)], 1))
        return
    for checkpoint in recckpt.follow(args.run, timeout_sec=args.timeout_sec, newest=True):
        begin = time.perf_counter()
        n_rows = store.apply(checkpoint)
        seconds = time.perf_counter() - begin
        print(f"step {checkpoint.manifest.step}: {n_rows} rows in {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
