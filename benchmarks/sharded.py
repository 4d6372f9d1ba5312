"""What tables that lie on several ranks cost: a training step against a plain table, 8 tables together or one by one.

Prints one JSON line a case. Ranks are processes on this machine under gloo, so with as many ranks as cores there is no
more computing power than without. Rounds alternate between the contestants and the medians are compared; where other
work disturbs them, the fastest rounds say more. About a minute.

    python benchmarks/sharded.py --ranks 2 --rounds 100
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from machine import describe_machine
from torch import Tensor

from recckpt.sparse import EmbeddingCollection, HashTable, Normal, ShardedHashTable, SparseAdam

BATCH, DIM, VOCABULARY = 16_384, 32, 1_000_000  # ids of all ranks together
N_TABLES, SMALL_BATCH = 8, 2_048  # ids a table
WARM_UP = 15

Lookup = Callable[[dict[str, Tensor]], list[Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    run_ranks(args.ranks, args.rounds)


def run_ranks(n_ranks: int, rounds: int) -> None:
    """Run the cases on all ranks, of which the first reports."""
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(n_ranks):
            child = os.fork()
            if child == 0:
                be_rank(rank, n_ranks, rounds, Path(directory))
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            sys.exit("a rank failed")
        for case in json.loads(Path(directory, "cases").read_text()):
            print(json.dumps({**case, "ranks": n_ranks, "machine": machine}), flush=True)


def be_rank(rank: int, n_ranks: int, rounds: int, directory: Path) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        meeting = f"file://{directory}/rendezvous"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=n_ranks)
        cases = [one_table(rank, n_ranks, rounds), together_or_not(rank, n_ranks, rounds)]
        if rank == 0:
            (directory / "cases").write_text(json.dumps(cases))
        dist.destroy_process_group()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def one_table(rank: int, n_ranks: int, rounds: int) -> dict[str, object]:
    """Thousand rows a second of forward, backward, step and zero_grad: the global batch is the same for all.

    The plain table trains on all of it while the other ranks wait; the sharded one on a share on each rank.
    """
    plain = HashTable(DIM, name="plain", initializer=Normal(0, 0.01))
    sharded = ShardedHashTable(DIM, name="sharded", initializer=Normal(0, 0.01))
    steps: dict[str, tuple[Lookup, torch.optim.Optimizer]] = {
        "plain": (lambda ids: [plain(ids["t"])], SparseAdam([plain])),
        "sharded": (lambda ids: [sharded(ids["t"][rank::n_ranks])], SparseAdam([sharded])),
    }
    ids = ({"t": batch} for batch in zipf_ids(BATCH))
    return {
        "case": "one_table",
        "ids": BATCH,
        "dim": DIM,
        **rates(steps, ids, BATCH, alone={"plain"}, rank=rank, rounds=rounds),
    }


def together_or_not(rank: int, n_ranks: int, rounds: int) -> dict[str, object]:
    """Thousand rows a second in 8 small tables: through one exchange for all of them, and through one for each."""
    names = [f"t{number}" for number in range(N_TABLES)]
    steps: dict[str, tuple[Lookup, torch.optim.Optimizer]] = {}
    for kind in ("one exchange", "8 exchanges"):
        tables = [ShardedHashTable(DIM, name=f"{kind} {name}", initializer=Normal(0, 0.01)) for name in names]
        steps[kind] = (together(tables) if kind == "one exchange" else one_by_one(tables), SparseAdam(tables))
    batches = zipf_ids(N_TABLES * SMALL_BATCH)
    ids = (dict(zip(names, batch.chunk(N_TABLES), strict=True)) for batch in batches)
    shares = ({name: some[rank::n_ranks] for name, some in batch.items()} for batch in ids)
    found = rates(steps, shares, N_TABLES * SMALL_BATCH, alone=set(), rank=rank, rounds=rounds)
    return {"case": "together_or_not", "tables": N_TABLES, "ids": N_TABLES * SMALL_BATCH, "dim": DIM, **found}


def together(tables: list[ShardedHashTable]) -> Lookup:
    collection = EmbeddingCollection(tables)
    return lambda ids: list(collection({t.name: some for t, some in zip(tables, ids.values(), strict=True)}).values())


def one_by_one(tables: list[ShardedHashTable]) -> Lookup:
    return lambda ids: [table(some) for table, some in zip(tables, ids.values(), strict=True)]


def rates(
    steps: dict[str, tuple[Lookup, torch.optim.Optimizer]],
    batches: Iterator[dict[str, Tensor]],
    n_ids: int,
    *,
    alone: set[str],
    rank: int,
    rounds: int,
) -> dict[str, object]:
    """Time a step of each contestant in turn; of those that work alone, only the first rank does."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    processor: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds + WARM_UP):
        ids = next(batches)
        for kind, (look_up, optimizer) in steps.items():
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            if kind not in alone or rank == 0:
                loss = torch.stack([torch.sigmoid(rows).mean() for rows in look_up(ids)]).mean()
                loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
                optimizer.step()
                optimizer.zero_grad()
            if kind not in alone:
                dist.barrier()
            times[kind].append(time.perf_counter() - start)
            processor[kind].append(time.process_time() - start_processor)
    taken = {kind: median(values[WARM_UP:]) for kind, values in times.items()}
    first, second = taken.values()
    return {
        "thousand_rows_per_s": {kind: round(n_ids / seconds / 1e3) for kind, seconds in taken.items()},
        "ms": {kind: round(seconds * 1e3, 2) for kind, seconds in taken.items()},
        "fastest_ms": {kind: round(min(values[WARM_UP:]) * 1e3, 2) for kind, values in times.items()},
        "processor_ms_of_first_rank": {k: round(median(some[WARM_UP:]) * 1e3, 2) for k, some in processor.items()},
        "time_over_first": round(second / first, 2),
        "rounds": rounds,
    }


def zipf_ids(n_ids: int) -> Iterator[Tensor]:
    """Yield batches of ids, the same on all ranks."""
    rng = np.random.default_rng(0)
    while True:
        yield torch.from_numpy(rng.zipf(1.1, n_ids) % VOCABULARY)


if __name__ == "__main__":
    main()
