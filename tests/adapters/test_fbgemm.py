"""Fused kernels as live tables, by a stand-in for FBGEMM's: caches, hooks, copies, and what cannot be saved."""

import copy
import threading

import pytest
import torch
from support.fake_fbgemm import (
    BatchedDynamicEmbeddingTablesV2,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    SSDTableBatchedEmbeddingBags,
    look_up,
)
from support.gate import Gate
from support.live_runs import Rows, assert_saved, rows_of
from torch import nn

from recckpt import Saver
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.save.job import SparseSaver
from recckpt.sparse.table.column import Column

SHAPES = ((40, 4), (30, 2))
EVERY = {"t0": set(range(40)), "t1": set(range(30))}


def model_of(**options):
    return nn.ModuleDict({"kernel": SplitTableBatchedEmbeddingBagsCodegen(SHAPES, **options)})


def test_rows_that_wait_in_a_cache_are_written_back_once_a_save_before_it_reads(tmp_path):
    model = model_of(has_cache=True)
    kernel, tables = model["kernel"], live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9)
    saver.save("c0")
    look_up(kernel, [3], [7, 8])
    assert not torch.equal(tables["t1"].embeddings(), kernel.trained(1))
    saver.save("c1")
    assert torch.equal(tables["t1"].embeddings(), kernel.trained(1))
    assert kernel.n_flushes == 2
    assert_saved(tables, tmp_path)


def save_beside_training(model, tmp_path, monkeypatch, marks="auto"):
    """Save twice, the second time while rows change, and check that it has those of its moment."""
    kernel, tables = model["kernel"], live_tables(model, min_rows=1, marks=marks)
    look_up(kernel, [3, 4], [7])
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9)
    saver.save("c0")
    look_up(kernel, [4, 5], [])
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = saver.save_async("c1")
    expected = rows_of(tables)
    look_up(kernel, [5, 6], [7])
    kernel.write_back()  # rows that have changed since the save began, and others that have not
    gate.open()
    handle.wait()
    assert_saved(tables, tmp_path, expected)


def test_rows_that_a_cache_evicts_beside_a_save_do_not_change_it(tmp_path, monkeypatch):
    save_beside_training(model_of(has_cache=True), tmp_path, monkeypatch)


@pytest.mark.parametrize("marks", ["auto", "fingerprints"])
def test_rows_that_torch_reads_as_on_a_device_are_saved_as_they_were(tmp_path, monkeypatch, marks):
    monkeypatch.setattr(Column, "is_on_cpu", False)
    save_beside_training(model_of(), tmp_path, monkeypatch, marks)


def test_a_load_of_rows_that_torch_writes_as_on_a_device_is_whole(tmp_path, monkeypatch):
    one, other = model_of(), model_of()
    Saver(one, output_dir=str(tmp_path), tables=live_tables(one, min_rows=1)).save("c")
    monkeypatch.setattr(Column, "is_on_cpu", False)
    tables = live_tables(other, min_rows=1)
    Saver(other, output_dir=str(tmp_path), tables=tables).load()
    assert_saved(tables, tmp_path)


def test_memory_that_is_freed_while_a_save_reads_it_fails_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(Column, "is_on_cpu", False)
    model = model_of()
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, min_rows=1))
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = saver.save_async("c")
    model["kernel"].momentum1_host.untyped_storage().resize_(0)
    gate.open()
    with pytest.raises(LiveTableError, match=r"its rows was freed while they were being saved.*saver.settle\(\)"):
        handle.wait()


def test_a_load_takes_steps_and_rate_and_drops_what_a_cache_had(tmp_path):
    one, other = model_of(has_cache=True), model_of(has_cache=True)
    look_up(one["kernel"], [3], [7])
    one["kernel"].set_learning_rate(0.5)
    Saver(one, output_dir=str(tmp_path), tables=live_tables(one, min_rows=1)).save("c")
    tables = live_tables(other, min_rows=1)
    look_up(other["kernel"], [1], [1])
    Saver(other, output_dir=str(tmp_path), tables=tables).load()
    assert torch.equal(other["kernel"].trained(0), tables["t0"].embeddings())
    assert (int(other["kernel"].iter), int(other["kernel"].iter_cpu), other["kernel"].rate) == (1, 1, 0.5)
    assert_saved(tables, tmp_path)


def test_a_load_of_one_table_loses_nothing_that_a_cache_has_of_another(tmp_path):
    one, other = model_of(has_cache=True), model_of(has_cache=True)
    Saver(one, output_dir=str(tmp_path), tables=live_tables(one, min_rows=1)).save("c")
    saver = Saver(other, output_dir=str(tmp_path / "o"), tables=live_tables(other, min_rows=1))
    look_up(other["kernel"], [3], [7])
    expected = other["kernel"].trained(0)
    saver.load_by_config({"path": str(tmp_path), "load": ["t1@embedding"]})
    assert torch.equal(other["kernel"].trained(0), expected)
    assert torch.equal(other["kernel"].trained(1), one["kernel"].trained(1))


def test_weights_that_are_stashed_refuse_a_save_until_they_are_back(tmp_path):
    """The memory of the host stands for that of the kernel here, and none for that of the host."""
    model = model_of()
    kernel, tables = model["kernel"], live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    storage, kept = kernel.weights_dev.untyped_storage(), kernel.weights_dev.detach().clone()
    storage.resize_(0)
    with pytest.raises(LiveTableError, match=r"'t0': its weights are stashed .*call MemoryStashingManager.restore"):
        saver.save("c0")
    storage.resize_(kept.nbytes)
    kernel.weights_dev.data.copy_(kept)
    saver.save("c1")
    assert_saved(tables, tmp_path)
    kernel.current_device = torch.device("cuda")
    with pytest.raises(LiveTableError, match="stashed in the memory of the host"):
        saver.save("c2")


def test_a_backward_pass_in_a_thread_of_its_own_beside_a_save_does_not_change_it(tmp_path, monkeypatch):
    """As on CUDA, where the hooks are called by the thread of the device."""
    model = model_of()
    kernel, tables = model["kernel"], live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9)
    saver.save("c0")
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = saver.save_async("c1")
    expected = rows_of(tables)
    threads = [threading.Thread(target=look_up, args=(kernel, [n, 8], [n])) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gate.open()
    handle.wait()
    assert_saved(tables, tmp_path, expected)
    saver.save("c2")
    assert_saved(tables, tmp_path)


def test_a_pass_that_is_captured_in_a_graph_refuses_all_saves_and_waits_for_no_device(tmp_path, monkeypatch):
    """The replays of a CUDA graph call no hooks, so from then on nobody says what changes."""
    model = model_of()
    tables = live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("waited for the device"))
        look_up(model["kernel"], [3], [7])
    for name in ("c0", "c1"):
        with pytest.raises(LiveTableError, match=r"table 't0': .* captured in a CUDA graph.*exclude="):
            saver.save(name)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_cache", [False, True])
def test_rows_on_cuda_are_saved_as_they_were_while_training_goes_on(tmp_path, monkeypatch, has_cache):
    model = model_of(has_cache=has_cache).cuda()
    model["kernel"].current_device = torch.device("cuda")
    save_beside_training(model, tmp_path, monkeypatch)


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
        assert rows.announced() == EVERY


def test_methods_that_write_announce_all_rows_until_the_tables_are_closed():
    model = model_of()
    tables = live_tables(model, min_rows=1)
    with Rows(tables) as rows:
        model["kernel"].ema_inplace({})
        assert rows.changed() == rows.announced() == EVERY
    tables.close()
    assert "ema_inplace" not in vars(model["kernel"])
    assert not model["kernel"]._forward_hooks


def reset(kernel, rows, bounds, tables):
    """Reset rows of some tables, as what evicts their ids does."""
    arguments = [torch.tensor(values) for values in (rows, bounds, tables, [0])]
    names = ("pruned_indices", "pruned_indices_offsets", "logical_table_ids", "buffer_ids")
    kernel.reset_embedding_weight_momentum(**dict(zip(names, arguments, strict=True)))


def train_a_copy(kernel):
    other = copy.deepcopy(kernel)
    other.ema_inplace({})
    look_up(other, [1], [2])


@pytest.mark.parametrize(
    ("features", "change", "expected"),
    [
        ((0, 0, 1), lambda kernel: look_up(kernel, [3, 3], [5], []), {"t0": {3, 5}, "t1": set()}),
        ((0, 1), lambda kernel: reset(kernel, [3, 5, 7], [0, 2, 3], [1, 0]), {"t0": {7}, "t1": {3, 5}}),
        ((0, 1), train_a_copy, {"t0": set(), "t1": set()}),
    ],
)
def test_rows_that_are_looked_up_or_have_other_ids_are_announced_by_table_and_those_of_copies_are_not(
    features, change, expected
):
    model = model_of(features=features)
    with Rows(live_tables(model, min_rows=1)) as rows:
        change(model["kernel"])
        assert rows.announced() == rows.changed() == expected


def test_a_hook_that_fails_lets_training_go_on_and_the_next_save_fail(tmp_path, caplog):
    model = model_of()
    tables = live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables)
    with pytest.raises(ValueError, match="zip"):  # of the kernel, which is called all the same
        reset(model["kernel"], [3], [0, 1], [0, 1])
    with pytest.raises(LiveTableError, match="changes were missed"):
        saver.save("c0")
    saver.save("c1")
    caplog.clear()
    before = tables["t0"].embeddings().clone()
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    model["kernel"](ids, offsets, batch_size_per_feature_per_rank=[[1]]).sum().backward()
    assert not torch.equal(tables["t0"].embeddings(), before)
    assert "changes were missed, so the next save fails" in caplog.text
    with pytest.raises(LiveTableError, match="changes were missed"):
        saver.save("c2")
    saver.save("c3")
    assert_saved(tables, tmp_path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"optimizer": OptimType.ENSEMBLE}, "its optimizer is 'ensemble_row_wise_adagrad', whose states recckpt does"),
        ({"optimizer": OptimType.NONE}, "its optimizer is 'none', whose states recckpt does not know"),
        ({"like": torch.zeros(220, dtype=torch.int8)}, "its weights are torch.int8, expected floats"),
        ({"like": torch.zeros(220).to(torch.float8_e4m3fn)}, "its weights are torch.float8_e4m3fn, expected floats"),
    ],
)
def test_a_kernel_that_cannot_be_saved_by_rows_stays_dense_and_says_why(options, why):
    tables = live_tables(model_of(**options), min_rows=1)
    assert len(tables) == 0
    assert why in str(tables)
    elsewhere = live_tables(nn.ModuleDict({"kernel": SSDTableBatchedEmbeddingBags()}))
    assert "a SSDTableBatchedEmbeddingBags keeps its rows on an SSD or in a store, not in tensors" in str(elsewhere)


NOT_SAVED = (
    "a BatchedDynamicEmbeddingTablesV2 keeps its rows in hash tables, which state dicts omit: dump it by "
    "DynamicEmbDump beside each checkpoint, which recckpt import --from dynamicemb reads, or return a table of "
    "your own (recckpt.types.SavableTable) from the state dict"
)


def test_kernels_of_dynamicemb_are_named_as_what_no_checkpoint_has_unless_they_are_excluded(caplog):
    model = nn.ModuleDict({"kernel": BatchedDynamicEmbeddingTablesV2()})
    assert f"not a live table: kernel: {NOT_SAVED}" in str(live_tables(model))
    assert caplog.messages == [f"not in the checkpoints are 'kernel': {NOT_SAVED}"]
    caplog.clear()
    live_tables(nn.ModuleDict(dict(model)), exclude=["kernel"])
    assert caplog.messages == []


def test_an_average_that_writes_all_rows_in_forward_is_announced_before_it_does():
    model = model_of(optimizer=OptimType.EMA)
    tables = live_tables(model, min_rows=1)
    assert "ema_in_place_row_wise_adagrad is not proven" in str(tables)
    with Rows(tables) as rows, torch.no_grad():
        model["kernel"](torch.tensor([1, 2]), torch.tensor([0, 1, 2]))
        assert rows.announced() == rows.changed() == EVERY


def test_all_tables_of_a_kernel_are_live_or_none_and_small_ones_go_with_large_ones():
    assert sorted(live_tables(model_of(), min_rows=35)) == ["t0", "t1"]
    assert len(live_tables(model_of(), min_rows=41)) == 0
    with pytest.raises(LiveTableError, match=r"'kernel' are one tensor: exclude 'kernel.1' too"):
        live_tables(model_of(), min_rows=1, exclude=["kernel.0"])
    with pytest.raises(LiveTableError, match=r"'t0': embedding is .* on meta, expected memory: materialize it first"):
        live_tables(model_of(like=torch.empty(220, device="meta")), min_rows=1)
