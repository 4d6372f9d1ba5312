"""What a save, a restore and a listing cost where something else than rows grows; each function makes one size of it.

The output dir is ``memory://``: a request is what an object store would be asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from math import log
from typing import Any

import torch
from fsspec.implementations.memory import MemoryFileSystem
from measuring import report
from torch import nn
from torch.optim import Optimizer

from recckpt import CheckpointManager, Deltas, Saver, diff, list_checkpoints
from recckpt import report as health_of
from recckpt.inspect.verify import verify
from recckpt.sparse import HashTable
from recckpt.storage.retry import Retries

ROWS, DIM = 50, 8  # of a table
Figures = dict[str, float]
_urls = count()


class Requests:
    """Counts what is asked of the store."""

    def __init__(self) -> None:
        self.n, call = 0, Retries.call

        def counted(retries: Retries, *args: Any, **options: Any) -> Any:
            self.n += 1
            return call(retries, *args, **options)

        Retries.call = counted  # type: ignore[assignment,method-assign]  # each way to the store goes through it

    @contextmanager
    def noted(self, found: Figures, name: str) -> Iterator[None]:
        """Add seconds of the processor, in all threads, and requests of a block."""
        before, cpu = self.n, time.process_time()
        yield
        found[f"{name}_sec"] = round(time.process_time() - cpu, 4)
        found[f"{name}_requests"] = self.n - before


def model_of(n_tables: int = 1, rows: int = ROWS) -> nn.ModuleDict:
    tables = {f"t{number}": HashTable(DIM, name=f"t{number}") for number in range(n_tables)}
    for table in tables.values():
        table.insert(torch.arange(rows), torch.rand(rows, DIM))
    return nn.ModuleDict(tables)


def figures(
    model: nn.Module,
    fresh: nn.Module,
    url: str,
    requests: Requests,
    optimizers: Sequence[Optimizer] = (),
    walks: bool = False,
    **options: Any,
) -> Figures:
    """Save once more where something was saved before, restore that, and list what is there; with ``walks`` look."""
    found: Figures = {}
    with Saver(model, output_dir=url, **options) as saver:
        for optimizer in optimizers[:1]:
            saver.register_for_checkpointing("optim", optimizer)
        CheckpointManager(saver, 10**9).restore()
        saver.save("warm", step=10**8)
        change(model)
        with requests.noted(found, "save"):
            begin = time.thread_time()
            handle = saver.save_async("last", step=10**8 + 1)
            found["pause_sec"] = round(time.thread_time() - begin, 4)
            handle.wait()
    with Saver(fresh, output_dir=url) as saver, requests.noted(found, "restore"):
        for optimizer in optimizers[1:]:
            saver.register_for_checkpointing("optim", optimizer)
        CheckpointManager(saver, 10**9).restore()
    with requests.noted(found, "list"):
        list_checkpoints(url)
    if walks:
        with requests.noted(found, "verify"):
            verify(url)
        with requests.noted(found, "report"):
            health_of(url)
        with requests.noted(found, "diff"):
            diff(f"{url}/warm", f"{url}/last")
    return found


def change(model: nn.Module) -> None:
    """Change a row of the first table, if there is one."""
    table = next((one for one in model.modules() if isinstance(one, HashTable)), None)
    if table is not None:
        table.insert(torch.tensor([1]), torch.rand(1, DIM))


def tables(n: int, url: str, requests: Requests) -> Figures:
    return figures(model_of(n), model_of(n, 0), url, requests, walks=True, max_keep=2)


def dense(n: int, url: str, requests: Requests) -> Figures:
    models = [nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(n)]) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters(), foreach=False) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.ones(4)
        optimizer.step()
    return figures(models[0], models[1], url, requests, optimizers)


def links(n: int, url: str, requests: Requests) -> Figures:
    deltas, model = Deltas(full_every=999, max_chain_bytes=1e9), model_of()
    with Saver(model, output_dir=url, deltas=deltas, max_keep=1) as saver:
        for step in range(n):
            change(model)
            saver.save(f"ckpt_{step}", step=step)
    return figures(model, model_of(rows=0), url, requests, deltas=deltas, max_keep=1)


def takeovers(n: int, url: str, requests: Requests) -> Figures:
    model = model_of()
    for step in range(n):
        with Saver(model, output_dir=url, max_keep=1) as saver:
            if step:
                CheckpointManager(saver, 10**9).restore()
            saver.save(f"ckpt_{step}", step=step)
    return figures(model, model_of(rows=0), url, requests, max_keep=1)


def kept(n: int, url: str, requests: Requests) -> Figures:
    model = model_of()
    with Saver(model, output_dir=url, max_keep=n) as saver:
        for step in range(n):
            saver.save(f"ckpt_{step}", step=step)
    return figures(model, model_of(rows=0), url, requests, max_keep=n)


CASES: dict[str, tuple[Callable[[int, str, Requests], Figures], list[int]]] = {
    "tables": (tables, [100, 1000, 10_000]),
    "dense": (dense, [100, 1000, 10_000]),
    "links": (links, [1, 10, 100]),
    "takeovers": (takeovers, [1, 10, 100, 1000]),
    "kept": (kept, [10, 100, 1000]),
}


def report_growth(case: str, most: int) -> None:
    """Print a line a size up to the largest, and what each figure grows by, as a power of the size: 1 is linear."""
    make, sizes = CASES[case]
    requests, found = Requests(), dict[int, Figures]()
    make(2, f"memory://growth-{next(_urls)}", requests)  # compiles
    for n in sorted({min(size, most) for size in sizes}):
        MemoryFileSystem.store.clear()
        found[n] = make(n, f"memory://growth-{next(_urls)}", requests)
        report({"case": case, "n": n, **found[n]})
    for (smaller, before), (larger, after) in pairwise(found.items()):
        grown = {name: (value, before[name]) for name, value in after.items() if value > 0 and before[name] > 0}
        powers = {name: round(log(new / old) / log(larger / smaller), 2) for name, (new, old) in grown.items()}
        report({"case": case, "from": smaller, "to": larger, "powers": powers})
