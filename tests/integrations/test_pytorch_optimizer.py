"""Each optimizer of the package ``pytorch-optimizer`` goes on after a load as if it had never stopped, bit for bit."""

import inspect
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from support.optimizer_runs import by_closure, classes_of, differences, net, trained
from torch import nn

from recckpt import Saver

library = pytest.importorskip("pytorch_optimizer", reason="NOT INSTALLED: pytorch-optimizer")

BY_MATRICES = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")  # and biases in another way
OF_MODELS = ("AdaLOMO", "AdamMini", "LOMO")
AROUND = ("Lookahead", "Magma", "OrthoGrad", "PCGrad", "TRAC")  # another optimizer
SHARPNESS = ("FriendlySAM", "LookSAM", "SAM")
REFUSED = {  # by the save, with the place: what is in their state cannot be read back without running code
    "AdaShift": "grad_queue.*deque",
    "Conda": "projector.*GaLoreProjector",
    "ScalableShampoo": "pre_conditioner.*PreConditioner",
}
NOT_TRIED = {
    "SafeFP16Optimizer": "trains copies of the parameters, which lie beside it: tests/save/test_trainers.py",
    **({} if find_spec("einops") else {"DeMo": "needs einops"}),
}
NOT_IN_BFLOAT16 = ("LoRARite", "TRAC")  # torch has no kernels for what they do
OWN = [name for name, kind in classes_of(library).items() if not kind.__module__.startswith("torch.")]
KINDS = [name for name in OWN if name not in (*REFUSED, *NOT_TRIED)]


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make(name):
    """Return what makes an optimizer of a class for a model."""
    kind = getattr(library, name)

    def made(model):
        parameters = list(model.parameters())
        matrices = [one for one in parameters if one.dim() == 2]
        if name in OF_MODELS:
            return kind(model, lr=0.01)
        if name in BY_MATRICES:
            biases = [one for one in parameters if one.dim() < 2]
            return kind([{"params": matrices, "use_muon": True}, {"params": biases, "use_muon": False}])
        if name in AROUND:
            return kind(adam(model))
        if name in SHARPNESS:
            return kind(parameters, torch.optim.Adam, lr=0.01)
        special = {
            "AliG": lambda: kind(parameters, max_lr=0.1),
            "BSAM": lambda: kind(parameters, num_data=100),
            "GSAM": lambda: _gsam(kind, model),
            "LoRARite": lambda: kind([model.wide.weight, model.top.weight]),
            "Ranger21": lambda: kind(parameters, num_iterations=100),
            "ScheduleFreeWrapper": lambda: _in_training(kind(adam(model))),
            "SpectralSphere": lambda: kind(matrices),
            "WSAM": lambda: kind(model, parameters, torch.optim.Adam, lr=0.01),
        }
        return special[name]() if name in special else kind(parameters)

    return made


def _gsam(kind, model):
    from pytorch_optimizer.lr_scheduler import LinearScheduler, ProportionScheduler

    base = adam(model)
    radius = ProportionScheduler(LinearScheduler(base, t_max=20, max_lr=0.01), max_lr=0.01, min_lr=0.0)
    return kind(model.parameters(), base_optimizer=base, model=model, rho_scheduler=radius)


def _in_training(optimizer):
    optimizer.train()
    return optimizer


def stepper(name):
    """Return how an optimizer of a class makes a step."""

    def after_gradients(optimizer, loss):
        optimizer.zero_grad()
        loss().backward(create_graph=name in ("AdaHessian", "SophiaH"))
        if name in ("BSAM", "WSAM", *SHARPNESS):
            by_closure(optimizer, loss)
        else:
            optimizer.step()

    def in_backward(optimizer, loss):
        optimizer.fused_backward(loss(), 0.01)

    def of_conflicts(optimizer, loss):
        optimizer.zero_grad()
        optimizer.pc_backward([loss(), loss().square()])
        optimizer.step()

    def of_a_batch(optimizer, loss):
        ids, wanted = (inspect.signature(loss).parameters[key].default for key in ("ids", "wanted"))
        optimizer.set_closure(nn.functional.mse_loss, ids, wanted)
        optimizer.step()

    closures = dict.fromkeys(("AliG", "DualAdam", "EmoFact", "EmoLynx", "EmoNavi"), by_closure)
    special = {"AdaLOMO": in_backward, "LOMO": in_backward, "PCGrad": of_conflicts, "GSAM": of_a_batch, **closures}
    return special.get(name, after_gradients)


@pytest.fixture(scope="module", autouse=True)
def _group():
    """A group of one, which DistributedMuon asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_equals_a_straight_one(tmp_path, name, dtype):
    if dtype == torch.bfloat16 and name in NOT_IN_BFLOAT16:
        model = net(dtype)
        with pytest.raises(RuntimeError):
            trained(model, make(name)(model), range(3), stepper(name))
        return
    assert differences(tmp_path, {name: (make(name), stepper(name))}, dtype) == {}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_only_code_can_read_back_is_refused_by_its_place(tmp_path, name):
    model = net()
    optimizer = make(name)(model)
    trained(model, optimizer, range(2), stepper(name))
    saver = Saver(model, output_dir=tmp_path)
    saver.register_for_checkpointing("optimizer", optimizer)
    with pytest.raises(ValueError, match=rf"'optimizer'.*{REFUSED[name]} cannot be loaded back safely"):
        saver.save("c")


def test_what_is_named_as_an_exception_is_one():
    assert {*REFUSED, *NOT_TRIED, *NOT_IN_BFLOAT16} <= {*OWN}
    assert not hasattr(library.SafeFP16Optimizer(adam(net())), "param_groups")
