"""The page wraps a hash table of another library: here a dict, with the methods that the page calls."""

import torch


class Library:
    """Rows by key: embedding, sum, score."""

    def __init__(self, dim):
        self.dim, self.rows, self.n_exports = dim, {}, 0

    def flush(self):
        pass

    def __len__(self):
        return len(self.rows)

    def export_keys_values(self, batch_size):
        self.n_exports += 1
        rows = list(self.rows.items())
        for first in range(0, len(rows), batch_size):
            some = rows[first : first + batch_size]
            embeddings, sums, scores = (torch.stack(column) for column in zip(*(row for _, row in some), strict=True))
            yield torch.tensor([key for key, _ in some]), embeddings, sums, scores

    def insert(self, keys, embeddings, sums, scores):
        rows = zip(embeddings.clone(), sums.clone(), scores.clone(), strict=True)
        self.rows.update(zip(keys.tolist(), rows, strict=True))

    def clear(self):
        self.rows.clear()


theirs = Library(2)
theirs.insert(torch.tensor([7, -3, 1 << 40]), torch.rand(3, 2), torch.rand(3, 2), torch.arange(3))
