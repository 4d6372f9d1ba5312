"""What differs inside registered objects, positions and plain values, held against what was put in."""

import json
import math
from collections import Counter, OrderedDict

import pytest
import torch
from support.forge import Forge

import recckpt
from recckpt import Saver
from recckpt.inspect import diff_tensors


class Holds:
    """Has the state that it is given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def saver_of(path, state=None, *, position=None, per_rank=False):
    saver = Saver(torch.nn.Linear(1, 1), None, str(path), None)
    if state is not None:
        saver.register_for_checkpointing("held", Holds(state), per_rank=per_rank)
    if position is not None:
        saver.register_io_state("stream", Holds(position))
    return saver


def inside(tmp_path, before, after, name="held", tolerance=0.0, **options):
    """Return key -> (status, before, after, largest) of what differs in the state of one object."""
    for number, state in enumerate((before, after)):
        torch.manual_seed(0)
        saver_of(tmp_path / str(number), state, **options).save("c", overwrite=True)
    found = recckpt.diff(tmp_path / "0", tmp_path / "1", tolerance=tolerance)
    [value] = [each for each in found.values if each.name == name]
    assert (value.status == "changed") == bool(value.inside)
    return {each.key: (each.status, each.before, each.after, each.largest) for each in value.inside}


def test_an_optimizer_and_a_scheduler_say_what_a_step_changed_in_them(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    saver = Saver(model, None, str(tmp_path), None)
    saver.register_for_checkpointing("optim", optimizer)
    saver.register_for_checkpointing("rates", scheduler)
    saver.register_for_checkpointing("untouched", {"is": 1})
    moments = []
    for number in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        moments.append(optimizer.state_dict()["state"][0]["exp_avg"].clone())
        saver.save(str(number))
    found = recckpt.diff(tmp_path / "0", tmp_path / "1")
    status = {each.name: each.status for each in found.values if each.group == "extra"}
    assert status == {"optim": "changed", "rates": "changed", "untouched": "same"}
    of = {each.name: {one.key: one for one in each.inside} for each in found.values}
    assert (of["optim"][".param_groups[0].lr"].before, of["optim"][".param_groups[0].lr"].after) == (0.25, 0.125)
    moment = of["optim"][".state[0].exp_avg"]
    assert (moment.before, moment.status) == ("float32[1, 2]", "changed")
    assert moment.largest == pytest.approx(float((moments[1] - moments[0]).abs().max()))
    assert of["optim"][".state[0].step"].largest == 1.0
    assert ".param_groups[0].betas" not in of["optim"]
    assert (of["rates"][".last_epoch"].before, of["rates"][".last_epoch"].after) == (1, 2)


def test_values_of_any_kind_are_compared_by_key(tmp_path):
    before = {
        "same": [1, {"a": math.nan}, {3, 4}, 1 + 2j, b"xy", (), {}],
        "number": 1,
        "kind": 1,
        "text": "a",
        "gone": None,
        "flat": [1, 2],
        "deep": [{"x": 1}, {"x": 2}],
        "ordered": OrderedDict(b=1),
        "counts": Counter("aab"),
        7: torch.float32,
        "size": torch.Size([2]),
    }
    after = {
        **before,
        "number": 2.5,
        "kind": True,
        "text": "b" * 1000,
        "added": -1,
        "flat": [1, 3],
        "deep": [{"x": 1}, {"x": 3}, {}],
        "ordered": OrderedDict(b=2),
        "counts": Counter("aabb"),
        7: torch.float16,
        "size": torch.Size([3]),
    }
    del after["gone"]
    assert inside(tmp_path, before, after) == {
        ".number": ("changed", 1, 2.5, None),
        ".kind": ("changed", 1, True, None),
        ".text": ("changed", "a", "b" * 200, None),
        ".gone": ("gone", None, None, None),
        ".flat": ("changed", "[1, 2]", "[1, 3]", None),
        ".deep[1].x": ("changed", 2, 3, None),
        ".deep[2]": ("added", None, "{}", None),
        ".ordered.b": ("changed", 1, 2, None),
        ".counts.b": ("changed", 1, 2, None),
        "[7]": ("changed", "float32", "float16", None),
        ".size": ("changed", "(2,)", "(3,)", None),
        ".added": ("added", None, -1, None),
    }
    assert inside(tmp_path, before, dict(reversed(before.items()))) == {}, "in another order"


@pytest.mark.parametrize("slab_bytes", [1, 100, 4 << 20])
def test_tensors_are_compared_by_their_values_wherever_these_lie(tmp_path, monkeypatch, slab_bytes):
    monkeypatch.setattr(diff_tensors, "_SLAB_BYTES", slab_bytes)
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    moved = base.clone()
    moved[1, 2, 0, 3] += 7
    halves = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    bits = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    before = {
        "layout": base,
        "permuted": base.permute(0, 3, 1, 2),
        "shape": base,
        "halves": halves,
        "bits": bits,
        "big": torch.tensor([2**62]),
        "scalar": torch.tensor(1.0),
        "nan": torch.tensor([math.nan]),
        "empty": torch.empty(0, 3),
        "kind": torch.ones(1),
    }
    after = {
        "layout": base.to(memory_format=torch.channels_last),
        "permuted": moved.permute(0, 3, 1, 2),
        "shape": base[:1],
        "halves": halves + 1,
        "bits": torch.tensor([2.0, 1.0]).to(torch.float8_e4m3fn),
        "big": torch.tensor([2**62 + 1]),
        "scalar": torch.tensor(1.25),
        "nan": torch.tensor([math.nan]),
        "empty": torch.empty(0, 3),
        "kind": 1,
    }
    found = inside(tmp_path, before, after)
    assert {key: largest for key, (*_, largest) in found.items()} == {
        ".permuted": 7.0,
        ".shape": None,
        ".halves": 1.0,
        ".bits": None,
        ".big": 1.0,
        ".scalar": 0.25,
        ".kind": None,
    }
    assert found[".kind"][1:3] == ("float32[1]", 1)
    assert set(inside(tmp_path, before, after, tolerance=1.0)) == {".permuted", ".shape", ".bits", ".kind"}


def test_positions_plain_values_and_states_of_each_rank_are_compared_too(tmp_path):
    assert inside(tmp_path, {"n": 1}, {"n": 2}, per_rank=True) == {" of rank 0: .n": ("changed", 1, 2, None)}
    for number in range(2):
        saver_of(tmp_path / f"p{number}", position={"read": number}).save("c")
    found = {each.name: each for each in recckpt.diff(tmp_path / "p0", tmp_path / "p1").values}
    assert [(one.key, one.before, one.after) for one in found["stream"].inside] == [(" of rank 0: .read", 0, 1)]

    class Plain(torch.nn.Linear):
        def __init__(self, value):
            super().__init__(1, 1)
            self.value = value

        def get_extra_state(self):
            return self.value

        def set_extra_state(self, value):
            self.value = value

    for number in range(2):
        Saver(Plain(number), None, str(tmp_path / f"m{number}")).save("c")
    [value] = [each for each in recckpt.diff(tmp_path / "m0", tmp_path / "m1").values if each.group == "plain value"]
    assert [(one.key, one.before, one.after) for one in value.inside] == [("", 0, 1)]


class Runs:
    def __reduce__(self):
        return print, ("it ran",)


def test_a_file_of_another_form_is_not_run_and_compared_as_a_whole(tmp_path, capsys):
    saver = saver_of(tmp_path, {"n": 1})
    saver.register_for_checkpointing("other", {"n": 1})
    saver.save("0")
    saver.save("1")
    Forge(tmp_path / "1").save("extra.pt", {"held": Runs(), "other": 1})
    found = recckpt.diff(tmp_path / "0", tmp_path / "1")
    assert {each.name: (each.status, each.inside) for each in found.values if each.group == "extra"} == {
        "held": ("unclear", ()),
        "other": ("unclear", ()),
    }
    assert "it ran" not in capsys.readouterr().out
    assert "they share a file that recckpt has not written" in str(found)


def test_text_begins_with_the_answer_and_has_few_keys_of_an_object_and_json_all(tmp_path):
    for number in range(2):
        saver_of(tmp_path / str(number), {f"k{n}": n + number for n in range(50)}).save("c")
    found = recckpt.diff(tmp_path / "0", tmp_path / "1")
    assert str(found).startswith("different: ")
    assert str(found).count("held.k") == 20
    assert "and 30 more keys" in str(found)
    [held] = [each for each in json.loads(json.dumps(found.to_dict()))["values"] if each["name"] == "held"]
    assert len(held["inside"]) == 50
    assert held["inside"][3] == {"key": ".k3", "status": "changed", "before": 3, "after": 4, "largest": None}
    assert "held.k3" in found.to_html()
