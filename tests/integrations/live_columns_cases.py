"""Tables of TorchRec by columns on two real ranks, for test_live_torchrec.py: ``live_columns_cases.py ROOT``."""

import logging
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import live_torchrec as models
from support.rank_processes import fork_ranks
from torch import nn

from recckpt import CheckpointManager, CheckpointReader, Deltas, Saver
from recckpt.adapters import columns as column_exchange
from recckpt.adapters.columns import ColumnRows
from recckpt.errors import SaveFailedError, StateMismatchError
from recckpt.policies import Choose
from recckpt.sparse import HashTable, SparseRowWiseAdagrad

COLUMNS = ("clicks", "wares", "words")
SUM = "sparse_rowwise_adagrad_sum"
N_SAVES = 12


def made(root, layout, kind, seed=0, **how):
    model, optimizer, tables = models.sharded(seed, 2, layout, kind, **how)
    deltas = Deltas(max_dirty=1, max_chain_bytes=1000, full_every=999)
    saver = Saver(model, output_dir=str(root), tables=tables, deltas=deltas, max_keep=None)
    saver.register_for_checkpointing("optimizer", optimizer)
    return model, optimizer, tables, saver


def check_saved(root, truth):
    """Compare the newest checkpoint with what there was at its moment."""
    with CheckpointReader(str(root)) as reader:
        for name, values in truth.items():
            if not name.startswith("dense "):
                table, slot = name.split(" ")
                rows, is_there = reader.lookup(table, np.arange(len(values)), slot)
                assert is_there.all(), name
                np.testing.assert_array_equal(rows, values.numpy(), err_msg=name)


def n_changed(before, now):
    """Return how many rows of the tables by columns differ in a bit."""
    total = 0
    for table in COLUMNS:
        slots = [name for name in now if name.startswith(f"{table} ")]
        is_other = [(before[name] != now[name]).flatten(1).any(1) for name in slots]
        total += int(torch.stack(is_other).any(0).sum())
    return total


def random_saves_beside_training(root):
    """Saves in the background, some of which fail, are each of one moment; deltas have no row more than has changed."""
    for kind in models.KINDS:
        output_dir = root / f"random-{kind}"
        model, optimizer, tables, saver = made(output_dir, "columns", kind)
        draw, base, written, changed = random.Random(kind), None, 0, 0
        for number in range(N_SAVES):
            for step in range(draw.randint(0, 2)):
                models.step(model, optimizer, 100 * number + step, n_ids=1)
            truth, fails = models.whole_state(model, tables), draw.random() < 0.25
            with FailsAtLast(1 if fails else None):
                handle = saver.save_async(f"ckpt_{number}", step=number)
                for step in range(draw.randint(0, 4)):
                    models.step(model, optimizer, 100 * number + 50 + step)
                if fails:
                    with pytest.raises(SaveFailedError, match="on rank 1: OSError: no room for rows; nothing"):
                        handle.wait()
                    if dist.get_rank() == 0:  # what says whose directory it is stays until the next save
                        assert [path.name for path in (output_dir / f"ckpt_{number}").iterdir()] == ["INTENT"]
                    continue
                record = handle.wait()
            if dist.get_rank() == 0:
                check_saved(output_dir, truth)
            if base is not None:
                assert record.kind == "delta"
                written += sum(table.delta.upserts for table in record.tables if table.name in COLUMNS)
                changed += n_changed(base, truth)
            base = truth
        assert changed
        assert written == changed, (kind, written, changed)
        saver.close()


class FailsAtLast:
    """A rank, or None, that fails once all columns are sent."""

    def __init__(self, rank):
        self._is_here, self._end = rank == dist.get_rank(), ColumnRows.end

    def __enter__(self):
        if self._is_here:
            ColumnRows.end = self._raise

    def __exit__(self, *error):
        ColumnRows.end = self._end

    @staticmethod
    def _raise(*args):
        raise OSError("no room for rows")


def sums_of_ranges_are_converted_where_that_is_allowed(root):
    """From columns to rows, from rows to columns, and to other columns."""
    width = {name: dim for name, (_, dim, _) in {**models.BAGS, **models.SEQUENCES}.items()}
    other = {"clicks": "other columns", "wares": "other columns"}
    for source, target, how in (("columns", "rows", {}), ("rows", "columns", {}), ("columns", "columns", other)):
        output_dir = root / f"converted-{source}-{target}-{len(how)}"
        model, optimizer, tables, saver = made(output_dir, source, "rowwise")
        models.step(model, optimizer, 1)
        truth = models.whole_state(model, tables)
        saver.save("ckpt_1", step=1)
        saver.close()
        model, optimizer, tables, saver = made(output_dir, target, "rowwise", seed=1, **how)
        optimizer.init_state()
        manager, before = CheckpointManager(saver, 10**9), models.whole_state(model, tables)
        with pytest.raises(StateMismatchError, match=r"one value .*'convert': True in load_conf"):
            manager.restore()
        assert models.differing(models.whole_state(model, tables), before) == []
        report = saver.load(load_conf={"convert": True})
        converted = {item.name.table: item.conversion for item in report.items if item.conversion}
        assert set(converted) == ({"clicks", "wares"} if how else set(COLUMNS))
        assert all(" -> one value" in text for text in converted.values())
        found = models.whole_state(model, tables)
        for table in converted:
            sums, now = truth.pop(f"{table} {SUM}"), found.pop(f"{table} {SUM}")
            if sums.dim() > 1:
                widths = torch.tensor([12.0, 12.0] if width[table] == 24 else [8.0, 4.0])
                sums = (sums * widths / widths.sum()).sum(1)
            torch.testing.assert_close(now, sums if now.dim() == 1 else sums[:, None].expand_as(now))
        assert models.differing(found, truth) == []
        assert saver.save("ckpt_2", step=2).kind == "full"
        saver.close()


def a_hash_table_takes_the_sums_of_a_table_by_columns(root):
    ours = nn.ModuleDict({"wares": HashTable(12, name="wares")})
    optimizer = SparseRowWiseAdagrad([ours["wares"]])
    path = str(root / "converted-columns-rows-0")
    saver = Saver(ours, optimizer, str(root / f"ours-{dist.get_rank()}"))
    bank = {"path": f"{path}/ckpt_1", "load": ["wares@*"], "convert": True}
    assert saver.load_by_config(bank).rows_taken["wares"] == 20
    with CheckpointReader(f"{path}/ckpt_1") as reader:
        sums, _ = reader.lookup("wares", np.arange(20), SUM)
    ids = ours["wares"].ids()
    expected = torch.from_numpy(sums[ids.numpy()] @ np.array([8 / 12, 4 / 12], np.float32))
    torch.testing.assert_close(ours["wares"].slots[SUM], expected)


def a_delta_stands_on_a_base_of_another_plan(root):
    """Where no slot has a value for each range of columns, tables by rows and by columns are the same."""
    output_dir = root / "other-base"
    model, optimizer, tables, saver = made(output_dir, "columns", "adagrad")
    models.step(model, optimizer, 1)
    saver.save("ckpt_1")
    saver.close()
    model, optimizer, tables, saver = made(output_dir, "rows", "adagrad", seed=1)
    optimizer.init_state()
    assert CheckpointManager(saver, 10**9).restore() == 0
    models.step(model, optimizer, 2, n_ids=1)
    truth, record = models.whole_state(model, tables), saver.save("ckpt_2")
    assert record.kind == "delta"
    assert not any(table.delta.replaced for table in record.tables)
    if dist.get_rank() == 0:
        check_saved(output_dir, truth)
    saver.close()


def choices_of_slots_apply_and_those_of_rows_are_refused(root):
    model, optimizer, tables, _ = made(root / "unused", "columns", "adagrad")
    models.step(model, optimizer, 1)
    truth = models.whole_state(model, tables)
    saver = Saver(
        model, output_dir=str(root / "slots"), tables=tables, choose=Choose(slots=[], store={"wares": "float16"})
    )
    saver.save("ckpt_1")
    with CheckpointReader(str(root / "slots")) as reader:
        rows, _ = reader.lookup("wares", np.arange(20))
        np.testing.assert_array_equal(rows, truth["wares embedding"].to(torch.float16).numpy())
    saver = Saver(model, output_dir=str(root / "rows"), tables=tables, choose=Choose(where={"wares": {"sample": 0.5}}))
    with pytest.raises((ValueError, SaveFailedError), match="the columns of table 'wares' are split over ranks"):
        saver.save("ckpt_1")


def work(rank, size, root):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    column_exchange.WINDOW_BYTES = 300  # so that these small tables need many
    random_saves_beside_training(root.parent)
    sums_of_ranges_are_converted_where_that_is_allowed(root.parent)
    a_hash_table_takes_the_sums_of_a_table_by_columns(root.parent)
    a_delta_stands_on_a_base_of_another_plan(root.parent)
    choices_of_slots_apply_and_those_of_rows_are_refused(root.parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[1]) / "run").mkdir()
    fork_ranks(2, Path(sys.argv[1]) / "run", work)
