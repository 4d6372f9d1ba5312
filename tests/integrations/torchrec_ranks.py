"""What real ranks do with a sharded model of TorchRec for test_torchrec.py: ``torchrec_ranks.py ROOT SIZE...``.

Each run of ranks restores what those before it have saved, and then saves of its own.
"""

import logging
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import torchrec_models as models
from support.rank_processes import fork_ranks
from torch.distributed import checkpoint as dcp

from recckpt import CheckpointManager, Saver
from recckpt.errors import StateMismatchError

LAYOUTS = {
    "mixed": {"clicks": "rows", "wares": "table", "users": "everywhere", "words": "rows", "shops": "table"},
    "other": {"clicks": "table", "wares": "rows", "users": "everywhere", "words": "table", "shops": "rows"},
    "columns": {"clicks": "rows", "wares": "columns", "users": "everywhere", "words": "columns", "shops": "rows"},
}
ELSEWHERE = {"mixed": "other", "other": "mixed", "columns": "columns"}
AS_DTENSORS = ("other",)


def made(seed, size, layout, output_dir):
    model, optimizer = models.sharded(seed, size, LAYOUTS[layout], as_dtensors=layout in AS_DTENSORS)
    saver = Saver(model, output_dir=str(output_dir))
    saver.register_for_checkpointing("optimizer", optimizer)
    return model, optimizer, CheckpointManager(saver, 10**9)


def restored(size, layout, output_dir):
    model, optimizer, manager = made(1, size, layout, output_dir)
    optimizer.init_state()  # it fills the state that it has
    assert manager.restore() == 3
    same(models.whole_state(model, optimizer), torch.load(output_dir / "truth.pt")[0])
    return model, optimizer


def run(rank, size, layout, output_dir):
    """Train, save in the background, and train on; the truth is what there was then, and at the end."""
    model, optimizer, manager = made(0, size, layout, output_dir)
    for number in range(3):
        models.step(model, optimizer, number)
    truth = models.whole_state(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=output_dir / "dcp")
    handle = manager.saver.save_async("ckpt_3", rank, size, step=3)
    for number in range(3, 6):
        models.step(model, optimizer, number)
    handle.wait()
    manager.saver.close()
    end = models.whole_state(model, optimizer)
    if rank == 0:
        torch.save((truth, end), output_dir / "truth.pt")


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def work(rank, size, root, *, known):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for source in known:
        layout, saved_by = source.name.split("-")
        is_again = saved_by == str(size)
        model, optimizer = restored(size, layout if is_again else ELSEWHERE[layout], source)
        if is_again:
            for number in range(3, 6):
                models.step(model, optimizer, number)
            same(models.whole_state(model, optimizer), torch.load(source / "truth.pt")[1])
    refused(size, known)
    for layout in LAYOUTS:
        output_dir = root.parent / f"{layout}-{size}"
        if output_dir not in known:
            output_dir.mkdir(exist_ok=True)
            run(rank, size, layout, output_dir)
    if size == 1:
        dist.destroy_process_group()


def refused(size, known):
    """One value a row for each shard of columns is no state of rows: the rank that has the table says so."""
    for source in (source for source in known if source.name.startswith("columns")):
        model, optimizer, manager = made(1, size, "mixed", source)
        optimizer.init_state()
        before = models.whole_state(model, optimizer)
        with pytest.raises(StateMismatchError) as caught:
            manager.restore()
        text = "'bags.embedding_bags.wares.weight wares.momentum1': found (40,), expected (20,)"
        assert text in str(caught.value), caught.value
        if size == 1:
            same(models.whole_state(model, optimizer), before)
        manager.saver.load(load_conf={"exclude": ["optimizer"]})


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for number, size in enumerate(map(int, sys.argv[2:])):
        known = sorted(path.parent for path in root.glob("*/truth.pt"))
        (root / f"run-{number}").mkdir()
        fork_ranks(size, root / f"run-{number}", partial(work, known=known))
