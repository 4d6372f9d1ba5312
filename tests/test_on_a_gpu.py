"""A whole run of a model on a device: tables of ours and live ones, dense state, random numbers, near saves."""

import pytest
import torch
from support.builders import OPTIMIZERS, Run, frozen, state_of
from support.devices import CUDA, DEVICES, here, on
from support.gate import Gate
from support.live_runs import LiveRun
from support.sweeps import mostly_slow

from recckpt import CheckpointManager, Deltas, Near
from recckpt.checkpointer import make_async_checkpointer
from recckpt.dense.data_loaders import dump_rng, load_rng
from recckpt.save.job import SparseSaver

DELTAS = Deltas(max_dirty=1.0, max_chain_bytes=1000)


@pytest.fixture(params=DEVICES)
def device(request):
    """Where runs lie during the test."""
    with on(request.param) as device:
        yield device


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("of", [Run, LiveRun])
def test_a_restored_run_goes_on_with_the_same_bits(tmp_path, of):
    one, other = of(tmp_path / "runs", 4, deltas=DELTAS), of(tmp_path / "runs", 4, seed=1, deltas=DELTAS)
    one.train(9)
    assert other.manager.restore() == 8
    other.train(1)
    assert state_of(other) == state_of(one)


@mostly_slow()
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("of", [Run, LiveRun])
def test_a_save_in_the_background_has_the_state_of_its_step(tmp_path, monkeypatch, of):
    run, expected = of(tmp_path / "runs", 10**9, max_keep=None, deltas=DELTAS), []
    for step in range(3):
        run.train(2)
        with monkeypatch.context() as patch:
            gate = Gate(patch, SparseSaver, "save")
            expected.append(state_of(run))
            handle = run.saver.save_async(f"c{step}", step=run.manager.global_step)
            run.train(3)
            gate.open()
            handle.wait()
    for step in (0, 2, 1):
        other = of(tmp_path / "runs", 10**9, seed=5, max_keep=None, deltas=DELTAS)
        other.saver.load(ckpt_id=f"c{step}")
        assert without_step(state_of(other)) == without_step(expected[step])


def without_step(state):
    """Return what a saver loads of a state, and a manager leaves alone."""
    return {name: value for name, value in state.items() if name not in ("step", "rng")}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("of", [Run, LiveRun])
def test_a_restore_takes_the_newest_near_save(tmp_path, of):
    def begin(seed):
        run = of(tmp_path / "runs", seed=seed, deltas=DELTAS, near=Near(tmp_path / "near", 2))
        run.manager = CheckpointManager(run.saver, 50)
        return run

    one, other = begin(0), begin(1)
    for _ in range(4):
        one.train(1)
        one.saver.near_saves.settle()
    assert one.manager.counts.near > 0
    assert other.manager.restore() == 4
    assert state_of(other) == state_of(one)


@mostly_slow()
@pytest.mark.parametrize(("there", "back"), [("cpu", "cpu"), pytest.param("cuda", "cpu", marks=CUDA.marks)])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_tables_of_ours_go_from_one_device_to_another_and_back(tmp_path, there, back, rule):
    def moved(device, seed):
        with on(device):
            return Run(tmp_path / "runs", 2, optimizer=rule, seed=seed, deltas=DELTAS)

    one = moved(there, 0).train(4)
    other = moved(back, 1)
    assert other.manager.restore() == 4
    assert state_of(other) == state_of(one)
    other.train(2)
    last = moved(there, 2)
    assert last.manager.restore() == 6
    assert state_of(last) == state_of(other)
    assert last.model.users.embeddings().device.type == there


@pytest.mark.parametrize("device", [CUDA])
def test_rows_that_a_load_writes_are_there_for_the_stream_that_trains(tmp_path, device):
    with on(device), torch.cuda.stream(torch.cuda.Stream()):
        run = Run(tmp_path / "runs", 10**9, deltas=DELTAS).train(3)
        run.saver.save("a", step=3)
        expected = without_step(state_of(run))
        for seed in range(3):
            other = Run(tmp_path / "runs", 10**9, seed=seed).train(seed)  # into tables with rows, too
            torch.cuda._sleep(50_000_000)
            other.saver.load()
            assert without_step(state_of(other)) == expected


@pytest.mark.parametrize("device", [CUDA])
def test_random_numbers_of_a_device_go_on_where_they_were(device):
    with on(device):
        torch.rand(3, device=here())
        states = dump_rng()
        drawn = torch.rand(5, device=here()).tolist()
        torch.rand(7, device=here())
        load_rng(states)
        assert torch.rand(5, device=here()).tolist() == drawn


@pytest.mark.usefixtures("device")
def test_a_checkpointer_saves_a_nested_state_as_it_was_and_loads_it_in_place(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)).to(here())
    optimizer = torch.optim.AdamW(model.parameters())

    def train():
        model(torch.rand(8, 300, device=here())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    train()
    expected = frozen(state())
    checkpointer = make_async_checkpointer()
    _, written = checkpointer.save(state(), tmp_path / "a")
    for _ in range(10):
        train()
    written.result()
    loaded = checkpointer.load(tmp_path / "a", state())
    checkpointer.close()
    assert frozen(loaded) == expected
    assert frozen(model.state_dict()) == expected["model"]
