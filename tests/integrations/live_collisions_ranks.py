"""What real ranks do with tables behind managed collision for test_live_collisions.py: ``... ROOT SIZE...``.

Each run of ranks restores what others before it have saved, and then saves and restores of its own.
"""

import logging
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import live_collisions as models
from support.rank_processes import fork_ranks

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.adapters.fbgemm import KernelHooks
from recckpt.errors import RecckptError
from recckpt.sparse.files.filler import BatchRows
from recckpt.sparse.table.tracker import Tracker

ALWAYS = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1)
NAMES = ["users", "users.unassigned"]
CASES = [("distance", "adagrad", True), ("lru", "rowwise", True), ("lfu", "sgd", False)]
N_SAVES, ZCH_SIZE = 8, 64
RAW = list(range(models.N_RAW))


def made(output_dir, size, case, zch_size=ZCH_SIZE, seed=0, **options):
    policy, kind, is_bagged = case
    model, top, tables = models.sharded(seed, size, zch_size, policy, kind, is_bagged=is_bagged, **options)
    saver = Saver(model, output_dir=str(output_dir), tables=tables, deltas=ALWAYS, max_keep=50)
    saver.register_for_checkpointing("dense_optim", top)
    return model, top, tables, CheckpointManager(saver, 10**9)


def train(model, top, first, end, **how):
    for number in range(first, end):
        models.step(model, [top], number + 1000 * dist.get_rank(), n_ids=12 // dist.get_world_size(), **how)


def state_of(model, top):
    """Return what is on this rank: all tensors, and the pieces of sharded ones."""
    state = {**model.state_dict(), **{f"fused {key}": value for key, value in fused_states(model)}}
    own = {n: v.local_shards()[0].tensor if hasattr(v, "local_shards") else v for n, v in state.items()}
    return {name: value.clone() for name, value in own.items()}


def fused_states(model):
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        yield from ((f"{name} {key}", value) for key, value in states.items())


def run(size, case, output_dir):
    """Save a chain in the background of training; each moment is compared with what the format's reader finds."""
    model, top, tables, manager = made(output_dir, size, case, audit=2)  # which fails where a row was missed
    train(model, top, 0, 20)
    infos, kinds, n_deletes, n_again, before, gone = [], [], 0, 0, set(), set()
    for number in range(N_SAVES):
        train(model, top, 20 + 3 * number, 22 + 3 * number)
        truth = models.of_all_ranks(tables)
        handle = manager.saver.save_async(f"c{number}", step=number)
        train(model, top, 22 + 3 * number, 23 + 3 * number)
        infos.append(handle.wait())
        kinds.append(infos[-1].kind)
        if dist.get_rank() == 0:
            assert models.saved_in(output_dir, f"c{number}", NAMES) == truth
        ids = truth["users"].keys()
        n_again += len(gone & ids)
        n_deletes += len(before - ids)
        gone, before = (gone | before) - ids, set(ids)
    assert kinds.count("delta") > N_SAVES // 2, kinds  # where many are evicted at once, a save is full
    assert len(truth["users"]) + len(truth["users.unassigned"]) == ZCH_SIZE
    assert sum(id_ < 0 for id_ in truth["users.unassigned"]) == size
    train(model, top, 100, 104)  # up to an eviction: what was looked up since is no part of the state
    truth, seen = models.of_all_ranks(tables), models.looked_up(model, RAW)
    infos.append(manager.saver.save("last", step=N_SAVES))
    train(model, top, 104, 124)
    (output_dir / "ends").mkdir(exist_ok=True)
    torch.save(state_of(model, top), output_dir / "ends" / f"{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save((truth, seen, n_deletes, n_again), output_dir / "truth.pt")
        links = infos[max(at for at, info in enumerate(infos) if info.kind == "full") :]
        n_bytes = sum(file.n_bytes for info in links for file in info.files)
        n_rows = sum(each.delta.upserts + each.delta.deletes for info in links[1:] for each in info.tables)
        torch.save((n_bytes, n_rows + 2 * ZCH_SIZE, size * len(links)), output_dir / "chain.pt")
    dist.barrier()
    manager.saver.close()


def without_places(rows):
    """Return rows of ids without where they lay."""
    return {id_: {name: value for name, value in row.items() if name != "zch_row"} for id_, row in rows.items()}


SENT = []  # how many rows this rank has sent to others, each time that it did


def count_rows_that_are_sent(patch):
    """Note rows that this rank sends to others in a load."""
    some = BatchRows.some

    def counted(rows, positions, columns):
        SENT.append(len(positions))
        return some(rows, positions, columns)

    patch.setattr(BatchRows, "some", counted)


def over_ranks(number):
    """Return the sum over all ranks; collective."""
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def load_once(manager, source):
    """Load a checkpoint: all ranks together read no byte twice, and send a row to those alone that are to have it."""
    SENT.clear()
    report = manager.load_model_bank([{"path": str(source / "last"), "load": ["*"]}])
    n_bytes, n_rows, n_shared = torch.load(source / "chain.pt")
    assert over_ranks(report.bytes_read) <= 1.02 * n_bytes
    assert over_ranks(sum(SENT)) <= n_rows + n_shared * (dist.get_world_size() - 1)


def restored_alike(size, case, source):
    """As many ranks get the same bits, and go on with the same; the next save is a delta."""
    truth, seen, _, _ = torch.load(source / "truth.pt", weights_only=False)
    model, top, tables, manager = made(source, size, case, seed=1)
    train(model, top, 0, 3)
    SENT.clear()
    assert manager.restore() == N_SAVES
    n_shared = size * len([one for one in source.glob("*") if (one / "manifest.json").exists()])
    assert sum(SENT) <= 2 * n_shared, "more than the rows that misses share"
    assert models.of_all_ranks(tables) == truth
    assert torch.equal(models.looked_up(model, RAW), seen)
    info = manager.saver.save(f"again-{size}", step=99)
    assert [(table.delta.upserts, table.delta.deletes) for table in info.tables] == [(0, 0), (0, 0)]
    train(model, top, 104, 124)
    end = torch.load(source / "ends" / f"{dist.get_rank()}.pt")
    found = state_of(model, top)
    assert found.keys() == end.keys()
    assert [name for name in end if not torch.equal(end[name], found[name])] == []
    manager.saver.close()


def restored_otherwise(size, case, source, output_dir, zch_size):
    """Other ranks, or another zch_size: each id is looked up where TorchRec sends it, and has its row and counts."""
    truth, seen, _, _ = torch.load(source / "truth.pt", weights_only=False)
    model, top, tables, manager = made(output_dir, size, case, zch_size, seed=1)
    train(model, top, 0, 3)
    load_once(manager, source)
    now = models.of_all_ranks(tables)
    assert without_places(now["users"]) == without_places(truth["users"])
    ids = sorted(truth["users"])
    assert torch.equal(models.looked_up(model, RAW)[ids], seen[ids])
    misses = sorted({*RAW} - {*ids})
    shared = {tuple(row) for row in seen[misses].tolist()}  # by the misses of each rank that saved
    assert {tuple(row) for row in models.looked_up(model, RAW)[misses].tolist()} <= shared
    for number in range(2):
        train(model, top, 40 + number, 45 + number)
        manager.saver.save(f"d{number}", step=number)
        truth = models.of_all_ranks(tables)
        if dist.get_rank() == 0:
            assert models.saved_in(output_dir, f"d{number}", NAMES) == truth
    manager.saver.close()


def a_rank_without_room_is_refused_by_all(size, root, case):
    """All ids are of the part of rank 0, which has room for some of them alone: nothing has changed on any rank."""
    model, top, _, manager = made(root / "wide", size, case, 200)
    train(model, top, 0, 16, n_raw=40)
    manager.saver.save("c", step=1)
    manager.saver.close()
    model, top, tables, manager = made(root / "narrow", size, case, seed=1)
    train(model, top, 0, 3)
    before = models.of_all_ranks(tables)
    bank = [{"path": str(root / "wide"), "load": ["*"]}]
    with pytest.raises(RecckptError, match="found 40 ids for the rows 0 to 30, expected at most 31"):
        manager.load_model_bank(bank)
    assert models.of_all_ranks(tables) == before
    manager.load_model_bank([{**bank[0], "zch": "drop"}])
    assert len(models.of_all_ranks(tables)["users"]) == 31
    train(model, top, 3, 6)
    manager.saver.close()


def is_of_its_moment(size, case):
    """Say whether a snapshot has on all ranks what was there before rows were given to other ids, and reset."""
    model, top, tables, _ = made("unused", size, case)
    train(model, top, 0, 20)
    truth, snapshot = models.truth_of(tables)["users"], Tracker().freeze(tables["users"]).snapshot
    train(model, top, 20, 28)
    rows = np.arange(snapshot.n_rows)
    read = {slot.name: np.zeros((len(rows), slot.row_bytes), np.uint8) for slot in snapshot.slots}
    snapshot.read_slots(rows, {name: values.reshape(-1) for name, values in read.items()}, is_last=False)
    ids = snapshot.ids.to_tensor(snapshot.n_rows).tolist()
    own = {id_: {name: values[at].tobytes() for name, values in read.items()} for at, id_ in enumerate(ids)}
    of_ranks = [None] * size
    dist.all_gather_object(of_ranks, own == truth)
    return all(of_ranks)


def rows_are_copied_before_they_are_reset(size, patch):
    """And the planted bug: resets that nobody announces."""
    assert all(is_of_its_moment(size, case) for case in CASES)
    with patch.context() as planted:
        planted.setattr(KernelHooks, "before_reset", lambda self, *args, **kwargs: None)
        assert not is_of_its_moment(size, CASES[0])


def what_is_said(size, case, root):
    _, _, tables, _ = made(root / "said", size, case)
    text = str(tables)
    assert "row_wise by raw ids" in text
    assert "the map of its ids" in text
    for name in NAMES:
        assert tables[name].live.n_rows == ZCH_SIZE


def ids_are_where_torchrec_sends_them(size):
    """Held against the operator by which TorchRec sends ids to ranks: any ids, and sizes that ranks do not divide."""
    for n_raw in (200, 201, 7, (1 << 63) - 1):
        *_, tables = models.sharded(0, size, n_raw=n_raw)
        some = [0, 1, 5, 66, 67, 100, 133, 134, 199, 200, 201, 500, (1 << 62) + 3, (1 << 63) - 2, -1, -5, -(1 << 63)]
        ids = torch.tensor(some)
        block = -(-n_raw // size)
        lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.ones(len(ids), dtype=torch.int64),
            ids,
            bucketize_pos=False,
            sequence=True,
            block_sizes=torch.tensor([block]),
            total_num_blocks=torch.tensor([size]),
            my_size=size,
            keep_orig_idx=True,
        )
        sent = lengths.view(size, len(ids)).argmax(0) == dist.get_rank()
        assert tables["users"].live.owned_ids.owns(ids.numpy()).tolist() == sent.tolist(), (n_raw, size)


def work(rank, size, root, *, known):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        models.reset_rows_on_the_cpu(patch)
        count_rows_that_are_sent(patch)
        for source in known:
            number, saved_by = map(int, source.name.split("-")[1:])
            if saved_by != size and number == (size + saved_by) % len(CASES):
                restored_otherwise(size, CASES[number], source, root / f"larger-{source.name}", 200)
            if size == 1 < saved_by:  # of several ranks one may have too many ids for its rows
                restored_otherwise(size, CASES[number], source, root / f"alone-{source.name}", ZCH_SIZE)
        if size == 2 and not known:
            a_rank_without_room_is_refused_by_all(size, root, CASES[0])
            rows_are_copied_before_they_are_reset(size, patch)
        for number, case in enumerate(CASES):
            output_dir = root.parent / f"case-{number}-{size}"
            if output_dir not in known:
                output_dir.mkdir(exist_ok=True)
                run(size, case, output_dir)
                restored_alike(size, case, output_dir)
        ids_are_where_torchrec_sends_them(size)
        what_is_said(size, CASES[0], root)
    if size == 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for number, size in enumerate(map(int, sys.argv[2:])):
        known = sorted(path.parent for path in root.glob("*/truth.pt"))
        (root / f"run-{number}").mkdir()
        fork_ranks(size, root / f"run-{number}", partial(work, known=known))
