"""What each of two real processes does for test_group.py: run it as ``two_ranks.py RANK DIR``."""

import gc
import json
import logging
import pickle
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from recckpt import CheckpointManager, Saver
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage
from support.builders import OPTIMIZERS, ClickModel, Stream, flip_bit, table_state

SIZE = 2


class Rank:
    """The run of one rank: its slice of the tables, its part of the data."""

    def __init__(self, rank, url, max_keep=1):
        torch.manual_seed(rank)
        random.seed(rank)
        self.model = ClickModel(slice=gen_slice(rank, SIZE))
        self.optim = OPTIMIZERS["adam"](self.model.tables)
        self.stream = Stream()
        self.saver = Saver(self.model, self.optim, str(url), max_keep=max_keep)
        self.saver.register_io_state("stream", self.stream)
        self.manager = CheckpointManager(self.saver, 10**9, shard_id=rank, shard_num=SIZE)
        self.rank = rank

    def train(self, n_steps):
        own = gen_slice(self.rank, SIZE)
        for _ in range(n_steps):
            self.stream.position += 1 + self.rank
            for table in self.model.tables:
                ids = torch.randint(0, 300, (32,))
                table(ids[own.owns(ids)]).sum().backward()
            self.optim.step()
            self.manager.step()
        return self

    def state(self):
        tables = {table.name: table_state(table) for table in self.model.tables}
        return {"tables": tables, "position": self.stream.position, "rng": torch.get_rng_state().numpy().tobytes()}


def outcome(work):
    """Return (kind, rank, text) of what work raised, None where it raised nothing."""
    try:
        work()
    except Exception as error:
        return type(error).__name__, getattr(error, "rank", None), str(error)
    return None


def save_and_restore(rank, url):
    saved = Rank(rank, url).train(3)
    manifest = saved.manager.save()
    state = saved.state()
    restored = Rank(rank, url)
    step = restored.manager.restore()
    on_disk = json.loads((url / "ckpt_3" / "manifest.json").read_text())
    return {
        "saved": state,
        "restored": restored.state(),
        "step": step,
        "same manifest": (manifest.save_id, manifest.time) == (on_disk["save_id"], on_disk["time"]),
    }


def start_from_a_bank(rank, url):
    source = Rank(rank, url / "source").train(3)
    source.manager.save()
    run = Rank(rank, url / "own")
    report = run.manager.load_model_bank([{"path": str(url / "source")}])
    state = {name: table["id"] for name, table in run.state()["tables"].items()}
    run.train(1).manager.save()
    resumed = Rank(rank, url / "own")
    resumed.manager.load_model_bank([{"path": str(url / "gone")}])
    return {
        "rows": {name: len(ids) // 8 for name, ids in state.items()},
        "equal": state == {name: table["id"] for name, table in source.state()["tables"].items()},
        "reported": report.rows_taken,
        "step": (run.manager.global_step, resumed.manager.global_step),
        "resumed": resumed.state() == run.state(),
    }


def fail_to_write(rank, url):
    run = Rank(rank, url).train(1)
    run.manager.save()
    dist.barrier()
    before = sorted(p.name for p in url.iterdir())
    run.train(1)
    create = LocalStorage.create

    def full(self, name):
        if name.endswith(".json"):
            raise OSError(28, "No space left on device", name)
        return create(self, name)

    if rank == 1:
        LocalStorage.create = full
    failed = outcome(run.manager.save)
    LocalStorage.create = create
    dist.barrier()
    left = sorted(p.relative_to(url).as_posix() for p in url.rglob("*") if p.is_file() and "ckpt_1/" not in str(p))
    dist.barrier()
    older = Rank(rank, url)
    step = older.manager.restore()
    dist.barrier()
    again = outcome(run.manager.save)
    return {"before": before, "failed": failed, "left": left, "restored": step, "again": again}


def stage_what_cannot_be_saved(rank, url):
    run = Rank(rank, url)
    if rank == 1:
        run.saver.register_for_checkpointing("bad", Lying())
    failed = outcome(run.manager.save)
    return {"failed": failed, "left": sorted(p.name for p in url.iterdir())}


class Lying:
    def state_dict(self):
        return {"deep": object()}

    def load_state_dict(self, state):
        raise NotImplementedError


def disagree_on_a_table(rank, url):
    table = HashTable(2 + rank, name="t", slice=gen_slice(rank, SIZE))
    saver = Saver(torch.nn.ModuleDict({"t": table}), output_dir=str(url))
    return {
        "failed": outcome(lambda: saver.save("c", rank, SIZE)),
        "committed": list(url.glob("*/manifest.json")) != [],
    }


def save_tables_without_slices(rank, url):
    saver = Saver(torch.nn.ModuleDict({"t": HashTable(2, name="t"), "u": HashTable(2, name="u")}), output_dir=str(url))
    return {"failed": outcome(lambda: saver.save("c", rank, SIZE)), "left": sorted(p.name for p in url.iterdir())}


def save_a_position_of_one_rank(rank, url):
    run = Rank(rank, url).train(1)
    own = Stream()
    own.position = 70 + rank
    if rank == 1:
        run.saver.register_io_state("own", own)
    run.manager.save()
    restored, found = Rank(rank, url), Stream()
    restored.saver.register_io_state("own", found)
    restored.manager.restore()
    return found.position


def save_twice(rank, url):
    saver = Rank(rank, url).saver
    saver.save("c", rank, SIZE)
    return {"failed": outcome(lambda: saver.save("c", rank, SIZE))}


def restore_what_is_damaged_for_one(rank, url):
    run = Rank(rank, url, max_keep=2).train(1)
    run.manager.save()
    expected = run.state()
    run.train(1)
    run.manager.save()
    dist.barrier()
    if rank == 0:
        flip_bit(url / "ckpt_2" / "io_state_1.pt")
    dist.barrier()
    restored = Rank(rank, url)
    step = restored.manager.restore()
    state = restored.state()
    return {"step": step, "equal": state == expected, "explicit": outcome(lambda: restored.manager.restore(2))}


def restore_where_there_is_nothing(rank, url):
    return {
        "step": Rank(rank, url).manager.restore(),
        "required": outcome(lambda: Rank(rank, url).manager.restore(required=True)),
    }


def save_each_for_itself(rank, url):
    """A rank that saves alone, into a dir of its own, beside a process group that is there for something else."""
    model = torch.nn.Linear(1, 1)
    stream = Stream()
    saver = Saver(model, output_dir=str(url / str(rank)))
    saver.register_io_state("stream", stream)
    manager = CheckpointManager(saver, 1, shard_id=0, shard_num=1)
    stream.position = 5 + rank
    manager.step()
    stream.position = 0
    return {"step": manager.restore(), "position": stream.position}


def save_with_many_savers(rank, url):
    def n_descriptors():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = n_descriptors()
    for number in range(3):
        Saver(torch.nn.Linear(1, 1), output_dir=str(url / str(number))).save("c", rank, SIZE)
    return n_descriptors() - before


def meet_again(rank, url):
    saver = Saver(torch.nn.Linear(1, 1), output_dir=str(url))
    saver.save("a", rank, SIZE)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{url}/rendezvous", rank=rank, world_size=SIZE)
    return saver.save("b", rank, SIZE).ckpt_id


SCENES = [
    save_and_restore,
    start_from_a_bank,
    fail_to_write,
    stage_what_cannot_be_saved,
    disagree_on_a_table,
    save_tables_without_slices,
    save_a_position_of_one_rank,
    save_twice,
    restore_what_is_damaged_for_one,
    restore_where_there_is_nothing,
    save_each_for_itself,
    save_with_many_savers,
    meet_again,
]


def main():
    rank, root = int(sys.argv[1]), Path(sys.argv[2])
    logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=SIZE)
    results = {}
    for scene in SCENES:
        url = root / scene.__name__
        url.mkdir(exist_ok=True)
        results[scene.__name__] = scene(rank, url)
        dist.barrier()
    (root / f"results_{rank}").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
