"""Ranks that restore live tables together read each batch once, and rows go to all ranks that have them."""

import threading
from itertools import product

import pytest
from support.builders import flip_bit
from support.late_storage import count_bytes
from support.live_reads import LAST_STEP, LAYOUTS, TABLES, LiveJob, changed_by, check, truth
from support.shared_reads import ChainJob, expected
from support.sweeps import SWEEP_STRIDE, mostly_slow
from support.thread_ranks import ThreadGroup, on_ranks

from recckpt.errors import CorruptCheckpointError, LiveTableError
from recckpt.sparse.files import filler, link_pass, loader
from recckpt.sparse.files.part_reader import LinkBatches

ALL = {name: truth(name) for name in TABLES}
LARGE = {"wide": (12_000, 32), "narrow": (50, 2)}


@pytest.fixture(scope="module")
def chain_of(tmp_path_factory):
    """Where a number of ranks has saved a chain of tables that lie as a layout says."""
    root, known = tmp_path_factory.mktemp("chains"), set()

    def of(layout, n_ranks):
        url = root / f"{layout}-{n_ranks}"
        if (layout, n_ranks) not in known:
            saved(url, layout, n_ranks)
            known.add((layout, n_ranks))
        return url

    return of


def saved(url, layout, n_ranks, last=LAST_STEP, **options):
    def save(rank, connect):
        return LiveJob(url, rank, n_ranks, layout, connect=connect, **options).save_chain(last)

    return on_ranks(n_ranks, save)[0]


def by_manager(job):
    return job.manager.load_model_bank([])


def by_saver(job):
    return job.saver.load()


def restored(url, layout, m_ranks, load=by_manager, **options):
    """Return the rows of each rank that has restored, and what it reports."""

    def work(rank, connect):
        job = LiveJob(url, rank, m_ranks, layout, connect=connect, **options)
        report = load(job)
        return job.rows(), report

    ranks = on_ranks(m_ranks, work)
    return [rows for rows, _ in ranks], [report for _, report in ranks]


def quick_or_slow():
    """Each layout to the next one by default, and every pair of layouts and numbers of ranks in the slow suite."""
    layouts = list(LAYOUTS)
    pairs = product(enumerate(layouts), enumerate(layouts), (1, 2, 3), (1, 2, 3, 4))
    for number, ((i, saving), (j, loading), n_ranks, m_ranks) in enumerate(pairs):
        is_quick = (n_ranks, m_ranks) == (2, 3) and (j - i) % len(layouts) == 1
        if number % SWEEP_STRIDE and not is_quick:
            continue
        yield pytest.param(saving, loading, n_ranks, m_ranks, marks=() if is_quick else pytest.mark.slow)


@mostly_slow()
@pytest.mark.parametrize(("saving", "loading", "n_ranks", "m_ranks"), list(quick_or_slow()))
def test_a_chain_comes_back_on_any_ranks_however_its_tables_lie(chain_of, saving, loading, n_ranks, m_ranks):
    rows, reports = restored(chain_of(saving, n_ranks), loading, m_ranks)
    check(rows, loading, ALL)
    for name, (n_rows, _) in TABLES.items():
        copies = m_ranks if LAYOUTS[loading][name] == "copies" else 1
        assert sum(report.rows_taken[name] for report in reports) == copies * n_rows


def bytes_read(monkeypatch, url, saving, n_ranks, restores, load):
    """Return what the storage gives for each restore, over what is there: a full checkpoint, saved first."""
    options = {"tables": LARGE, "batch_bytes": 256 << 10}
    info = saved(url, saving, n_ranks, last=1, **options)
    stored = sum(file.n_bytes for file in info.files if file.name.startswith("sparse/"))
    counted, ratios = count_bytes(monkeypatch), {}
    for layout, m_ranks in restores:
        counted.clear()
        rows, _ = restored(url, layout, m_ranks, load=load, **options)
        check(rows, layout, {name: truth(name, 1, LARGE) for name in LARGE})
        ratios[layout, m_ranks] = counted["rows"] / stored
    return ratios


def assert_read_twice(ratios):
    """Live tables have rows to lose, so that a load reads all of it to check it, and then once more."""
    assert all(0.98 <= ratio / 2 <= 1.02 for ratio in ratios.values()), ratios


def test_the_storage_gives_each_byte_of_live_tables_about_once_to_the_check_and_once_to_the_tables(monkeypatch):
    assert_read_twice(bytes_read(monkeypatch, "memory://live-once", "rows", 2, [("rows", 3)], by_manager))


@pytest.mark.slow
@pytest.mark.parametrize("saving", ["rows", "copies", "mixed", "ours"])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_it_does_so_for_one_to_four_ranks_however_tables_lie(monkeypatch, saving, n_ranks):
    restores = list(product(("rows", "uneven", "copies", "tables", "mixed"), range(1, 5)))[:: max(1, SWEEP_STRIDE // 4)]
    assert_read_twice(
        bytes_read(monkeypatch, f"memory://live-{saving}-{n_ranks}", saving, n_ranks, restores, by_manager)
    )


def test_ranks_that_load_by_themselves_read_the_batches_that_may_have_their_rows(monkeypatch):
    assert_read_twice(bytes_read(monkeypatch, "memory://live-alone", "rows", 2, [("rows", 2)], by_saver))


@pytest.fixture
def sent(monkeypatch):
    """What each rank has sent to others in each exchange: number of rows."""
    some, lock, n_rows = filler.BatchRows.some, threading.Lock(), []

    def counted(rows, positions, columns):
        with lock:
            n_rows.append(len(positions))
        return some(rows, positions, columns)

    monkeypatch.setattr(filler.BatchRows, "some", counted)
    return n_rows


@mostly_slow()
@pytest.mark.parametrize("layout", ["rows", "uneven", "tables"])
def test_ranks_with_the_plan_of_the_save_send_no_rows(chain_of, sent, layout):
    rows, _ = restored(chain_of(layout, 2), layout, 2)
    check(rows, layout, ALL)
    assert not sent


def test_a_copy_gets_from_others_what_it_has_not_read(chain_of, sent):
    rows, _ = restored(chain_of("rows", 2), "copies", 3)
    check(rows, "copies", ALL)
    n_named = sum(len(changed_by(n_rows, step)) for n_rows, _ in TABLES.values() for step in range(1, 4))
    assert sum(sent) == 2 * 2 * n_named  # each row of each link to two others, first its id, then all of it


@pytest.mark.parametrize("load", [by_manager, by_saver])
def test_an_id_without_a_row_is_refused_by_all_ranks_alike_before_rows_are_read(chain_of, monkeypatch, load):
    url, shapes = chain_of("ours", 2), {**TABLES, "wide": (1499, 12)}
    monkeypatch.setattr(LinkBatches, "reader", None)

    def work(rank, connect):
        job = LiveJob(url, rank, 3, "tables", connect=connect, tables=shapes)
        before = job.rows()
        with pytest.raises(LiveTableError) as refusal:
            load(job)
        assert job.rows() == before
        return str(refusal.value)

    refusals = on_ranks(3, work)
    assert len(set(refusals)) == 1
    assert "table 'wide': found ids from 0 to 1499, expected ids from 0 to 1498: make the table larger" in refusals[0]


@pytest.mark.parametrize(
    ("layout", "n_filtered"), [("rows", [0, 0, 300]), ("tables", [0, 0, 300]), ("copies", [300, 300, 300])]
)
@pytest.mark.parametrize("load", [by_manager, by_saver])
@mostly_slow()
def test_ids_without_a_row_can_be_left_out_and_count_once(chain_of, tmp_path, load, layout, n_filtered):
    url, shapes = chain_of("ours", 2), {**TABLES, "wide": (1200, 12)}

    def work(rank, connect):
        job = LiveJob(tmp_path / layout, rank, 3, layout, connect=connect, tables=shapes)
        bank = [{"path": str(url), "load": ["*@*"], "out_of_range": "skip"}]
        report = job.manager.load_model_bank(bank) if load is by_manager else job.saver.load_by_config(bank)
        return job.rows(), report.rows_filtered["wide"]

    ranks = on_ranks(3, work)
    there = {slot: {id_: row for id_, row in rows.items() if id_ < 1200} for slot, rows in ALL["wide"].items()}
    check([rows for rows, _ in ranks], layout, {**ALL, "wide": there})
    assert [n_rows for _, n_rows in ranks] == n_filtered


@pytest.mark.parametrize("layout", ["rows", "tables", "copies"])
@mostly_slow()
def test_rows_of_ids_that_a_chain_deletes_stay_as_they_are(tmp_path, layout):
    on_ranks(2, lambda rank, connect: ChainJob(tmp_path / "ours", rank, 2, connect=connect).save_chain())
    there, n_rows = expected("wide"), 1700
    rows = {id_: tuple(there.get(id_, [-1.0] * 12)) for id_ in range(n_rows)}

    def work(rank, connect):
        job = LiveJob(tmp_path / layout, rank, 3, layout, connect=connect, tables={"wide": (n_rows, 12)})
        bank = [{"path": str(tmp_path / "ours"), "load": ["wide@*"], "strict": False}]
        return job.manager.load_model_bank(bank).rows_taken["wide"], {
            "wide": {"embedding": job.rows()["wide"]["embedding"]}
        }

    ranks = on_ranks(3, work)
    check([some for _, some in ranks], layout, {"wide": {"embedding": rows}})
    assert sum(n for n, _ in ranks) == len(there) * (3 if layout == "copies" else 1)


def test_damage_that_one_rank_meets_has_all_go_on_from_an_older_checkpoint(tmp_path):
    saved(tmp_path, "rows", 2)
    flip_bit(max(tmp_path.glob("ckpt_3*/**/*.arrow"), key=lambda path: path.stat().st_size))
    rows, _ = restored(tmp_path, "rows", 3)
    check(rows, "rows", {name: truth(name, LAST_STEP - 1) for name in TABLES})


@pytest.mark.slow
def test_no_rank_gets_more_at_once_than_it_has_room_for(chain_of, monkeypatch):
    exchange, received, lock = ThreadGroup.exchange, [], threading.Lock()

    def counted(group, mark, parcels, *into):
        marks, got = exchange(group, mark, parcels, *into)
        with lock:
            received.append(sum(map(len, got)))
        return marks, got

    monkeypatch.setattr(ThreadGroup, "exchange", counted)
    monkeypatch.setattr(link_pass, "WINDOW_BYTES", 4 << 10)
    for room, least, most in ((8 << 10, 4 << 10, 10 << 10), (16 << 10, 14 << 10, 18 << 10)):
        received.clear()
        monkeypatch.setattr(loader, "RECEIVED_BYTES", room)
        rows, _ = restored(chain_of("rows", 2), "copies", 5)  # each rank sends to four others
        check(rows, "copies", ALL)
        assert least < max(received) < most


@pytest.mark.parametrize("layout", ["rows", "uneven"])
@mostly_slow()
def test_rows_that_no_rank_has_got_are_missed(chain_of, monkeypatch, layout):
    url, packed = chain_of("rows", 2), link_pass.packed
    monkeypatch.setattr(link_pass, "packed", lambda pieces: packed(piece for piece in pieces if piece.table != "wide"))

    def restore(rank, connect):
        job = LiveJob(url, rank, 3, layout, connect=connect)
        with pytest.raises(CorruptCheckpointError, match="'wide': found 1500 rows, expected"):
            job.manager.restore(global_step=LAST_STEP)

    on_ranks(3, restore)
