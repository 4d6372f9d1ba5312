"""Data whose position goes over to any number of ranks: each sample of an epoch is used once, whoever restores."""

from recckpt.positions.epochs import ElasticLoader
from recckpt.positions.files import ElasticFiles
from recckpt.positions.shards import ElasticShards

__all__ = ["ElasticFiles", "ElasticLoader", "ElasticShards"]
