"""Tables under compilers, tracers, transforms and exporters of torch."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.sweeps import SWEEP_STRIDE, mostly_slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from recckpt.errors import LookupFailedError
from recckpt.policies.admit import MinCount
from recckpt.sparse import Constant, EmbeddingCollection, HashTable, ShardedHashTable, SparseSGD

IDS, ONE = torch.tensor([[1, 2, 2], [3, 9, 1]]), torch.ones(())
BACKENDS, CASES = ["eager", "aot_eager", "inductor"], ["table", "sharded", "collection"]
SWEEP = list(itertools.product(BACKENDS, CASES))[:: min(SWEEP_STRIDE, 4)]  # with four, each of them once


def table_of(make=HashTable):
    return make(2, name="t", initializer=Constant(0.5), track=("count",), admit=MinCount(2))


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = table_of()

    def forward(self, ids):
        return self.table(ids)


class Sharded(Called):
    def __init__(self):
        super().__init__()
        self.table = table_of(ShardedHashTable)


class Pooled(Called):
    def forward(self, ids):
        return self.table.bag(ids)


class Collected(Called):
    def __init__(self):
        super().__init__()
        self.table = table_of(ShardedHashTable)
        self.tables = EmbeddingCollection([self.table])

    def forward(self, ids):
        return self.tables({"t": ids})["t"]


class CollectedBags(Collected):
    def forward(self, ids):
        return self.tables.bag({"t": ids})["t"]


class LookedUp(Called):
    def forward(self, ids):
        return self.table.lookup(ids)[0]


CALLS = [Called, Sharded, Pooled, Collected, CollectedBags, LookedUp]


def scaled(model):
    """Return a function of a factor, to be differentiated."""
    return lambda factor: (model(IDS) * factor).sum()


TRACES = {
    "functionalize": (lambda model: functionalize(model)(IDS), "functionalize"),
    "jit.trace": (lambda model: torch.jit.trace(model, IDS, check_trace=False), r"torch\.jit\.trace"),
    "make_fx": (lambda model: make_fx(model)(IDS), "make_fx"),
    "make_fx of fakes": (lambda model: make_fx(model, tracing_mode="fake")(IDS), "make_fx"),
    "make_fx of symbols": (lambda model: make_fx(model, tracing_mode="symbolic")(IDS), "make_fx"),
    "symbolic_trace": (lambda model: torch.fx.symbolic_trace(model), "symbolic_trace"),
    "functionalize, traced": (lambda model: make_fx(functionalize(model))(IDS), "functionalize"),
    "vmap": (lambda model: vmap(model)(IDS), "vmap"),
    "vmap of something else": (lambda model: vmap(scaled(model))(torch.ones(3)), "vmap"),
    "grad": (lambda model: grad(scaled(model))(ONE), r"torch\.func\.grad"),
    "vjp": (lambda model: vjp(scaled(model), ONE), r"torch\.func\.grad"),
    "jacrev": (lambda model: jacrev(scaled(model))(ONE), r"torch\.func\.grad"),
    "hessian": (lambda model: hessian(scaled(model))(ONE), r"torch\.func"),
    "jvp": (lambda model: jvp(scaled(model), (ONE,), (ONE,)), "jvp"),
}


def contents(table):
    counts = dict(zip(table.ids().tolist(), table.slots["count"].tolist(), strict=True))
    waiting = dict(zip(table.candidates.ids().tolist(), table.candidates.embeddings().tolist(), strict=True))
    return counts, waiting, table.grad


@mostly_slow("mode")
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("trace", TRACES)
def test_what_traces_or_transforms_a_function_is_refused_by_name_and_changes_nothing(trace, call, mode):
    model = call()
    model(IDS)
    model.train(mode == "train")
    before = contents(model.table)
    run, name = TRACES[trace]
    with torch.set_grad_enabled(mode != "no_grad"), pytest.raises(Exception, match=rf"tables? .*{name}"):
        run(model)
    assert contents(model.table) == before
    assert model(IDS).shape[-1] == 2  # and nothing stays behind


@mostly_slow()
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "name"), [("meta", "device 'meta'"), ("fake", "FakeTensorMode")])
def test_ids_without_values_are_refused(kind, name, call, is_training):
    model = call().train(is_training)
    fakes = FakeTensorMode()
    ids = IDS.to("meta") if kind == "meta" else fakes.from_tensor(IDS)
    with pytest.raises((ValueError, LookupFailedError), match=f"ids .*{name} have no values"):
        model(ids)
    with fakes, pytest.raises(RuntimeError, match="FakeTensorMode"):
        model(IDS)
    assert contents(model.table) == ({}, {}, None)


@pytest.mark.slow  # what traces takes seconds to import
def test_a_function_is_refused_when_linearize_traces_it_after_a_plain_run():
    model = Called()
    with pytest.raises(RuntimeError, match=r"a table .*torch\.func\.linearize"):
        linearize(scaled(model), ONE)
    assert contents(model.table)[0] == {1: 2, 2: 2}  # those of the plain run


def plain(model):
    return model(IDS)


def in_another_thread(model):
    """Call a table while this thread traces something else."""

    def traced(factor):
        with ThreadPoolExecutor(1) as pool:
            rows.append(pool.submit(model, IDS).result())
        return factor * 2

    rows = []
    vmap(traced)(torch.ones(1))
    return rows[0]


def with_flops_counted(model):
    with FlopCounterMode(display=False):
        return model(IDS)


def with_dual_numbers(model):
    with forward_ad.dual_level():
        rows = model(IDS) * forward_ad.make_dual(ONE, ONE)
        primal, tangent = forward_ad.unpack_dual(rows)
        torch.testing.assert_close(tangent, primal)
        return primal


UNDISTURBED = {
    "functional_call": lambda model: functional_call(model, {}, (IDS,)),
    "checkpoint": lambda model: checkpoint(model, IDS, use_reentrant=False),
    "inference_mode": lambda model: torch.inference_mode()(model)(IDS),
    "another mode": with_flops_counted,
    "another thread": in_another_thread,
    "forward mode": with_dual_numbers,
}


@mostly_slow()
@pytest.mark.parametrize("call", UNDISTURBED.values(), ids=UNDISTURBED)
def test_what_only_calls_a_table_is_not_disturbed(call):
    model, expected = Called(), Called()
    torch.testing.assert_close(call(model), plain(expected), check_stride=False)
    assert contents(model.table) == contents(expected.table)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_export_to_onnx_is_refused_by_name(tmp_path):
    with pytest.raises(RuntimeError, match=r"cannot be part of a program of torch\.onnx\.export"):
        torch.onnx.export(Called(), (IDS,), tmp_path / "model.onnx", dynamo=False)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "case"), SWEEP)
def test_a_compiled_model_and_a_compiled_step_train_as_plain_ones_with_cold_kernels(backend, case, tmp_path):
    script = Path(__file__).with_name("compiled_run.py")
    environ = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else it starts interpreters for it, which import torch
    }
    done = subprocess.run(
        [sys.executable, script, backend, case], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recompile_limit" not in done.stderr
    assert any((tmp_path / "numba").rglob("*.nbi"))  # compiled there, and not before


@pytest.mark.slow
def test_what_else_a_table_does_is_done_in_a_compiled_function_too():
    table = HashTable(2, name="t")
    optim = SparseSGD([table], lr=1.0)

    @torch.compile(backend="eager")
    def change(ids):
        table.reserve(100)
        table.add_slot("count", ())
        rows, found = table.lookup(ids)
        table.insert(ids + 1, torch.ones_like(rows))
        table.erase(ids)
        table(ids).sum().backward()
        optim.step()
        optim.zero_grad()
        return found.any().item(), table.ids().tolist(), table.embeddings()

    assert change(torch.tensor([1]))[:2] == (False, [2, 1])
    found, ids, rows = change(torch.tensor([2]))
    assert (found, ids) == (True, [3, 1, 2])
    assert rows[0].tolist() == [1, 1]


def test_a_graph_that_may_not_break_names_the_table():
    table = HashTable(2, name="t")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"HashTable\.forward"):
        torch.compile(lambda ids: table(ids) + 1, backend="eager", fullgraph=True)(torch.tensor([1]))


@pytest.mark.parametrize("call", ["forward", "bag", "lookup"])
def test_an_error_of_a_look_up_passes_through_no_frame_of_the_compiler(call):
    assert "torch._dynamo" in sys.modules
    table = HashTable(2, name="t")
    look_up = table if call == "forward" else getattr(table, call)
    with pytest.raises(ValueError, match="int64") as caught:
        look_up(torch.tensor([[1.5]]))
    files = [entry.path.as_posix() for entry in caught.traceback]
    assert not [file for file in files if "_dynamo" in file or file.endswith("external_utils.py")]
    assert sum(entry.path.name == "checks.py" and entry.name == call for entry in caught.traceback) == 1


class Model(nn.Module):
    def __init__(self, tables, look_up):
        super().__init__()
        self.tables, self.look_up = tables, look_up

    def forward(self, ids):
        return self.look_up(self.tables, ids)


EXPORTS = {
    "called": lambda table, ids: table(ids),
    "pooled": lambda table, ids: table.bag(ids.view(1, -1)),
    "collected": lambda tables, ids: tables({"t": ids})["t"],
}


@pytest.mark.slow  # what exports takes seconds to import
@pytest.mark.parametrize(
    ("call", "strict"), [("called", False), ("called", True), ("pooled", False), ("collected", False)]
)
def test_a_table_is_refused_with_what_to_export_in_its_place(call, strict):
    tables = EmbeddingCollection([ShardedHashTable(2, name="t")]) if call == "collected" else HashTable(2, name="t")
    model, ids = Model(tables, EXPORTS[call]).eval(), torch.tensor([1, 2])
    assert model(ids).shape[-1] == 2
    with pytest.raises(Exception, match=r"a table cannot be part of a program of torch\.export"):
        torch.export.export(model, (ids,), strict=strict)
