"""What an error says could be put into a load_conf, or into an entry of a bank."""

import pytest
import torch
from torch import nn

from recckpt import Saver
from recckpt.errors import StateMismatchError
from recckpt.format.names import Name, slot_name
from recckpt.load.conf import Entry
from recckpt.load.inventory import Thing
from recckpt.load.problems import Problems, fitting_action, nearest_names
from recckpt.sparse import HashTable, SparseAdam

OWN, BANK = Entry(), Entry(label="bank[1]", path="runs/other")


def advised(entry, *things):
    problems = Problems()
    for name, saved, live in things:
        problems.misfit(entry, name.text, saved, live, fitting_action(name, Thing(*saved), Thing(*live)))
    return problems.remedy()


@pytest.mark.parametrize(
    ("name", "saved", "live", "action"),
    [
        (slot_name("t", "embedding"), ("float32", (4,)), ("float32", (8,)), "'t': 'resize'"),
        (slot_name("t", "embedding"), ("float32", (4,)), ("float16", (4,)), "'t': 'cast'"),
        (slot_name("t", "embedding"), ("float32", (2, 4)), ("float32", (3, 4)), "'t': 'skip'"),
        (Name("dense", "w"), ("float32", (2, 4)), ("float32", (3, 4)), "'w': 'resize'"),
        (Name("dense", "w"), ("float32", (2, 4)), ("float32", (2, 5)), "'w': 'skip'"),
        (Name("dense", "w"), ("float32", (2,)), ("float32", (3,)), "'w': 'resize'"),
        (Name("dense", "w"), ("float32", (2, 4)), ("float32", (8,)), "'w': 'skip'"),
        (Name("dense", "w"), ("plain data", ()), ("float32", ()), "'w': 'skip'"),
    ],
)
def test_the_example_is_the_action_that_keeps_most(name, saved, live, action):
    text = advised(OWN, (name, saved, live))
    assert text.endswith(f"where state differs: pass load_conf={{'on_mismatch': {{{action}}}, 'strict': True}}")


def test_of_a_resize_the_advice_says_what_it_keeps():
    longer = (Name("dense", "w"), ("float32", (2, 4)), ("float32", (3, 4)))
    wider = (Name("dense", "w"), ("float32", (2, 4)), ("float32", (2, 5)))
    kept = "'resize' keeps the values at equal positions; of a tensor, the first rows"
    assert advised(OWN, longer).startswith(f"{kept}: say in 'on_mismatch'")
    assert kept not in advised(OWN, wider)


def test_a_layer_behind_a_concatenation_that_gets_wider_is_advised_to_begin_anew(tmp_path):
    def saver(dim):
        model = nn.ModuleDict(
            {"t": HashTable(dim, name="t"), "u": HashTable(4, name="u"), "top": nn.Linear(dim + 4, 2)}
        )
        return model, Saver(model, output_dir=tmp_path)

    before, first = saver(4)
    first.save("1")
    model, wider = saver(6)
    fresh = model["top"].weight.detach().clone()
    with pytest.raises(StateMismatchError) as caught:
        wider.load("1")
    wider.load("1", load_conf=eval(str(caught.value).rpartition("pass load_conf=")[2]))
    assert torch.equal(model["top"].weight, fresh)
    assert torch.equal(model["top"].bias, before["top"].bias)


@pytest.mark.parametrize("name", ["dense", "extra"])
def test_a_table_that_is_called_as_a_group_can_be_left_out_and_a_warning_says_how(tmp_path, name):
    saver_of(tmp_path, name)[1].save("1")
    model, saver = saver_of(tmp_path / "new", name)
    before = model["t"].embeddings().clone()
    plan = saver.plan([{"path": tmp_path, "exclude": [name]}])
    [warning] = [text for text in plan.warnings if "group" in text]
    assert warning.endswith(
        f"'exclude': {name!r} means the group; for an object of this name, write '[{name[0]}]{name[1:]}'"
    )
    assert f"{name}@embedding" in {item.name.text for item in plan.taken}
    report = saver.load_by_config([{"path": tmp_path, "exclude": [f"[{name[0]}]{name[1:]}"]}])
    assert not any("group" in text for text in report.warnings)
    assert torch.equal(model["t"].embeddings(), before)
    assert any(item.name.text == "top.weight" for item in report.taken)


def test_of_a_table_the_example_does_for_all_its_slots_and_many_of_one_kind_are_one_value():
    wider = (("float32", (4,)), ("float32", (8,)))
    cast = (("float32", (4,)), ("float16", (4,)))
    text = advised(BANK, (slot_name("t", "sparse_m"), *wider), (slot_name("t", "embedding"), *cast))
    assert text.endswith("where state differs: add 'on_mismatch': {'t': 'resize'} to bank[1]")
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


RENAME = r"'oname': \{'NAME IN THE MODEL': 'NAME IN THE CHECKPOINT'\}"


def saver_of(path, table="user", layer="top"):
    model = nn.ModuleDict({"t": HashTable(4, name=table), layer: nn.Linear(4, 1)})
    optim = SparseAdam([model["t"]])
    model["t"](torch.arange(3)).sum().backward()
    optim.step()
    return model, Saver(model, optim, output_dir=path)


def test_names_that_only_one_side_has_are_listed_with_the_nearest_of_the_other(tmp_path):
    before, first = saver_of(tmp_path)
    first.save("1")
    after, second = saver_of(tmp_path, "users", "head")
    with pytest.raises(StateMismatchError, match=f"pass load_conf={{{RENAME}, 'strict': True}} if names") as caught:
        second.load("1")
    assert (sorted(caught.value.missing), sorted(caught.value.unexpected)) == (
        ["head.bias", "head.weight", "users"],
        ["top.bias", "top.weight", "user"],
    )
    for line in ("checkpoint: 'users' (nearest there: 'user')\n", "'head.weight' (nearest there: 'top.weight')\n"):
        assert line in str(caught.value)
    assert str(caught.value).endswith("if names have changed; 'strict': False loads what fits by name")
    second.load("1", load_conf={"oname": {"users": "user", "head.*": "top.*"}, "strict": True})
    assert torch.equal(after["t"].embeddings(), before["t"].embeddings())
    assert torch.equal(after["t"].slots["sparse_adam_exp_avg"], before["t"].slots["sparse_adam_exp_avg"])
    assert torch.equal(after["head"].weight, before["top"].weight)


def test_where_one_side_has_all_names_the_advice_is_to_load_what_fits_and_in_a_bank_it_names_the_entry(tmp_path):
    saver_of(tmp_path / "all")[1].save("1")
    less = nn.ModuleDict({"t": HashTable(4, name="user")})
    with pytest.raises(StateMismatchError, match=r"\n  pass load_conf=\{'strict': False\} to load what fits by name$"):
        Saver(less, output_dir=tmp_path / "all").load("1")
    saver = Saver(nn.ModuleDict({"t": HashTable(2, name="c")}), output_dir=tmp_path / "c")
    with pytest.raises(StateMismatchError, match=rf"add {RENAME} to bank\[0\] if names have changed"):
        saver.load_by_config([{"path": tmp_path / "all", "strict": True, "load": ["sparse"]}])


def test_a_name_without_a_likeness_has_no_nearest_nor_have_more_names_than_an_error_waits_for():
    assert nearest_names(["user", "zzz"], ["users", "top"]) == {"user": "users"}
    assert nearest_names([f"a{n}" for n in range(200)], [f"a{n}" for n in range(51)]) == {}
