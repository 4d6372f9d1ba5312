"""Models of TorchRec are saved and restored as they are, and what TorchRec itself has written becomes tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import torchrec_models as models
from support.conversions import rows_bytes, table_bytes
from support.rank_processes import run_script
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.convert import import_checkpoint
from recckpt.inspect.verify import verify

SCRIPT = Path(__file__).with_name("torchrec_ranks.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks and one have saved, after two, one and two have restored what was there before them."""
    root = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, root, 2, 1, 2)
    return root


def test_any_ranks_restore_a_sharded_model_and_train_on_with_the_same_bits(saved):
    runs = sorted(path.parent for path in saved.glob("*/truth.pt"))
    assert [path.name for path in runs] == ["columns-1", "columns-2", "mixed-1", "mixed-2", "other-1", "other-2"]
    for path in runs:
        assert verify(str(path)) == []
        truth, _ = torch.load(path / "truth.pt")
        with CheckpointReader(str(path)) as reader:
            for name in reader.tensor_names():
                np.testing.assert_array_equal(reader.read_tensor(name), truth[f"model {name}"].numpy())


@pytest.mark.parametrize("run", ["mixed-2", "other-2", "columns-2", "mixed-1"])
def test_what_dcp_has_saved_of_a_sharded_model_becomes_tables_with_slots(saved, tmp_path, run):
    truth, _ = torch.load(saved / run / "truth.pt")
    done = import_checkpoint(saved / run / "dcp", tmp_path / "out", format="torchrec")
    adagrad = {"clicks": "rowwise_adagrad", "wares": "rowwise_adagrad", "words": "adagrad", "shops": "adagrad"}
    by_columns = "table wares, momentum1"  # has a value for each row and shard of columns
    assert [left.name for left in done.contents.left_out] == ([by_columns] if run == "columns-2" else [])
    for table in (*models.BAGS, *models.SEQUENCES):
        name = f"{'bags.embedding_bags' if table in models.BAGS else 'sequences.embeddings'}.{table}.weight"
        rows = {"embedding": truth[f"model {name}"]}
        if table == "users":
            rows |= {f"sparse_adam_{key}": truth[f"optimizer {name} {key}"] for key in ("exp_avg", "exp_avg_sq")}
        elif (run, table) != ("columns-2", "wares"):
            rows[f"sparse_{adagrad[table]}_sum"] = truth[f"optimizer {name} {table}.momentum1"]
        numpy = {"id": np.arange(len(rows["embedding"])), **{slot: values.numpy() for slot, values in rows.items()}}
        assert table_bytes(tmp_path / "out", table) == rows_bytes(numpy)
    assert done.contents.extra["sparse_optim"]["state"] == {"users": {"step": 3}}


def run_of_one(seed, output_dir):
    """Return a model that is not sharded, what trains it, and its manager."""
    model = models.plain(seed)
    dense = KeyedOptimizerWrapper(dict(model.top.named_parameters("top")), lambda values: torch.optim.Adam(values))
    saver = Saver(model, output_dir=str(output_dir))
    saver.register_for_checkpointing("dense", dense)
    for name, parameter in model.named_parameters():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            saver.register_for_checkpointing(f"backward of {name}", optimizer)
    return model, dense, CheckpointManager(saver, 3)


def test_a_model_of_one_process_resumes_with_its_optimizers_of_the_backward_pass(tmp_path):
    def train(run, steps):
        model, dense, manager = run
        while manager.global_step < steps:
            models.step(model, dense, manager.global_step)
            manager.step()
        return model.state_dict()

    whole = train(run_of_one(0, tmp_path / "whole"), 8)
    train(run_of_one(0, tmp_path / "ended"), 5)
    again = run_of_one(1, tmp_path / "ended")
    again[1].init_state()
    assert again[2].restore() == 3
    found = train(again, 8)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_collection_with_its_keyed_optimizer_from_torch_save(tmp_path):
    config = EmbeddingBagConfig(num_embeddings=5, embedding_dim=3, name="t", feature_names=["f"])
    model = EmbeddingBagCollection(tables=[config])
    adam = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda values: torch.optim.Adam(values))
    model(KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))).values().sum().backward()
    adam.step()
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "out", format="torchrec")
    (weight,) = model.state_dict().values()
    (state,) = adam.state_dict()["state"].values()
    rows = {"embedding": weight, **{f"sparse_adam_{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}}
    numpy = {"id": np.arange(5), **{slot: values.numpy() for slot, values in rows.items()}}
    assert table_bytes(tmp_path / "out", "t") == rows_bytes(numpy)


def test_raw_ids_of_zch_are_the_ids_of_the_table(tmp_path):
    config = EmbeddingBagConfig(num_embeddings=8, embedding_dim=2, name="t", feature_names=["f"])
    zch = MCHManagedCollisionModule(8, torch.device("cpu"), DistanceLFU_EvictionPolicy(), eviction_interval=1)
    model = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config]), ManagedCollisionCollection({"t": zch}, [config])
    )
    raw = torch.tensor([10**12, 17, 10**12, -4, 17])
    ids = KeyedJaggedTensor(["f"], raw, lengths=torch.ones(5, dtype=torch.int64))
    model(ids)  # meets them, and gives them places
    torch.save(model.state_dict(), tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "out", format="torchrec")
    found, _ = model.eval()(ids)
    with CheckpointReader(tmp_path / "out") as reader:
        vectors, is_there = reader.lookup("t", raw.tolist())
    assert is_there.all()
    np.testing.assert_array_equal(vectors, found.values().detach().numpy())


def test_a_collection_loads_back_what_was_saved_of_it_under_its_own_names(tmp_path):
    one, other = models.plain(0), models.plain(1)
    Saver(one, output_dir=str(tmp_path)).save("c")
    Saver(other, output_dir=str(tmp_path)).load()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_warm_up_that_torchrec_leaves_out_of_its_state_is_named(is_inside, tmp_path, caplog):
    def run(n_steps):
        model = torch.nn.Linear(2, 1)
        keyed = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda values: torch.optim.Adam(values, lr=0.1))
        warm = lambda optimizer: WarmupOptimizer(optimizer, [WarmupStage(max_iters=9, value=0.1)])  # noqa: E731
        optimizer = CombinedOptimizer([warm(keyed)]) if is_inside else warm(CombinedOptimizer([keyed]))
        saver = Saver(model, output_dir=str(tmp_path))
        saver.register_for_checkpointing("optimizer", optimizer)
        manager = CheckpointManager(saver, save_interval=2)
        optimizer.init_state()
        manager.restore()
        for _ in range(n_steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            manager.step()
        return keyed.param_groups[0]["lr"]

    rate = run(4)
    said = [record.getMessage() for record in caplog.records if "leaves the state of" in record.getMessage()]
    assert (run(0) == rate) == is_inside
    assert len(said) == (0 if is_inside else 1)
    assert all(text.startswith("registered optimizer 'optimizer' leaves the state of '__warmup' out") for text in said)
