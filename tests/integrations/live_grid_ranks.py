"""A table over a grid of four real ranks on two hosts, for test_live_torchrec.py: ``live_grid_ranks.py ROOT``.

On CPUs TorchRec does not train such a table right: its look-up has the columns of one host alone. So rows are written.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from support import live_torchrec as models
from support.rank_processes import fork_ranks

from recckpt import Deltas, Saver

DIM = 256  # TorchRec divides no rows of fewer columns over hosts


def made(seed, root, kind):
    model, optimizer, tables = models.sharded(seed, 4, "rows", kind, users="grid")
    saver = Saver(model, output_dir=str(root / kind), tables=tables, deltas=Deltas(max_dirty=1))
    saver.register_for_checkpointing("optimizer", optimizer)
    optimizer.init_state()
    return model, tables, saver


def work(rank, size, root):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = str(rank % 2)
    for kind in ("sgd", "rowwise"):
        model, tables, saver = made(0, root.parent, kind)
        users = tables["users"]
        first, _ = users.live.box().rows
        assert users.live.box().part == rank // 2
        for number in range(2):
            values = {slot: torch.rand_like(tensor[:2]) for slot, tensor in users.live.tensors().items()}
            users.write(torch.arange(first + number, first + number + 2), values)
            record = saver.save(f"ckpt_{number}", step=number)
        assert {table.name: table.delta.upserts for table in record.tables}["users"] == 4
        truth = models.whole_state(model, tables)
        saver.close()
        model, tables, saver = made(1, root.parent, kind)
        saver.load()
        assert models.differing(models.whole_state(model, tables), truth) == []
        saver.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "TORCHREC_RESOLVED_POD_SIZE": "2"}
    models.BAGS["users"] = (11, DIM, ["user"])
    (Path(sys.argv[1]) / "run").mkdir()
    fork_ranks(4, Path(sys.argv[1]) / "run", work)
