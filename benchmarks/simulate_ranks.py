"""The save and the restore of many ranks without their rows: what rank 0 has to do, and what each rank reads.

The real save runs as rank 0 of so many, with the records that the others would send and their files: real catalogs, and
holes of the right size in place of parts. The real load runs as some of the ranks that restore, up to where it would
read rows. One JSON line a case; medians of three, after a save that is not counted.

    python benchmarks/simulate_ranks.py                                  # 1,024 ranks, 100 GB
    python benchmarks/simulate_ranks.py --ranks 128 256 512 1024 2048    # is it linear?
    python benchmarks/simulate_ranks.py --gb 110000                      # 110 TB: all batches of 8 MiB
    python benchmarks/simulate_ranks.py --ranks 1024 8192 --batches 1 --cases agree commit    # and over the wire?
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from machine import describe_machine
from measuring import report, scratch, status_mib
from simulated import Job, OneOfMany, proposals, save_as_rank_0, write_shard

from recckpt.checkpoint import attempt as attempts
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.format import catalog as catalogs
from recckpt.format import manifest as manifests
from recckpt.format.manifest import Manifest
from recckpt.load import load as loading
from recckpt.load import open_source as opening
from recckpt.load.conf import parse_load_conf
from recckpt.load.live_state import LiveState
from recckpt.load.problems import Problems
from recckpt.load.source import LocatedCheckpoint
from recckpt.output_dir import commit as committing
from recckpt.output_dir import fence as fencing
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent, read_manifest
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.ranks import Meetings
from recckpt.save import commit as saving
from recckpt.save import save as hallway
from recckpt.save.decide import decide
from recckpt.save.save_info import SaveInfo
from recckpt.save.write import RankRecord
from recckpt.sparse import HashTable, gen_slice
from recckpt.sparse.files import link_pass as row_loading
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage

ROUNDS = 3
CHUNK_RANKS = 16
COUNTED = ("open", "read", "map", "size", "list_dirs", "list_files", "sync_dir", "put_if_absent", "remove")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024])
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--batches", type=int, default=64, help="of each table on each rank; more where one is full")
    parser.add_argument("--gb", type=float, default=100.0, help="of all rows on all ranks")
    parser.add_argument("--threads", type=int, default=8, help="that write on each rank")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cases", nargs="*", default=["agree", "restore", "commit"])
    args = parser.parse_args()
    report({"case": "machine", **describe_machine(), "load": os.getloadavg()[0]})
    for ranks in args.ranks:
        job = Job(ranks, args.tables, args.batches, int(args.gb * 1e9), args.threads)
        with scratch(args.tmpfs) as root, fresh_processes(1) as pool:  # its own memory for each count
            pool.submit(simulate, job, root, args.cases).result()


def agree(job: Job) -> dict[str, Any]:
    """Return what rank 0 has to do to agree with all on a save, and what goes over the wire for that."""
    of_all = proposals(job)
    begin = time.process_time()
    plan = decide(of_all)
    seconds = time.process_time() - begin
    pickled = [pickle.dumps(each) for each in of_all]
    begin = time.process_time()
    for each in pickled:
        pickle.loads(each)
    figures = {"unpickle_cpu_sec": time.process_time() - begin, "decide_cpu_sec": seconds}
    wire_bytes = sum(map(len, pickled[1:])) + (job.ranks - 1) * len(pickle.dumps(plan))
    return {"case": "agree", **asdict(job), "wire_bytes": wire_bytes, **figures}


def simulate(job: Job, root: Path, cases: Sequence[str]) -> None:
    if "agree" in cases:
        report(agree(job))
    if cases == ["agree"]:
        return
    before = status_mib("VmRSS")
    rank_0 = RankZero(job, root)
    begin = time.perf_counter()
    rank_0.save("ckpt_0", rank_0.written)
    about = {
        **asdict(job),
        "files": len(rank_0.manifest.files),
        "seconds_to_build": round(time.perf_counter() - begin, 1),
    }
    near = (job.ranks, round(job.ranks * 1000 / 1024), job.ranks * 3 // 4)
    for to_ranks in near if "restore" in cases else ():
        with fresh_processes(1) as pool:
            report({"case": "restore", **about, **pool.submit(restore, job, root, to_ranks).result()})
    if "commit" in cases:
        rounds = [rank_0.measured_save(f"ckpt_{number}") for number in range(1, ROUNDS + 1)]
        peak = {"peak_mib": round(status_mib("VmHWM") - before, 1), "load": os.getloadavg()[0]}
        report({"case": "commit", **about, **rank_0.sizes(), **medians(rounds), **peak})


@contextmanager
def fresh_processes(number: int) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(number, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of figures, which are numbers or dicts of them."""
    return {
        key: medians([one[key] for one in rounds])
        if isinstance(value, dict)
        else round(statistics.median(one.get(key, 0) for one in rounds), 3)
        for key, value in rounds[0].items()
    }


class CountedStorage(LocalStorage):
    """Counts what is asked of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.calls: Counter[str] = Counter()
        for name in (
            "open",
            "read",
            "map",
            "size",
            "list_dirs",
            "list_files",
            "sync_dir",
            "put_if_absent",
            "remove",
        ):
            setattr(self, name, partial(self._counted, name, getattr(self, name)))

    def _counted(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self.calls[name] += 1
        return call(*args)


class Stopwatch:
    """Processor seconds and calls of some functions while they are watched, of those that are called from others too.

    Seconds of the processor, since those of the clock hang on who else is at work.
    """

    def __init__(self, **watched: tuple[object, str]) -> None:
        self._watched = watched
        self.seconds = dict.fromkeys(watched, 0.0)
        self.calls: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch."""
        with ExitStack() as stack:
            for label, (owner, name) in self._watched.items():
                call = partial(self._timed, label, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, call))
            yield

    def _timed(self, label: str, call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        self.calls[label] += 1
        begin = time.process_time()
        try:
            return call(*args, **more)
        finally:
            self.seconds[label] += time.process_time() - begin


class RankZero:
    """Rank 0 of a job, and the records that the others have sent once."""

    def __init__(self, job: Job, root: Path) -> None:
        self._job, self._records, self._root = job, root / "records", root / "runs"
        self._storage = CountedStorage(str(self._root))
        self._storage.prepare()
        self._fence = Fence(self._storage)
        self._directory = ""
        self.wire_bytes = 0
        self.manifest: Manifest

    def save(self, ckpt_id: str, others: Callable[[Intent], Sequence[RankRecord]]) -> SaveInfo:
        """Save, with the records of the others."""
        info, group = SaveInfo(ckpt_id, step=1), OneOfMany(self._job, others)
        self.manifest = save_as_rank_0(self._job, self._storage, self._fence, info, group, 1)
        self._directory, self.wire_bytes = ckpt_id, group.n_bytes
        return info

    def measured_save(self, ckpt_id: str) -> dict[str, Any]:
        """Save over what was saved before, which is rotated away."""
        watch = Stopwatch(
            begin=(hallway, "begin"),
            commit=(attempts, "commit"),
            rotate=(hallway, "rotate"),
            conclude=(hallway, "commit"),
            tables=(saving, "tables_of_all"),
            shards=(saving, "with_shards"),
            encode=(manifests, "encode"),
            decode=(manifests, "decode"),
            check_sizes=(committing, "check_files"),
            put=(self._storage, "put_if_absent"),
            list=(fencing, "list_checkpoints"),
            index=(self._fence, "write_index"),
            remove=(rotation, "remove"),
        )
        self._storage.calls.clear()
        with watch.running():
            info = self.save(ckpt_id, self.linked)
        watch.seconds["manifest"] = watch.seconds["conclude"] - watch.seconds["commit"]
        parts = ("begin", "manifest", "commit", "rotate")
        return {
            "wire_bytes": self.wire_bytes,
            "rank_0_cpu_sec": sum(watch.seconds[part] for part in parts),
            "commit_and_rotate_clock_sec": info.commit_sec + info.rotate_sec,
            "cpu_sec": watch.seconds,
            "calls": dict(self._storage.calls),
        }

    def written(self, intent: Intent) -> list[RankRecord]:
        """Have other processes write what the other ranks write."""
        ranks = range(1, self._job.ranks)
        chunks = [ranks[first : first + CHUNK_RANKS] for first in range(0, len(ranks), CHUNK_RANKS)]
        with self._records.open("wb") as file, fresh_processes(2) as pool:
            for pickled in pool.map(partial(write_shards, self._job, self._storage.url, intent), chunks):
                file.writelines(pickled)
        return list(self._sent())

    def linked(self, intent: Intent) -> list[RankRecord]:
        """Give the files of the last save another name: commit and rotation cannot tell them from new ones."""
        records = [replace(record, shard=replace(record.shard, save_id=intent.save_id)) for record in self._sent()]
        for record in records:
            for file in record.shard.files:
                os.link(self._root / self._directory / file.name, self._root / intent.directory / file.name)
        return records

    def _sent(self) -> Iterator[RankRecord]:
        with self._records.open("rb") as file:
            for _ in range(1, self._job.ranks):
                yield pickle.load(file)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of what the checkpoint says of itself."""
        of_catalogs = [file.n_bytes for file in self.manifest.files if file.name.endswith(".json")]
        return {
            "manifest_bytes": len(manifests.encode(self.manifest)),
            "catalog_bytes_per_rank": round(statistics.mean(of_catalogs)),
            "record_bytes_per_rank": self._records.stat().st_size // max(1, self._job.ranks - 1),
        }


def write_shards(job: Job, url: str, intent: Intent, ranks: Sequence[int]) -> list[bytes]:
    """Write the files of some ranks and return their records as they are sent."""
    storage = open_storage(url)
    with mock.patch("os.fsync"):  # the ranks' own disks, not what is measured
        return [pickle.dumps(write_shard(job, rank, storage, intent)) for rank in ranks]


def restore(job: Job, root: Path, ranks: int) -> dict[str, Any]:
    """Plan the restore of a few ranks, up to where rows would be read."""
    storage = CountedStorage(str(root / "runs"))
    watched = sorted({0, ranks // 3, ranks // 2, ranks - 1})
    planned(job, storage, 0, ranks)  # imports, and compiles
    figures = [planned(job, storage, rank, ranks) for rank in watched]
    record = read_manifest(storage, "ckpt_0")
    assert record is not None
    slices = [gen_slice(rank, ranks) for rank in range(ranks)]
    return {
        "to_ranks": ranks,
        "catalogs_that_meet_at_most": max(sum(slice.meets(*s.buckets) for s in record.shards) for slice in slices),
        "catalogs_read_at_most": max(one["calls"].get("catalogs", 0) for one in figures),
        **medians(figures),
    }


def planned(job: Job, storage: CountedStorage, rank: int, ranks: int) -> dict[str, Any]:
    """Run a load as one rank, without its rows."""
    live = LiveState(empty_model(job, rank, ranks), None, extra_registry(), io_registry(), rank, ranks)
    storage.calls.clear()
    watch = Stopwatch(
        manifest=(manifests, "decode"),
        catalogs=(catalogs, "decode"),
        open=(opening, "OpenSource"),
        plan=(loading, "plan"),
    )
    before = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin, begin_cpu = time.perf_counter(), time.process_time()
    with watch.running(), without_rows():
        record = read_manifest(storage, "ckpt_0")
        assert record is not None
        source = LocatedCheckpoint(parse_load_conf(None), storage, Checkpoint("ckpt_0", record))
        alone = Meetings()
        with opening.opened([source], live.needs) as sources:
            loading.load(live, sources, Problems(), concurrency=1, download_dir=None, rng=False, meetings=alone)
    return {
        "plan_cpu_sec": time.process_time() - begin_cpu,
        "plan_clock_sec": time.perf_counter() - begin,
        "cpu_sec": watch.seconds,
        "peak_mib": status_mib("VmHWM") - before,
        "calls": {**storage.calls, "catalogs": watch.calls["catalogs"]},
    }


@contextmanager
def without_rows() -> Iterator[None]:
    """Let a load decide what it would read, and read nothing."""
    with mock.patch.object(row_loading.LinkPass, "run", return_value=0):
        yield


class Tables(torch.nn.Module):
    """A model of tables and the dense part that was saved."""

    def __init__(self, tables: Sequence[HashTable]) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(tables)
        self.top = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(8))


def empty_model(job: Job, rank: int, ranks: int) -> Tables:
    tables = []
    for hollow in job.hollow_tables():
        table = HashTable(hollow.slots[0].shape, name=hollow.name, slice=gen_slice(rank, ranks))
        for slot in hollow.slots[1:]:
            table.add_slot(slot.name, slot.shape, torch.float32)
        tables.append(table)
    return Tables(tables)


if __name__ == "__main__":
    main()
