"""Optimizers of TorchRec's form find what is theirs among the states of all ranks, or name what does not fit."""

import pytest
import torch
from torch import nn

from recckpt import Saver
from recckpt.dense.keyed_optimizer import KeyedOptimizer
from recckpt.dense.optimizers import by_name
from recckpt.errors import StateMismatchError


class Keyed(torch.optim.Optimizer):
    """As TorchRec's KeyedOptimizer is: its state goes by the names it was given, and is filled where it lies."""

    def __init__(self, params, lr, *, with_groups=False):
        self.params, self._with_groups = dict(params), with_groups
        super().__init__(self.params.values(), {"lr": lr})

    def init_state(self):
        for parameter in self.params.values():
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    def state_dict(self):
        keys = {parameter: key for key, parameter in self.params.items()}
        state = {"state": {keys[parameter]: values for parameter, values in self.state.items()}}
        groups = [{"params": sorted(self.params), "lr": group["lr"]} for group in self.param_groups]
        return {**state, "param_groups": groups} if self._with_groups else state

    def load_state_dict(self, state):
        if len(self.state) != len(state["state"]):
            raise ValueError(f"Different parameter count: {len(self.state)} vs {len(state['state'])}")
        for key, values in state["state"].items():
            self.state[self.params[key]]["sum"].copy_(values["sum"])
        for live, group in zip(self.param_groups, state.get("param_groups", []), strict=False):
            live["lr"] = group["lr"]


@pytest.mark.parametrize("with_groups", [False, True])
def test_it_is_saved_in_its_own_form_and_filled_where_it_lies(tmp_path, with_groups):
    def run(lr):
        model = nn.Linear(2, 1)
        named = {f"ebc.{name}": parameter for name, parameter in model.named_parameters()}
        optimizer = Keyed(named, lr, with_groups=with_groups)
        saver = Saver(model, output_dir=str(tmp_path))
        saver.register_for_checkpointing("keyed", optimizer)
        return saver, optimizer

    saver, optimizer = run(0.5)
    optimizer.init_state()
    for number, values in enumerate(optimizer.state.values()):
        values["sum"].fill_(number + 1)
    saver.save("c")
    other, restored = run(0.1)
    with pytest.raises(StateMismatchError, match=r"'keyed'[\s\S]*'ebc.weight'[\s\S]*call its init_state\(\) before"):
        other.load()
    restored.init_state()
    sums = [values["sum"] for values in restored.state.values()]
    other.load()
    assert [values.unique().tolist() for values in sums] == [[1], [2]]
    assert restored.param_groups[0]["lr"] == (0.5 if with_groups else 0.1)


def test_one_that_steps_in_backward_passes_and_is_not_registered_is_warned_of(tmp_path, caplog):
    """As that of a sharded collection, whose steps no hook sees: the states of tables that stay dense would be lost."""
    model = nn.ModuleDict({"inner": nn.Linear(2, 1)})
    model.fused_optimizer = Keyed(dict(model.named_parameters()), 0.1)
    model["inner"].fused_optimizer = Keyed(dict(model["inner"].named_parameters()), 0.1)
    model.fused_optimizer.init_state()
    saver = Saver(model, output_dir=str(tmp_path))
    saver.save("a", step=1)
    assert "2 parameters of the model ('inner.weight', 'inner.bias') train, and no registered" in caplog.text
    caplog.clear()
    saver.register_for_checkpointing("fused", model.fused_optimizer)
    saver.save("b", step=2)
    assert "train" not in caplog.text


def of(names, *, value=0.0, with_groups=False):
    """Return a wrapped optimizer of parameters of two values, with a state of these."""
    optimizer = Keyed({name: nn.Parameter(torch.ones(2)) for name in names}, 0.1, with_groups=with_groups)
    optimizer.init_state()
    for values in optimizer.state.values():
        values["sum"].fill_(value)
    wrapped = by_name(optimizer, dict)
    assert isinstance(wrapped, KeyedOptimizer)
    return wrapped


def gathered(wrapped, *saved):
    found, _ = wrapped.gathered("fused", saved, lambda name: None)
    wrapped.load_state_dict(found)
    return {name: values["sum"].tolist() for name, values in wrapped.state_dict()["state"].items()}


def test_each_rank_finds_its_parameters_wherever_they_were_saved():
    saved = [of("ab", value=1).state_dict(), of("cd", value=2).state_dict()]
    assert gathered(of("bc"), *saved) == {"b": [1, 1], "c": [2, 2]}
    assert gathered(of("abcd"), *saved) == {"a": [1, 1], "b": [1, 1], "c": [2, 2], "d": [2, 2]}


def test_settings_come_from_the_group_that_had_most_of_the_parameters():
    one, other = of("a", with_groups=True), of("bcd", with_groups=True)
    other.optimizer.param_groups[0]["lr"] = 0.5
    taken = of("abc", with_groups=True)
    gathered(taken, one.state_dict(), other.state_dict())
    assert taken.optimizer.param_groups[0]["lr"] == 0.5


def test_all_that_does_not_fit_is_named_before_anything_changes():
    saved, live = of("ab").state_dict(), of("abc", value=7)
    saved["state"]["a"]["sum"] = torch.zeros(1)  # torch would spread it over two
    saved["state"]["b"]["step"] = 3
    with pytest.raises(StateMismatchError, match=r"another optimizer .*exclude': \['fused'\]") as caught:
        gathered(live, saved)
    assert caught.value.missing == ["c"]
    assert caught.value.mismatched == {"a sum": ((1,), (2,)), "b step": ("a value", "nothing")}
    assert all(values["sum"].tolist() == [7, 7] for values in live.state_dict()["state"].values())


def test_sums_of_another_number_of_shards_are_not_taken_for_those_of_another_optimizer():
    saved, live = of("a").state_dict(), of("a")
    saved["state"]["a"]["sum"] = torch.zeros(4)
    with pytest.raises(StateMismatchError, match=r"one value per row for each shard of columns: .* 'exclude'"):
        gathered(live, saved)
