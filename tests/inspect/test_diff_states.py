"""What differs inside registered objects, positions and plain values, held against what was put in."""

import io
import json
import math
import struct
import zipfile
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.forge import Forge
from support.sweeps import mostly_slow

import recckpt
from recckpt import Saver
from recckpt.dense import torch_archive
from recckpt.inspect import diff_states, diff_tensors


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


@mostly_slow()
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


def test_what_holds_the_same_values_in_another_kind_or_order_has_changed(tmp_path):
    one = torch.ones(2)
    before = {"list": [one], "tuple": ((1,),), "deep": {"x": 1, "y": {2}}, "set": [{0, 8}]}
    after = {"list": {0: one}, "tuple": [(1,)], "deep": OrderedDict(x=1, y={2}), "set": [{8, 0}]}
    assert inside(tmp_path, before, after) == {
        ".list": ("changed", "list", "dict", None),
        ".tuple": ("changed", "tuple", "list", None),
        ".deep": ("changed", "dict", "OrderedDict", None),
    }
    assert inside(tmp_path, {"a": {"x": 1, "y": 2}, "b": 3, "c": 4}, {"b": 3, "a": {"y": 2, "x": 1}}) == {
        "": ("changed", "the order .a.x, .a.y, .b", "the order .b, .a.y, .a.x", None),
        ".c": ("gone", 4, None, None),
    }


@pytest.mark.parametrize(
    ("sizes", "dims"), [((24, 30), (1, 0)), ((6, 4, 30), (2, 0, 1)), ((2, 3, 4, 30), (0, 3, 1, 2))]
)
def test_each_byte_of_a_permuted_tensor_is_read_once(tmp_path, monkeypatch, sizes, dims):
    monkeypatch.setattr(diff_tensors, "_SLAB_BYTES", 64)
    tensor = torch.arange(float(math.prod(sizes))).reshape(sizes).permute(dims)
    lengths = []

    def from_buffer(data, kind):
        lengths.append(len(data))
        return np.frombuffer(data, kind)

    monkeypatch.setattr(diff_states, "np", SimpleNamespace(frombuffer=from_buffer))
    moved = tensor.clone()
    moved[(1,) * len(dims)] += 3
    assert moved.stride() == tensor.stride()
    assert inside(tmp_path, {"a": tensor}, {"a": moved})[".a"][3] == 3.0
    assert sum(lengths) == 2 * tensor.nbytes
    assert max(lengths) <= 64


def test_a_large_tensor_in_another_order_of_dimensions_counts_as_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(diff_states, "_REORDERED_BYTES", 96)
    small, large = torch.arange(24.0).reshape(4, 6), torch.arange(28.0).reshape(4, 7)
    found = inside(
        tmp_path, {"s": small, "l": large}, {"s": small.t().contiguous().t(), "l": large.t().contiguous().t()}
    )
    assert found == {".l": ("changed", "float32[4, 7]", "float32[4, 7]", None)}


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return b"\x8a\x08" + struct.pack("<q", value)


def a_tensor(sizes, strides):
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
    shape = b"".join(b"(" + b"".join(each) + b"t" for each in (sizes, strides))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + shape + b"\x89ccollections\nOrderedDict\n)RtR"


def shared(begin, n):
    """Return the pickle of a container that stands for 2 ** n of the first."""
    return begin + b"q\0" + b"".join(b"h" + bytes([k]) + b"\x86q" + bytes([k + 1]) for k in range(n))


def archived(value, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        pickled = b"\x80\x02}(" + text("held") + value + text("other") + b"K\1u."
        for name, data in {"data.pkl": pickled, "data/0": bytes(1600), "version": b"3\n"}.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


ONE, FLOAT = b"K\1", b"G" + struct.pack(">d", 2.0)
SET = b"c__builtin__\nset\n(](%setR"


def deep(n):
    return b")" + b"\x85" * (400_000 // n)


HOSTILE = {  # what is large or deep is so by n times less
    "deep": deep,
    "deep key": lambda n: b"}" + deep(n) + b"K\1s",
    "deep member of a set": lambda n: SET % deep(n),
    "shared lists": lambda n: shared(b"]", 60),
    "shared key": lambda n: b"}" + shared(b")", 60) + b"K\1s",
    "shared members of a set": lambda n: SET % shared(b")", 60),
    "shared text": lambda n: b"](" + text("a" * 100_000) + b"q\1" + b"h\1" * 1000 + b"e",
    "shared list": lambda n: b"]((" + ONE * (100_000 // n) + b"tq\1" + b"h\1" * (100_000 // n) + b"e",
    "copied list": lambda n: (
        b"](](" + ONE * (100_000 // n) + b"eq\1" + b"c__builtin__\nset\nh\1\x85R" * (100_000 // n) + b"e"
    ),
    "shared tensor": lambda n: b"](" + a_tensor([b"M\x90\1"], [ONE]) + b"q\1" + b"h\1" * 2000 + b"e",
    "shared storage": lambda n: b"ctorch\ndevice\n" + shared(b")", 60) + b"\x85R",
    "many opcodes": lambda n: b"(" + b"]" * (2_000_000 // n) + b"t",
    "stride 0": lambda n: a_tensor([number(10**12)], [b"K\0"]),
    "strides 0": lambda n: a_tensor([ONE, number(10**12)], [b"K\0", b"K\0"]),
    "gaps": lambda n: a_tensor([b"K\2"], [b"K\2"]),
    "negative": lambda n: a_tensor([number(-1)], [ONE]),
    "float": lambda n: a_tensor([FLOAT], [ONE]),
    "floats": lambda n: a_tensor([b"K\2", FLOAT], [b"K\2", ONE]),
    "bool": lambda n: a_tensor([b"\x88"], [ONE]),
    "text": lambda n: a_tensor([text("a")], [ONE]),
    "dimensions": lambda n: a_tensor([ONE] * 100, [ONE] * 100),
    "fewer strides": lambda n: a_tensor([ONE, ONE], [ONE]),
    "larger": lambda n: a_tensor([b"M\x91\1"], [ONE]),
    "attributes": lambda n: b"ccollections\nOrderedDict\n)R}" + text("items") + b"K\1sb",
}


@pytest.mark.parametrize("n", [100, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_files_are_compared_as_a_whole(tmp_path, monkeypatch, value, n):
    for limit in ("_MOST_OPCODES", "_MOST_WORK"):
        monkeypatch.setattr(diff_states, limit, getattr(diff_states, limit) // n)
    assert statuses_beside(tmp_path, archived(HOSTILE[value](n))) == {"held": "unclear", "other": "unclear"}


def statuses_beside(tmp_path, data):
    """Return what diff says of a good file and one of some bytes."""
    saver = saver_of(tmp_path, {"n": 1})
    saver.register_for_checkpointing("other", {"n": 1})
    saver.save("0")
    saver.save("1")
    Forge(tmp_path / "1").write("extra.pt", data)
    found = recckpt.diff(tmp_path / "0", tmp_path / "1")
    assert str(found).startswith("different: ")
    return {each.name: each.status for each in found.values if each.group == "extra"}


def test_a_pickle_that_is_compressed_or_too_large_is_not_read(tmp_path, monkeypatch):
    bomb = archived(text("a" * (64 << 20)), zipfile.ZIP_DEFLATED)
    assert statuses_beside(tmp_path / "bomb", bomb) == {"held": "unclear", "other": "unclear"}
    good = archived(text("a" * 5000))
    assert statuses_beside(tmp_path / "good", good) == {"held": "changed", "other": "changed"}
    monkeypatch.setattr(diff_states, "_MOST_BYTES", 5000)
    assert statuses_beside(tmp_path / "large", good) == {"held": "unclear", "other": "unclear"}


def test_a_tensor_that_lies_behind_the_end_of_its_file_counts_as_changed(tmp_path):
    data = bytearray(archived(a_tensor([b"K\4"], [ONE])))
    struct.pack_into("<H", data, data.find(b"archive/data/0") - 2, 60_000)
    saver = saver_of(tmp_path, {"n": 1})
    saver.register_for_checkpointing("other", 1)
    for name in "01":
        saver.save(name)
        Forge(tmp_path / name).write("extra.pt", bytes(data) if name == "0" else archived(a_tensor([b"K\4"], [ONE])))
    found = recckpt.diff(tmp_path / "0", tmp_path / "1")
    [held] = [each for each in found.values if each.name == "held"]
    assert [(one.key, one.status, one.largest) for one in held.inside] == [("", "changed", None)]


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
    assert "their file is too large, or not as recckpt writes it" in str(found)


def test_every_global_that_a_load_lets_pass_is_known_here():
    """The format lists them once; a name that only one of the two knew would make each state unclear."""
    reader = diff_states._StateReader(None, None, 0, 0)
    assert reader._known.keys() == torch_archive._globals()


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
