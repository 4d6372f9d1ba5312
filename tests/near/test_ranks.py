"""Near saves of several ranks that see one near dir, restored by any number of them."""

import logging

import pytest
from near.test_near_saves import rows
from support.near_runs import NearRun, output_dir, parts_of
from support.thread_ranks import ThreadGroup, Wire, alone, on_ranks

from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import gen_slice

OTHERS = {f"_{id_}": 0.5 for id_ in range(100, 120)}


def run_of(root, rank, size, connect, wire, **options):
    """Return the run of one rank, whose near saves have a group of their own."""
    run = NearRun(root, slice=gen_slice(rank, size), shard_id=rank, shard_num=size, **options)
    connect(run.saver)
    run.saver.near_saves.ranks[rank, size] = alone(ThreadGroup(rank, wire))
    return run


def on_near_ranks(root, size, work, **options):
    """Do ``work(run)`` on several ranks; return what each gives."""
    wire = Wire(size)
    return on_ranks(size, lambda rank, connect: work(run_of(root, rank, size, connect, wire, **options)))


def trained(run):
    run.put(_1=1.0, _2=2.0, **OTHERS).step().put(_3=3.0, _4=4.0).step()
    if 4 in run.rows:
        run.erase(4)
    run.put(_5=5.0).step()
    return run.counts


def together(parts):
    whole = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_two_ranks_have_saved_is_restored_by_any_number(tmp_path, size):
    assert on_near_ranks(tmp_path, 2, trained) == [(2, 0, 0)] * 2
    left = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}
    assert together(on_near_ranks(tmp_path, size, lambda run: rows(run.restore()))) == left

    on_near_ranks(tmp_path, size, lambda run: run.restore().put(_6=6.0).save())
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.kind == "delta"
    assert rows(NearRun(tmp_path).restore(near=False)) == {**left, 6: 6.0}, "deletes too are marks of who owns the ids"


def test_what_fails_on_one_rank_fails_the_near_save_on_all(tmp_path, monkeypatch):
    def failing(run):
        run.put(_1=1.0, **OTHERS).step().put(_2=2.0)
        if run.saver.near_saves.ranks.keys() == {(1, 2)}:
            storage = run.saver.near_saves.tier.dir.storage
            storage.create = lambda name: (_ for _ in ()).throw(OSError(28, "no room", name))
        run.step()
        return run.counts

    assert on_near_ranks(tmp_path, 2, failing) == [(0, 1, 0)] * 2
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}


def test_ranks_that_see_several_near_dirs_make_none_and_restore_none(tmp_path, caplog):
    on_near_ranks(tmp_path, 2, trained)
    wire = Wire(2)

    def work(rank, connect):
        run = run_of(tmp_path, rank, 2, connect, wire, near="near" if rank == 0 else "elsewhere")
        run.restore().put(_9=9.0).step().step()
        return rows(run), run.counts

    (first, counts), (second, others) = on_ranks(2, work)
    assert together([first, second]) == {1: 1.0, 2: 2.0, 9: 9.0}
    assert counts == others == (0, 1, 0)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warnings if "near saves are for ranks of one host" in text]) == 1
    assert len([text for text in warnings if "not all ranks see that directory" in text]) == 2


def test_damage_of_one_rank_is_seen_by_all(tmp_path):
    on_near_ranks(tmp_path, 2, trained)
    damaged = parts_of(NearRun(tmp_path).near_dirs[-1])[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert together(on_near_ranks(tmp_path, 3, lambda run: rows(run.restore()))) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
