"""Start a new model from three older ones.

    python examples/warm_start.py

Three small runs are trained first. The new model takes a table from each, two of them under other names, one without
its optimizer slots and its rare ids, and a dense tower by a renaming with a star; one of its tables is new. What is
taken from where is said in BANK, shown as a plan, and done. A second start with the same bank resumes, since the
output dir of a run is the last word. Try other entries: docs/load.md says what there is.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from click_log import FEATURES, ClickLog, generated_clicks
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, Normal, SparseAdamW

RUNS: dict[str, dict[str, str]] = {  # run -> table -> the column of the click log that it embeds
    "search": {"member": "user", "context": "context"},
    "ads": {"user": "user", "ad": "item"},
    "feed": {"context": "context", "item": "item"},
    "home": {"user": "user", "item": "item", "context": "context", "context_2": "context"},  # the new one
}
TOWERS = {"search": "layers", "ads": "deep", "feed": "deep", "home": "tower"}  # run -> its dense half

BANK: list[dict[str, Any]] = [  # model name -> name in the checkpoint
    {"path": "search", "load": ["user", "tower.*"], "oname": {"user": "member", "tower.*": "layers.*"}},
    {
        "path": "ads",
        "load": ["item"],
        "oname": {"item": "ad"},
        "exclude": ["item@sparse_adamw*"],  # its moments start at zero
        "where": {"frequency": {"min": 5}},  # ids that were seen five times or more
    },
    {"path": "feed", "load": ["context"]},
]


class Model(nn.Module):
    """Tables over columns of a click log, whose rows are added up for a dense tower."""

    def __init__(self, tables: Mapping[str, str], tower: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList(HashTable(8, name=name, initializer=Normal(std=0.01)) for name in tables)
        self.columns = [FEATURES.index(column) for column in tables.values()]
        self.add_module(tower, nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.tower_name = tower

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of a click, shape (batch,), for ids of shape (batch, features)."""
        rows = [table(ids[:, column]) for table, column in zip(self.tables, self.columns, strict=True)]
        logits: Tensor = self.get_submodule(self.tower_name)(torch.stack(rows).sum(0))
        return logits.squeeze(1)


class Run:
    """One of RUNS: a model, its optimizers, and the manager of its checkpoints."""

    def __init__(self, name: str, output_dir: str) -> None:
        torch.manual_seed(0)
        self.model = Model(RUNS[name], TOWERS[name])
        self.tables: list[Any] = list(self.model.tables)
        for table in self.tables:
            table.add_slot("frequency", (), torch.int64)  # a slot of our own; see train
        self.sparse_optim = SparseAdamW(self.tables, lr=0.01)
        self.dense_optim = torch.optim.Adam(self.model.parameters(), lr=0.001)
        saver = Saver(self.model, self.sparse_optim, f"{output_dir}/{name}")
        saver.register_for_checkpointing("dense_optim", self.dense_optim)
        self.manager = CheckpointManager(saver, save_interval=1000)

    def train(self, clicks: ClickLog, steps: int) -> None:
        """Learn from the next batches, and note how often each id was met."""
        seen = []
        for ids, labels in islice(clicks, steps):
            loss = binary_cross_entropy_with_logits(self.model(ids), labels)
            self.sparse_optim.zero_grad()
            self.dense_optim.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
            self.sparse_optim.step()
            self.dense_optim.step()
            self.manager.step()
            seen.append(ids)
        for table, column in zip(self.tables, self.model.columns, strict=True):
            met, frequency = np.unique(torch.cat(seen)[:, column], return_counts=True)
            ids = torch.from_numpy(met)
            table.insert(ids, table.lookup(ids)[0], {"frequency": torch.from_numpy(frequency)})

    def loss(self, clicks: ClickLog) -> float:
        """Return the mean loss on the next clicks, from which nothing is learned."""
        self.model.eval()  # no rows for new ids
        with torch.no_grad():
            losses = [binary_cross_entropy_with_logits(self.model(ids), y).item() for ids, y in islice(clicks, 20)]
        self.model.train()
        return sum(losses) / len(losses)


def main() -> None:
    """Train the three sources, start the new run from them, save it, and start it again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--output-dir", default="demo_output/warm_start", help="of all runs; emptied first")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # says aloud what starts from scratch
    torch.set_num_threads(1)
    shutil.rmtree(args.output_dir, ignore_errors=True)
    ids, labels = generated_clicks(n_clicks=100_000)
    bank = [{**entry, "path": f"{args.output_dir}/{entry['path']}"} for entry in BANK]

    for seed, name in enumerate(["search", "ads", "feed"]):
        source = Run(name, args.output_dir)
        source.train(ClickLog(ids, labels, batch_size=256, seed=seed), args.steps)
        source.manager.save()
        print(f"trained {name}: {', '.join(f'{len(table):,} rows of {table.name}' for table in source.tables)}")

    new = Run("home", args.output_dir)
    print("\n== the plan: no row has been read, nothing has changed")
    print(new.manager.plan(bank))
    cold = new.loss(ClickLog(ids, labels, batch_size=256, seed=9))

    print("\n== the same, done")
    print(new.manager.load_model_bank(bank))
    warm = new.loss(ClickLog(ids, labels, batch_size=256, seed=9))
    print(f"\nloss before the first step: {warm:.3f}, and {cold:.3f} without the bank")
    new.train(ClickLog(ids, labels, batch_size=256, seed=3), args.steps)
    new.manager.save()

    print("\n== the same start again: the run has a checkpoint of its own now, so it resumes")
    again = Run("home", args.output_dir)
    report = again.manager.load_model_bank(bank)
    print(f"step {again.manager.global_step}, all from {', '.join({report.source_of(item) for item in report.taken})}")


if __name__ == "__main__":
    main()
