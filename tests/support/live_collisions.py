"""Models of TorchRec whose ids are remapped by managed collision, trained so that ids are evicted and come again."""

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recckpt.live import live_tables
from support import spec_reader

CPU = torch.device("cpu")
POLICIES = {"lfu": LFU_EvictionPolicy, "lru": LRU_EvictionPolicy, "distance": DistanceLFU_EvictionPolicy}
FUSED = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise": RowWiseAdagrad}
N_RAW, DIM = 200, 4


class Colliding(nn.Module):
    """Users behind managed collision, beneath a layer."""

    def __init__(self, zch_size=64, policy="distance", *, is_bagged=True, interval=2, n_raw=N_RAW):
        super().__init__()
        options = {"name": "users", "num_embeddings": zch_size, "embedding_dim": DIM, "feature_names": ["user"]}
        config = EmbeddingBagConfig(**options) if is_bagged else EmbeddingConfig(**options)
        inner = (EmbeddingBagCollection if is_bagged else EmbeddingCollection)(tables=[config], device=CPU)
        module = MCHManagedCollisionModule(
            zch_size=zch_size,
            device=CPU,
            eviction_policy=POLICIES[policy](),
            eviction_interval=interval,
            input_hash_size=n_raw,
        )
        wrapper = ManagedCollisionEmbeddingBagCollection if is_bagged else ManagedCollisionEmbeddingCollection
        self.sparse = wrapper(inner, ManagedCollisionCollection({"users": module}, [config]))
        self.top = nn.Linear(DIM, 1)
        self.is_bagged = is_bagged

    @property
    def ids(self):
        """What maps raw ids."""
        return self.sparse._managed_collision_collection._managed_collision_modules["users"]

    @property
    def users(self):
        """The embedding."""
        inner = self.sparse._embedding_module
        return (inner.embedding_bags if self.is_bagged else inner.embeddings)["users"]

    def forward(self, jagged):
        found = self.sparse(jagged)[0]
        return self.top(found["user"] if self.is_bagged else found["user"].values())


def batch(seed, n_ids=16, n_raw=N_RAW):
    """Return raw ids around a place that wanders to and fro, so that ids go and come again."""
    draw = torch.Generator().manual_seed(seed)
    near = torch.randint(60, (n_ids,), generator=draw) + 50 * (seed // 8 % 3)
    values = 7 * (near % n_raw) % n_raw
    return KeyedJaggedTensor(["user"], values, lengths=torch.full((n_ids // 2,), 2))


def step(model, optimizers, seed, **how):
    """Train on one batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(batch(seed, **how)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def truth_of(tables):
    """Return the rows of all ids of the tables, id by id, as their owner has them."""
    found = {}
    for name, table in tables.items():
        id_map, tensors = table.live.id_map(), table.live.tensors()
        columns = {slot: values.detach()[id_map.rows].numpy() for slot, values in tensors.items()}
        columns |= {slot: values.numpy() for slot, values in id_map.meta.items()}
        found[name] = {
            id_: {slot: values[number].tobytes() for slot, values in columns.items()}
            for number, id_ in enumerate(id_map.ids.tolist())
        }
    return found


def saved_in(output_dir, ckpt_id, tables):
    """Return the same of a checkpoint, as the page of the format reads it."""
    return {name: spec_reader.read(output_dir, ckpt_id, name) for name in tables}


def state_of(model, optimizers):
    """Return all tensors of a model and of its optimizers, but for what is made of the others."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for at, values in enumerate(optimizer.state.values()):
            state |= {f"{number} {at} {key}": torch.as_tensor(value).clone() for key, value in values.items()}
    return state


def looked_up(model, ids):
    """Return the embeddings of raw ids, each by itself, without training; collective where the model is sharded."""
    was_training = model.training
    model.eval()
    inner = getattr(model, "module", model)
    jagged = KeyedJaggedTensor(["user"], torch.as_tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
    with torch.no_grad():
        found = inner.sparse(jagged)[0]
        found = found.wait() if hasattr(found, "wait") else found
    model.train(was_training)
    return found["user"] if inner.is_bagged else found["user"].values()


def sharded(seed, size, zch_size=64, policy="distance", kind="adagrad", *, audit=0, **options):
    """Return the model with its table divided by rows over ranks, the optimizer of its layer, and its live tables."""
    torch.manual_seed(seed)
    model = Colliding(zch_size, policy, **options)
    apply_optimizer_in_backward(FUSED[kind], model.sparse._embedding_module.parameters(), {"lr": 0.1})
    of_bags, of_sequences = ManagedCollisionEmbeddingBagCollectionSharder, ManagedCollisionEmbeddingCollectionSharder
    sharder = (of_bags if model.is_bagged else of_sequences)()
    how = {"sharder": sharder, "local_size": size, "world_size": size, "device_type": "cpu"}
    plan = ShardingPlan({"sparse": construct_module_sharding_plan(model.sparse, {"users": row_wise()}, **how)})
    env = ShardingEnv(size, dist.get_rank(), dist.group.WORLD)
    model = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=[sharder])
    top = torch.optim.SGD(model.module.top.parameters(), lr=0.1)
    return model, top, live_tables(model, [top], min_rows=1, audit=audit)


def reset_rows_on_the_cpu(patch):
    """Let kernels on the CPU reset evicted rows of row-wise Adagrad, of which FBGEMM has a kernel for GPUs alone."""
    kernel = SplitTableBatchedEmbeddingBagsCodegen
    original = kernel.reset_embedding_weight_momentum

    def reset(self, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids):
        if self.optimizer != OptimType.EXACT_ROWWISE_ADAGRAD:
            original(self, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)
            return
        [table] = logical_table_ids.tolist()
        for values in (self.split_embedding_weights()[table], *self.split_optimizer_states()[table]):
            values.index_fill_(0, pruned_indices, 0)

    patch.setattr(kernel, "reset_embedding_weight_momentum", reset)


def of_all_ranks(tables):
    """Return the rows of all ids of all ranks, as of :func:`truth_of`; collective."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, truth_of(tables))
    found = {}
    for name in of_ranks[0]:
        ids = [id_ for of_rank in of_ranks for id_ in of_rank[name]]
        assert len(ids) == len({*ids}), f"{name}: an id on two ranks"
        found[name] = {id_: row for of_rank in of_ranks for id_, row in of_rank[name].items()}
    return found
