"""State of TorchRec by its documented names; TorchRec itself is not needed."""

import numpy as np
import pytest
import torch
from support.conversions import refused, rows_bytes, save_dcp, save_torch, table_bytes

from recckpt import CheckpointReader
from recckpt.convert import ImportOptions, import_checkpoint

FREE = torch.iinfo(torch.int64).max


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
@pytest.mark.parametrize("is_counted", [False, True])
def test_rows_under_zch_have_the_raw_ids_and_what_it_counts_of_them(tmp_path, save, is_counted):
    weight, state = zch([-7, 1000, 2000, FREE], [3, 0, 1, 2])
    rows = {"id": np.array([1000, 2000, -7]), "embedding": weight[[0, 1, 3]].numpy()}
    if is_counted:
        module = "mc._managed_collision_collection._managed_collision_modules.t1."
        state |= {f"{module}_mch_counts": torch.tensor([5, 6, 7, 0]), f"{module}_mch_last_access_iter": torch.arange(4)}
        rows |= {"zch_counts": np.array([6, 7, 5]), "zch_last_access_iter": np.array([1, 2, 0])}
    done = import_checkpoint(save(state, tmp_path / "x"), tmp_path / "out", format="torchrec")
    assert table_bytes(tmp_path / "out", "t1") == rows_bytes(rows)
    left = done.contents.left_out
    if is_counted:
        assert not [each for each in left if "counts" in each.name or "access" in each.name]
    else:
        assert ("1 rows without an id from ZCH" in left[0].reason, len(left)) == (True, 4)


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
    refused(save_torch(zch(raw, places)[1], tmp_path / "x"), match, format="torchrec")


def test_what_has_no_table_of_torchrec_is_refused(tmp_path):
    without = save_torch({"w": torch.ones(1)}, tmp_path / "x")
    refused(without, "no table of TorchRec", format="torchrec")
    _, state = zch([1, 2], [0, 1])
    state["mc._managed_collision_modules.t1._hash_zch_identities"] = torch.ones(4)
    refused(save_torch(state, tmp_path / "y"), "multi-probe hashing", format="torchrec")


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
    both = r"state 'momentum1': found .*momentum1' and .*momentum_1'"
    refused(source, both, format="torchrec")


def _flat_states(states):
    return {f"embedding_bags.t.weight.t.{name}": value for name, value in states.items()}


def kv_zch(ids, rows, prefix="ec.embeddings.t1"):
    """As a collection behind a key-value store has it: rows in the order of their buckets, with their ids."""
    return {
        f"{prefix}.weight": rows,
        f"{prefix}.weight_id": torch.tensor(ids).view(-1, 1),
        f"{prefix}.bucket": torch.tensor([[2], [1]]),
        f"{prefix}.metadata": torch.zeros(len(ids), 1, dtype=torch.int64),
    }


@pytest.mark.parametrize("save", [save_torch, save_dcp])
def test_rows_behind_a_key_value_store_have_the_ids_beside_them(tmp_path, save):
    ids, rows, sums = [-5, FREE, 2**40], torch.randn(3, 4), torch.rand(3)
    state = {"model": kv_zch(ids, rows), "optim": {"state": fused("ec.embeddings", "t1", momentum1=sums)}}
    done = import_checkpoint(save(state, tmp_path / "x"), tmp_path / "out", format="torchrec")
    expected = {"id": np.array(ids), "embedding": rows.numpy(), "sparse_rowwise_adagrad_sum": sums.numpy()}
    assert table_bytes(tmp_path / "out", "t1") == rows_bytes(expected)
    assert {left.name.rpartition(".")[2] for left in done.contents.left_out} == {"bucket", "metadata"}
    assert done.contents.dense == ()


@pytest.mark.parametrize(
    ("change", "match"),
    [({"weight_id": torch.arange(2)}, "ids of shape"), ({"weight_id": torch.ones(3)}, "ids of float32")],
)
def test_ids_that_do_not_fit_their_rows_are_refused(tmp_path, change, match):
    state = {**kv_zch([1, 2, 3], torch.randn(3, 4)), **{f"ec.embeddings.t1.{name}": t for name, t in change.items()}}
    refused(save_torch(state, tmp_path / "x"), match, format="torchrec")


def two_collections():
    """Two collections with a table of one name, of which the second has its ids remapped, and both an optimizer."""
    first, (second, remapped) = torch.randn(3, 2), zch([7, 8, 9, FREE], [3, 0, 1, 2])
    sums = torch.rand(3), torch.rand(4)
    model = {"user.embedding_bags.t1.weight": first, **remapped}
    paths = "user.embedding_bags", "mc._embedding_module.embedding_bags"
    state = {key: value for path, s in zip(paths, sums, strict=True) for key, value in fused(path, "t1", m=s).items()}
    adam = {"exp_avg": first + 1, "exp_avg_sq": first + 2, "step": torch.tensor(5)}
    state |= fused("user.embedding_bags", "t1", **adam)
    state |= fused(paths[1], "t1", momentum1=sums[1])
    return first, second, sums[1], {"model": model, "optim": {"state": state}}


@pytest.mark.parametrize("save", [save_torch, save_dcp])
def test_tables_of_one_name_in_two_collections_come_under_names_of_their_own(tmp_path, save):
    first, second, sums, state = two_collections()
    source = save(state, tmp_path / "x")
    long = ["model.user.embedding_bags.t1", "model.mc._embedding_module.embedding_bags.t1"]
    plan = import_checkpoint(source, tmp_path / "out", format="torchrec", dry_run=True)
    assert sorted(table.name for table in plan.contents.tables) == sorted(long)
    assert sum("several collections" in left.reason for left in plan.contents.left_out) == 2

    names = dict(zip(long, ["user", "shop"], strict=True))
    done = import_checkpoint(source, tmp_path / "out", format="torchrec", options=ImportOptions(names=names))

    moments = {"sparse_adam_exp_avg": (first + 1).numpy(), "sparse_adam_exp_avg_sq": (first + 2).numpy()}
    rows = {"id": np.arange(3), "embedding": first.numpy(), **moments}
    assert table_bytes(tmp_path / "out", "user") == rows_bytes(rows)
    places = [0, 1, 3]
    rows = {"id": np.array([8, 9, 7]), "embedding": second[places].numpy()}
    rows["sparse_rowwise_adagrad_sum"] = sums[places].numpy()
    assert table_bytes(tmp_path / "out", "shop") == rows_bytes(rows)
    assert done.contents.extra["sparse_optim"]["state"] == {"user": {"step": 5}}
    assert done.contents.extra["sparse_optim"]["param_groups"] == [{"tables": ["user"]}]


def test_a_name_for_a_table_that_is_not_there_and_one_for_two_tables_are_refused(tmp_path):
    source = save_torch(two_collections()[3], tmp_path / "x")
    options = ImportOptions(names={"t1": "user"})
    unknown = r"no table 't1' to rename, expected one of 'model\.user"
    refused(source, unknown, format="torchrec", options=options)
    plan = import_checkpoint(source, tmp_path / "out", format="torchrec", dry_run=True)
    options = ImportOptions(names=dict.fromkeys([table.name for table in plan.contents.tables], "t"))
    refused(source, "expected each name once", format="torchrec", options=options)
