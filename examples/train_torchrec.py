"""A model of TorchRec on several ranks, whose tables are saved where they lie: deltas, kills, and another plan.

Run it with ``torchrun --nproc-per-node 2 examples/train_torchrec.py --dir runs/torchrec``, kill it, and run it again:
it goes on where the newest checkpoint was made. With ``--plan table_wise``, or on another number of ranks, it does so
too: each rank takes the rows that are its own now.
"""

import argparse
import logging
import os
import signal

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recckpt import CheckpointManager
from recckpt.live import live_tables

ROWS, DIM, SAMPLES = 5000, 16, 32
NAMES = ("users", "wares")


class Model(torch.nn.Module):
    """Two tables beneath a layer."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=[name])
            for name in NAMES
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        self.top = torch.nn.Linear(DIM * len(NAMES), 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Return a score for each sample."""
        scores: torch.Tensor = self.top(self.bags(ids).values())
        return scores.squeeze(1)


def sharded(plan: str) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the model, spread over the ranks, and the optimizer of all of it."""
    size = dist.get_world_size()
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
    places = {name: row_wise() if plan == "row_wise" else table_wise(i % size) for i, name in enumerate(NAMES)}
    kinds = {"sharder": EmbeddingBagCollectionSharder(), "local_size": size, "world_size": size, "device_type": "cpu"}
    of_bags = construct_module_sharding_plan(model.bags, places, **kinds)
    model = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"bags": of_bags}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda values: torch.optim.Adam(values, lr=0.01))
    return model, CombinedOptimizer([model.fused_optimizer, adam])


def batch(step: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Return the ids and labels of a step on this rank."""
    draw = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    ids = torch.randint(ROWS, (len(NAMES) * SAMPLES,), generator=draw)
    labels = (ids[:SAMPLES] > ids[SAMPLES:]).float()
    return KeyedJaggedTensor(list(NAMES), ids, lengths=torch.ones(len(ids), dtype=torch.int64)), labels


def main() -> None:
    """Train to ``--steps`` from the newest checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default="runs/torchrec")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plan", choices=("row_wise", "table_wise"), default="row_wise")
    parser.add_argument("--kill-at", type=int, help="kill all ranks at this step, as a machine may")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer = sharded(args.plan)

    tables = live_tables(model, [optimizer])
    optimizer.init_state()
    with CheckpointManager.attach(model, optimizer, tables=tables, output_dir=args.dir, save_interval=10) as manager:
        manager.restore()
        while manager.global_step < args.steps:
            if manager.global_step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            ids, labels = batch(manager.global_step)
            optimizer.zero_grad()
            loss: torch.Tensor = torch.nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it where torchrec is skipped
            optimizer.step()
            manager.step()
    if dist.get_rank() == 0:
        print(tables)
        print(f"step {manager.global_step}, loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
