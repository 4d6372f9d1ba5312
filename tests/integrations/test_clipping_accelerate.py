"""A loop of accelerate clips, accumulates and scales a table as it does an ``nn.Embedding`` in its place."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs
from support import twins
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from recckpt import CheckpointManager, Saver
from recckpt.sparse import JointOptimizer, SparseAdam, clip_grad_norm_

BOTH_SPOILT = {1: twins.TABLE, 4: twins.DENSE}


@pytest.fixture(autouse=True)
def _a_state_of_its_own():
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState):
        state._reset_state()


def accelerator_of(accumulate, scale):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if scale is not None:  # as with fp16, which accelerate refuses on a CPU
        accelerator.native_amp, accelerator.scaler = True, GradScaler("cpu", init_scale=scale, growth_interval=3)
        accelerator.state._mixed_precision = "fp16"
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
    return accelerator


def train(twin, *, limit=None, accumulate=1, scale=None, spoilt=None, joint=False, steps_of_table=1, fused=False):
    """Train for two epochs as the documentation of accelerate does; return the norms, and the scale."""
    accelerator = accelerator_of(accumulate, scale)
    dense, sparse = twins.optimizers(twin, fused=fused)
    optimizers = [dense] if sparse is None else [dense, sparse]
    if sparse is not None:
        sparse.set_grad_accum_steps(steps_of_table)
    if joint:
        optimizers = [JointOptimizer(*optimizers)]
    loader = DataLoader(TensorDataset(*twins.samples(spoilt)), batch_size=twins.BATCH)
    model, loader, *optimizers = accelerator.prepare(twin, loader, *optimizers)
    norms = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(*batch))
                if accelerator.sync_gradients and limit is not None:
                    of_tables = [p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]]
                    parameters = {id(p): p for p in (*model.parameters(), *of_tables)}.values()
                    norms.append(accelerator.clip_grad_norm_(parameters, limit).item())
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
    return norms, scale and accelerator.scaler.state_dict()


CASES = {
    "neither": {},
    "clipped": {"limit": 1.0},
    "accumulated, and the last window is short": {"accumulate": 3},
    "both": {"limit": 1.0, "accumulate": 3},
}
SCALED = {
    "scaled": {"scale": 256.0},
    "scaled and all": {"scale": 256.0, "limit": 1.0, "accumulate": 3},
    "overflows": {"scale": 256.0, "spoilt": BOTH_SPOILT},
    "overflows and all": {"scale": 2.0**16, "spoilt": BOTH_SPOILT, "limit": 1.0, "accumulate": 2},
    "overflows of a fused optimizer": {"scale": 256.0, "spoilt": BOTH_SPOILT, "fused": True},
}


def assert_learns_the_same(case, joint):
    gain = 100.0 if "limit" in case else 1.0  # gradients far beyond the limit, where there is one
    ours, theirs = twins.with_table(gain), twins.with_embedding(gain)
    seen = train(ours, **case, joint=joint), train(theirs, **case)
    twins.assert_equal(ours, theirs)
    torch.testing.assert_close(*(norms for norms, _ in seen), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert seen[0][1] == seen[1][1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_prepared_optimizers_are_what_one_is(case):
    assert_learns_the_same(case, joint=False)


@pytest.mark.parametrize("case", [*CASES.values(), *SCALED.values()], ids=[*CASES, *SCALED])
def test_a_prepared_joint_optimizer_is_what_one_is_with_a_scaler_too(case):
    assert_learns_the_same(case, joint=True)


@pytest.mark.parametrize("spoilt", [None, {0: twins.TABLE}])
def test_two_prepared_optimizers_and_a_scaler_are_refused_before_rows_move(spoilt):
    twin = twins.with_table()
    with pytest.raises(ValueError, match=r"gradients twice: prepare recckpt.sparse.JointOptimizer\(dense, sparse\)"):
        train(twin, scale=256.0, spoilt=spoilt)
    assert torch.equal(twins.trained(twin)["rows"], twins.weights())


@pytest.mark.parametrize("joint", [False, True])
def test_a_table_that_counts_batches_itself_is_refused(joint):
    with pytest.raises(ValueError, match=r"set_grad_accum_steps\(2\).*leave it at 1"):
        train(twins.with_table(), accumulate=2, steps_of_table=2, joint=joint)


def test_a_prepared_optimizer_is_refused_in_a_joint_one():
    accelerator = accelerator_of(1, None)
    dense, sparse = twins.optimizers(twins.with_table())
    with pytest.raises(ValueError, match="prepare the JointOptimizer instead"):
        JointOptimizer(accelerator.prepare(dense), sparse)


def test_clipping_by_one_line_takes_prepared_optimizers():
    twin = twins.with_table()
    accelerator = accelerator_of(1, None)
    model, dense, sparse = accelerator.prepare(twin, *twins.optimizers(twin))
    accelerator.backward(model(*(column[: twins.BATCH] for column in twins.samples())))
    norm = clip_grad_norm_(model, [dense, sparse], 0.5)
    assert norm > 0.5
    torch.testing.assert_close(clip_grad_norm_(model, [dense, sparse], float("inf")), torch.tensor(0.5))


@pytest.mark.parametrize("joint", [False, True])
def test_a_run_whose_optimizers_are_prepared_resumes_bit_for_bit(tmp_path, joint):
    def run(name, steps):
        twin = twins.with_table()
        dense, sparse = torch.optim.Adam(twin.parameters(), lr=0.1), SparseAdam([twin.rows], lr=0.1)
        given = [JointOptimizer(dense, sparse)] if joint else [dense, sparse]
        accelerator = accelerator_of(1, None)
        model, *optimizers = accelerator.prepare(twin, *given)
        if not joint:
            dense, sparse = optimizers
        saver = Saver(accelerator.unwrap_model(model), sparse, str(tmp_path / name))
        saver.register_for_checkpointing("dense_optim", dense)
        manager = CheckpointManager(saver, 2)
        manager.restore()
        batches = twins.batches()
        while manager.global_step < steps:
            accelerator.backward(model(*batches[manager.global_step]))
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
            manager.step()
        return twins.trained(twin)

    whole = run("whole", 6)
    run("ended", 3)
    resumed = run("ended", 6)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_prepared_optimizers_are_known_to_a_saver_for_what_they_are(tmp_path):
    twin, other = twins.with_table(), twins.with_table()
    dense, sparse = twins.optimizers(twin)
    accelerator = accelerator_of(1, None)
    both, prepared = accelerator.prepare(JointOptimizer(dense, sparse)), accelerator.prepare(sparse)
    saver = Saver(twin, prepared, str(tmp_path))
    for name, optimizer, what in (
        ("both", both, "is a JointOptimizer"),
        ("sparse", sparse, "is an optimizer of tables"),
    ):
        with pytest.raises(ValueError, match=f"'{name}' {what}"):
            saver.register_for_checkpointing(name, optimizer)
    with pytest.raises(ValueError, match="trains tables that are not in the model"):
        Saver(other, prepared, str(tmp_path))
