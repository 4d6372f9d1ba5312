"""What N ranks saved, M ranks restore: every row once, on the rank that owns it, read once."""

import threading
from collections import Counter
from itertools import product, starmap
from types import SimpleNamespace

import pytest
from support.paths import SUPPORT
from support.rank_processes import results, run_script
from support.resharding import Job, check
from support.sweeps import mostly_slow
from support.thread_ranks import on_ranks

from recckpt.format import catalog as catalogs
from recckpt.format.manifest import ShardEntry
from recckpt.sparse import gen_slice
from recckpt.sparse.files.catalogs import met_shards
from recckpt.storage.local import LocalStorage

SIZES = (1, 2, 3, 4, 5, 8)
N_ROWS = 16_000  # 6 MB


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where a number of ranks has saved, and the manifest: saves when it is asked for the first time."""
    root, known = tmp_path_factory.mktemp("saved"), {}

    def of(n_ranks):
        if n_ranks not in known:
            url = root / str(n_ranks)
            manifests = on_ranks(n_ranks, lambda rank, connect: Job(url, rank, n_ranks, connect=connect).save(N_ROWS))
            known[n_ranks] = url, manifests[0]
        return known[n_ranks]

    return of


def some(n_ranks, m_ranks):
    """Return the pair: of those that the test of catalogs and parts does not have, a few are in the default suite."""
    is_quick = (n_ranks, m_ranks) in [(1, 1), (1, 8), (2, 3), (3, 2), (5, 8)]
    return pytest.param(n_ranks, m_ranks, marks=() if is_quick else pytest.mark.slow)


@mostly_slow()
@pytest.mark.parametrize(("n_ranks", "m_ranks"), list(starmap(some, product(SIZES, SIZES))))
def test_every_number_of_ranks_restores_what_any_other_saved_and_reads_it_once(saved, n_ranks, m_ranks):
    url, manifest = saved(n_ranks)
    ranks = on_ranks(m_ranks, lambda rank, connect: Job(url, rank, m_ranks, connect=connect).restore())
    check(ranks, N_ROWS)
    stored = sum(file.n_bytes for file in manifest.files if file.name.endswith(".arrow"))
    others = sum(file.n_bytes for file in manifest.files if not file.name.endswith(".arrow"))
    assert sum(rank["bytes_read"] for rank in ranks) <= stored + m_ranks * others


@mostly_slow()
@pytest.mark.parametrize(("n_ranks", "m_ranks"), [(5, 3), (4, 5), (8, 8), (8, 5), (8, 1)])
def test_a_rank_opens_the_catalogs_and_parts_alone_that_meet_its_slice(saved, monkeypatch, n_ranks, m_ranks):
    url, manifest = saved(n_ranks)
    read, opened, lock = Counter(), Counter(), threading.Lock()
    rank_of = threading.local()
    decode, map_ = catalogs.decode, LocalStorage.map

    def counted_decode(*args):
        with lock:
            read[rank_of.rank] += 1
        return decode(*args)

    def counted_map(storage, name):
        with lock:
            opened[name.rpartition("/")[2]] += 1
        return map_(storage, name)

    monkeypatch.setattr(catalogs, "decode", counted_decode)
    monkeypatch.setattr(LocalStorage, "map", counted_map)

    def work(rank, connect):
        rank_of.rank = rank
        return Job(url, rank, m_ranks, connect=connect).restore()

    check(on_ranks(m_ranks, work), N_ROWS)
    assert read == {rank: len(met_shards(manifest, [gen_slice(rank, m_ranks)])) for rank in range(m_ranks)}
    if n_ranks == m_ranks:
        parts = [file.name.rpartition("/")[2] for file in manifest.files if file.name.endswith(".arrow")]
        assert {name: opened[name] for name in parts} == dict.fromkeys(parts, 1)
    else:
        assert m_ranks == 1 or max(read.values()) <= 3


@pytest.mark.parametrize(("n_ranks", "m_ranks"), [(1024, 768), (768, 1024), (1000, 999)])
def test_ranks_of_nearly_as_many_read_three_catalogs_at_most(n_ranks, m_ranks):
    slices = [gen_slice(rank, n_ranks) for rank in range(n_ranks)]
    manifest = SimpleNamespace(shards=[ShardEntry("", (own.begin, own.end)) for own in slices])
    assert max(len(met_shards(manifest, [gen_slice(rank, m_ranks)])) for rank in range(0, m_ranks, 37)) <= 3


def with_real_ranks(root, n_rows, saving, restoring):
    script = SUPPORT / "resharding.py"
    run_script(script, root, n_rows, *(",".join(map(str, sizes)) for sizes in (saving, restoring)))
    for size in restoring:
        ranks = results(root / f"restore-{size}", size)
        for n_ranks in saving:
            check([rank[n_ranks] for rank in ranks], n_rows)


@pytest.mark.slow
def test_three_real_ranks_restore_what_two_saved(tmp_path):
    with_real_ranks(tmp_path, 2_000, [2], [3])


@pytest.mark.slow
def test_up_to_four_real_ranks_restore_what_up_to_four_saved(tmp_path):
    with_real_ranks(tmp_path, 20_000, [1, 2, 3, 4], [1, 2, 3, 4])
