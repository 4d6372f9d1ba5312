"""What an error says could be put into a load_conf, or into an entry of a bank."""

import pytest
import torch
from torch import nn

from recckpt import Saver
from recckpt.errors import StateMismatchError
from recckpt.format.names import Name, slot_name
from recckpt.load.advice import Advice
from recckpt.load.conf import Entry
from recckpt.load.inventory import Thing
from recckpt.sparse import HashTable

OWN, BANK = Entry(), Entry(label="bank[1]", path="runs/other")


def advised(entry, *things):
    advice = Advice()
    for name, saved, live in things:
        advice.act(entry, name, Thing(*saved), Thing(*live))
    return advice.of_values()


@pytest.mark.parametrize(
    ("name", "saved", "live", "action"),
    [
        (slot_name("t", "embedding"), ("float32", (4,)), ("float32", (8,)), "'t': 'resize'"),
        (slot_name("t", "embedding"), ("float32", (4,)), ("float16", (4,)), "'t': 'cast'"),
        (slot_name("t", "embedding"), ("float32", (2, 4)), ("float32", (3, 4)), "'t': 'skip'"),
        (Name("dense", "w"), ("float32", (2, 4)), ("float32", (3, 4)), "'w': 'resize'"),
        (Name("dense", "w"), ("float32", (2, 4)), ("float32", (8,)), "'w': 'skip'"),
        (Name("dense", "w"), ("plain data", ()), ("float32", ()), "'w': 'skip'"),
    ],
)
def test_the_example_is_the_action_that_keeps_most(name, saved, live, action):
    text = advised(OWN, (name, saved, live))
    assert text.endswith(f"where state differs: pass load_conf={{'on_mismatch': {{{action}}}, 'strict': True}}")


def test_of_a_table_the_example_does_for_all_its_slots():
    wider = (("float32", (4,)), ("float32", (8,)))
    cast = (("float32", (4,)), ("float16", (4,)))
    text = advised(BANK, (slot_name("t", "sparse_m"), *wider), (slot_name("t", "embedding"), *cast))
    assert text.endswith("where state differs: add 'on_mismatch': {'t': 'resize'} to bank[1]")


def test_many_of_one_kind_are_one_value():
    cast = (("float32", (4,)), ("float16", (4,)))
    text = advised(OWN, *((Name("dense", f"w{n}"), *cast) for n in range(9)))
    assert text.endswith("pass load_conf={'on_mismatch': 'cast', 'strict': True}")


def test_the_example_for_another_width_loads(tmp_path):
    def saver(dim, dtype=torch.float32):
        model = nn.ModuleDict({"t": HashTable(dim, name="t", dtype=dtype), "top": nn.Linear(dim, 2)})
        model["t"](torch.arange(5))
        return model, Saver(model, output_dir=tmp_path)

    saver(4)[1].save("1")
    model, wider = saver(6, torch.float16)
    with pytest.raises(StateMismatchError) as caught:
        wider.load("1")
    text = str(caught.value)
    wider.load("1", load_conf=eval(text.rpartition("pass load_conf=")[2]))
    assert len(model["t"]) == 5


def test_in_a_bank_the_advice_names_the_entry(tmp_path):
    for name in ("a", "b"):
        Saver(nn.ModuleDict({"t": HashTable(2, name=name)}), output_dir=tmp_path / name).save("1")
    saver = Saver(nn.ModuleDict({"t": HashTable(2, name="c")}), output_dir=tmp_path / "c")
    with pytest.raises(StateMismatchError, match=r"add 'oname': \{'c': 'b'\} to bank\[0\] if names have changed"):
        saver.load_by_config([{"path": tmp_path / "b", "strict": True}])
