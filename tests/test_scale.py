"""What grows with the number of ranks, counted in a save of many whose rows nobody wrote (benchmarks/simulated.py)."""

import importlib
from collections import Counter
from functools import partial

import pytest
from support.paths import ROOT

from recckpt.checkpoint.chain import OpenLink
from recckpt.format import catalog as catalogs
from recckpt.format import manifest as manifests
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import list_checkpoints
from recckpt.save.save_info import SaveInfo
from recckpt.sparse import gen_slice
from recckpt.sparse.files.catalogs import met_shards
from recckpt.storage import open_storage

OPERATIONS = (
    *("make_dir", "put_if_absent", "replace", "sync_dir", "open", "map", "read", "size"),
    *("list_dirs", "list_files", "remove", "remove_empty_dirs"),
)


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("simulated")


class Run:
    """Saves of so many ranks to one output dir, of which one stays."""

    def __init__(self, simulated, root, ranks, monkeypatch):
        root.mkdir()
        self.simulated, self.storage = simulated, open_storage(str(root))
        self.job = simulated.Job(ranks, tables=6, batches=4, n_bytes=ranks * 100_000, threads=2)
        self.calls = Counter()
        self.fence = Fence(self.storage)
        monkeypatch.setattr("os.fsync", lambda fd: None)
        for name in OPERATIONS:
            monkeypatch.setattr(self.storage, name, partial(self._counted, name, getattr(self.storage, name)))

    def _counted(self, name, call, *args):
        self.calls[name] += 1
        return call(*args)

    def save(self, ckpt_id):
        def others(intent):
            writers = range(1, self.job.ranks)
            records = [self.simulated.write_shard(self.job, rank, self.storage, intent) for rank in writers]
            self.calls.clear()  # what follows is the commit
            return records

        group = self.simulated.OneOfMany(self.job, others)
        return self.simulated.save_as_rank_0(self.job, self.storage, self.fence, SaveInfo(ckpt_id), group, 1)


@pytest.fixture
def run_of(simulated, tmp_path, monkeypatch):
    return lambda ranks: Run(simulated, tmp_path / f"{ranks}", ranks, monkeypatch)


def test_a_manifest_grows_by_the_same_bytes_with_each_rank_and_stays_small(run_of):
    sizes = {ranks: len(manifests.encode(run_of(ranks).save("a"))) for ranks in (10, 20, 40)}
    a_rank = (sizes[40] - sizes[20]) / 20
    assert (sizes[20] - sizes[10]) / 10 == pytest.approx(a_rank, rel=0.1)
    assert 1024 * a_rank < 4 << 20


def test_a_commit_asks_the_storage_as_often_whatever_the_number_of_ranks_but_to_remove_files(run_of):
    calls = {}
    for ranks in (3, 12):
        run = run_of(ranks)
        run.save("a")
        record = run.save("b")  # and "a" goes
        assert [found.ckpt_id for found in list_checkpoints(run.storage).committed] == ["b"]
        calls[ranks] = run.calls
        assert run.calls.pop("remove") == len(record.files) + 2  # the manifest and INTENT
    assert calls[3] == calls[12]
    assert calls[3]["size"] == 0


def test_ranks_of_about_as_many_read_three_catalogs_at_most(run_of, monkeypatch):
    run = run_of(24)
    run.save("a")
    [checkpoint] = list_checkpoints(run.storage).committed
    expected = {table.name: table.rows for table in checkpoint.manifest.tables}
    read, decode = [], catalogs.decode
    monkeypatch.setattr(catalogs, "decode", lambda *args: (read.append(args[3]), decode(*args))[1])
    for to_ranks in (24, 23, 18):
        rows = dict.fromkeys(expected, 0)
        for rank in range(to_ranks):
            read.clear()
            owned = gen_slice(rank, to_ranks)
            met = met_shards(checkpoint.manifest, [owned])
            parts = [part for each in OpenLink.of(run.storage, checkpoint).catalogs_of(met) for part in each.parts]
            assert 1 <= len(read) <= 3
            assert read == met
            for batch in (batch for part in parts for batch in part.batches):
                rows[batch.table] += batch.rows if owned.begin <= batch.buckets[0] < owned.end else 0
        assert rows == expected
