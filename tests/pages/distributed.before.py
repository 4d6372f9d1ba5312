"""The page shows the heart of a script for many ranks; here is the rest of it, for one."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from recckpt import CheckpointManager, Saver
from recckpt.recis import filter_out_sparse_param
from recckpt.sparse import EmbeddingCollection, ShardedHashTable, SparseAdamW

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
output_dir = "runs/ranks"
share_of_this_rank = [(torch.arange(4), torch.arange(4), torch.ones(4))]


class ClickModel(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables, self.dense = tables, torch.nn.Linear(32, 1)

    def forward(self, users, items):
        rows = self.tables({"user": users, "item": items})
        return self.dense(torch.cat([rows["user"], rows["item"]], -1)).squeeze(-1)


loss_of = torch.nn.functional.binary_cross_entropy_with_logits
