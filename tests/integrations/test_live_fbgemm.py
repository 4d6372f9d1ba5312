"""Fused kernels of FBGEMM as live tables: what they announce, beside what really changes, bit for bit."""

import copy
import random
import threading

import numpy as np
import pytest
import torch
from faults.plants import plant
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from support.live_runs import Rows, assert_saved, rows_of
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.adapters import fbgemm
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.save.job import SparseSaver

KINDS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "rowwise": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "decay": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.01,
        "weight_decay_mode": WeightDecayMode.L2,
    },
    "decoupled": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.01,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
    },
    "counter": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay": 0.01,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": CounterBasedRegularizationDefinition(),
    },
}
SLOTS = {
    "sgd": set(),
    "adagrad": {"sparse_adagrad_sum"},
    "rowwise": {"sparse_rowwise_adagrad_sum"},
    "counter": {"sparse_rowwise_adagrad_sum", "sparse_fbgemm_prev_iter", "sparse_fbgemm_row_counter"},
}
SHAPES = ((40, 8), (30, 4), (25, 8))
FEATURES = (0, 0, 1, 1, 2)  # of which table; two tables have two features


def model_of(kind="rowwise", *, seed=0, shapes=SHAPES, features=FEATURES, pooling=PoolingMode.SUM, **options):
    """Return a model of one kernel, whose tables are called t0, t1 ..."""
    torch.manual_seed(seed)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes],
        feature_table_map=list(features),
        table_names=[f"t{number}" for number in range(len(shapes))],
        pooling_mode=pooling,
        learning_rate=0.1,
        device=torch.device("cpu"),
        **{**KINDS[kind], **options},
    )
    kernel.init_embedding_weights_uniform(-1, 1)
    return nn.ModuleDict({"kernel": kernel, "top": nn.Linear(3, 1)})


def inputs(draw, *, shapes=SHAPES, features=FEATURES, size=3, dtype=torch.int64):
    """Return random indices and offsets of so many samples of each feature."""
    lengths = torch.randint(0, 4, (len(features), size), generator=draw)
    indices = [
        torch.randint(shapes[table][0], (int(own.sum()),), generator=draw)
        for table, own in zip(features, lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    return torch.cat(indices).to(dtype), offsets.to(dtype)


def backward(output, draw):
    (output * torch.randn(output.shape, generator=draw)).sum().backward()


def train(model, draw, **how):
    backward(model["kernel"](*inputs(draw, **how)), draw)


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_model_trains_on_with_the_same_bits(kind, tmp_path, draw):
    one, other = model_of(kind, seed=0), model_of(kind, seed=1)
    saver = Saver(one, output_dir=str(tmp_path), tables=live_tables(one, min_rows=1), deltas=True, max_keep=9)
    kinds = []
    for number in range(3):
        train(one, draw)
        kinds.append(saver.save(f"c{number}", step=number).kind)
    assert kinds == ["full", "delta", "delta"]
    tables = live_tables(other, min_rows=1)
    assert {slot for table in tables.values() for slot in table.slots} == SLOTS.get(kind, SLOTS["rowwise"])
    assert CheckpointManager(Saver(other, output_dir=str(tmp_path), tables=tables), 10**9).restore() == 2
    draws = [torch.Generator().manual_seed(9) for _ in range(2)]
    for _ in range(20):
        for model, own in zip((one, other), draws, strict=True):
            train(model, own)
    assert rows_of(live_tables(one, min_rows=1)) == rows_of(tables)
    counted = 0 if kind in {"sgd", "adagrad"} else 23  # those two need no steps, and count none
    assert [int(step) for model in (one, other) for step in (model["kernel"].iter, model["kernel"].iter_cpu)] == [
        counted
    ] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_row_changes_unannounced_in_random_models(kind, seed):
    random.seed(seed)
    draw = torch.Generator().manual_seed(seed)
    shapes = [(random.randint(3, 60), random.choice((4, 8))) for _ in range(random.randint(1, 4))]
    features = [*range(len(shapes)), *random.choices(range(len(shapes)), k=3)]
    model = model_of(kind, seed=seed, shapes=shapes, features=sorted(features))
    how = {"shapes": shapes, "features": sorted(features), "dtype": random.choice((torch.int32, torch.int64))}
    with Rows(live_tables(model, min_rows=1)) as rows:
        for _ in range(6):
            train(model, draw, size=random.randint(1, 4), **how)
        assert rows.changed() == rows.announced()
        with torch.no_grad():
            model["kernel"](*inputs(draw, **how))
        model["kernel"](*inputs(draw, **how))  # a pass that nothing follows
        assert rows.changed() == rows.announced()


def test_random_models_show_that_one_table_of_a_feature_alone_is_marked(monkeypatch):
    plant("the first table of a feature alone is marked", monkeypatch.setattr)
    with pytest.raises(AssertionError):
        test_no_row_changes_unannounced_in_random_models("rowwise", 1)


def test_a_feature_of_two_tables_marks_both():
    class Shared(nn.Module):
        """Looks one feature up in two tables, as TorchRec does."""

        def __init__(self):
            super().__init__()
            self.kernel = model_of(features=(0, 1, 2))["kernel"]

        def forward(self, ids):
            offsets = torch.arange(len(ids) * 3 + 1)
            return self.kernel(ids.repeat(3), offsets)

    model = Shared()
    with Rows(live_tables(model, min_rows=1)) as rows:
        model(torch.tensor([3, 17, 3])).sum().backward()
        assert rows.announced() == rows.changed() == {f"t{number}": {3, 17} for number in range(3)}


def test_an_id_that_is_not_there_trains_row_0_and_marks_it(monkeypatch):
    def rows_marked():
        model = model_of(shapes=((40, 8),), features=(0,), bounds_check_mode=BoundsCheckMode.WARNING)
        with Rows(live_tables(model, min_rows=1)) as rows:
            model["kernel"](
                torch.tensor([5, 99], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
            ).sum().backward()
            return rows.changed(), rows.announced()

    changed, announced = rows_marked()
    assert changed == announced == {"t0": {0, 5}}
    read = fbgemm.KernelHooks.after_forward

    def reading_before_the_check(self, kernel, args, kwargs):
        self.early = args[0].clone()

    def as_read_before(self, kernel, args, kwargs, output):
        read(self, kernel, (self.early, *args[1:]), kwargs, output)

    install = fbgemm.KernelHooks._install

    def installing_both(self):
        self._kernel.register_forward_pre_hook(lambda *given: reading_before_the_check(self, *given), with_kwargs=True)
        install(self)

    monkeypatch.setattr(fbgemm, "_looked_up", lambda ids, n_rows: ids[ids < n_rows])
    monkeypatch.setattr(fbgemm.KernelHooks, "after_forward", as_read_before)
    monkeypatch.setattr(fbgemm.KernelHooks, "_install", installing_both)
    changed, announced = rows_marked()
    assert changed["t0"] - announced["t0"] == {0}  # the planted bug is one that this test finds


def test_batches_of_different_sizes_by_feature(draw):
    model = model_of(shapes=((40, 8), (30, 8)), features=(0, 1))
    sizes = [[2, 1], [4, 3]]  # by feature and rank
    with Rows(live_tables(model, min_rows=1)) as rows:
        offsets = torch.arange(11) * 2
        indices = torch.cat([torch.randint(40, (6,), generator=draw), torch.randint(30, (14,), generator=draw)])
        backward(model["kernel"](indices, offsets, batch_size_per_feature_per_rank=sizes), draw)
        assert rows.changed() == rows.announced()
        assert rows.changed() == {"t0": {*indices[:6].tolist()}, "t1": {*indices[6:].tolist()}}


def test_weights_by_sample_and_sequences(draw):
    model = model_of()
    with Rows(live_tables(model, min_rows=1)) as rows:
        indices, offsets = inputs(draw)
        backward(model["kernel"](indices, offsets, torch.rand(len(indices), generator=draw) + 0.5), draw)
        assert rows.changed() == rows.announced()
    model = model_of(shapes=((40, 8), (30, 8)), features=(0, 1), pooling=PoolingMode.NONE)
    with Rows(live_tables(model, min_rows=1)) as rows:
        train(model, draw, shapes=((40, 8), (30, 8)), features=(0, 1))
        assert rows.changed() == rows.announced()


def test_passes_that_are_open_across_a_save_and_repeated_ones(tmp_path, draw):
    how = {"shapes": [(rows * 50, dim) for rows, dim in SHAPES]}
    model = model_of(**how)
    tables = live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9)
    saver.save("c0")
    outputs = [model["kernel"](*inputs(draw, **how)) for _ in range(2)]
    assert saver.save("c1").kind == "delta"
    (outputs[0].sum()).backward(retain_graph=True)
    assert saver.save("c2").kind == "delta"
    assert_saved(tables, tmp_path)
    (outputs[0].sum() * 2).backward()
    outputs[1].square().sum().backward()
    assert saver.save("c3").kind == "delta"
    assert_saved(tables, tmp_path)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise", "counter"])
def test_saves_in_the_background_have_the_rows_of_their_moment(kind, tmp_path, draw):
    model = model_of(kind, shapes=((3000, 16), (2000, 8)), features=(0, 1, 1))
    tables = live_tables(model, min_rows=1)
    how = {"shapes": ((3000, 16), (2000, 8)), "features": (0, 1, 1), "size": 200}
    with Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=2) as saver:
        for number in range(8):
            train(model, draw, **how)
            moment, handle = rows_of(tables), saver.save_async(f"c{number}")
            for _ in range(5):
                train(model, draw, **how)
            handle.wait()
            assert_saved(tables, tmp_path, moment)


def test_without_copies_of_rows_before_they_change_a_save_has_others(tmp_path, draw, monkeypatch):
    """The planted bug of all: the test above tells it."""
    model = model_of(shapes=((3000, 16),), features=(0,))
    tables = live_tables(model, min_rows=1)
    monkeypatch.setattr("recckpt.sparse.table.store.Observers.keep", lambda *given, **named: None)
    train(model, draw, shapes=((3000, 16),), features=(0,), size=200)
    with Saver(model, output_dir=str(tmp_path), tables=tables) as saver:
        moment, begin = rows_of(tables), threading.Event()
        monkeypatch.setattr(SparseSaver, "save", held(begin))
        handle = saver.save_async("c")
        for _ in range(5):
            train(model, draw, shapes=((3000, 16),), features=(0,), size=200)
        begin.set()
        handle.wait()
    with pytest.raises(AssertionError):
        assert_saved(tables, tmp_path, moment)


def held(begin):
    """Return the writing of tables, which waits until training has gone on."""
    write = SparseSaver.save

    def writing(*given, **named):
        assert begin.wait(60)
        return write(*given, **named)

    return writing


@pytest.mark.parametrize(
    "change",
    [
        lambda kernel: kernel.init_embedding_weights_uniform(-2, 2),
        lambda kernel: kernel.load_state_dict(
            {name: value + 1 if name == "weights_host" else value for name, value in kernel.state_dict().items()}
        ),
        lambda kernel: kernel.ema_inplace({"step_ema": 1, "step_start": 0, "step_ema_coef": 0.5}),
    ],
)
def test_what_writes_rows_beside_training_changes_all_of_them(change, tmp_path, draw):
    model = model_of()
    tables = live_tables(model, min_rows=1)
    saver = Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9)
    saver.save("c0")
    change(model["kernel"])
    saver.save("c1")
    assert_saved(tables, tmp_path)


def test_a_copy_of_the_model_announces_nothing_and_calls_its_own_methods():
    model = model_of()
    with Rows(live_tables(model, min_rows=1)) as rows:
        other = copy.deepcopy(model)
        other["kernel"].init_embedding_weights_uniform(-3, 3)
        train(other, torch.Generator().manual_seed(1))
        assert not torch.equal(other["kernel"].weights_host, model["kernel"].weights_host)
        assert rows.changed() == rows.announced() == {"t0": set(), "t1": set(), "t2": set()}


def test_the_state_dict_of_a_kernel_is_saved_once_as_tables_and_its_rate_comes_back(tmp_path, draw):
    model = model_of()
    train(model, draw)
    model["kernel"].set_learning_rate(0.25)
    saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, min_rows=1))
    saver.save("c")
    assert {name.text for name in saver.loader.live_state().inventory if name.group == "dense"} == {
        "top.weight",
        "top.bias",
    }
    other = model_of(seed=1)
    Saver(other, output_dir=str(tmp_path), tables=live_tables(other, min_rows=1)).load()
    assert other["kernel"].get_learning_rate() == 0.25


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"weights_precision": SparseType.INT8}, "its weights are torch.uint8"),
    ],
)
def test_kernels_that_cannot_be_saved_by_rows_stay_as_they_are_and_say_why(options, why):
    assert why in str(live_tables(model_of(**options), min_rows=1))


def test_some_tables_of_a_kernel_cannot_be_left_out():
    model = model_of()
    with pytest.raises(LiveTableError, match=r"one tensor: exclude 'kernel\.1', 'kernel\.2' too, or none"):
        live_tables(model, min_rows=1, exclude=["kernel.0"])
    assert len(live_tables(model, min_rows=1, exclude=[f"kernel.{number}" for number in range(3)])) == 0


def test_names_of_tables_are_those_of_the_kernel_or_given():
    names = {"kernel.1": "other"}
    assert sorted(live_tables(model_of(), min_rows=1, names=names)) == ["other", "t0", "t2"]


def test_rows_are_as_they_lie():
    model = model_of()
    tables = live_tables(model, min_rows=1)
    for number, weights in enumerate(model["kernel"].split_embedding_weights()):
        np.testing.assert_array_equal(tables[f"t{number}"].embeddings().numpy(), weights.detach().numpy())
        assert tables[f"t{number}"].embeddings().data_ptr() == weights.data_ptr()
