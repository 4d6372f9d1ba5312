"""Start a new model from other runs: the tables of one, the dense network of another.

    python examples/warm_start.py

A model bank is a list of ``load_conf`` entries with a ``path``, loaded in order. ``restore()`` comes after it and wins
where the new run has a checkpoint of its own, so the same script starts a run and resumes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from click_log import ClickLog, generated_clicks
from train_ctr import Run

from recckpt import CheckpointReader


def main() -> None:
    """Train two source runs, warm-start a third from them, and compare it with a cold start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--output-dir", default="demo_output/warm_start", help="directory of the runs")
    args = parser.parse_args()
    torch.set_num_threads(1)

    sources = {name: f"{args.output_dir}/{name}" for name in ("long", "tuned")}
    for seed, (name, path) in enumerate(sources.items(), start=1):
        print(f"source run {name!r}, in {path}")
        source = make_run(path, seed)
        source.manager.restore()  # a source that is trained already is not trained again
        source.train(args.steps)

    bank = [
        {"path": sources["long"], "load": ["sparse", "sparse_opt"]},
        {"path": sources["tuned"], "load": ["dense"]},
    ]
    warm = make_run(f"{args.output_dir}/warm", seed=3)
    warm.manager.load_model_bank(bank)
    if start := warm.manager.restore():
        print(f"the new run has checkpoints of its own and resumes at step {start}, not from the bank")
    else:
        for name, path in sources.items():
            print(f"the new run has from {name!r}: {', '.join(what_is_from(path, warm)) or 'nothing'}")
    print("warm start")
    warm.train(args.steps)
    print("cold start, for comparison")
    make_run(f"{args.output_dir}/cold", seed=3).train(args.steps)


def make_run(output_dir: str, seed: int) -> Run:
    """Return a run over the same clicks as the others, with first weights and an order of its own."""
    ids, labels = generated_clicks()
    return Run(ClickLog(ids, labels, batch_size=512, seed=seed), output_dir, save_interval=300, max_keep=1, seed=seed)


def what_is_from(path: str, run: Run) -> Iterator[str]:
    """Name what in the model of a run equals the newest checkpoint in ``path``."""
    reader = CheckpointReader(path)
    for table in run.sparse_optim.tables.values():
        batches = list(reader.table(table.name, columns=["embedding"]))
        saved = np.concatenate([batch.column("embedding").to_numpy_ndarray() for batch in batches])
        ids = torch.from_numpy(np.concatenate([batch.column("id").to_numpy() for batch in batches]))
        if len(table) == len(ids) and np.array_equal(table.lookup(ids)[0].numpy(), saved):
            yield f"{len(table):,} rows of {table.name}"
    dense = run.model.state_dict()
    for name in reader.tensor_names():
        if np.array_equal(dense[name].numpy(), reader.read_tensor(name)):
            yield name


if __name__ == "__main__":
    main()
