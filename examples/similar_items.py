"""Build an index of usearch from an exported table, and ask it which rows are nearest to those of some ids.

recckpt export runs/clicks vectors --to npy --table item
python examples/similar_items.py vectors item 17 42         # pip install usearch

An index takes the files as they are, ids included; with --dtype int8 or float16 an export has fewer bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from usearch.index import Index

Int64s = npt.NDArray[np.int64]


def built(ids: Int64s, vectors: npt.NDArray[Any]) -> Index:
    """Return an index by the angle between rows; its keys have no sign, so that ids go in as their bits."""
    index = Index(ndim=vectors.shape[1], metric="cos", dtype="f32")
    index.add(ids.view(np.uint64), vectors.astype(np.float32))
    return index


def nearest(index: Index, vector: npt.NDArray[Any], count: int) -> list[tuple[int, float]]:
    """Return (id, distance) of the rows nearest to a vector."""
    found = index.search(vector.astype(np.float32), count)
    return list(zip(found.keys.view(np.int64).tolist(), found.distances.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vectors", type=Path, help="target of the export")
    parser.add_argument("table")
    parser.add_argument("ids", type=int, nargs="+")
    parser.add_argument("--count", type=int, default=5, help="how many rows are nearest, the id's own among them")
    args = parser.parse_args()
    directory = args.vectors / quote(args.table, safe="")
    ids, vectors = np.load(directory / "id.npy"), np.load(directory / "embedding.npy")
    index = built(ids, vectors)
    for asked in args.ids:
        at = np.flatnonzero(ids == asked)
        if not len(at):
            print(f"{asked}: not in the table")
            continue
        rows = ", ".join(f"{id_} ({distance:.3f})" for id_, distance in nearest(index, vectors[at[0]], args.count))
        print(f"{asked}: {rows}")


if __name__ == "__main__":
    main()
