"""Two ranks of a trainer are killed and resume, for the tests of its name: ``trainer_ranks.py ROOT TRAINER``."""

import logging
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support.rank_processes import fork_ranks
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).parent))
SIZE = 2


def lightning(rank, root):
    """From steps within two epochs: as a run that was never killed."""
    import test_lightning_resumes as alone

    class Data(alone.Data):
        def loader(self, shuffle):
            data = super().loader(shuffle).dataset
            return StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data, SIZE, rank, shuffle=shuffle))

    def fit(*callbacks, **options):
        ranks = {"devices": SIZE, "strategy": "ddp", "max_steps": 10, "num_sanity_val_steps": 0}
        module, trainer = alone.fit(root, *callbacks, **{**ranks, **options})
        dist.barrier()
        return module, trainer

    alone.Data = Data
    whole, _ = fit(of_whole := alone.Grows())
    for step in (3, 6):  # of its first and second epoch
        fit(alone.ours(root / f"ours-{step}", step), alone.Grows(), killed=step + 2)
        resumed, _ = fit(alone.ours(root / f"ours-{step}", step), of_resumed := alone.Grows())
        assert resumed.events == whole.events[-len(resumed.events) :], (rank, resumed.events, whole.events)
        assert resumed.events[0][0] == step
        assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
        assert {name for name, *_ in resumed.brought_back} == {"module", "callback", "data"}
        assert of_resumed.seen == of_whole.seen


def failing(rank, root):
    """One rank raises alone, and the other loses it: neither saves, waits, or hides its exception."""
    import test_lightning_resumes as alone

    alone.Clicks.training_step = fails_on_rank_1(alone.Clicks.training_step, rank)
    options = {"devices": SIZE, "strategy": "ddp", "max_steps": 10, "num_sanity_val_steps": 0}
    try:
        alone.fit(root, alone.ours(root / "ours", 2, save_on_exception=True), **options)
        raise AssertionError("it is raised on")
    except ValueError:
        assert rank == 1
    except RuntimeError:
        assert rank == 0
    [text] = [text for text in TOLD.texts if "no emergency checkpoint" in text]
    assert f"rank {rank} of 2 cannot know whether the other ranks have failed too" in text
    assert text.endswith("a restart resumes from step 4"), text
    os._exit(0)  # which is how the other rank learns that it is alone


def fails_on_rank_1(step, rank):
    def failing_step(module, *batch):
        if rank == 1 and module.global_step == 5:
            raise ValueError("bad batch")
        return step(module, *batch)

    return failing_step


def transformers(rank, root):
    """From a step within an epoch and from its end: as a run that was never killed."""
    import test_transformers_resumes as alone

    fit = partial(alone.fit, max_steps=9, per_device_train_batch_size=4)
    whole = fit(root / "whole", False, interval=100)
    for interval, killed in ((2, 5), (alone.STEPS // SIZE, 4)):
        fit(root / f"ours-{interval}", True, interval=interval, killed=killed)
        dist.barrier()
        resumed = fit(root / f"ours-{interval}", True, interval=interval)
        assert alone.history(resumed) == alone.history(whole)
        assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def work(rank, size, root, trainer):
    logging.getLogger("recckpt").addHandler(TOLD)
    {"lightning": lightning, "transformers": transformers, "failing": failing}[trainer](rank, root)
    assert not TOLD.texts, TOLD.texts


class Told(logging.Handler):
    """Keeps the warnings: none is due, as ranks that save what differs among them would have one."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


TOLD = Told()


def of_rank(rank, size, root, trainer):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # of a group that there is already
    work(rank, size, root, trainer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(SIZE, Path(sys.argv[1]), partial(of_rank, trainer=sys.argv[2]))
