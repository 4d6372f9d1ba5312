"""Hashtable embeddings: tables, their initializers and optimizers, and how Arrow files save and restore them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.format.buckets import Slice, gen_slice
    from recckpt.sparse.from_torch import replace_embeddings
    from recckpt.sparse.optim import (
        JointOptimizer,
        SparseAdagrad,
        SparseAdagradSum,
        SparseAdam,
        SparseAdamW,
        SparseAdamWTF,
        SparseRowWiseAdagrad,
        SparseRowWiseAdagradSum,
        SparseSGD,
        clip_grad_norm_,
    )
    from recckpt.sparse.sharded.table import EmbeddingCollection, ShardedHashTable
    from recckpt.sparse.string_ids import hash_ids
    from recckpt.sparse.table.initializers import Constant, FromRow, Normal, TruncatedNormal, Uniform
    from recckpt.sparse.table.table import HashTable

_HOMES = {
    "HashTable": "sparse.table.table",
    "ShardedHashTable": "sparse.sharded.table",
    "EmbeddingCollection": "sparse.sharded.table",
    "Slice": "format.buckets",
    "gen_slice": "format.buckets",
    "hash_ids": "sparse.string_ids",
    "replace_embeddings": "sparse.from_torch",
    "Constant": "sparse.table.initializers",
    "FromRow": "sparse.table.initializers",
    "Normal": "sparse.table.initializers",
    "Uniform": "sparse.table.initializers",
    "TruncatedNormal": "sparse.table.initializers",
    "SparseSGD": "sparse.optim",
    "SparseAdagrad": "sparse.optim",
    "SparseRowWiseAdagrad": "sparse.optim",
    "SparseAdagradSum": "sparse.optim",
    "SparseRowWiseAdagradSum": "sparse.optim",
    "SparseAdam": "sparse.optim",
    "SparseAdamW": "sparse.optim",
    "SparseAdamWTF": "sparse.optim",
    "JointOptimizer": "sparse.optim",
    "clip_grad_norm_": "sparse.optim",
}

__all__ = [
    "HashTable",
    "ShardedHashTable",
    "EmbeddingCollection",
    "Slice",
    "gen_slice",
    "hash_ids",
    "replace_embeddings",
    "Constant",
    "FromRow",
    "Normal",
    "Uniform",
    "TruncatedNormal",
    "SparseSGD",
    "SparseAdagrad",
    "SparseRowWiseAdagrad",
    "SparseAdagradSum",
    "SparseRowWiseAdagradSum",
    "SparseAdam",
    "SparseAdamW",
    "SparseAdamWTF",
    "JointOptimizer",
    "clip_grad_norm_",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"recckpt.{_HOMES[name]}"), name)
