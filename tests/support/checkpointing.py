"""States for tests of the checkpointers, and how two of them are compared."""

from collections import OrderedDict

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    *("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]


def save(checkpointer, state, path, **kwargs):
    """Save and wait, whatever the kind of checkpointer."""
    futures = checkpointer.save(state, path, **kwargs)
    if futures is not None:
        staged, written = futures
        assert staged.result() is None
        assert written.result() is None


def bits(tensor):
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def frozen(value):
    """Return a state as plain data that is equal for equal states only: types, shapes, bits."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), bits(value)
    if isinstance(value, dict):
        return type(value).__name__, [(key, frozen(item)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return type(value).__name__, [frozen(item) for item in value]
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, value


def pattern(dtype, shape=(2, 3)):
    """Return a tensor of a dtype with all kinds of bits in it, among them NaNs with a payload."""
    dtype = getattr(torch, dtype)
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    values = (torch.arange(n_bytes) * 37 + 11).to(torch.uint8)
    return (values % 2 if dtype == torch.bool else values).view(dtype).reshape(shape)


def everything():
    """Return a state with all kinds of things in it."""
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}
    return {
        "model": model.state_dict(),
        "optim": {"state": {0: moments}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None}]},
        "dtypes": {dtype: pattern(dtype) for dtype in DTYPES},
        "shapes": [torch.tensor(2.5), torch.empty(0), torch.empty(0, 3), torch.zeros(1, 1, 1)],
        "views": {
            "turned": base.t(),
            "steps": base[1::2, ::3],
            "column": base[:, 3],
            "wide": torch.ones(1).expand(4, 5),
        },
        "parameter": torch.nn.Parameter(torch.linspace(-1, 1, 3)),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "channels": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "numpy": {"array": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1], "number": np.float64(0.5)},
        "plain": [1, -(2**70), 0.1, float("-inf"), True, None, "täglich", b"", b"ab", 1 + 2j, (1, [2, ()])],
        "types": [{1, "a"}, set(), torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), OrderedDict(b=1, a=2)],
        "keys": {0: torch.ones(2), True: 2, None: 3, (1, "x"): 4, 2.5: 5, b"k": 6, "": 7, "a.b": 8},
    }


KEYS = st.text(max_size=4) | st.integers(-3, 3) | st.booleans() | st.none()
TENSORS = st.builds(
    lambda dtype, shape, turned: pattern(dtype, shape).t() if turned and len(shape) == 2 else pattern(dtype, shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.booleans(),
)
LEAVES = TENSORS | KEYS | st.floats() | st.binary(max_size=4) | st.sets(st.integers(0, 3), max_size=3)


def _containers(inner):
    few = st.lists(inner, max_size=3)
    named = st.dictionaries(KEYS, inner, max_size=3)
    return few | few.map(tuple) | named | named.map(OrderedDict)


STATES = st.dictionaries(KEYS, st.recursive(LEAVES, _containers, max_leaves=10), max_size=4)
