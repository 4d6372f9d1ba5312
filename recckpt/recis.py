"""Functions that programs for RecIS call: which parts of a model are tables, and which are dense."""

from recckpt.sparse.split import filter_out_sparse_param, split_sparse_dense_state_dict
from recckpt.types import is_hashtable

__all__ = ["split_sparse_dense_state_dict", "filter_out_sparse_param", "is_hashtable"]
