"""Registered objects and random generators: their state taken and given back."""

import collections
import copy
import pickle
import random
import re
from collections import OrderedDict, defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from support.calls import calls_of
from torch.optim import lr_scheduler as schedules

from recckpt.dense.data_loaders import check_rng, dump_rng, load_rng
from recckpt.dense.registered import extra_registry, io_registry
from recckpt.dense.state_copy import DenseBuffers, portable
from recckpt.errors import StateMismatchError


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Reader(Counter):
    """Has both pairs; the more specific one counts."""

    def dump_io_state(self):
        return {"offset": self.count * 100}

    def load_io_state(self, state):
        self.count = state["offset"] // 100


def load(registry, states):
    with registry.loaded(states) as give_rest:
        give_rest()


def test_a_state_is_that_of_the_moment_and_goes_back_to_its_object():
    registry, counter, other = extra_registry(), Counter(), Counter(2)
    registry.add("c", counter)
    registry.add("plain", 3)
    registry.add("other", other)
    counter.count = 7
    assert registry.dump() == {"c": {"count": 7}, "plain": 3, "other": {"count": 2}}
    load(registry, {"c": {"count": 5}, "plain": 4})
    assert (counter.count, registry.get("plain"), other.count) == (5, 4, 2)  # the checkpoint lacks the last one
    counter.count = {"deep": [1, defaultdict(int)]}
    with pytest.raises(ValueError, match=r"'c'\['count'\]\['deep'\]\[1\]: a collections.defaultdict"):
        registry.dump()


def test_one_object_is_registered_under_one_name_and_values_that_are_equal_by_chance_have_a_name_each():
    for make in (Counter, list, lambda: torch.ones(2), lambda: np.ones(2)):
        registry, obj = extra_registry(), make()
        registry.add("first", obj)
        match = rf"'first' and 'second' are the same {type(obj).__name__}: keep one of the two"
        with pytest.raises(ValueError, match=match):
            registry.add("second", obj)
        registry.add("second", make())
        assert list(registry) == ["first", "second"]
    for value in (0, "word", None, True, ()):
        registry = extra_registry()
        registry.add("first", value)
        registry.add("second", value)
        assert registry.dump() == {"first": value, "second": value}


class Half:
    """Can only be dumped."""

    def state_dict(self):
        return {}


NEITHER = "'key' has neither dump_io_state/load_io_state nor state_dict/load_state_dict"


@pytest.mark.parametrize(
    ("make", "name", "value", "match"),
    [
        *((extra_registry, name, 1, "cannot be registered") for name in ("", None, 3, "sparse_optim")),
        *((make, "known", Counter(), "'known' is registered already") for make in (extra_registry, io_registry)),
        (io_registry, "key", [1, 2], NEITHER),
        (extra_registry, "key", Half(), "key.*cannot be loaded back safely"),
        (extra_registry, "key", defaultdict(int), "key"),
        (extra_registry, "key", object(), "key"),
        (extra_registry, "key", {"a": [lambda: 0]}, "key"),
        (extra_registry, "key", np.array([object()]), "key"),
        (extra_registry, "key", {object(): 1}, "key"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(make, name, value, match):
    registry = make()
    registry.add("known", Counter())
    with pytest.raises(ValueError, match=match):
        registry.add(name, value)
    assert list(registry) == ["known"]


def test_plain_values_are_their_own_state_and_numpy_becomes_numbers_and_tensors():
    for value in (1, 2.5, True, None, "x", b"x", [1, {"a": (2,)}], {1, 2}, OrderedDict(a=1)):
        registry = extra_registry()
        registry.add("v", value)
        assert registry.dump() == {"v": value}
        assert type(registry.dump()["v"]) is type(value)
    registry = extra_registry()
    registry.add("v", {"a": np.float32(1.5), np.int64(3): np.arange(3, dtype=np.int16)})
    dumped = registry.dump()["v"]
    assert type(dumped["a"]) is float
    assert [type(key) for key in dumped] == [str, int]
    assert torch.equal(dumped[3], torch.arange(3, dtype=torch.int16))


class Unasked(Counter):
    """Begins to read when it is asked where it is, as some data loaders do."""

    def state_dict(self):
        raise AssertionError("asked for its state")

    dump_io_state = state_dict

    def load_io_state(self, state):
        self.load_state_dict(state)


@pytest.mark.parametrize("make", [extra_registry, io_registry])
def test_no_object_is_asked_for_its_state_before_it_is_loaded(make):
    registry, unasked = make(), Unasked()
    registry.add("u", unasked)
    load(registry, {"u": {"count": 3}})
    assert registry.beside("u", {"count": torch.ones(1)}) == ({"count": torch.ones(1)}, None)
    assert unasked.count == 3


def trained_adam(seed):
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=seed / 10)
    (layer(torch.ones(2)) * seed).sum().backward()
    optimizer.step()
    return optimizer


def frozen(state):
    return pickle.dumps(portable("state", state))


def test_an_object_that_refuses_its_state_is_named_and_what_can_go_back_does(caplog):
    registry, first, optimizer, last = extra_registry(), Counter(1), trained_adam(1), Counter(2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    value = [1]
    for name, obj in {"first": first, "adam": optimizer, "value": value, "lr": scheduler, "last": last}.items():
        registry.add(name, obj)
    before = frozen([optimizer.state_dict(), scheduler.state_dict()])
    states = {
        "first": {"count": 9},
        "value": [2],
        "adam": trained_adam(2).state_dict(),
        "lr": {**scheduler.state_dict(), "last_epoch": 7},
        "last": {},
    }
    with pytest.raises(StateMismatchError, match=r"'last'[\s\S]*Counter.load_state_dict refused it: KeyError: 'count'"):
        load(registry, states)
    assert frozen([optimizer.state_dict(), scheduler.state_dict()]) == before
    assert (value, last.count) == ([1], 2)
    assert first.count == 9, "it may not be asked for what it had"
    [kept] = [record.getMessage() for record in caplog.records]
    assert "'first' keeps the loaded state although the load failed" in kept


def test_nothing_is_copied_to_be_able_to_go_back():
    registry, optimizer = extra_registry(), trained_adam(1)
    registry.add("adam", optimizer)

    def moments():
        return [values["exp_avg"] for values in optimizer.state.values()]

    before = moments()

    def load_and_fail():
        with registry.loaded({"adam": trained_adam(2).state_dict()}):
            assert not any(map(torch.equal, moments(), before))
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        load_and_fail()
    assert all(now is then for now, then in zip(moments(), before, strict=True))


def test_plain_values_are_loaded_in_place():
    registry = extra_registry()
    inner = torch.zeros(2)
    live = {
        "tensor": torch.zeros(2, requires_grad=True),
        "array": np.zeros((2, 2), np.int16),
        "list": [inner, 1, 2],
        "dict": {"gone": 1, "mean": np.zeros(2), "grown": torch.zeros(1)},
        "set": {1},
        "counts": collections.Counter(a=1, b=2),
    }
    for name, value in live.items():
        registry.add(name, value)
    mean = live["dict"]["mean"]
    saved = extra_registry()
    for name, value in {
        "tensor": torch.ones(2),
        "array": np.ones((2, 2), np.int16),
        "list": [torch.ones(2), 5],
        "dict": {"mean": np.ones(2), "grown": torch.ones(3), "new": 2},
        "set": {2, 3},
        "counts": collections.Counter(a=5),
    }.items():
        saved.add(name, value)
    load(registry, saved.dump())
    assert live["tensor"].tolist() == [1, 1]
    assert live["array"].tolist() == [[1, 1], [1, 1]]
    assert live["list"][0] is inner
    assert (inner.tolist(), live["list"][1:]) == ([1, 1], [5])
    assert live["dict"]["mean"] is mean
    assert (mean.tolist(), live["dict"]["grown"].tolist(), live["dict"]["new"]) == ([1, 1], [1, 1, 1], 2)
    assert "gone" not in live["dict"]
    assert (live["set"], live["counts"]) == ({2, 3}, {"a": 5})
    live["tensor"].data.fill_(7)
    assert registry.dump()["tensor"].tolist() == [7, 7], "the next save has the value of the tensor itself"


@pytest.mark.parametrize(
    ("live", "saved", "found"),
    [
        (torch.zeros(2), torch.zeros(3), "found float32 (3,), expected float32 (2,)"),
        (np.zeros(2), torch.zeros(2), "found float32 (2,), expected float64 (2,)"),
        ([1], {"a": 1}, "found dict, expected list"),
        ({"a": 1}, 3, "found int, expected dict"),
    ],
)
def test_a_value_of_another_kind_is_refused_before_anything_changes(live, saved, found):
    registry, counter = extra_registry(), Counter(1)
    registry.add("c", counter)
    registry.add("v", live)
    with pytest.raises(StateMismatchError, match=re.escape(f"'v': {found}")):
        load(registry, {"c": {"count": 2}, "v": saved})
    assert counter.count == 1


def test_a_tensor_that_no_load_can_write_to_is_replaced_and_the_others_are_loaded(caplog):
    registry, saved = extra_registry(), extra_registry()
    with torch.inference_mode():
        frozen = torch.zeros(2)
    live = {"expanded": torch.zeros(1).expand(2), "frozen": frozen, "plain": torch.zeros(2)}
    for name, value in live.items():
        registry.add(name, value)
        saved.add(name, torch.ones(2))
    load(registry, saved.dump())
    assert [registry.get(name).tolist() for name in live] == [[1, 1]] * 3
    assert live["plain"].tolist() == [1, 1]
    assert "'expanded' is of type Tensor, which a load cannot change" in caplog.text


def test_of_a_value_that_no_load_can_change_one_warning_says_so_and_of_an_unknown_name_a_hint(caplog):
    registry = extra_registry()
    registry.add("epoch", 0)
    registry.add("name", "x")
    registry.add("placeholder", None)
    for epoch in (1, 2):
        load(registry, {"epoch": epoch, "name": "y", "placeholder": [1]})
    assert (registry.get("epoch"), registry.get("name"), registry.get("placeholder")) == (2, "y", [1])
    [warning] = [record.getMessage() for record in caplog.records]
    assert "'epoch' is of type int, which a load cannot change" in warning
    assert "get_extra_data('epoch')" in warning
    assert registry.get("epoc") is None
    assert "nothing is registered as 'epoc', nor was loaded for it; did you mean 'epoch'?" in caplog.text


@pytest.mark.parametrize("make", [extra_registry, io_registry])
def test_an_object_is_flushed_before_its_state_is_taken_by_either_pair_of_methods(make):
    class Buffered(Counter):
        def _flush_io_state(self):
            self.count += 1

    registry = make()
    registry.add("b", Buffered(4))
    registry.add("own", Reader(2))
    own = {"offset": 200} if make is io_registry else {"count": 2}
    assert registry.dump() == {"b": {"count": 5}, "own": own}


def test_an_object_that_refuses_to_merge_is_named():
    class Merging(Counter):
        def merge_io_state(self, states, index, count):
            return {"count": sum(state["count"] for state in states) // count + index}

    registry = io_registry()
    registry.add("d", Merging())
    assert registry.merged("d", [{"count": 3}, {"count": 5}], 1, 4) == {"count": 3}
    with pytest.raises(StateMismatchError, match=r"'d'[\s\S]*Merging.merge_io_state refused it: KeyError: 'count'"):
        registry.merged("d", [{}], 0, 1)


def test_random_generators_go_on_where_they_were_and_a_look_at_their_states_changes_nothing():
    def draw():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    np.random.randn()  # the legacy generator makes two and keeps one, which is part of its state
    random.gauss(0, 1)
    is_started, state = torch.cuda.is_initialized(), dump_rng()
    expected = draw()
    load_rng(state)
    assert draw() == expected
    assert torch.cuda.is_initialized() == is_started  # it is not started to ask
    moved = dump_rng()
    check_rng(state)
    with pytest.raises(ValueError, match="KeyError: 'numpy'"):
        check_rng({name: each for name, each in state.items() if name != "numpy"})
    after = dump_rng()
    assert torch.equal(after["torch"], moved["torch"])
    assert torch.equal(after["numpy"][1], moved["numpy"][1])
    assert after["python"] == moved["python"]


def test_a_schedule_by_milestones_goes_on_where_it_was():
    def schedule():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], gamma=0.1)

    registry, ours = extra_registry(), schedule()
    registry.add("schedule", ours)
    ours.optimizer.step(), ours.step()
    resumed = schedule()
    resumed.load_state_dict(registry.dump()["schedule"])
    assert resumed.milestones == ours.milestones
    assert type(resumed.milestones) is type(ours.milestones)


STEP, COSINE = partial(schedules.StepLR, step_size=2), partial(schedules.CosineAnnealingLR, T_max=9)


def two(optimizer, last=STEP):
    parts = [schedules.LinearLR(optimizer, 0.5), last(optimizer)]
    return schedules.SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (STEP, COSINE, "'gamma', 'step_size'"),
        (two, COSINE, "'_milestones'"),
        (two, partial(two, last=COSINE), "'gamma'"),
    ],
    ids=["plain", "several", "inside"],
)
def test_the_state_of_another_kind_of_schedule_is_refused_and_changes_nothing(old, new, found):
    def registered(make):
        registry, optimizer = extra_registry(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        registry.add("schedule", make(optimizer))
        return registry

    registry = registered(new)
    before = copy.deepcopy(registry.dump())
    with pytest.raises(StateMismatchError, match=f"another kind of scheduler saved it: found .*{found}.*'schedule'"):
        load(registry, registered(old).dump())
    assert registry.dump() == before
    load(registry, registered(new).dump())


@pytest.mark.parametrize(
    "state",
    [
        dict.fromkeys(range(1000), 0.5),
        {f"key{i}": i for i in range(1000)},
        [0.5] * 1000,
        {f"key{i}": [i, 0.5] for i in range(1000)},
    ],
    ids=["numbers", "names", "list", "nested"],
)
def test_a_state_is_taken_for_the_price_of_a_deep_copy(state):
    registry, buffers = extra_registry(), DenseBuffers()
    registry.add("state", state)

    def dump():
        with buffers.copying() as copy_of:
            return registry.dump(copy_of)

    found = dump()["state"]
    assert found == state
    assert found is not state
    assert calls_of(dump) < calls_of(lambda: copy.deepcopy(state))
