"""What a device does beside the threads of Python: kernels that wait in streams, graphs, and memory of its own."""

import threading
from contextlib import nullcontext

import pytest
import torch
from support.devices import CUDA, here, ids, on
from support.gate import Gate
from support.live_runs import OPTIMIZERS, SPARSE, Run, assert_same, assert_saved, rows_of
from support.sweeps import mostly_slow
from torch import nn, optim

from recckpt import CheckpointManager, Deltas, Near, Saver
from recckpt.errors import LiveTableError
from recckpt.live import live_tables
from recckpt.save.job import SparseSaver

DELTAS = Deltas(max_dirty=1.0, max_chain_bytes=1000)
DIM, WIDTH = 16, 256  # of a row, of the dense layer
N_ROWS = {"cpu": 3_000, "cuda": 400_000}
N_CYCLES = 50_000_000  # that a device sleeps: about 30 ms
AHEAD = {"cpu": 2, "cuda": 8}  # steps beside a save before it may read
DEFAULT, OWN = "default stream", "stream of its own"
ON_CUDA = [pytest.param("cuda", place, marks=CUDA.marks) for place in (DEFAULT, OWN)]


class Training:
    """A table that is large enough to be torn, and a dense layer; steps change rows here and there."""

    def __init__(self, rule, *, is_frozen=False, n_rows=None):
        torch.manual_seed(0)
        self.table = nn.Embedding(n_rows or N_ROWS[here().type], DIM, sparse=rule in SPARSE).to(here())
        self.model = nn.ModuleDict({"users": self.table, "top": nn.Linear(DIM, WIDTH).to(here())})
        self.rows = OPTIMIZERS[rule]([self.table.weight])
        self.table.weight.requires_grad_(not is_frozen)
        self.dense = optim.Adam(self.model["top"].parameters())
        self.tables = live_tables(self.model, [] if is_frozen else [self.rows], min_rows=1)
        self.is_frozen = is_frozen

    def saver(self, output_dir):
        saver = Saver(self.model, output_dir=str(output_dir), tables=self.tables, deltas=DELTAS, max_keep=None)
        saver.register_for_checkpointing("dense", self.dense)
        return saver

    def step(self):
        some = torch.randint(len(self.table.weight), (500,), device=here())
        self.model["top"](self.table(some)).square().sum().backward()
        for one in (self.rows, self.dense):
            one.step()
            one.zero_grad()
        if self.is_frozen:
            with torch.no_grad():
                self.table.weight[some] += 1

    def rewrite(self):
        """Write all rows and the dense layer, on CUDA by kernels that are still to begin when this returns."""
        state = {name: value.detach() * 1.5 for name, value in self.model.state_dict().items()}
        if here().type == "cuda":
            torch.cuda._sleep(N_CYCLES)
        self.model.load_state_dict(state)

    def expected(self):
        """Return copies of now, queued where the steps are."""
        dense = {name: value.detach().clone() for name, value in self.model["top"].state_dict().items()}
        slots = {slot: values.detach().clone() for slot, values in self.tables["users"].live.tensors().items()}
        return dense, slots


@mostly_slow()
@pytest.mark.parametrize(("device", "place"), [("cpu", DEFAULT), *ON_CUDA])
@pytest.mark.parametrize("rule", ["SparseAdam", "sparse Adagrad", "SGD", "Adam", "frozen"])
def test_a_save_beside_training_has_all_rows_of_its_moment(tmp_path, monkeypatch, device, place, rule):
    is_cuda = device == "cuda"
    with on(device), in_stream(place):
        training = Training("SGD" if rule == "frozen" else rule, is_frozen=rule == "frozen")
        saver, kinds = training.saver(tmp_path), []
        for moment in range(3):
            training.step()
            if moment == 1:
                training.rewrite()
            dense, slots = training.expected()
            with monkeypatch.context() as patch:
                gate = Gate(patch, SparseSaver, "save")
                handle = saver.save_async(f"c{moment}", step=moment)
                for _ in range(AHEAD[device] if moment < 2 else 0):
                    training.step()
                gate.open()
                while is_cuda and not handle.done():  # the reader and the kernels side by side
                    training.step()
                kinds.append(handle.wait().kind)
            assert_saved(training.tables, tmp_path, {("users", slot): bits(values) for slot, values in slots.items()})
        assert kinds == ["full", "delta", "delta"]
        training.step()
        saver.load()
        assert_same(dict(training.model["top"].state_dict()), dense)
        assert_same(training.expected()[1], slots)


def in_stream(place):
    return torch.cuda.stream(torch.cuda.Stream()) if place == OWN else nullcontext()


def bits(values):
    return values.cpu().numpy().tobytes()


@pytest.mark.parametrize(("device", "place"), ON_CUDA)
def test_what_a_load_has_written_is_there_for_the_stream_that_trains(tmp_path, device, place):
    with on(device), in_stream(place):
        training = Training("SparseAdam")
        training.step()
        saver = training.saver(tmp_path)
        saver.save("a")
        dense, slots = training.expected()
        for _ in range(5):
            training.rewrite()  # is still to be done when the load begins
            saver.load()
            assert_same(training.expected()[1], slots)
            assert_same(dict(training.model["top"].state_dict()), dense)


@pytest.mark.usefixtures("device")
def test_a_backward_pass_and_step_in_a_thread_of_its_own_does_not_tear_a_save(tmp_path, monkeypatch):
    training = Training("SGD")
    saver = training.saver(tmp_path)
    saver.save("base", step=0)
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = saver.save_async("open", step=1)
    expected = rows_of(training.tables)
    for _ in range(2):
        thread = threading.Thread(target=training.step)
        thread.start()
        thread.join()
    gate.open()
    handle.wait()
    assert_saved(training.tables, tmp_path, expected)
    saver.save("next", step=2)
    assert_saved(training.tables, tmp_path)


@mostly_slow("there", "back")  # each rule on one device is tried by test_optimizers.py
@pytest.mark.parametrize(("there", "back"), [("cpu", "cpu"), pytest.param("cuda", "cpu", marks=CUDA.marks)])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_a_checkpoint_goes_from_one_device_to_another_and_back(tmp_path, there, back, rule):
    with on(there):
        first = Run(tmp_path / "there", rule, deltas=DELTAS)
        first.saver.save("a", step=0)
        first.train(2)
        first.saver.save("b", step=1)
    with on(back):
        other = Run(tmp_path / "there", rule, seed=1)
        other.saver.load()
        assert_same(other.state(), first.state())
        other = Run(tmp_path / "back", rule, seed=2)
        other.saver.load_by_config({"path": str(tmp_path / "there"), "load": ["*"]})
        other.saver.save("a", step=0)
    with on(there):
        last = Run(tmp_path / "back", rule, seed=3)
        last.saver.load()
        assert last.rows() == first.rows()
        assert_same(last.state()["model"], first.state()["model"])
        assert last.model.users.weight.device.type == there


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rule", ["sparse Adagrad", "Adam"])
def test_near_saves_hold_the_rows_of_a_device(tmp_path, rule):
    def begun(seed):
        run = Run(tmp_path / "runs", rule, seed=seed, deltas=DELTAS, near=Near(tmp_path / "near", 1))
        return run, CheckpointManager(run.saver, 50)

    run, manager = begun(0)
    for _ in range(3):
        run.train()
        manager.step()
        run.saver.near_saves.settle()
    assert manager.counts.near > 0
    other, restoring = begun(1)
    assert restoring.restore() == 3
    assert_same(other.state(), run.state())
    assert other.saver.save("after", step=4).kind == "delta"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("marks", ["auto", "fingerprints"])
def test_a_step_by_a_scaler_under_autocast_is_in_the_next_delta(tmp_path, marks):
    training = Training("Adagrad")
    training.tables.close()
    training.tables = live_tables(training.model, training.rows, min_rows=1, marks=marks, audit=int(marks == "auto"))
    saver = training.saver(tmp_path)
    saver.save("base", step=0)
    scaler = torch.amp.GradScaler(here().type, init_scale=8.0)
    with torch.autocast(here().type, torch.bfloat16):
        loss = training.model["top"](training.table(ids(3, 5, 3))).square().sum()
    scaler.scale(loss).backward()
    scaler.step(training.rows)
    scaler.update()
    [table] = saver.save("next", step=1).tables
    assert (table.delta.upserts, table.delta.replaced) == (2, False)
    assert_saved(training.tables, tmp_path)


@pytest.mark.parametrize("device", [CUDA])
def test_replays_of_a_graph_are_refused_by_every_save_and_train_all_the_same(tmp_path, device):
    with on(device):
        table = nn.Embedding(100, DIM).to(here())
        optimizer, some = optim.SGD(table.parameters(), lr=0.1), ids(3, 5)
        model = nn.ModuleDict({"users": table})
        saver = Saver(model, output_dir=str(tmp_path), tables=live_tables(model, optimizer, min_rows=1))

        def step():
            optimizer.zero_grad()
            table(some).square().sum().backward()
            optimizer.step()

        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        saver.save("before", step=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        before = table.weight.detach().clone()
        graph.replay()
        assert (before != table.weight).any(1).nonzero().flatten().tolist() == [3, 5]
        for name in ("c0", "c1"):
            with pytest.raises(LiveTableError, match=r"table 'users': .* captured in a CUDA graph.*exclude="):
                saver.save(name, step=1)


@pytest.mark.parametrize("device", [CUDA])
def test_rows_are_never_copied_as_a_whole_on_the_device(tmp_path, device):
    """As docs/your-tables.md says: piece by piece."""
    with on(device):
        training = Training("SparseAdam", n_rows=4_000_000)
        n_bytes = sum(values.nbytes for values in training.tables["users"].live.tensors().values())
        saver = training.saver(tmp_path)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        handle = saver.save_async("a", step=0)
        training.step()
        handle.wait()
        assert torch.cuda.max_memory_allocated() - before < n_bytes / 2


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "Adam", "sparse SGD"])
def test_a_step_waits_for_the_device_no_more_than_one_without_live_tables(tmp_path, device, rule):
    with on(device):
        training = Training(rule)
        training.step()
        saver = training.saver(tmp_path)
        saver.save("base", step=0)
        some = ids(*range(0, 1000, 3))

        def step():
            training.rows.zero_grad()
            training.table(some).square().sum().backward()
            training.rows.step()

        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        [table] = saver.save("next", step=1).tables
        assert_saved(training.tables, tmp_path)
        if rule != "Adam":  # which changes all rows
            assert (table.delta.upserts, table.delta.replaced) == (len(some), False)
