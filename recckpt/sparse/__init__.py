"""Hashtable embeddings: the table, its initializers and optimizers, and their way to and from Arrow files."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.sparse.buckets import Slice, gen_slice
    from recckpt.sparse.collection import EmbeddingCollection
    from recckpt.sparse.initializers import Constant, Normal, TruncatedNormal, Uniform
    from recckpt.sparse.optim import SparseAdagrad, SparseAdam, SparseAdamW, SparseRowWiseAdagrad, SparseSGD
    from recckpt.sparse.sharded import ShardedHashTable
    from recckpt.sparse.table import HashTable

_HOMES = {
    "HashTable": "table",
    "ShardedHashTable": "sharded",
    "EmbeddingCollection": "collection",
    "Slice": "buckets",
    "gen_slice": "buckets",
    "Constant": "initializers",
    "Normal": "initializers",
    "Uniform": "initializers",
    "TruncatedNormal": "initializers",
    "SparseSGD": "optim",
    "SparseAdagrad": "optim",
    "SparseRowWiseAdagrad": "optim",
    "SparseAdam": "optim",
    "SparseAdamW": "optim",
}

__all__ = [
    "HashTable",
    "ShardedHashTable",
    "EmbeddingCollection",
    "Slice",
    "gen_slice",
    "Constant",
    "Normal",
    "Uniform",
    "TruncatedNormal",
    "SparseSGD",
    "SparseAdagrad",
    "SparseRowWiseAdagrad",
    "SparseAdam",
    "SparseAdamW",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
