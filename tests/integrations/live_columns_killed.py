"""A rank that is killed while columns are exchanged, for test_live_torchrec.py: ``live_columns_killed.py ROOT``."""

import logging
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it has much to say of connections that end

import pytest
import torch
import torch.distributed as dist
from support import live_torchrec as models
from support.rank_processes import whole_life

from recckpt import Saver
from recckpt.adapters import columns as column_exchange
from recckpt.adapters.columns import ColumnRows
from recckpt.errors import SaveFailedError
from recckpt.policies import Transfers

SECONDS = 30


def be_rank(rank, root):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    column_exchange.WINDOW_BYTES = 300
    meeting = {"init_method": f"file://{root}/rendezvous", "timeout": timedelta(seconds=SECONDS)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **meeting)
    model, optimizer, tables = models.sharded(0, 2, "columns", "adagrad")
    saver = Saver(
        model, output_dir=str(root / "runs"), tables=tables, deltas=True, transfers=Transfers(timeout_sec=SECONDS)
    )
    saver.register_for_checkpointing("optimizer", optimizer)
    models.step(model, optimizer, 0)
    saver.save("ckpt_0", step=0)
    models.step(model, optimizer, 1)
    if rank == 1:
        die_in_window(3)
    handle, begin = saver.save_async("ckpt_1", step=1), time.monotonic()
    with pytest.raises(SaveFailedError, match="rank 1"):
        handle.wait()
    assert time.monotonic() - begin < SECONDS + 10


def die_in_window(number):
    """Let this process be killed when it reads the columns that it would send in a window."""
    send, calls = ColumnRows.send, []

    def sent(*args):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*args)

    ColumnRows.send = sent


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            with whole_life():
                be_rank(rank, Path(sys.argv[1]))
        ranks[pid] = rank
    ended = dict(os.wait() for _ in ranks)
    assert {ranks[pid]: status for pid, status in ended.items()} == {0: 0, 1: signal.SIGKILL}, ended
