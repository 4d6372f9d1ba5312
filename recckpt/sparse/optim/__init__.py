"""Optimizers of hashtables: they touch the rows that had a gradient and keep their moments as slots."""

from recckpt.sparse.optim.adagrad import SparseAdagrad, SparseRowWiseAdagrad
from recckpt.sparse.optim.adagrad_sum import SparseAdagradSum, SparseRowWiseAdagradSum
from recckpt.sparse.optim.adam import SparseAdam, SparseAdamW
from recckpt.sparse.optim.adamw_tf import SparseAdamWTF
from recckpt.sparse.optim.clipping import clip_grad_norm_
from recckpt.sparse.optim.joint import JointOptimizer
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.optim.sgd import SparseSGD

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
