"""State of TorchRec by its documented names; TorchRec itself is not needed."""

import warnings

import numpy as np
import pytest
import torch
from support.conversions import rows_bytes, table_bytes
from torch.distributed import checkpoint as dcp

from recckpt import CheckpointReader
from recckpt.convert import import_checkpoint
from recckpt.errors import ConversionError

FREE = torch.iinfo(torch.int64).max


def save_torch(state, path):
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def save_dcp(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def fused(prefix, table, **states):
    """As ``KeyedOptimizer.state_dict()`` has it: by the name of the parameter, and then of the table and state."""
    return {f"{prefix}.{table}.weight": {f"{table}.{name}": value for name, value in states.items()}}


@pytest.mark.parametrize("save", [save_torch, save_dcp])
def test_tables_come_with_the_states_of_their_fused_optimizers(tmp_path, save):
    bags, collection = "sparse.ebc.embedding_bags", "sparse.ec.embeddings"
    weights = {name: torch.randn(n, 4) for name, n in (("t1", 6), ("t2", 5), ("t3", 3), ("t4", 2))}
    model = {f"{bags}.t1.weight": weights["t1"], f"{collection}.t2.weight": weights["t2"], "over.w": torch.ones(2)}
    model |= {f"{bags}.t3.weight": weights["t3"], f"{bags}.t4.weight": weights["t4"]}
    rowwise, moments, sums = torch.rand(6), (torch.rand(5, 4), torch.rand(5, 4)), torch.rand(3, 4)
    state = {
        **fused(bags, "t1", momentum1=rowwise),
        **fused(collection, "t2", exp_avg=moments[0], exp_avg_sq=moments[1], step=torch.tensor(7)),
        **fused(bags, "t3", momentum1=sums),
        f"{bags}.t4.weight": {"t4.weight.momentum_1": torch.rand(2, 1)},  # as a collection that is not sharded has it
    }
    source = save({"model": model, "optim": {"state": state}}, tmp_path / "x")

    done = import_checkpoint(source, tmp_path / "out", format="torchrec", budget_bytes=100)

    expected = {
        "t1": {"sparse_rowwise_adagrad_sum": rowwise},
        "t2": {"sparse_adam_exp_avg": moments[0], "sparse_adam_exp_avg_sq": moments[1]},
        "t3": {"sparse_adagrad_sum": sums},
        "t4": {"sparse_rowwise_adagrad_sum": state[f"{bags}.t4.weight"]["t4.weight.momentum_1"][:, 0]},
    }
    for table, slots in expected.items():
        rows = {"embedding": weights[table], **slots}
        numpy = {"id": np.arange(len(weights[table])), **{name: values.numpy() for name, values in rows.items()}}
        assert table_bytes(tmp_path / "out", table) == rows_bytes(numpy)
    assert CheckpointReader(tmp_path / "out").tensor_names() == ["model.over.w"]
    assert done.contents.left_out == ()
    assert done.contents.extra["sparse_optim"]["state"] == {"t2": {"step": 7}}


def zch(raw, places):
    module = "mc._managed_collision_collection._managed_collision_modules.t1."
    weight = torch.arange(8.0).view(4, 2)
    return weight, {
        "mc._embedding_module.embedding_bags.t1.weight": weight,
        f"{module}_mch_sorted_raw_ids": torch.tensor(raw),
        f"{module}_mch_remapped_ids_mapping": torch.tensor(places),
        f"{module}_mch_counts": torch.ones(4),
    }


@pytest.mark.parametrize("save", [save_torch, save_dcp])
def test_rows_under_zch_have_the_raw_ids(tmp_path, save):
    weight, state = zch([-7, 1000, 2000, FREE], [3, 0, 1, 2])
    done = import_checkpoint(save(state, tmp_path / "x"), tmp_path / "out", format="torchrec")
    rows = {"id": np.array([1000, 2000, -7]), "embedding": weight[[0, 1, 3]].numpy()}
    assert table_bytes(tmp_path / "out", "t1") == rows_bytes(rows)
    assert "1 rows to which ZCH has given no id" in done.contents.left_out[0].reason
    assert len(done.contents.left_out) == 4


@pytest.mark.parametrize(
    ("raw", "places", "match"),
    [
        ([1, 2, 3, FREE], [0, 0, 1, 2], "two ids in one place"),
        ([1, 2, 3, FREE], [0, 4, 1, 2], "places from 0 to 4"),
        ([1, 1, 3, FREE], [0, 3, 1, 2], "id 1 twice"),
        ([1.0, 2.0], [0, 3], "ids of float32"),
        ([1, 2], [0, 3, 1], "2 raw ids and 3 places"),
    ],
)
def test_a_remap_that_is_damaged_is_refused(tmp_path, raw, places, match):
    with pytest.raises(ConversionError, match=match):
        import_checkpoint(save_torch(zch(raw, places)[1], tmp_path / "x"), tmp_path / "out", format="torchrec")
    assert not (tmp_path / "out").exists()


def test_what_has_no_table_of_torchrec_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="no table of TorchRec"):
        import_checkpoint(save_torch({"w": torch.ones(1)}, tmp_path / "x"), tmp_path / "out", format="torchrec")
    _, state = zch([1, 2], [0, 1])
    state["mc._managed_collision_modules.t1._hash_zch_identities"] = torch.ones(4)
    with pytest.raises(ConversionError, match="multi-probe hashing"):
        import_checkpoint(save_torch(state, tmp_path / "y"), tmp_path / "out", format="torchrec")


@pytest.mark.parametrize("second", ["exp_avg_sq", "momentum_2"])
def test_a_first_moment_beside_a_second_is_no_sum_of_adagrad(tmp_path, second):
    states = {"momentum_1": torch.randn(5, 4), second: torch.rand(5)}
    source = save_torch({"embedding_bags.t.weight": torch.randn(5, 4), **_flat_states(states)}, tmp_path / "x")
    done = import_checkpoint(source, tmp_path / "out", format="torchrec")
    assert [slot.name for slot in done.contents.tables[0].slots] == ["embedding"]
    assert len(done.contents.left_out) == 2


def test_two_tensors_for_one_state_are_refused(tmp_path):
    states = {"momentum1": torch.ones(5), "momentum_1": torch.zeros(5)}
    source = save_torch({"embedding_bags.t.weight": torch.randn(5, 4), **_flat_states(states)}, tmp_path / "x")
    with pytest.raises(ConversionError, match=r"state 'momentum1': found .*momentum1' and .*momentum_1'"):
        import_checkpoint(source, tmp_path / "out", format="torchrec")


def _flat_states(states):
    return {f"embedding_bags.t.weight.t.{name}": value for name, value in states.items()}
