"""Stand-ins for what FBGEMM and TorchRec make on GPUs alone: known by their names, with what recckpt reads of them."""

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
    EMA = "ema_in_place_row_wise_adagrad"
    ENSEMBLE = "ensemble_row_wise_adagrad"
    NONE = "none"


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, kernel, indices, offsets):
        ctx.kernel, ctx.indices, ctx.offsets = kernel, indices, offsets
        return torch.zeros(len(offsets) - 1, device=trigger.device)

    @staticmethod
    def backward(ctx, gradient):
        ctx.kernel.write(ctx.indices, ctx.offsets)
        return gradient.new_zeros(()), None, None, None


class SplitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Tables of so many rows and columns; a step adds 1 to each row that was looked up, in a cache if there is one.

    A row in the cache is newer than below it, and evicted one day. Beside a step EMA halves all rows in forward.
    """

    __module__ = MODULE

    def __init__(self, shapes, *, features=None, optimizer=OptimType.ROWWISE, has_cache=False, like=None):
        super().__init__()
        self.embedding_specs = [(rows, dim, None, None) for rows, dim in shapes]
        self.feature_table_map = list(features or range(len(shapes)))
        self.table_names, self.optimizer = [f"t{number}" for number in range(len(shapes))], optimizer
        weights = torch.rand(sum(rows * dim for rows, dim in shapes)) if like is None else like
        self._place = "weights_uvm" if has_cache else "weights_dev"
        setattr(self, self._place, nn.Parameter(weights, requires_grad=weights.is_floating_point()))
        self.current_device = weights.device
        self.register_buffer("momentum1_host", torch.zeros(sum(rows for rows, _ in shapes)))
        self.trigger = nn.Parameter(torch.zeros(()))
        self.optimizer_args = SimpleNamespace(eps=1e-8, weight_decay=0.0, beta1=0.9, beta2=0.999)
        self.iter, self.iter_cpu, self.rate = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0.1
        self._used_rowwise_adagrad_with_counter = self._used_rowwise_adagrad_with_global_weight_decay = False
        self.use_rowwise_bias_correction = False
        self.lxu_cache_weights = torch.zeros(int(has_cache))
        self.cached, self.n_flushes = {}, 0  # (table, row) -> values

    def forward(self, indices, offsets, per_sample_weights=None, *, batch_size_per_feature_per_rank=None):
        if self.optimizer is OptimType.EMA:
            self.ema_inplace({})
        return _LookUp.apply(self.trigger, self, indices, offsets)

    def write(self, indices, offsets):
        self.iter += 1
        size = (len(offsets) - 1) // len(self.feature_table_map)
        for feature, table in enumerate(self.feature_table_map):
            begin, end = (int(offsets[at * size]) for at in (feature, feature + 1))
            for row in indices[begin:end].unique().tolist():
                self._add_1(table, row)

    @torch.no_grad()
    def _add_1(self, table, row):
        below = self.split_embedding_weights()[table][row]
        if len(self.lxu_cache_weights):
            self.cached[table, row] = self.cached.get((table, row), below) + 1
        else:
            below += 1

    @torch.no_grad()
    def write_back(self):
        """Write to the weights what the cache has, as when rows are evicted and when it is flushed."""
        for (table, row), values in self.cached.items():
            self.split_embedding_weights()[table][row] = values

    def flush(self):
        self.n_flushes += 1
        self.write_back()

    def reset_cache_states(self):
        self.cached = {}

    def trained(self, table):
        """Return the rows as training sees them: those of the cache, and the others."""
        rows = self.split_embedding_weights()[table].clone()
        for (of, row), values in self.cached.items():
            if of == table:
                rows[row] = values
        return rows

    def split_embedding_weights(self):
        sizes = [rows * dim for rows, dim, *_ in self.embedding_specs]
        parts = getattr(self, self._place).detach().split(sizes)
        return [part.view(rows, dim) for part, (rows, dim, *_) in zip(parts, self.embedding_specs, strict=True)]

    def split_optimizer_states(self):
        return [[part] for part in self.momentum1_host.split([rows for rows, *_ in self.embedding_specs])]

    def get_learning_rate(self):
        return self.rate

    def set_learning_rate(self, rate):
        self.rate = rate

    def reset_embedding_weight_momentum(self, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids):
        bounds = pruned_indices_offsets.tolist()
        for table, begin, end in zip(logical_table_ids.tolist(), bounds[:-1], bounds[1:], strict=True):
            for values in (self.split_embedding_weights()[table], *self.split_optimizer_states()[table]):
                values.index_fill_(0, pruned_indices[begin:end], 0)

    def ema_inplace(self, mode):
        with torch.no_grad():
            getattr(self, self._place).data.mul_(0.5)


class SSDTableBatchedEmbeddingBags(nn.Module):
    """A kernel of which nothing is known but its name."""

    __module__ = "fbgemm_gpu.tbe.ssd.training"


class BatchedDynamicEmbeddingTablesV2(nn.Module):
    """A kernel of dynamicemb, of which nothing is known but its name."""

    __module__ = "dynamicemb.batched_dynamicemb_tables"


def look_up(kernel, *ids):
    """Train on ids of each feature, in one sample."""
    device = kernel.trigger.device
    offsets = torch.tensor([0, *torch.tensor([len(own) for own in ids]).cumsum(0).tolist()], device=device)
    kernel(torch.tensor([one for own in ids for one in own], device=device), offsets).sum().backward()


class ShardedEmbeddingBagCollection(nn.Module):
    """A collection of one table ``t`` of 40 rows, in this kernel, whole on this rank."""

    __module__ = "torchrec.distributed.embeddingbag"

    def __init__(self, kernel, *, stash_weights=False):
        super().__init__()
        config = SimpleNamespace(name="t", num_embeddings=40, embedding_dim=2, stash_weights=stash_weights)
        owner = nn.Module()
        owner._emb_module, owner._config = kernel, SimpleNamespace(embedding_tables=[config])
        owner.fused_optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
        lookup = nn.Module()
        lookup._emb_modules = nn.ModuleList([owner])
        self._embedding_bag_configs, self._lookups = [config], [lookup]
        self.module_sharding_plan = {"t": SimpleNamespace(sharding_type="row_wise")}
        self.embedding_bags = nn.ModuleDict({"t": nn.Module()})


class DMPCollection(nn.Module):
    """The wrapper of a model in two dimensions, whose groups of ranks train replicas of their own."""

    __module__ = "torchrec.distributed.model_parallel"

    def __init__(self, module):
        super().__init__()
        self._dmp_wrapped_module = module
