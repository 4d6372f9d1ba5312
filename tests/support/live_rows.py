"""What of live tables has changed, bit for bit, beside what was announced and what was saved."""

import numpy as np
import torch

from recckpt import CheckpointReader


def rows_of(tables):
    """Return the bytes of all rows by table and slot."""
    return {
        (name, slot): values.detach().cpu().numpy().tobytes()
        for name, table in tables.items()
        for slot, values in table.live.tensors().items()
    }


class Rows:
    """Notes what live tables announce from now on, and compares with copies what has changed since; a context."""

    def __init__(self, tables):
        self._tables, self._announced, self._removers = tables, {name: set() for name in tables}, []
        self._before = {name: self._bits(table) for name, table in tables.items()}

    def __enter__(self):
        for name, table in self._tables.items():
            self._removers.append(self._noting(table.store, self._announced[name]))
        return self

    def __exit__(self, *error):
        for remove in self._removers:
            remove()

    def announced(self):
        """Return the rows that were announced, by table."""
        return {name: set(rows) for name, rows in self._announced.items()}

    def changed(self):
        """Return the rows that differ by a bit from those at the beginning, by table."""
        return {
            name: set(np.flatnonzero((self._bits(table) != self._before[name]).any(1)).tolist())
            for name, table in self._tables.items()
        }

    @staticmethod
    def _bits(table):
        tensors = [values.detach().cpu().contiguous() for values in table.live.tensors().values()]
        return np.concatenate(
            [values.flatten(1).view(torch.uint8).numpy().copy() for values in map(_matrix, tensors)], 1
        )

    @staticmethod
    def _noting(store, rows):
        announce, announce_all = store.announce, store.announce_all

        def noting(some):  # numbers of rows, or a bool for each
            rows.update((some.nonzero() if some.dtype == torch.bool else some).flatten().tolist())
            announce(some)

        store.announce = noting
        store.announce_all = lambda: (rows.update(range(len(store))), announce_all())

        def remove():
            del store.announce, store.announce_all

        return remove


def _matrix(values):
    """Return a tensor of two dimensions: of scalars, with a column."""
    return values[:, None] if values.dim() == 1 else values


def assert_saved(tables, output_dir, rows=None):
    """Check that the newest checkpoint has these rows of all tables, by default those of now."""
    rows = rows_of(tables) if rows is None else rows
    with CheckpointReader(str(output_dir)) as reader:
        for (name, slot), expected in rows.items():
            values, is_there = reader.lookup(name, np.arange(tables[name].live.n_rows), slot)
            assert is_there.all(), name
            assert values.tobytes() == expected, (name, slot)
