"""What each of two real processes does for test_ranks.py: run it as ``ranks.py RANK DIR``."""

import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.writer_hooks import Failing, Noting, notes

from recckpt.checkpointer import RankInfo, make_async_checkpointer, make_sync_checkpointer
from recckpt.errors import CheckpointNotFoundError

SIZE = 2
MAKERS = {"sync": make_sync_checkpointer, "async": make_async_checkpointer}


def save(checkpointer, state, path, **kwargs):
    """Return (kind, rank, text) of the error of a save, None where there was none."""
    try:
        futures = checkpointer.save(state, path, **kwargs)
        if futures:
            futures[1].result()
    except Exception as error:
        return type(error).__name__, getattr(error, "rank", None), str(error)
    return None


def names(path):
    return sorted(file.name for file in path.iterdir()) if path.exists() else []


def save_and_load(rank, path, make):
    with make(commit_hook=Noting(path / f"hook_{rank}")) as checkpointer:
        (path / f"hook_{rank}").mkdir(parents=True)
        failed = [save(checkpointer, {"rank": rank, "w": torch.full((9,), float(step))}, path / "c") for step in (1, 2)]
        loaded = checkpointer.load(path / "c")
        after = [found for when, _, found, _ in notes(path / f"hook_{rank}") if when == "post"]
        return {"failed": failed, "rank": loaded["rank"], "w": loaded["w"].tolist(), "seen after": after}


def fail_on_one(rank, path, make):
    """Fail on rank 1 in every room, and save well after each of them."""
    found = {}
    with make(commit_hook=Failing()) as checkpointer:
        for room in ("pre", "post", "state", "path"):
            here = path / room
            save(checkpointer, {"is": "old"}, here)
            dist.barrier()
            bad = {"is": object()} if room == "state" and rank == 1 else {"is": "new"}
            where = path / "file" / "c" if room == "path" and rank == 1 else here
            (path / "file").touch()
            failed = save(checkpointer, bad, where, fail=room if rank == 1 else "")
            dist.barrier()
            found[room] = failed, checkpointer.load(here)["is"], names(here)
            dist.barrier()
            assert save(checkpointer, {"is": "newer"}, here) is None
            found[room] += (checkpointer.load(here)["is"],)
            dist.barrier()
    return found


def miss_one(rank, path, make):
    """Rank 1 begins its save only when rank 0 has given up."""
    with make(barrier_timeout_sec=600.0) as checkpointer:
        save(checkpointer, {"is": "old"}, path / "c")
        dist.barrier()
        barrier_of(checkpointer)._timeout_sec = 0.5  # for the one save that is to fail, however slow this machine is
        if rank == 1:
            dist.barrier()
        began = time.monotonic()
        failed = save(checkpointer, {"is": "new"}, path / "c")
        took = time.monotonic() - began
        if rank == 0:
            dist.barrier()
        dist.barrier()
        found = failed, took, names(path / "c"), checkpointer.load(path / "c")["is"]
        barrier_of(checkpointer)._timeout_sec = 600.0
        dist.barrier()
        return (*found, save(checkpointer, {"is": "newer"}, path / "c"), checkpointer.load(path / "c")["is"])


def barrier_of(checkpointer):
    return (checkpointer._writer if hasattr(checkpointer, "_writer") else checkpointer._process)._barrier


def save_alone(rank, path, make):
    """A rank that saves by itself beside a process group, and one that looks for what nobody wrote."""
    with make(rank_info=RankInfo(0, 1)) as checkpointer:
        failed = save(checkpointer, {"is": rank}, path / str(rank))
        found = checkpointer.load(path / str(rank))
    dist.barrier()
    with make() as checkpointer:
        try:
            checkpointer.load(path / "0")
            missing = None
        except CheckpointNotFoundError as error:
            missing = str(error)
    return failed, found, names(path / str(rank)), missing


def leave_in_flight(path):
    """Let the interpreter end with a save in flight, and with another that fails unseen."""
    good = make_async_checkpointer(rank_info=RankInfo(0, 1))
    bad = make_async_checkpointer(rank_info=RankInfo(0, 1), commit_hook=Failing())
    LEFT.extend([good, bad])
    (path / "pids").write_text(f"{good._process.pid} {bad._process.pid}")
    good.save({"w": torch.arange(1000.0)}, path / "good")
    bad.save({"w": 1}, path / "bad", fail="pre")


LEFT = []
SCENES = [save_and_load, fail_on_one, miss_one, save_alone]


def main():
    rank, root = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=SIZE)
    results = {}
    for kind, make in MAKERS.items():
        for scene in SCENES:
            path = root / kind / scene.__name__
            path.mkdir(parents=True, exist_ok=True)
            results[kind, scene.__name__] = scene(rank, path, make)
            dist.barrier()
    (root / f"results_{rank}").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
    if rank == 0:
        leave_in_flight(root)


if __name__ == "__main__":
    main()
