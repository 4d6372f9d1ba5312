"""Models of TorchRec with live tables for the tests: plans, batches, and the state of all ranks in one."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recckpt.live import live_tables

BAGS = {"clicks": (23, 12, ["click", "both"]), "wares": (20, 12, ["both"]), "users": (11, 8, ["user"])}
SEQUENCES = {"words": (17, 24, ["word"]), "shops": (6, 24, ["shop"])}
FEATURES = {"click": 23, "both": 20, "user": 11, "word": 17, "shop": 6}  # feature: ids
LAYOUTS = {
    "rows": dict.fromkeys((*BAGS, *SEQUENCES), "rows"),
    "tables": {"clicks": "last", "wares": "first", "users": "last", "words": "first", "shops": "last"},
    "copies": {"clicks": "copies", "wares": "copies", "users": "copies", "words": "rows", "shops": "first"},
    "mixed": {"clicks": "rows", "wares": "last", "users": "copies", "words": "rows", "shops": "first"},
    "columns": {"clicks": "columns", "wares": "columns", "users": "host", "words": "equal columns", "shops": "first"},
}
KINDS = {  # of fused kernels, and of copies, whose slots are the same
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "rowwise": (RowWiseAdagrad, None),
}
N_SAMPLES = 4


def copies(layout):
    """Return the tables of which a layout puts a copy on each rank."""
    return {name for name, how in LAYOUTS[layout].items() if how == "copies"}


class Model(nn.Module):
    """Pooled and sequence embeddings beneath a layer."""

    def __init__(self, *, is_weighted=False):
        super().__init__()
        bags = [
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f)
            for n, (r, d, f) in BAGS.items()
        ]
        sequences = [
            EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f)
            for n, (r, d, f) in SEQUENCES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=torch.device("cpu"), is_weighted=is_weighted)
        self.sequences = EmbeddingCollection(tables=sequences, device=torch.device("cpu"))
        self.top = nn.Linear(sum(dim * len(names) for _, dim, names in (*BAGS.values(), *SEQUENCES.values())), 1)

    def forward(self, bags, sequences):
        found = self.sequences(sequences)
        means = [found[key].to_padded_dense(2).mean(1) for key in ("word", "shop")]
        return self.top(torch.cat([self.bags(bags).values(), *means], 1))


def by_columns(size, *, is_last=False):
    """Return a plan of columns on all ranks, 4 of them on each but the first, or the last, which has the rest."""

    def plan(weight, *options):
        widths = [weight.shape[1] - 4 * (size - 1), *[4] * (size - 1)]
        return column_wise(size_per_rank=widths[::-1] if is_last else widths)(weight, *options)

    return plan


def sharded(seed, size, layout, kind, *, is_weighted=False, **how):
    """Return a model whose tables lie as a layout says, but for some of them; its optimizer, and its live tables."""
    torch.manual_seed(seed)
    fused, copied = KINDS[kind]
    how = {**LAYOUTS[layout], **how}
    model = Model(is_weighted=is_weighted)
    apply_optimizer_in_backward(fused, [*model.bags.parameters(), *model.sequences.parameters()], {"lr": 0.1})
    places = {
        "rows": row_wise,
        "first": partial(table_wise, 0),
        "last": partial(table_wise, size - 1),
        "copies": data_parallel,
        "columns": partial(by_columns, size),
        "equal columns": partial(column_wise, ranks=list(range(size))),  # of sequences TorchRec has no others
        "other columns": partial(by_columns, size, is_last=True),
        "columns on one rank": partial(column_wise, ranks=[0, 0, 0]),
        "host": partial(table_row_wise, 0),
        "grid": partial(grid_shard, [0, 1]),
    }
    any_kind = {"sharding_types": lambda self, device: [kind.value for kind in ShardingType]}
    plan = {}
    for name, sharder in (("bags", EmbeddingBagCollectionSharder), ("sequences", EmbeddingCollectionSharder)):
        module = getattr(model, name)
        configs = module.embedding_bag_configs() if name == "bags" else module.embedding_configs()
        on_cpu = type(sharder.__name__, (sharder,), any_kind)()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # ranks of a host
        options = {"sharder": on_cpu, "local_size": local_size, "world_size": size, "device_type": "cpu"}
        plan[name] = construct_module_sharding_plan(module, {c.name: places[how[c.name]]() for c in configs}, **options)
    options = {"env": ShardingEnv(size, dist.get_rank(), dist.group.WORLD), "device": torch.device("cpu")}
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    model = DistributedModelParallel(model, **options, plan=ShardingPlan(plan), sharders=sharders)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    rest = KeyedOptimizerWrapper(dense, lambda values: (copied or torch.optim.SGD)(values, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, rest])
    return model, optimizer, live_tables(model, [optimizer], min_rows=1)


def batch(seed, *, is_weighted=False, n_ids=2):
    """Return the ids of a step, some of each feature in each sample."""
    draw = torch.Generator().manual_seed(seed)
    jagged = []
    for features, weighted in ((["click", "both", "user"], is_weighted), (["word", "shop"], False)):
        values = torch.cat([torch.randint(FEATURES[name], (n_ids * N_SAMPLES,), generator=draw) for name in features])
        weights = torch.rand(len(values), generator=draw) if weighted else None
        lengths = torch.full((len(features) * N_SAMPLES,), n_ids)
        jagged.append(KeyedJaggedTensor(features, values, weights=weights, lengths=lengths))
    return jagged


def step(model, optimizer, seed, **how):
    """Train on one batch."""
    optimizer.zero_grad()
    model(*batch(seed, **how)).square().mean().backward()
    optimizer.step()


def whole_state(model, tables):
    """Return all rows of all tables and their scalars, whatever rank has them, and the dense parameters."""
    own = {
        name: (table.live.box(), {slot: values.clone() for slot, values in table.live.tensors().items()})
        for name, table in tables.items()
    }
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    found = {f"dense {name}": value.detach().clone() for name, value in model.module.top.named_parameters()}
    for name, table in tables.items():
        for box, slots in (of_rank[name] for of_rank in of_ranks):
            for slot, values in slots.items():
                shape = next(spec.shape for spec in table.specs if spec.name == slot)
                whole = found.setdefault(f"{name} {slot}", torch.full((table.live.n_rows, *shape), float("nan")))
                columns = () if not box.columns else (slice(*box.columns[box.part]) if values.dim() > 1 else box.part,)
                whole[(slice(*box.rows), *columns)] = values
    assert not any(values.isnan().any() for values in found.values())
    return found


def differing(one, other):
    """Return the names under which two states differ by a bit."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if not (name in one and name in other and torch.equal(one[name], other[name]))
    )
