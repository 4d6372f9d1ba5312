"""Reading: only the bytes that are needed, and nothing that a file was not meant to say."""

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpointing import STATES, everything, frozen
from support.sweeps import SWEEP_STRIDE

from recckpt.checkpointer import CheckpointWriter, RankInfo, StateReader
from recckpt.errors import CorruptCheckpointError, StateMismatchError
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage

ALONE = RankInfo(0, 1)
READER = StateReader(ALONE)
IN_MEMORY = "memory://states/any"
FEW_BYTES = 20_000  # the directory of the zip and the pickle


def written(path, state):
    CheckpointWriter(ALONE).write(path, state)
    return path / "checkpoint_0.pt"


@pytest.fixture
def counted(monkeypatch):
    """Count the bytes that are read from storage."""
    counts = [0]
    open_file = LocalStorage.open

    class Counting(io.FileIO):
        def readinto(self, buffer):
            n_bytes = super().readinto(buffer)
            counts[0] += n_bytes
            return n_bytes

        def read(self, size=-1):
            data = super().read(size)
            counts[0] += len(data)
            return data

        def readall(self):
            raise AssertionError("all of it")

    def open_counting(self, name):
        with open_file(self, name) as file:
            return Counting(os.dup(file.fileno()))

    monkeypatch.setattr(LocalStorage, "open", open_counting)
    return counts


def test_with_a_template_only_the_bytes_of_its_tensors_are_read(tmp_path, counted):
    state = {str(i): {"w": torch.full((250_000,), float(i)), "v": torch.ones(250_000)} for i in range(10)}
    n_bytes = written(tmp_path, state).stat().st_size
    for template, needed in [
        ({}, 0),
        ({"3": {}}, 0),
        ({"3": {"w": torch.zeros(250_000)}}, 1_000_000),
        ({"3": {"w": None}}, 1_000_000),
        ({"3": None}, 2_000_000),
        ({"3": {"w": torch.zeros(500_000)[::2]}, "4": {"v": None}}, 2_000_000),
        (None, 20_000_000),
    ]:
        counted[0] = 0
        READER.read(tmp_path, template)
        assert needed <= counted[0] <= needed + FEW_BYTES
    assert n_bytes < 20_000_000 + FEW_BYTES


def test_of_tensors_that_share_memory_only_the_asked_part_is_read(tmp_path, counted):
    base = torch.arange(1_000_000, dtype=torch.int64).reshape(1000, 1000)
    written(tmp_path, {"all": base, "row": base[3], "rows": base[5:7]})
    row = torch.zeros(1000, dtype=torch.int64)
    READER.read(tmp_path, {"row": row})
    assert torch.equal(row, base[3])
    assert counted[0] <= 8_000 + FEW_BYTES
    counted[0] = 0
    state, _ = READER.read(tmp_path, {"row": None, "rows": None})
    assert torch.equal(state["rows"], base[5:7])
    assert 32_000 <= counted[0] <= 32_000 + 64 + FEW_BYTES


def test_what_does_not_fit_is_found_before_a_tensor_is_read(tmp_path, counted):
    written(tmp_path, {"a": torch.ones(250_000), "b": 1})
    with pytest.raises(StateMismatchError):
        READER.read(tmp_path, {"a": torch.zeros(250_000), "b": "x"})
    assert counted[0] <= FEW_BYTES


@settings(max_examples=40)
@given(STATES)
def test_any_state_comes_back_as_it_was_and_as_torch_loads_it(state):
    CheckpointWriter(ALONE).write(IN_MEMORY, state)
    loaded, missing = READER.read(IN_MEMORY)
    assert (frozen(loaded), missing) == (frozen(state), [])
    with open_storage(IN_MEMORY).open("checkpoint_0.pt") as file:
        assert frozen(torch.load(file, weights_only=True)) == frozen(state)


@settings(max_examples=40)
@given(STATES, st.randoms(use_true_random=False))
def test_any_template_of_a_state_is_filled_with_what_it_asks_for(state, choose):
    CheckpointWriter(ALONE).write(IN_MEMORY, state)
    template, expected = thinned(state, choose)
    loaded, missing = READER.read(IN_MEMORY, template, strict=True)
    assert loaded is template
    assert (frozen(loaded), missing) == (frozen(expected), [])


def thinned(value, choose, root=True):
    """Return a template for a part of a state, and the part."""
    if not root and choose.random() < 0.2:
        return None, value
    if isinstance(value, dict):
        kept = {key: thinned(item, choose, False) for key, item in value.items() if choose.random() < 0.7}
        make = dict if root else type(value)
        return make((k, t) for k, (t, _) in kept.items()), make((k, e) for k, (_, e) in kept.items())
    if type(value) in (list, tuple):
        pairs = [thinned(item, choose, False) for item in value]
        return type(value)(t for t, _ in pairs), type(value)(e for _, e in pairs)
    if isinstance(value, torch.Tensor):
        empty = torch.empty_like(value)
        empty.untyped_storage().fill_(0)
        return empty, value
    return {bool: not value, int: 7, float: 7.5, str: "other", bytes: b"other", set: {9}}.get(type(value)), value


def test_a_tuple_in_a_template_keeps_its_tensors_and_a_read_only_array_is_not_filled(tmp_path):
    written(tmp_path, {"pair": (torch.ones(2), 5), "tensors": (torch.ones(3),), "a": np.ones(2)})
    tensor, tensors = torch.zeros(2), (torch.zeros(3),)
    template, _ = READER.read(tmp_path, {"pair": (tensor, 0), "tensors": tensors})
    assert (template["pair"][0] is tensor, template["pair"][1], tensor.tolist()) == (True, 5, [1, 1])
    assert template["tensors"][0] is tensors[0]
    array = np.zeros(2)
    array.flags.writeable = False
    with pytest.raises(StateMismatchError, match="a read-only numpy array, not to be filled"):
        READER.read(tmp_path, {"a": array})
    with pytest.raises(TypeError, match="state_dict is a dict or None, found a list"):
        READER.read(tmp_path, [])


def test_containers_that_are_shared_in_a_file_of_torch_are_shared_again_and_types_survive(tmp_path):
    inner = [torch.ones(2)]
    state = OrderedDict(size=torch.Size([1]), kind=torch.int8, where=torch.device("cpu"), some={1, (2, "x")}, z=1j)
    torch.save({"a": inner, "b": (inner, inner), "plain": state}, tmp_path / "checkpoint_0.pt")
    found, _ = READER.read(tmp_path)
    assert found["a"] is found["b"][0] is found["b"][1]
    assert frozen(found["plain"]) == frozen(state)


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def check_flips(tmp_path, bits):
    state = {"w": torch.arange(20.0), "n": {"v": torch.ones(3, dtype=torch.bfloat16), "step": 123}, "l": [1, "x"]}
    file = written(tmp_path, state)
    data, expected, n_found = file.read_bytes(), frozen(state), 0
    for bit in bits(len(data) * 8):
        file.write_bytes(flipped(data, bit))
        try:
            found, _ = READER.read(tmp_path)
        except CorruptCheckpointError:
            n_found += 1
        else:
            assert frozen(found) == expected
    return n_found


def test_a_flipped_bit_is_found_or_means_nothing(tmp_path):
    assert check_flips(tmp_path, lambda n_bits: random.Random(0).sample(range(n_bits), 200)) > 25


@pytest.mark.slow
def test_any_flipped_bit_is_found_or_means_nothing(tmp_path):
    stride = SWEEP_STRIDE
    assert check_flips(tmp_path, lambda n_bits: range(0, n_bits, stride)) > 50


def test_a_file_that_was_cut_off_or_whose_list_of_contents_points_before_its_begin_is_damaged(tmp_path):
    file = written(tmp_path, everything())
    data = file.read_bytes()
    for size in range(0, len(data), 997):
        file.write_bytes(data[:size])
        with pytest.raises(CorruptCheckpointError):
            READER.read(tmp_path)
    changed = bytearray(data)
    changed[data.rindex(b"PK\x05\x06") + 18] += 1  # of the end record: where the list begins
    file.write_bytes(changed)
    with pytest.raises(CorruptCheckpointError, match="Invalid argument"):
        READER.read(tmp_path)


class Command:
    def __reduce__(self):
        return os.system, ("echo this must never run > /dev/stderr; exit 1",)


def hostile(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (pickle.dumps({"a": Command()}, 2), "posix.system"),
        (pickle.dumps([1, 2], 2), "found the opcode EMPTY_LIST, expected a dict"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "a value that contains itself"),
        (pickle.dumps({"a": bytearray(b"x")}, 2), "bytearray"),
        (b"\x80\x02}X\x01\x00\x00\x00actorch\nload\n)Rs.", "torch.load"),
        (b"\x80\x02}X\x01\x00\x00\x00actorch\ndevice\nX\x03\x00\x00\x00abc\x85Rs.", "device"),
        (b"not a pickle", "found the opcode 110"),
    ],
    ids=["command", "list", "itself", "bytearray", "torch.load", "device", "text"],
)
def test_a_file_that_means_harm_is_refused(tmp_path, capfd, data, match):
    (tmp_path / "checkpoint_0.pt").write_bytes(hostile(data))
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        READER.read(tmp_path)
    assert "recckpt verify" not in str(caught.value), "which knows no such files"
    assert capfd.readouterr().err == ""
