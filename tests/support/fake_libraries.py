"""Hash tables of libraries that need a GPU, as dicts: with the methods, scores and evictions that adapters go by."""

from itertools import count
from types import SimpleNamespace

import torch

_NOW = count(100)  # a time, which goes on from one process to the next


class _Rows:
    """Rows by key, (values, score) each, of which those with the lowest scores go where there are too many."""

    def __init__(self, dim, capacity):
        self.dim, self.capacity, self.rows = dim, capacity, {}

    def put(self, keys, values, scores):
        """Set rows; return the keys that had to go for them."""
        for key, row, score in zip(keys.tolist(), values.clone(), scores, strict=True):
            self.rows[key] = row, int(score)
        n_over = max(0, len(self.rows) - self.capacity)
        evicted = sorted(self.rows, key=lambda key: (self.rows[key][1], key))[:n_over]
        for key in evicted:
            del self.rows[key]
        return torch.tensor(evicted, dtype=torch.int64)

    def train(self, keys, scores):
        """Add 1 to all values of keys, beginning at random ones; return the keys that had to go."""
        new = torch.rand(len(keys), 2 * self.dim)
        values = torch.stack([self.rows[key][0] if key in self.rows else new[i] for i, key in enumerate(keys)])
        return self.put(torch.tensor(keys), values + 1, scores)

    def at_least(self, threshold):
        """Return keys, values and scores of the rows whose score is not less."""
        some = {key: row for key, row in self.rows.items() if row[1] >= threshold}
        values = torch.stack([values for values, _ in some.values()]) if some else torch.empty(0, 2 * self.dim)
        scores = torch.tensor([score for _, score in some.values()], dtype=torch.int64)
        return torch.tensor(list(some), dtype=torch.int64), values, scores


class FakeDynamicemb:
    """One table of ``BatchedDynamicEmbeddingTablesV2``: TIMESTAMP scores, ``evicted_item_mode=RETAIN_KEY``."""

    def __init__(self, name="item", dim=2, capacity=40):
        self.table_names, self._table = [name], _Rows(dim, capacity)
        self._evicted, self._erased, self._cache = [], [], {}

    @property
    def rows(self):
        """Key -> values and score."""
        self.flush()
        return self._table.rows

    def flush(self):
        """Write what is cached to the table."""
        for keys in self._cache.values():
            self._train(keys)
        self._cache = {}

    def size(self, name):
        """Return how many rows a table has."""
        return len(self._table.rows)

    def train(self, keys):
        """Train rows; the newest are cached for now."""
        self.flush()
        self._cache[len(self._cache)] = keys

    def _train(self, keys):
        self._evicted += self._table.train(keys, [next(_NOW)] * len(keys)).tolist()

    def erase(self, keys):
        """Drop rows, and note the keys."""
        self.flush()
        self._erased += [key for key in keys if self._table.rows.pop(key, None) is not None]

    def incremental_dump(self, thresholds):
        """Return what has a score of at least a threshold, by table, and read and clear which keys went."""
        self.flush()
        [(_, threshold)] = thresholds.items()
        now = next(_NOW)
        keys, values, scores = self._table.at_least(threshold)
        evicted, self._evicted = sorted({*self._evicted}), []
        erased, self._erased = sorted({*self._erased}), []
        return SimpleNamespace(
            keys=[keys],
            values=[values[:, : self._table.dim]],
            optimizer_states=[values[:, self._table.dim :]],
            scores=[scores[:, None].view(torch.uint64)],
            evicted_keys=[torch.tensor(evicted, dtype=torch.int64)],
            erased_keys=[torch.tensor(erased, dtype=torch.int64)],
            meta=[{"current_score": now}],
        )

    def insert(self, keys, values, scores):
        """Set whole rows, with their scores."""
        self.flush()
        self._evicted += self._table.put(keys, values, scores).tolist()

    def clear(self):
        """Drop all rows."""
        self._cache, self._table.rows = {}, {}


class FakeHkv:
    """A ``HashTable`` of HierarchicalKV whose scores are those of ``kEpochLru``: the epoch, and a clock in 32 bits."""

    def __init__(self, dim=2, capacity=40):
        self._table, self._epoch, self._clock = _Rows(dim, capacity), 0, 0

    @property
    def rows(self):
        """Key -> values and score."""
        return self._table.rows

    def set_global_epoch(self, epoch):
        """Let what is written from now on have this epoch."""
        self._epoch = epoch

    def size(self):
        """Return how many rows it has."""
        return len(self._table.rows)

    def train_and_evict(self, keys):
        """Train rows, and return the keys that had to go for new ones: of a kernel that ends by insert_and_evict."""
        self._clock += 1
        return self._table.train(keys, [self._epoch << 32 | self._clock] * len(keys))

    def erase(self, keys):
        """Drop rows."""
        for key in keys.tolist():
            self._table.rows.pop(key, None)

    def export_batch_if(self, threshold):
        """Return keys, values and scores of the rows whose score is not less."""
        return self._table.at_least(threshold)

    def insert_or_assign(self, keys, values, scores):
        """Set rows with their scores; more than there is room for evict others, which nobody is given."""
        self._table.put(keys, values, scores)

    def clear(self):
        """Drop all rows."""
        self._table.rows = {}
