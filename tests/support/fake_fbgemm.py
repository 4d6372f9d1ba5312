"""A stand-in for FBGEMM's fused kernel: it is known by its names, writes rows in backward, and may have a cache."""

from enum import Enum
from types import SimpleNamespace

import torch
from torch import nn

MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


class OptimType(Enum):
    """The optimizers that the tests need."""

    SGD = "exact_sgd"
    ROWWISE = "exact_row_wise_adagrad"
    ADAM = "adam"
    ENSEMBLE = "ensemble_row_wise_adagrad"


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, kernel, indices, offsets):
        ctx.kernel, ctx.indices, ctx.offsets = kernel, indices, offsets
        return torch.zeros(len(offsets) - 1)

    @staticmethod
    def backward(ctx, gradient):
        ctx.kernel.write(ctx.indices, ctx.offsets)
        return torch.zeros(()), None, None, None


class SplitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Tables of so many rows and columns; a step adds 1 to each row that was looked up, in a cache if there is one."""

    __module__ = MODULE

    def __init__(self, shapes, *, features=None, optimizer=OptimType.ROWWISE, has_cache=False):
        super().__init__()
        self.embedding_specs = [(rows, dim, None, None) for rows, dim in shapes]
        self.feature_table_map = list(features or range(len(shapes)))
        self.table_names, self.optimizer = [f"t{number}" for number in range(len(shapes))], optimizer
        self.weights_host = nn.Parameter(torch.rand(sum(rows * dim for rows, dim in shapes)))
        self.register_buffer("momentum1_host", torch.zeros(sum(rows for rows, _ in shapes)))
        self.trigger = nn.Parameter(torch.zeros(()))
        self.optimizer_args = SimpleNamespace(eps=1e-8, weight_decay=0.0, beta1=0.9, beta2=0.999)
        self.iter, self.iter_cpu, self.rate = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0.1
        self._used_rowwise_adagrad_with_counter = self._used_rowwise_adagrad_with_global_weight_decay = False
        self.use_rowwise_bias_correction = False
        self.has_cache, self.cached, self.n_flushes = has_cache, [], 0

    def forward(self, indices, offsets, per_sample_weights=None, *, batch_size_per_feature_per_rank=None):
        return _LookUp.apply(self.trigger, self, indices, offsets)

    def write(self, indices, offsets):
        self.iter += 1
        size = (len(offsets) - 1) // len(self.feature_table_map)
        for feature, table in enumerate(self.feature_table_map):
            begin, end = (int(offsets[at * size]) for at in (feature, feature + 1))
            self.cached.append((table, indices[begin:end].long().unique()))
        if not self.has_cache:
            self._write_back()

    def _write_back(self):
        with torch.no_grad():
            for table, rows in self.cached:
                self.split_embedding_weights()[table][rows] += 1
        self.cached = []

    def flush(self):
        self.n_flushes += 1
        self._write_back()

    def reset_cache_states(self):
        self.cached = []

    def split_embedding_weights(self):
        sizes = [rows * dim for rows, dim, *_ in self.embedding_specs]
        parts = self.weights_host.detach().split(sizes)
        return [part.view(rows, dim) for part, (rows, dim, *_) in zip(parts, self.embedding_specs, strict=True)]

    def split_optimizer_states(self):
        return [[part] for part in self.momentum1_host.split([rows for rows, *_ in self.embedding_specs])]

    def get_learning_rate(self):
        return self.rate

    def set_learning_rate(self, rate):
        self.rate = rate

    def ema_inplace(self, mode):
        with torch.no_grad():
            self.weights_host.data.mul_(0.5)


def look_up(kernel, *ids):
    """Train on ids of each feature, in one sample."""
    offsets = torch.tensor([0, *torch.tensor([len(own) for own in ids]).cumsum(0).tolist()])
    kernel(torch.tensor([one for own in ids for one in own]), offsets).sum().backward()
