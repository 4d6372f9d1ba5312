"""Models of TorchRec for the tests, with the optimizers that train their tables in the backward pass."""

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

BAGS = {"clicks": (23, 8), "wares": (20, 8), "users": (11, 8)}  # table: rows, width
SEQUENCES = {"words": (17, 4), "shops": (6, 4)}
N_SAMPLES = 4


class Model(nn.Module):
    """Pooled and sequence embeddings beneath a layer."""

    def __init__(self):
        super().__init__()
        bags = [
            EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=dim, feature_names=[f"{name}_ids"])
            for name, (n, dim) in BAGS.items()
        ]
        sequences = [
            EmbeddingConfig(name=name, num_embeddings=n, embedding_dim=dim, feature_names=[f"{name}_ids"])
            for name, (n, dim) in SEQUENCES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=torch.device("cpu"))
        self.sequences = EmbeddingCollection(tables=sequences, device=torch.device("cpu"))
        self.top = nn.Linear(8 * len(BAGS) + 4 * len(SEQUENCES), 1)

    def forward(self, bags, sequences):
        pooled = self.bags(bags).values()
        found = self.sequences(sequences)
        means = [found[key].to_padded_dense(2).mean(1) for key in sequences.keys()]  # noqa: SIM118
        return self.top(torch.cat([pooled, *means], 1))


def plain(seed):
    torch.manual_seed(seed)
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.Adagrad, model.sequences.parameters(), {"lr": 0.1})
    return model


def sharded(seed, size, how, *, as_dtensors):
    """Return a model whose tables lie as ``how`` says, and the optimizer of all of it."""
    model = plain(seed)
    kinds = {
        "rows": row_wise,
        "table": lambda: table_wise(size - 1),
        "columns": lambda: column_wise(ranks=[0, size - 1]),
        "everywhere": data_parallel,
    }
    any_kind = {"sharding_types": lambda self, device: ["row_wise", "table_wise", "column_wise", "data_parallel"]}
    plan = {}
    for name, sharder in (("bags", EmbeddingBagCollectionSharder), ("sequences", EmbeddingCollectionSharder)):
        module = getattr(model, name)
        configs = module.embedding_bag_configs() if name == "bags" else module.embedding_configs()
        places = {config.name: kinds[how[config.name]]() for config in configs}
        on_cpu = type(sharder.__name__, (sharder,), any_kind)()
        options = {"sharder": on_cpu, "local_size": size, "world_size": size, "device_type": "cpu"}
        plan[name] = construct_module_sharding_plan(module, places, **options)
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    env = ShardingEnv(size, dist.get_rank(), dist.group.WORLD, output_dtensor=as_dtensors)
    options = {"env": env, "device": torch.device("cpu"), "plan": ShardingPlan(plan), "sharders": sharders}
    model = DistributedModelParallel(model, **options)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda values: torch.optim.Adam(values, lr=0.01))
    return model, CombinedOptimizer([model.fused_optimizer, adam])


def batch(step):
    """Return the ids of a step, two of each feature in each sample."""
    draw = torch.Generator().manual_seed(step)
    jagged = []
    for tables in (BAGS, SEQUENCES):
        lengths = torch.full((len(tables) * N_SAMPLES,), 2)
        values = torch.cat([torch.randint(n, (2 * N_SAMPLES,), generator=draw) for n, _ in tables.values()])
        jagged.append(KeyedJaggedTensor([f"{name}_ids" for name in tables], values, lengths=lengths))
    return jagged


def step(model, optimizer, number):
    model.train()
    optimizer.zero_grad()
    model(*batch(number)).square().mean().backward()
    optimizer.step()


def whole_state(model, optimizer):
    """Return all tensors of a model and its optimizer by name, each whole, whatever rank has which part."""
    found = {f"model {name}": value for name, value in model.state_dict().items()}
    for name, values in optimizer.state_dict()["state"].items():
        found |= {f"optimizer {name} {key}": value for key, value in values.items()}
    pieces = {name: list(_pieces(value)) for name, value in found.items()}
    of_ranks = [pieces]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, pieces)
    names = dict.fromkeys(chain(*of_ranks))
    return {name: _joined(list(chain(*(own.get(name, []) for own in of_ranks)))) for name in sorted(names)}


def _pieces(value):
    if isinstance(value, ShardedTensor):
        boxes = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    elif isinstance(value, DTensor):
        boxes = zip(value.to_local().local_offsets(), value.to_local().local_shards(), strict=False)
    else:
        boxes = [((0,) * value.dim(), value)]
    for offsets, values in boxes:
        yield tuple(value.shape), tuple(offsets), values.detach().clone()


def _joined(pieces):
    joined = torch.full(pieces[0][0], float("nan"))
    for _, offsets, values in pieces:
        joined[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    assert not joined.isnan().any()
    return joined
