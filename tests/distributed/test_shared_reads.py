"""Ranks that restore together read each batch once, and send each other the rows that others own."""

import threading
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from support.builders import flip_bit
from support.late_storage import count_bytes
from support.paths import SUPPORT
from support.rank_processes import results, run_script
from support.resharding import Job, check
from support.shared_reads import LAST_STEP, TABLES, ChainJob, expected, union
from support.sweeps import mostly_slow
from support.thread_ranks import ThreadGroup, on_ranks

from recckpt.errors import CorruptCheckpointError, PartlyLoadedError, RecckptError
from recckpt.format.buckets import Slice
from recckpt.output_dir.listing import locate
from recckpt.policies import Transfers
from recckpt.sparse.files import filler, link_pass
from recckpt.sparse.files.filler import Filler
from recckpt.sparse.files.part_reader import LinkBatches
from recckpt.storage import open_storage

ALL = {name: expected(name) for name in TABLES}


@pytest.fixture(scope="module")
def chain_of(tmp_path_factory):
    """Where a number of ranks has saved a chain."""
    root, known = tmp_path_factory.mktemp("chains"), set()

    def of(n_ranks):
        url = root / str(n_ranks)
        if n_ranks not in known:
            on_ranks(n_ranks, lambda rank, connect: ChainJob(url, rank, n_ranks, connect=connect).save_chain())
            known.add(n_ranks)
        return url

    return of


@pytest.fixture
def sent(monkeypatch):
    """How many bytes each rank has sent in each exchange."""
    sizes, lock, exchange = [], threading.Lock(), ThreadGroup.exchange

    def counted(group, mark, parcels, *into):
        with lock:
            sizes.append(sum(len(parcel) for to, parcel in enumerate(parcels) if to != group.rank))
        return exchange(group, mark, parcels, *into)

    monkeypatch.setattr(ThreadGroup, "exchange", counted)
    return sizes


def restored(url, m_ranks, *, before=0, **options):
    """Return the rows of each rank that has restored, or its error and its rows."""

    def work(rank, connect):
        job = ChainJob(url, rank, m_ranks, connect=connect, **options)
        for step in range(1, before + 1):
            job.set_state(step)
        try:
            job.manager.restore()
        except (RecckptError, OSError) as error:
            return error, job.rows()
        return job.rows()

    return on_ranks(m_ranks, work)


@mostly_slow("n_ranks", "m_ranks")
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("n_ranks", "m_ranks"), list(product([1, 2, 3], [1, 2, 3, 4])))
def test_a_chain_with_deletes_comes_back_on_any_number_of_ranks(chain_of, n_ranks, m_ranks, before):
    assert union(restored(chain_of(n_ranks), m_ranks, before=before)) == ALL


def test_rows_travel_in_bounded_rounds(chain_of, monkeypatch, sent):
    monkeypatch.setattr(link_pass, "WINDOW_BYTES", 3000)
    url = chain_of(1)
    assert union(restored(url, 3)) == ALL
    assert max(sent) <= 2 * 3000 + 4000, "a window, or a batch, and what it is wrapped in"
    many = len(sent)
    sent.clear()
    monkeypatch.undo()
    restored(url, 3)
    assert len(sent) < many


def test_ranks_as_of_the_save_send_no_rows(chain_of, monkeypatch):
    taken, some = [], filler.BatchRows.some
    monkeypatch.setattr(filler.BatchRows, "some", lambda *args: (taken.append(args), some(*args))[1])
    assert union(restored(chain_of(3), 3)) == ALL
    assert not taken
    assert union(restored(chain_of(3), 2)) == ALL
    assert taken


@mostly_slow()
@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"where": {"sample": 0.5}},
        {"where": {"ids": list(range(0, 2000, 3))}},
        {"hashtable_clear": False},
        {"load": ["other"]},
        {"on_mismatch": "resize"},
    ],
)
def test_a_warm_start_gives_what_one_rank_alone_gets(chain_of, tmp_path, conf):
    bank = [{"path": str(chain_of(2)), "oname": {"other": "wide"}, "ignore_error": True, **conf}]
    names = {"other": "wide", "narrow": "narrow"}

    def started(m_ranks):
        def work(rank, connect):
            job = ChainJob(tmp_path / str(m_ranks), rank, m_ranks, connect=connect, names=names)
            if "hashtable_clear" in conf:
                job.set_state(1)
            report = job.manager.load_model_bank(bank)
            return job.rows(), report.rows_taken, report.rows_filtered

        ranks = on_ranks(m_ranks, work)
        counts = [sum((Counter(rank[number]) for rank in ranks), Counter()) for number in (1, 2)]
        return union([rank[0] for rank in ranks]), counts

    alone = started(1)
    assert alone[0]["other"]
    assert started(3) == alone


def test_tables_that_only_one_rank_has_or_several_have_whole_come_back_whole(chain_of):
    def work(rank, connect):
        names = {"wide": "wide", "narrow": "narrow"} if rank else {"wide": "wide"}
        job = ChainJob(chain_of(2), rank, 3, connect=connect, names=names)
        if rank:
            job.tables["narrow"].slice = None if rank == 1 else Slice(0, 1, 1)
        job.manager.restore(load_conf={"strict": False})
        return job.rows()

    ranks = on_ranks(3, work)
    assert ranks[1].pop("narrow") == ranks[2].pop("narrow") == ALL["narrow"]
    assert union(ranks) == {"wide": ALL["wide"]}


@pytest.mark.parametrize("before", [0, 1])
def test_damage_that_one_rank_meets_has_all_go_on_from_an_older_checkpoint(tmp_path, before):
    on_ranks(2, lambda rank, connect: ChainJob(tmp_path, rank, 2, connect=connect).save_chain())
    flip_bit(max(tmp_path.glob("ckpt_3*/**/*.arrow"), key=lambda path: path.stat().st_size))
    assert union(restored(tmp_path, 3, before=before)) == {name: expected(name, LAST_STEP - 1) for name in TABLES}


@pytest.mark.parametrize("before", [0, 1])
def test_damage_without_anything_older_leaves_the_tables_of_all_ranks_as_they_were(tmp_path, before):
    on_ranks(2, lambda rank, connect: ChainJob(tmp_path, rank, 2, connect=connect).save_chain(1))
    flip_bit(max(tmp_path.rglob("*.arrow"), key=lambda path: path.stat().st_size))
    ranks = restored(tmp_path, 3, before=before)
    assert [type(error) for error, _ in ranks] == [CorruptCheckpointError] * 3
    assert len({str(error) for error, _ in ranks}) == 1
    rows = {name: expected(name, 1) if before else {} for name in TABLES}
    assert union(rows for _, rows in ranks) == rows


@pytest.mark.parametrize("n_reads", [0, 2])
def test_a_rank_that_cannot_read_is_named_by_all(chain_of, monkeypatch, n_reads):
    reader, of_victim = LinkBatches.reader, threading.local()
    monkeypatch.setattr(link_pass, "WINDOW_BYTES", 3000)
    monkeypatch.setattr("recckpt.sparse.files.link_pass.run_all", lambda work, items, n: [work(item) for item in items])

    def read_or_fail(batches, *args):
        of_victim.left = getattr(of_victim, "left", n_reads) - 1
        if threading.current_thread().name == "recckpt-1" and of_victim.left < 0:
            raise OSError("no such bucket")
        return reader(batches, *args)

    monkeypatch.setattr(LinkBatches, "reader", read_or_fail)
    ranks = restored(chain_of(1), 3)
    assert len({str(error) for error, _ in ranks}) == 1
    assert "OSError: no such bucket" in str(ranks[0][0])
    assert all(not some for _, rows in ranks for some in rows.values())


def test_damage_after_the_check_says_on_all_ranks_that_tables_have_changed(chain_of, monkeypatch):
    monkeypatch.setattr("recckpt.sparse.files.link_pass.run_all", lambda work, items, n: [work(item) for item in items])
    fill = Filler.fill

    def fill_or_fail(filler, rows):
        if threading.current_thread().name == "recckpt-1":
            raise CorruptCheckpointError(rows.path, "", found="a", expected="b")
        return fill(filler, rows)

    monkeypatch.setattr(Filler, "fill", fill_or_fail)
    ranks = restored(chain_of(1), 3, before=1)
    assert [type(error) for error, _ in ranks] == [PartlyLoadedError] * 3
    assert len({str(error) for error, _ in ranks}) == 1


@pytest.fixture
def counted(monkeypatch):
    """Bytes that the storage has given, of files with rows and their catalogs."""
    return count_bytes(monkeypatch)


@mostly_slow()
@pytest.mark.parametrize("n_ranks", [3, 1])
def test_the_storage_gives_each_byte_about_once_to_one_to_eight_ranks(counted, n_ranks):
    url, n_rows = f"memory://read-once-{n_ranks}", 12_000
    saved = on_ranks(
        n_ranks, lambda rank, connect: Job(url, rank, n_ranks, connect=connect, batch_bytes=256 << 10).save(n_rows)
    )
    stored = sum(file.n_bytes for file in saved[0].files if file.name.startswith("sparse/"))
    for m_ranks in range(1, 9):
        counted.clear()
        check(on_ranks(m_ranks, lambda rank, to, m=m_ranks: Job(url, rank, m, connect=to).restore()), n_rows)
        assert 0.98 <= counted["rows"] / stored <= 1.02, m_ranks


def with_real_ranks(root, saving, restoring):
    run_script(SUPPORT / "shared_reads.py", root, *(",".join(map(str, sizes)) for sizes in (saving, restoring)))
    for size, n_ranks in product(restoring, saving):
        ranks = [rank[n_ranks] for rank in results(root / f"restore-{size}", size)]
        assert union(rows for rows, _ in ranks) == ALL
        stored = sum(path.stat().st_size for path in (root / f"save-{n_ranks}").rglob("*.arrow"))
        assert sum(n_bytes for _, n_bytes in ranks) <= 1.02 * stored + size * small_bytes(root / f"save-{n_ranks}")


def small_bytes(root):
    """Return the bytes of what every rank may read: all but rows."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and path.suffix != ".arrow")


def test_three_real_ranks_restore_a_chain_of_two(tmp_path):
    with_real_ranks(tmp_path, [2], [3])


@pytest.mark.slow
def test_up_to_four_real_ranks_restore_a_chain_of_up_to_three(tmp_path):
    with_real_ranks(tmp_path, [1, 2, 3], [1, 2, 3, 4])


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_reads_is_named_by_the_others(tmp_path):
    run_script(SUPPORT / "shared_reads.py", tmp_path, "killed")
    assert {path.name: path.read_text() for path in tmp_path.glob("met-*")} == {
        f"met-{rank}": "RankLostError (1,) [0, 0]" for rank in (0, 2)
    }


def test_bits_of_odd_values_arrive_as_they_were(tmp_path):
    """NaNs with payloads, denormals and minus zero are bytes on their way."""
    bits = np.array([0x7FC00001, 0xFFC12345, 1, 0x80000000, 0x7F800000, 0xFF800000], np.uint32)

    def fill(job):
        ids = np.arange(3000)
        own = ids[job.own.owns(ids)]
        values = np.resize(bits, (3000, 12)) if len(own) else np.empty((0, 12), np.uint32)
        torch_values = torch.from_numpy(values[own].view(np.float32))
        job.tables["wide"].insert(torch.from_numpy(own), torch_values)

    def save(rank, connect):
        job = ChainJob(tmp_path, rank, 2, connect=connect)
        fill(job)
        job.saver.save("ckpt_1", rank, 2, step=1)

    def restore(rank, connect):
        job = ChainJob(tmp_path, rank, 3, connect=connect)
        job.manager.restore()
        table = job.tables["wide"]
        return dict(zip(table.ids().tolist(), table.embeddings().numpy().view(np.uint32).tolist(), strict=True))

    on_ranks(2, save)
    rows = {}
    for some in on_ranks(3, restore):
        rows |= some
    assert [rows[id_] for id_ in range(3000)] == np.resize(bits, (3000, 12)).tolist()


@mostly_slow("n_tables", "m_ranks")
@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("m_ranks", [1, 3])
@pytest.mark.parametrize("n_tables", [60, 2, pytest.param(300, marks=pytest.mark.slow)])
def test_a_chain_of_many_tables_is_read_once_and_in_few_requests(counted, tmp_path, n_tables, n_ranks, m_ranks):
    url, names = f"memory://tables-{n_tables}-{n_ranks}-{m_ranks}", {f"t{n}": "narrow" for n in range(n_tables)}
    on_ranks(n_ranks, lambda rank, to: ChainJob(url, rank, n_ranks, connect=to, names=names).save_chain())
    links = [checkpoint.manifest for checkpoint in locate(open_storage(url), f"ckpt_{LAST_STEP}").links]
    parts = [file.n_bytes for link in links for file in link.files if file.name.endswith(".arrow")]

    def restore(rank, connect, **options):
        job = ChainJob(url, rank, m_ranks, connect=connect, names=names, **options)
        job.manager.restore()
        return job.rows()

    def counted_in(**options):
        counted.clear()
        rows = union(on_ranks(m_ranks, lambda rank, to: restore(rank, to, **options)))
        assert rows["t1"] == ALL["narrow"]
        return Counter(counted)

    straight, copied = counted_in(), counted_in(transfers=Transfers(pre_download=True, work_dir=tmp_path))
    assert 0.8 <= straight["parts"] / sum(parts) <= 1.05
    assert straight["requests"] <= copied["requests"]
