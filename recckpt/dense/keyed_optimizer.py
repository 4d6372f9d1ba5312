"""TorchRec's optimizers: their states are keyed by parameter name; each rank has the states of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.sharded import STAND_IN
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import StateMismatchError

_FILLS = "the optimizer has no state for these parameters yet: call its init_state() before the load"
_LAYOUT = "TorchRec has one value per row for each shard of columns: use the number of column shards of the save"
_OTHER = (
    "at the save, another optimizer trained these parameters; for example, no fused optimizer trains a table that the "
    "plan makes data-parallel: use the plan and optimizers of the save"
)
_FRESH = "; leave the state out with 'exclude': [{name!r}] to start it fresh"
_NOTHING = "nothing"


class KeyedOptimizer:
    """Wraps an optimizer like TorchRec's ``KeyedOptimizer``, recognized by ``params`` and its methods.

    ``is_table`` says whether a weight is saved as a table, together with its state; this class leaves such weights out.
    """

    def __init__(self, optimizer: Optimizer, is_table: Callable[[str], bool] = lambda name: False) -> None:
        self.optimizer: Any = optimizer
        self._is_table = is_table

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's parameters that are not tables."""
        state = dict(self.optimizer.state_dict())
        return {**state, "state": {name: own for name, own in state["state"].items() if not self._is_table(name)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.optimizer.state_dict()["state"]
        tables = {name: values for name, values in own.items() if self._is_table(name)}
        self.optimizer.load_state_dict({**state, "state": {**tables, **state["state"]}})

    def gathered(
        self, name: str, saved: Iterable[Mapping[str, Any]], stored: Callable[[str], StoredTensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (this rank's state, taken from the states that ranks saved; the live state, which has its layout).

        ``saved`` has one state per saving rank; ``stored`` returns a sharded tensor by name. StateMismatchError lists
        all entries of the state of ``name`` that do not fit.
        """
        live = self.state_dict()
        names = {name for name in self.optimizer.params if not self._is_table(name)}
        states, groups = dict[str, Any](), list[Mapping[str, Any]]()
        for state in saved:
            states |= {key: values for key, values in state["state"].items() if key in names and key not in states}
            groups += state.get("param_groups", [])
            if states.keys() >= names and not groups:
                break  # often one saving rank has all the states that this rank needs
        _check(name, states, live["state"], stored)
        gathered_state: dict[str, Any] = {"state": states}
        if "param_groups" in live:
            gathered_state["param_groups"] = [_with_settings(group, groups) for group in live["param_groups"]]
        return gathered_state, live


def is_keyed(obj: Any) -> bool:
    is_form = isinstance(getattr(obj, "params", None), Mapping) and callable(getattr(obj, "init_state", None))
    return isinstance(obj, Optimizer) and is_form


def fused_optimizers(model: nn.Module) -> Iterator[Any]:
    """Yield TorchRec's optimizers that step in backward passes; of nested modules, only the outermost module's."""
    above: list[str] = []
    for path, module in model.named_modules():
        if not any(path.startswith(each) for each in above):
            optimizer: Any = getattr(module, "fused_optimizer", None)
            if inspect.ismethod(optimizer) and type(module).__module__.startswith("torchrec."):
                optimizer = optimizer()  # it is a method in collections that are not sharded
            if is_keyed(optimizer):
                above.append(f"{path}." if path else "")
                yield optimizer


def _check(name: str, saved: Mapping[str, Any], live: Mapping[str, Any], stored: Callable[[str], StoredTensor]) -> None:
    what = f"the state of {name!r}"
    uninitialized = [key for key in saved if saved[key] and key not in live]
    if uninitialized:
        raise StateMismatchError(what, unexpected=uninitialized, remedy=_FILLS)
    missing = [key for key in live if key not in saved]
    mismatched = dict[str, tuple[object, object]]()
    for key in live.keys() & saved.keys():
        one, other = (dict(_described(values, stored)) for values in (saved[key], live[key]))
        differing = (place for place in {**one, **other} if one.get(place) != other.get(place))
        mismatched |= {f"{key}{place}": (one.get(place, _NOTHING), other.get(place, _NOTHING)) for place in differing}
    if missing or mismatched:
        is_other = any(_NOTHING in forms for forms in mismatched.values())
        remedy = (_OTHER if is_other else _LAYOUT) + _FRESH.format(name=name)
        raise StateMismatchError(what, missing=missing, mismatched=mismatched, remedy=remedy)


def _described(value: Any, stored: Callable[[str], StoredTensor], place: str = "") -> Iterator[tuple[str, object]]:
    """Yield (place, shape) for each tensor in a state and (place, "a value") for each other value."""
    if isinstance(value, Mapping) and value.keys() == {STAND_IN}:
        yield place, tuple(stored(value[STAND_IN]).shape)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _described(item, stored, f"{place} {key}")
    else:
        yield place, tuple(value.shape) if isinstance(value, Tensor) else "a value"


def _with_settings(live: Mapping[str, Any], saved: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the live group with the settings of the saved group that shares most parameters with it, if any."""
    best = max(saved, key=lambda group: len(set(live["params"]) & set(group["params"])), default=live)
    return {**(best if set(live["params"]) & set(best["params"]) else live), "params": live["params"]}
