"""Data with a saved position that any number of ranks can restore: each sample is used once per epoch."""

from recckpt.positions.epochs import ElasticLoader
from recckpt.positions.files import ElasticFiles
from recckpt.positions.shards import ElasticShards

__all__ = ["ElasticFiles", "ElasticLoader", "ElasticShards"]
