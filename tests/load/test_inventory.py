"""What a checkpoint and a model have to offer, by name, without reading rows."""

import pytest
import torch
from support.bank_runs import run, saved, table
from support.builders import flip_bit
from torch import nn

from recckpt.dense.tensors import DenseTensors
from recckpt.errors import CorruptCheckpointError, LoadConfError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import Name, slot_name, state_name
from recckpt.load.inventory import (
    PLAIN,
    Thing,
    checkpoint_inventory,
    list_inventory,
    listed_inventory,
    names_here,
)
from recckpt.output_dir.at_path import locate_path


def inventory(url, *model_dense):
    storage, checkpoint = locate_path(url)
    tensors = DenseTensors(storage, checkpoint.directory, checkpoint.manifest)
    return checkpoint_inventory(checkpoint, tensors.model, model_dense)


class Position:
    def dump_io_state(self):
        return {"position": 1}

    def load_io_state(self, state):
        raise NotImplementedError


def test_a_checkpoint_offers_all_that_was_saved(url):
    saver = run(url, table("t", range(7)), optimizer="adagrad", top=nn.Linear(3, 2).to(torch.bfloat16))
    saver.register_for_checkpointing("lr", 0.1)
    saver.register_io_state("reader", Position())
    saver.save("c", step=5)
    row = 4 * 4
    assert inventory(url) == {
        slot_name("t", "id"): Thing("int64", (), 7, 7 * 8),
        slot_name("t", "embedding"): Thing("float32", (4,), 7, 7 * row),
        slot_name("t", "sparse_adagrad_sum"): Thing("float32", (4,), 7, 7 * row),
        Name("dense", "top.weight"): Thing("bfloat16", (2, 3), 0, 12),
        Name("dense", "top.bias"): Thing("bfloat16", (2,), 0, 4),
        Name("extra", "lr"): Thing(PLAIN),
        Name("io_state", "reader"): Thing(PLAIN),
        Name("sparse_opt", SPARSE_OPTIM): Thing(PLAIN),
        Name("global_step", "global_step"): Thing(PLAIN),
    }


def test_the_names_of_the_saver_are_those_of_its_checkpoint(tmp_path):
    saver = run(tmp_path, table("a@b", range(3)), table("line\nbreak"), optimizer="adam", top=nn.Linear(1, 1))
    saver.register_for_checkpointing(' "lr"\t', 0.1)
    saver.save("c", step=1)
    lines = saver.names()
    assert not any("\n" in line for line in lines)
    here, there = listed_inventory(lines), inventory(str(tmp_path))
    assert {name: (thing.dtype, thing.shape) for name, thing in here.items()} == {
        name: (thing.dtype, thing.shape) for name, thing in there.items()
    }
    assert listed_inventory("\r\n".join(lines).split("\n")) == here
    assert list_inventory(here) == lines


def test_a_checkpoint_of_nothing_but_tables_tensors_or_plain_values_offers_that_and_damage_is_named(tmp_path):
    class Odd(nn.Module):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            raise NotImplementedError

    assert set(inventory(saved(tmp_path / "a", table("t")))) == {slot_name("t", "id"), slot_name("t", "embedding")}
    assert {name.group for name in inventory(saved(tmp_path / "b", top=nn.Linear(1, 1)))} == {"dense"}
    found = inventory(saved(tmp_path / "c", odd=Odd()))
    assert found == {Name("dense", "odd._extra_state"): Thing(PLAIN)}
    flip_bit(tmp_path / "b" / "c" / "dense/00000-of-00001.json", 0)
    with pytest.raises(CorruptCheckpointError, match=r"c/dense/00000-of-00001\.json"):
        inventory(str(tmp_path / "b"))


def test_names_are_told_by_the_manifest_and_the_index_and_no_state_is_opened(tmp_path):
    saver = run(tmp_path, table("t"), optimizer="adam")
    saver.register_for_checkpointing("tensor", torch.ones(2))
    saver.register_for_checkpointing("value", 3)
    saver.register_io_state("reader", Position())
    saver.save("c")
    expected = inventory(str(tmp_path))
    for name in ("model.pt", "extra.pt", "io_state_0.pt"):
        flip_bit(tmp_path / "c" / name, 0)
    assert inventory(str(tmp_path)) == expected
    assert Name("extra", "tensor") in expected


@pytest.mark.parametrize(
    ("found", "model", "here"),
    [  # the prefix of a wrapper is a matter of all names or none; those of compiled modules are at any depth
        (["a", "b"], ["a", "b"], ["a", "b"]),
        (["module.a", "module.b"], ["a", "b"], ["a", "b"]),
        (["a"], ["module.a"], ["module.a"]),
        (["module.a"], ["module.a"], ["module.a"]),
        (["module.b", "c"], ["a", "module.b"], ["module.b", "c"]),
        (["module.a", "b"], ["a"], ["module.a", "b"]),
        (["module.a", "n_averaged"], ["a"], ["a", "n_averaged"]),  # of AveragedModel
        (["a"], ["module.a", "n_averaged"], ["module.a"]),
        (["module.a"], [], ["module.a"]),
        ([], ["module.a"], []),
        (["module.x"], ["a"], ["module.x"]),  # another model, whose names are as they are in the file, for 'oname'
        (["_orig_mod.a", "b._orig_mod.c"], ["a", "b.c"], ["a", "b.c"]),
        (["module.b._orig_mod.c"], ["b.c"], ["b.c"]),
        (["b._orig_mod.c"], ["module.b.c"], ["module.b.c"]),
        (["b._orig_mod.c"], ["b._orig_mod.c"], ["b._orig_mod.c"]),
        (["b._orig_mod.c", "b.c"], ["b.c"], ["b._orig_mod.c", "b.c"]),
        (["b_orig_mod.c"], ["b.c"], ["b_orig_mod.c"]),
    ],
)
def test_wrappers_that_one_side_alone_had_are_looked_through(found, model, here):
    assert names_here(found, model) == dict(zip(found, here, strict=True))


def test_names_may_be_listed_by_hand_and_lines_that_are_none_are_refused():
    assert listed_inventory(["t@id", "", "t@sparse_m", "top.weight", "lr\textra", "w\tdense\tfloat16\t2,3\n"]) == {
        slot_name("t", "id"): Thing(),
        slot_name("t", "sparse_m"): Thing(),
        Name("dense", "top.weight"): Thing(),
        Name("extra", "lr"): Thing(),
        Name("dense", "w"): Thing("float16", (2, 3)),
    }
    things = {state_name("a", "adam"): Thing(PLAIN, tied=("b", "c\td")), state_name("e", "adam"): Thing(PLAIN)}
    lines = list_inventory(things)
    assert lines == ['a@adam\tdense_opt\tplain data\t\tb\t"c\\td"', "e@adam\tdense_opt\tplain data"]
    assert listed_inventory(lines) == things
    for line, message in (
        ("a\tdens", "'a' has unknown group 'dens'; groups are sparse, dense"),
        ("a\tdense\tfloat32\t2x3", "'a' has the invalid shape '2x3'"),
        ('"a\tdense', "is not a JSON string"),
    ):
        with pytest.raises(LoadConfError, match=message):
            listed_inventory([line])
