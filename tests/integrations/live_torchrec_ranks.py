"""What real ranks do with live tables of TorchRec for test_live_torchrec.py: ``live_torchrec_ranks.py ROOT SIZE...``.

Each run of ranks restores what those before it have saved, under the same plan or another, and then saves of its own.
"""

import logging
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support import live_torchrec as models
from support.rank_processes import fork_ranks

from recckpt import CheckpointManager, Saver

DELTAS = True
LAYOUTS = list(models.LAYOUTS)


def kinds_of(layout):
    """Copies are trained by torch, whose row-wise Adagrad is TorchRec's own, so that they are left out there."""
    return [kind for kind in models.KINDS if kind != "rowwise" or not models.copies(layout)]


def fitting_for(saved_as, kind):
    """Return the layouts that another number of ranks restores without a conversion."""
    if kind == "rowwise" and saved_as == "columns":
        return []
    return [layout for layout in LAYOUTS if kind in kinds_of(layout) and (kind, layout) != ("rowwise", "columns")]


def made(seed, size, layout, kind, output_dir):
    model, optimizer, tables = models.sharded(seed, size, layout, kind)
    saver = Saver(model, output_dir=str(output_dir), tables=tables, deltas=DELTAS, max_keep=10)
    saver.register_for_checkpointing("optimizer", optimizer)
    return model, optimizer, tables, CheckpointManager(saver, 10**9)


def train(model, optimizer, first, end):
    for number in range(first, end):
        models.step(model, optimizer, number)


def run(rank, size, layout, kind, output_dir):
    """Save a full checkpoint and two deltas, the last in the background; the truth is what there was then."""
    model, optimizer, tables, manager = made(0, size, layout, kind, output_dir)
    kept = []
    for number in range(3):
        train(model, optimizer, number, number + 1)
        if number < 2:
            kept.append(manager.saver.save(f"ckpt_{number}", step=number).kind)
    truth = models.whole_state(model, tables)
    handle = manager.saver.save_async("ckpt_2", step=2)
    train(model, optimizer, 3, 23)
    kept.append(handle.wait().kind)
    manager.saver.close()
    end = models.whole_state(model, tables)
    if rank == 0:
        torch.save((truth, end, kept), output_dir / "truth.pt")


def restored(size, layout, kind, source):
    model, optimizer, tables, manager = made(1, size, layout, kind, source)
    optimizer.init_state()
    assert manager.restore() == 2
    truth, end, _ = torch.load(source / "truth.pt")
    found = models.differing(models.whole_state(model, tables), truth)
    assert found == [], (source, layout, found)
    saved_as, _, saved_by = source.name.split("-")
    if int(saved_by) == size:  # under other plans TorchRec adds gradients in another order
        train(model, optimizer, 3, 23)
        assert layout == saved_as
        found = models.differing(models.whole_state(model, tables), end)
        assert found == [], (source, found)
    manager.saver.close()


def work(rank, size, root, *, known):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for number, source in enumerate(known):
        saved_as, kind, saved_by = source.name.split("-")
        fitting = fitting_for(saved_as, kind)
        if fitting or int(saved_by) == size:
            restored(size, saved_as if int(saved_by) == size else fitting[(number + size) % len(fitting)], kind, source)
    for layout in LAYOUTS:
        for kind in kinds_of(layout):
            output_dir = root.parent / f"{layout}-{kind}-{size}"
            if output_dir not in known:
                output_dir.mkdir(exist_ok=True)
                run(rank, size, layout, kind, output_dir)
    if size == 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for number, size in enumerate(map(int, sys.argv[2:])):
        known = sorted(path.parent for path in root.glob("*/truth.pt"))
        (root / f"run-{number}").mkdir()
        fork_ranks(size, root / f"run-{number}", partial(work, known=known))
