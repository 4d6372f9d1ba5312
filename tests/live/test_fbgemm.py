"""Fused kernels as live tables, by a stand-in for FBGEMM's: caches, hooks, copies, and what cannot be saved."""

import copy

import pytest
import torch
from support.fake_fbgemm import OptimType, SplitTableBatchedEmbeddingBagsCodegen, look_up
from support.live_rows import Rows, assert_saved
from torch import nn

from recckpt import Saver
from recckpt.errors import LiveTableError
from recckpt.live import live_tables

SHAPES = ((40, 4), (30, 2))


def model_of(**options):
    return nn.ModuleDict({"kernel": SplitTableBatchedEmbeddingBagsCodegen(SHAPES, **options)})


def test_rows_that_wait_in_a_cache_are_written_back_once_a_save_before_it_reads(tmp_path):
    model = model_of(has_cache=True)
    kernel, tables = model["kernel"], live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9)
    saver.save("c0")
    look_up(kernel, [3], [7, 8])
    assert kernel.cached
    saver.save("c1")
    assert kernel.cached == []
    assert kernel.n_flushes == 2
    assert_saved(tables, tmp_path)


def test_a_load_takes_steps_and_rate_and_drops_what_a_cache_had(tmp_path):
    one, other = model_of(has_cache=True), model_of(has_cache=True)
    look_up(one["kernel"], [3], [7])
    one["kernel"].set_learning_rate(0.5)
    Saver(one, output_dir=str(tmp_path), tables=live_tables(one, min_rows=1)).save("c")
    tables = live_tables(other, min_rows=1)
    look_up(other["kernel"], [1], [1])
    Saver(other, output_dir=str(tmp_path), tables=tables).load()
    assert (int(other["kernel"].iter), int(other["kernel"].iter_cpu), other["kernel"].rate) == (1, 1, 0.5)
    assert other["kernel"].cached == []
    assert_saved(tables, tmp_path)


def test_what_is_looked_up_is_announced_by_table():
    model = model_of(features=(0, 0, 1))
    with Rows(live_tables(model, min_rows=1)) as rows:
        look_up(model["kernel"], [3, 3], [5], [])
        assert rows.announced() == rows.changed() == {"t0": {3, 5}, "t1": set()}


def test_an_optimizer_of_which_nothing_is_proven_announces_all_rows():
    kernel = SplitTableBatchedEmbeddingBagsCodegen(SHAPES)
    kernel._used_rowwise_adagrad_with_global_weight_decay = True
    kernel.split_optimizer_states = lambda: [[torch.zeros(rows), torch.zeros(rows)] for rows, _ in SHAPES]
    model = nn.ModuleDict({"kernel": kernel})
    tables = live_tables(model, min_rows=1)
    assert "global weight decay is not proven" in str(tables)
    assert tables["t0"].slots.keys() == {"sparse_rowwise_adagrad_sum", "sparse_fbgemm_prev_iter"}
    with Rows(tables) as rows:
        look_up(kernel, [3], [])
        assert rows.announced() == {"t0": set(range(40)), "t1": set(range(30))}


def test_methods_that_write_announce_all_rows_until_the_tables_are_closed():
    model = model_of()
    tables = live_tables(model, min_rows=1)
    with Rows(tables) as rows:
        model["kernel"].ema_inplace({})
        assert rows.changed() == rows.announced() == {"t0": set(range(40)), "t1": set(range(30))}
    tables.close()
    assert "ema_inplace" not in vars(model["kernel"])
    assert not model["kernel"]._forward_hooks


def test_a_hook_that_fails_lets_training_go_on_and_the_next_save_fail(tmp_path, caplog):
    model = model_of()
    tables = live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    before = tables["t0"].embeddings().clone()
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    model["kernel"](ids, offsets, batch_size_per_feature_per_rank=[[1]]).sum().backward()
    assert not torch.equal(tables["t0"].embeddings(), before)
    assert "its changes were not seen, and the next save fails" in caplog.text
    with pytest.raises(LiveTableError, match="its changes were not seen"):
        saver.save("c0")
    saver.save("c1")
    assert_saved(tables, tmp_path)


def test_a_copy_of_a_model_announces_nothing():
    model = model_of()
    with Rows(live_tables(model, min_rows=1)) as rows:
        other = copy.deepcopy(model)
        other["kernel"].ema_inplace({})
        look_up(other["kernel"], [1], [2])
        assert rows.changed() == rows.announced() == {"t0": set(), "t1": set()}


def test_a_kernel_with_an_unknown_optimizer_stays_dense_and_says_why():
    tables = live_tables(model_of(optimizer=OptimType.ENSEMBLE), min_rows=1)
    assert len(tables) == 0
    assert "its optimizer is 'ensemble_row_wise_adagrad', whose states recckpt does not know" in str(tables)


def test_all_tables_of_a_kernel_are_live_or_none_and_small_ones_go_with_large_ones():
    assert sorted(live_tables(model_of(), min_rows=35)) == ["t0", "t1"]
    assert len(live_tables(model_of(), min_rows=41)) == 0
    with pytest.raises(LiveTableError, match=r"'kernel' are one tensor: exclude 'kernel.1' too"):
        live_tables(model_of(), min_rows=1, exclude=["kernel.0"])
