"""Tables under what traces or transforms functions, which is refused by name before anything changes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.sweeps import mostly_slow
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from recckpt.errors import LookupFailedError
from recckpt.policies.admit import MinCount
from recckpt.sparse import Constant, EmbeddingCollection, HashTable, ShardedHashTable

IDS, ONE = torch.tensor([[1, 2, 2], [3, 9, 1]]), torch.ones(())


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


@pytest.mark.parametrize("call", UNDISTURBED.values(), ids=UNDISTURBED)
def test_what_only_calls_a_table_is_not_disturbed(call):
    model, expected = Called(), Called()
    torch.testing.assert_close(call(model), plain(expected), check_stride=False)
    assert contents(model.table) == contents(expected.table)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_export_to_onnx_is_refused_by_name(tmp_path):
    with pytest.raises(RuntimeError, match=r"cannot be part of a program of torch\.onnx\.export"):
        torch.onnx.export(Called(), (IDS,), tmp_path / "model.onnx", dynamo=False)
