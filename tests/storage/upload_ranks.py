"""A rank that saves and restores as it is told, one JSON line in and one out: ``upload_ranks.py RANK DIR OPTIONS``."""

import json
import logging
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from fsspec.config import conf
from support.builders import ClickModel, table_state
from support.late_storage import LateStorage

from recckpt import Saver
from recckpt.policies import Transfers
from recckpt.save import arguments
from recckpt.save.arguments import transport_of
from recckpt.sparse import gen_slice
from recckpt.storage import open_storage

SIZE = 2


def run(rank, url, step, late, **transfers):
    """Save the rows of a step, load them into another model, and return what came of it."""
    model = ClickModel(slice=gen_slice(rank, SIZE))
    ids = torch.arange(500)
    for table in model.tables:
        table.insert(ids[table.slice.owns(ids)], torch.full((int(table.slice.owns(ids).sum()), 4), float(step)))
    storages = []
    arguments.open_storage = lambda path: (
        storages.append(LateStorage(path) if late else open_storage(path)) or storages[-1]
    )
    if late:
        arguments.transport_of = lambda *asked: without_waiting(transport_of(*asked), LateStorage(url))
    saver = Saver(model, output_dir=url, transfers=Transfers(**transfers))
    if late:
        [storage] = storages
        storage.late = {f"ckpt/{name}": seen for name, seen in late.items()}
    try:
        saver.save("ckpt", rank, SIZE, step=step, overwrite=True)
    except Exception as error:
        return {"failed": [type(error).__name__, getattr(error, "rank", None), str(error)]}
    other = ClickModel(slice=gen_slice(rank, SIZE))
    report = Saver(other, output_dir=url, transfers=Transfers(**transfers)).load(shard_id=rank)
    equal = [table_state(a) == table_state(b) for a, b in zip(model.tables, other.tables, strict=True)]
    return {"failed": None, "equal": equal, "step": report.global_step}


def without_waiting(transport, storage):
    """Let the time in which files of others are looked for pass at once."""
    return replace(transport, visible=replace(storage.visible, deadline_sec=transport.visible.deadline_sec))


def main():
    rank, directory, conf["s3"] = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    logging.getLogger("recckpt").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(rank, **json.loads(line))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
