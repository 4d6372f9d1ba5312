"""Optimizers of hashtables: they update only rows that had a gradient and keep their moments in slots of the table."""

from recckpt.sparse.optim.joint import JointOptimizer, clip_grad_norm_
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.optim.rules import (
    SparseAdagrad,
    SparseAdagradSum,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    SparseRowWiseAdagrad,
    SparseRowWiseAdagradSum,
    SparseSGD,
)

__all__ = [
    "SparseOptimizer",
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
