"""Stand-ins for what TorchRec makes on GPUs alone: known by their names, with the attributes that recckpt reads."""

from types import SimpleNamespace

from torch import nn


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
