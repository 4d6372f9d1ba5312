"""The saver: what of a model goes into a checkpoint, and how it comes back."""

import json
import re
from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.builders import OPTIMIZERS, ClickModel, bits, checkpoints, table_state, tree
from support.forge import Forge
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadConfError,
    StateMismatchError,
)
from recckpt.sparse import HashTable, JointOptimizer, SparseAdagrad
from recckpt.storage import open_storage


def trained(seed=0, optimizer="adamw", steps=3, **kwargs):
    """Return a model that has been trained a little, and its optimizer of the tables."""
    torch.manual_seed(seed)
    model = ClickModel(**kwargs)
    optim = OPTIMIZERS[optimizer](model.tables)
    for _ in range(steps):
        model(torch.randint(0, 50, (8,)), torch.randint(0, 50, (8,))).sum().backward()
        optim.step()
    return model, optim


def tensors(model):
    return {name: bits(value) for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def tables(model):
    return {table.name: table_state(table) for table in model.tables}


class Value:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


# construction


def test_an_optimizer_of_tables_that_would_not_be_saved_is_refused_when_the_saver_is_made(tmp_path):
    model, other = ClickModel(), HashTable(1, name="other")
    optim = OPTIMIZERS["sgd"]([*model.tables, other])
    with pytest.raises(ValueError, match=r"trains tables that are not in the model: 'other'; the model has \['item'"):
        Saver(model, optim, str(tmp_path / "new"))
    with pytest.raises(ValueError, match=r"not in the model: .*'item'.*, and others of the same name: make them"):
        Saver(ClickModel(), OPTIMIZERS["sgd"](model.tables), str(tmp_path / "new"))
    dense = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"found Adam of the dense parameter 'weight'.*register_for_checkpointing"):
        Saver(dense, torch.optim.Adam(dense.parameters()), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    Saver(torch.nn.DataParallel(model), OPTIMIZERS["sgd"](model.tables[:1]), str(tmp_path / "new"))


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"model": nn.Linear(1, 1).state_dict()}, "model must be a torch.nn.Module, found a OrderedDict"),
        ({"model": None}, "model must be a torch.nn.Module, found a NoneType"),
        ({"sparse_optim": nn.Linear(1, 1)}, "sparse_optim must be an optimizer of tables or None, found a Linear"),
        ({"choose": ["*@count"]}, r"choose must be a recckpt.policies.Choose, or None, found \["),
        ({"transfers": 60}, "transfers must be a recckpt.policies.Transfers, or None, found 60"),
        ({"on_save": 3}, "on_save must be a callable .*, found 3"),
    ],
)
def test_a_part_of_the_wrong_type_is_refused_when_the_saver_is_made(tmp_path, kwargs, found):
    with pytest.raises(TypeError, match=found):
        Saver(**{"model": nn.Linear(1, 1), "output_dir": str(tmp_path / "new"), **kwargs})
    assert not (tmp_path / "new").exists()


def test_a_part_cannot_be_replaced_for_it_would_be_saved_and_not_loaded(tmp_path):
    model, optim = trained()
    saver = Saver(model, optim, str(tmp_path))
    for name in ("model", "sparse_optim", "storage"):
        with pytest.raises(AttributeError, match=f"the {name} of a saver cannot be replaced: make another Saver"):
            setattr(saver, name, None)
    assert (saver.model, saver.sparse_optim) == (model, optim)


def test_a_table_that_took_the_place_of_a_trained_one_is_refused_at_the_save_and_the_older_checkpoint_stays(tmp_path):
    table = HashTable(2, name="t")
    model = nn.ModuleDict({"t": table})
    table(torch.tensor([1])).sum().backward()
    saver = Saver(model, SparseAdagrad([table]), str(tmp_path))
    saver.save("good")
    model["t"] = HashTable(2, name="t")
    with pytest.raises(ValueError, match=r"tables that are not in the model: 't'.*others of the same name"):
        saver.save("next")
    assert checkpoints(tmp_path) == ["good"]


def test_flags_max_keep_and_the_numbers_of_this_rank_are_checked_where_they_are_given(tmp_path):
    saver = Saver(nn.Linear(1, 1), None, str(tmp_path))
    for call, message in (
        (
            lambda: saver.register_for_checkpointing("x", [1], per_rank="no"),
            "per_rank must be True or False, found 'no'",
        ),
        (lambda: saver.save("c", overwrite=1), "overwrite must be True or False, found 1"),
        (lambda: saver.save("c", ephemeral=1), "ephemeral must be True or False, found 1"),
        (lambda: setattr(saver, "max_keep", "x"), "'x'"),
        (lambda: saver.save("b", 3, 1), "found shard_id=3, shard_num=1"),
        (lambda: saver.save("b", 0, 2), r"2 ranks need torch\.distributed"),
    ):
        saver.max_keep = 3
        with pytest.raises(ValueError, match=message):
            call()
        assert saver.max_keep == 3
    assert checkpoints(tmp_path) == []
    saver.save("a", 0, 1)
    assert checkpoints(tmp_path) == ["a"]


@pytest.mark.parametrize("left", ["manifest.json", "INTENT"])
def test_the_directory_of_a_checkpoint_is_refused_as_an_output_dir(url, left):
    Saver(nn.Linear(1, 1), output_dir=url).save("c")
    storage = open_storage(f"{url}/c")
    storage.remove({"manifest.json": "INTENT", "INTENT": "manifest.json"}[left])
    before = storage.list_files("")
    with pytest.raises(ValueError, match=re.escape(f"{url}/c is a checkpoint of {url}; give {url}")):
        Saver(nn.Linear(1, 1), output_dir=f"{url}/c")
    assert storage.list_files("") == before


def test_an_output_dir_is_made_and_left_empty_and_may_have_the_manifest_of_another_program(tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "a" / "b"))
    assert saver.output_dir == str(tmp_path / "a" / "b")
    assert tree(tmp_path) == {"a": None, "a/b": None}
    (tmp_path / "manifest.json").write_text('{"name": "of a web page"}')
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    obj, data = Value({"a": 1}), Value({"b": 2})
    saver.register_for_checkpointing("x", obj)
    saver.register_io_state("x", data)  # one name may stand for an object and for a dataset
    saver.save("c")
    obj.state = data.state = None
    saver.load()
    assert (obj.state, data.state) == ({"a": 1}, {"b": 2})


# what is saved


def test_the_state_is_read_at_each_save(tmp_path):
    model, value = nn.Linear(1, 1), Value({"n": 0})
    saver = Saver(model, output_dir=str(tmp_path), max_keep=None)
    saver.register_for_checkpointing("v", value)
    for n in (1, 2):
        with torch.no_grad():
            model.weight.fill_(n)
        value.state = {"n": n}
        saver.save(f"c{n}")
    model.weight = nn.Parameter(torch.full((1, 1), 9.0))  # another tensor under the same name
    saver.save("c3")
    for ckpt_id, weight, n in (("c1", 1, 1), ("c2", 2, 2), ("c3", 9, 2)):
        saver.load(ckpt_id=ckpt_id)
        assert (model.weight.item(), value.state) == (weight, {"n": n})


def test_the_pt_files_load_with_plain_torch(tmp_path):
    model, optim = trained()
    saver = Saver(model, optim, str(tmp_path))
    saver.register_for_checkpointing("lr", np.float64(0.5))
    saver.register_for_checkpointing("dense", torch.optim.Adam(model.top.parameters()))
    saver.register_io_state("data", Value({"offset": np.int64(7), "perm": np.arange(3)}))
    saver.save("c")

    def load(name):
        return torch.load(tmp_path / "c" / name, weights_only=True)

    assert {name: bits(value) for name, value in load("model.pt").items()} == tensors(model)
    assert load("extra.pt")["lr"] == 0.5
    assert set(load("extra.pt")) == {"lr", "dense", "sparse_optim"}
    assert load("io_state_0.pt")["data"]["offset"] == 7
    assert load("io_state_0.pt")["data"]["perm"].tolist() == [0, 1, 2]
    assert set(load("rng_0.pt")) == {"torch", "cuda", "numpy", "python"}


def test_plain_values_come_back_as_they_were_saved_of_the_last_load_that_took_them(tmp_path):
    saver = Saver(*trained(), str(tmp_path))
    saver.register_for_checkpointing("conf", {"dims": [1, 2], "name": "x"})
    saver.register_for_checkpointing("mean", np.array([1.0, 2.0]))
    assert saver.get_extra_data("conf") == {"dims": [1, 2], "name": "x"}
    saver.save("c")
    other = Saver(*trained(1), str(tmp_path))
    other.load(load_conf={"load": ["sparse", "sparse_opt"]})
    for name in ("mean", "sparse_optim"):
        assert other.get_extra_data(name) is None
    other.register_for_checkpointing("conf", None)
    other.load()
    other.load(load_conf={"load": ["dense"]})
    assert other.get_extra_data("conf") == {"dims": [1, 2], "name": "x"}
    assert other.get_extra_data("mean").tolist() == [1.0, 2.0], "not registered, but in the checkpoint"
    assert other.get_extra_data("absent") is None
    other.save("d")
    assert torch.load(tmp_path / "d" / "extra.pt")["conf"] == {"dims": [1, 2], "name": "x"}


class Own:
    pass


def failed_save(output_dir, before):
    """Return the timeline, after making sure that it has grown by the line of a failed save."""
    timeline = (output_dir / "timeline.jsonl").read_bytes()
    assert timeline.startswith(before["timeline.jsonl"])
    (line,) = timeline.removeprefix(before["timeline.jsonl"]).splitlines()
    assert json.loads(line)["error"]
    return {"timeline.jsonl": timeline}


@mostly_slow()
@pytest.mark.parametrize("bad", [defaultdict(int), Own(), [Own()], np.array(["x"]), {Own: 1}, lambda: 0])
@pytest.mark.parametrize("kind", ["register_for_checkpointing", "register_io_state"])
def test_what_could_not_be_loaded_back_raises_at_save_and_leaves_a_line_in_the_timeline_alone(tmp_path, kind, bad):
    value = Value({"good": 1})
    saver = Saver(*trained(), str(tmp_path))
    getattr(saver, kind)("obj", value)
    saver.save("c1")
    before = tree(tmp_path)
    value.state = {"good": 1, "bad": bad}
    with pytest.raises(ValueError, match=r"'obj'\['bad'\]"):
        saver.save("c2")
    assert tree(tmp_path) == before | failed_save(tmp_path, before)
    value.state = {"good": 2}
    saver.save("c2")
    assert checkpoints(tmp_path) == ["c2"]


def test_an_id_that_none_can_have_or_that_is_committed_is_refused_unless_it_is_to_be_overwritten(tmp_path):
    model = nn.Linear(1, 1)
    saver = Saver(model, output_dir=str(tmp_path))
    for ckpt_id in ("", None, 3, "x" * 201, "checkpoint"):
        with pytest.raises(ValueError, match="checkpoint id"):
            saver.save(ckpt_id)
    assert tree(tmp_path) == {}
    with pytest.raises(ValueError, match="is reserved by the format"):
        saver.save("manifest.json")
    saver.save("c")
    before = tree(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"'c' is committed already, in c/; .* overwrite=True"):
        saver.save("c")
    assert tree(tmp_path) == before | failed_save(tmp_path, before)
    with torch.no_grad():
        model.weight.fill_(5)
    saver.save("c", overwrite=True)
    assert checkpoints(tmp_path) == ["c.1"]
    saver.load(ckpt_id="c")
    assert model.weight.item() == 5


def test_tensors_in_any_memory_order_come_back_and_do_not_drag_the_storage_they_are_a_view_of_into_the_file(tmp_path):
    def model():
        made, big = nn.Module(), torch.randn(1000, 1000)
        for name, value in {
            **{"row": big[3], "column": big[:, 5], "corner": big[:2, :2].t(), "wide": torch.ones(1).expand(4)},
            "image": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "matrix": torch.randn(3, 4).t(),
            "conj": torch.randn(3, dtype=torch.complex64).conj(),
        }.items():
            made.register_buffer(name, value)
        return made

    first, second = model(), model()
    strides = {name: value.stride() for name, value in second.state_dict().items()}
    Saver(first, output_dir=str(tmp_path)).save("c")
    assert (tmp_path / "c" / "model.pt").stat().st_size < 20_000
    saved = torch.load(tmp_path / "c" / "model.pt")
    Saver(second, output_dir=str(tmp_path)).load()
    for name, value in first.state_dict().items():
        assert torch.equal(saved[name], value)
        assert torch.equal(second.state_dict()[name], value)
        assert second.state_dict()[name].stride() == strides[name] == value.stride()


class WithExtraState(nn.Linear):
    def __init__(self, extra):
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "fresh"), [({"a": [1, "x"]}, None), (torch.ones(3), torch.ones(5)), (torch.ones(3), None)]
)
def test_tied_weights_are_written_once_and_the_extra_state_of_modules_comes_back_in_any_shape(tmp_path, saved, fresh):
    def model(extra):
        made = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False), WithExtraState(extra))
        made[1].weight = made[0].weight
        return made

    first, second = model(saved), model(fresh)
    Saver(first, output_dir=str(tmp_path)).save("c")
    assert (tmp_path / "c" / "model.pt").stat().st_size < 60_000
    Saver(second, output_dir=str(tmp_path)).load()
    assert second[1].weight is second[0].weight
    assert torch.equal(second[0].weight, first[0].weight)
    assert second[2].extra is saved or str(second[2].extra) == str(saved)


# wrappers


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_in_ddp_and_one_without_load_each_other(tmp_path, process_group):
    model, optim = trained()
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(torch.arange(4), torch.arange(4)).sum().backward()
    Saver(wrapped, optim, str(tmp_path / "wrapped")).save("c")
    plain, plain_optim = trained(1)
    Saver(plain, plain_optim, str(tmp_path / "wrapped")).load()
    assert tensors(plain) == tensors(model)
    assert tables(plain) == tables(model)

    Saver(plain, plain_optim, str(tmp_path / "plain")).save("c")
    third, third_optim = trained(2)
    Saver(nn.parallel.DistributedDataParallel(third), third_optim, str(tmp_path / "plain")).load()
    assert tensors(third) == tensors(model)
    assert tables(third) == tables(model)


@mostly_slow()
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda m: torch.compile(nn.DataParallel(m))])
def test_wrappers_leave_no_trace_in_the_names(tmp_path, wrap):
    model = trained()[0]
    Saver(wrap(model), output_dir=str(tmp_path)).save("c")
    assert set(torch.load(tmp_path / "c" / "model.pt")) == set(tensors(model))
    other = trained(1)[0]
    Saver(wrap(other), output_dir=str(tmp_path)).load()
    assert tensors(other) == tensors(model)


class Wrapper(nn.Module):
    """A wrapper that is none of torch's."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_the_prefix_of_a_wrapper_is_stripped_and_added(tmp_path):
    first, second, third = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    Saver(Wrapper(first), output_dir=str(tmp_path / "a")).save("c")
    Saver(second, output_dir=str(tmp_path / "a")).load()
    Saver(second, output_dir=str(tmp_path / "b")).save("c")
    Saver(Wrapper(third), output_dir=str(tmp_path / "b")).load()
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.weight, third.weight)


# which checkpoint


def test_a_load_takes_the_newest_checkpoint_or_the_one_that_is_named(tmp_path):
    model = nn.Linear(1, 1)
    saver = Saver(model, output_dir=str(tmp_path / "own"), max_keep=None)
    for n in (10, 9, 100):  # the order of saves, not of names or numbers
        with torch.no_grad():
            model.weight.fill_(n)
        saver.save(f"c{n}")

    def loaded(saver, **kwargs):
        [source] = saver.load(**kwargs).sources
        return source.rpartition("/")[2], saver.model.weight.item()

    other = Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "other"))
    own = str(tmp_path / "own")
    assert loaded(saver) == ("c100", 100)
    assert loaded(saver, ckpt_id="c9") == ("c9", 9)
    assert loaded(other, ckpt_path=own) == ("c100", 100)
    assert loaded(other, ckpt_path=own, ckpt_id="c10") == ("c10", 10)
    assert loaded(other, ckpt_path=f"{own}/c9", direct_path=True) == ("c9", 9)
    assert loaded(other, ckpt_path=f"{own}/c9/", direct_path=True) == ("c9", 9)


def test_a_checkpoint_that_is_not_there_is_named_and_so_are_those_that_are(tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    for conf in ({"load": [3]}, {"lod": []}, {"exclude": "sparse"}, ["sparse"], {"path": "x"}):
        with pytest.raises(LoadConfError):  # before anything is read, and not CheckpointNotFoundError
            saver.load(load_conf=conf)
    for kwargs in ({"ckpt_path": "x", "ckpt_id": "y"}, {"ckpt_id": "y"}):
        with pytest.raises(ValueError, match="direct_path=True needs ckpt_path"):
            saver.load(direct_path=True, **kwargs)
    with pytest.raises(CheckpointNotFoundError, match="found no committed checkpoint"):
        saver.load()
    saver.save("here")
    with pytest.raises(FileNotFoundError, match="no committed checkpoint 'there'; there are 'here'"):
        saver.load(ckpt_id="there")
    with pytest.raises(CheckpointNotFoundError, match=r"no manifest.json"):
        saver.load(ckpt_path=str(tmp_path), direct_path=True)


# load_conf

GROUPS = ("sparse", "dense", "extra", "sparse_opt", "io_state")


def observed(model, optim, value, data):
    """Return the state of each group."""
    slots = {name: {k: v for k, v in t.items() if k.startswith("sparse_")} for name, t in tables(model).items()}
    rows = {name: {k: v for k, v in t.items() if not k.startswith("sparse_")} for name, t in tables(model).items()}
    return {
        "sparse": rows,
        "dense": tensors(model),
        "extra": value.state,
        "sparse_opt": (optim.state_dict(), slots),
        "io_state": data.state,
    }


@mostly_slow()
@pytest.mark.parametrize("chosen", [c for n in (1, 0, 2, 3, 4, 5) for c in combinations(GROUPS, n)], ids=" ".join)
def test_each_group_is_loaded_independently_of_the_others(tmp_path, chosen):
    def build(seed, url):
        # both know the same ids, so that the slots of the one fit the rows of the other
        model, optim = trained(seed, steps=0)
        for table in model.tables:
            table(torch.arange(20)).sum().backward()
        optim.param_groups[0]["lr"] = 0.1 + seed
        for _ in range(seed + 1):
            optim.step()
            (torch.cat([t(torch.arange(20)) for t in model.tables]) * (seed + 2)).sum().backward()
        optim.zero_grad()
        value, data = Value({"seed": seed}), Value({"seed": seed})
        saver = Saver(model, optim, url)
        saver.register_for_checkpointing("v", value)
        saver.register_io_state("d", data)
        return saver, (model, optim, value, data)

    saver, source = build(0, str(tmp_path))
    saver.save("c")
    loader, target = build(1, str(tmp_path))
    before, there = observed(*target), observed(*source)
    assert all(before[group] != there[group] for group in GROUPS)
    loader.load(load_conf={"load": list(chosen)})
    after = observed(*target)
    for group in set(GROUPS) - {"sparse_opt"}:
        assert after[group] == (there if group in chosen else before)[group], group
    optimizer, slots = after["sparse_opt"]
    if "sparse_opt" in chosen:
        assert (optimizer, slots) == there["sparse_opt"]
    elif "sparse" in chosen:  # new rows start at the initial value of their slots, and their tables at step 0
        assert not any(any(slot) for table in slots.values() for slot in table.values())
        assert optimizer == {**before["sparse_opt"][0], "state": {}}
    else:
        assert (optimizer, slots) == before["sparse_opt"]


def test_a_name_that_nothing_has_is_refused_and_nothing_changes(tmp_path):
    Saver(*trained(), str(tmp_path)).save("c")
    model, optim = trained(1)
    before = tensors(model), tables(model), optim.state_dict()
    for key in ("load", "exclude"):
        with pytest.raises(LoadConfError, match=r"'dens' .* did you mean 'dense'"):
            Saver(model, optim, str(tmp_path)).load(load_conf={key: ["dens"]})
    assert (tensors(model), tables(model), optim.state_dict()) == before


def test_load_by_config_takes_an_output_dir_or_a_checkpoint(tmp_path):
    model, optim = trained()
    source = Saver(model, optim, str(tmp_path / "a"), max_keep=None)
    source.save("c1")
    old = tables(model)
    model.users.insert(torch.tensor([999]), torch.ones(1, 4))
    source.save("c2")
    other, other_optim = trained(1)
    saver = Saver(other, other_optim, str(tmp_path / "b"))
    report = saver.load_by_config({"path": str(tmp_path / "a"), "load": ["sparse"]})
    assert report.sources == (str(tmp_path / "a" / "c2"),)
    assert report.rows_taken == {table.name: len(table) for table in model.tables}
    assert len(other.users) == len(model.users)
    assert saver.load_by_config({"path": str(tmp_path / "a" / "c1")}).sources == (str(tmp_path / "a" / "c1"),)
    assert tables(other) == old
    with pytest.raises(LoadConfError, match="'path'"):
        saver.load_by_config({"load": ["sparse"]})


# what does not fit


def test_strict_false_loads_what_fits_by_name(tmp_path, caplog):
    saved = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1), "t": HashTable(1, name="gone")})
    live = nn.ModuleDict({"a": nn.Linear(1, 1), "c": nn.Linear(1, 1), "t": HashTable(1, name="new")})
    Saver(saved, output_dir=str(tmp_path)).save("c")
    kept = live["c"].weight.item()
    saver = Saver(live, output_dir=str(tmp_path))
    with pytest.raises(StateMismatchError) as caught:
        saver.load()
    assert caught.value.missing == ["new", "c.bias", "c.weight"]
    assert sorted(caught.value.unexpected) == ["b.bias", "b.weight", "gone"]
    saver.load(load_conf={"strict": False})
    assert live["a"].weight.item() == saved["a"].weight.item()
    assert live["c"].weight.item() == kept
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(any(f"'{name}'" in message for message in messages) for name in ("new", "gone", "c.bias", "b.bias"))


def test_all_that_does_not_fit_is_named_at_once_and_nothing_changes(tmp_path):
    class Model(nn.Module):
        def __init__(self, *, dim, dtype, width, **more):
            super().__init__()
            self.t, self.u = HashTable(dim, name="t"), HashTable(2, name="u", dtype=dtype)
            self.top, self.norm = nn.Linear(width, 1), nn.Linear(1, 1).to(dtype)
            self.t(torch.arange(5))
            for name, module in more.items():
                self.add_module(name, module)

    saved = Model(dim=2, dtype=torch.float32, width=2, old=nn.Linear(1, 1), gone=HashTable(1, name="gone"))
    live = Model(dim=3, dtype=torch.float64, width=3, new=nn.Linear(1, 1), come=HashTable(1, name="come"))
    value = Value("before")
    Saver(saved, OPTIMIZERS["adam"]([saved.t, saved.u]), str(tmp_path)).save("c")
    optim = OPTIMIZERS["adam"]([live.t, live.u])
    saver = Saver(live, optim, str(tmp_path))
    saver.register_for_checkpointing("v", value)
    before = (tensors(live), table_state(live.t), optim.state_dict(), tree(tmp_path))
    with pytest.raises(StateMismatchError) as caught:
        saver.load()
    error = caught.value
    assert error.missing == ["come", "new.bias", "new.weight"]
    assert sorted(error.unexpected) == ["gone", "old.bias", "old.weight"]
    slots = ("embedding", "sparse_adam_exp_avg", "sparse_adam_exp_avg_sq")
    assert set(error.mismatched) == {
        *(f"{table}@{slot}" for table in ("t", "u") for slot in slots),
        *("top.weight", "norm.weight", "norm.bias"),
    }
    assert error.mismatched["t@embedding"] == ("float32 (2,)", "float32 (3,)")
    assert error.mismatched["u@embedding"] == ("float32 (2,)", "float64 (2,)")
    assert error.mismatched["top.weight"] == ("float32 (1, 2)", "float32 (1, 3)")
    assert all(repr(name) in str(error) for name in (*error.missing, *error.unexpected, *error.mismatched))
    assert "strict" in str(error)
    assert (tensors(live), table_state(live.t), optim.state_dict(), tree(tmp_path)) == before
    assert value.state == "before"


def test_tables_of_another_optimizer_keep_ids_and_embeddings_and_start_their_slots_fresh(tmp_path, caplog):
    saved, saved_optim = trained(optimizer="adam")
    Saver(saved, saved_optim, str(tmp_path)).save("c")
    model, optim = trained(1, optimizer="adagrad")
    lr = optim.param_groups[0]["lr"]
    report = Saver(model, optim, str(tmp_path)).load()
    for table, other in zip(model.tables, saved.tables, strict=True):
        assert sorted(table.ids().tolist()) == sorted(other.ids().tolist())
        assert torch.equal(table.lookup(other.ids())[0], other.embeddings())
        assert set(table.slots) == {"sparse_adagrad_sum"}
        assert torch.equal(table.slots["sparse_adagrad_sum"], torch.full((len(table), 4), 0.1))
    assert tensors(model) == tensors(saved)
    assert optim.state_dict()["state"] == {}
    assert optim.param_groups[0]["lr"] == lr
    fresh = {item.name.text: item.reason for item in report.fresh if item.name.group != "global_step"}
    assert set(fresh) == {"sparse_optim", "item@sparse_adagrad_sum", "user/1@sparse_adagrad_sum"}
    assert "sparse_adam_exp_avg" in fresh["sparse_optim"]
    warnings = " ".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert all(repr(name) in warnings for name in fresh)
    model(torch.arange(5), torch.arange(5)).sum().backward()
    optim.step()


@pytest.mark.parametrize("kind", ["register_for_checkpointing", "register_io_state"])
def test_an_object_that_refuses_its_state_stops_the_load_before_tables_and_tensors_change(tmp_path, kind):
    class Refusing(Value):
        def load_state_dict(self, state):
            if state != {"mine": 1}:
                raise KeyError("parameter group")

    model, optim = trained()
    saver = Saver(model, optim, str(tmp_path))
    saver.register_for_checkpointing("other", Value({"n": 1}))
    saver.register_io_state("other data", Value({"n": 1}))
    getattr(saver, kind)("picky", Value({"n": 1}))
    saver.save("c")
    live, live_optim = trained(1)
    loader, others = Saver(live, live_optim, str(tmp_path)), (Value({"n": 2}), Value({"n": 2}))
    loader.register_for_checkpointing("other", others[0])
    loader.register_io_state("other data", others[1])
    getattr(loader, kind)("picky", Refusing({"mine": 1}))
    before = tensors(live), tables(live), live_optim.state_dict()
    with pytest.raises(StateMismatchError, match=r"'picky'[\s\S]*parameter group"):
        loader.load()
    assert (tensors(live), tables(live), live_optim.state_dict()) == before
    given = [1, 2] if kind == "register_for_checkpointing" else [1, 1]
    assert [value.state["n"] for value in others] == given, "nobody asks an object for what it had"


def test_a_dataset_that_cannot_tell_where_it_is_before_it_begins_is_loaded_and_one_not_saved_is_refused(tmp_path):
    class Late(Value):
        def state_dict(self):
            return {"position": self.state["position"]}

    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    saver.register_io_state("d", Late({"position": 5}))
    saver.save("c")
    loader, late = Saver(nn.Linear(1, 1), output_dir=str(tmp_path)), Late(None)
    loader.register_io_state("d", late)
    loader.load()
    assert late.state == {"position": 5}
    late.state = {"position": 6}
    Forge(tmp_path / "c").save("io_state_0.pt", {})
    with pytest.raises(CorruptCheckpointError, match=r"io_state_0.pt at 'd'"):
        loader.load()
    assert late.state == {"position": 6}


def test_a_sparse_optimizer_that_was_not_saved_starts_afresh_and_is_reported(tmp_path, caplog):
    model = trained(optimizer="sgd")[0]
    Saver(model, output_dir=str(tmp_path)).save("c")
    other, optim = trained(1)
    Saver(other, optim, str(tmp_path)).load()
    assert optim.state_dict()["state"] == {}, "as the slots do"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for name in ("sparse_optim", "item@sparse_adamw_exp_avg", "user/1@sparse_adamw_exp_avg"):
        assert any(f"'{name}" in warning for warning in warnings), name
    assert not other.users.slots["sparse_adamw_exp_avg"].any()


def test_an_optimizer_of_tables_is_not_registered_but_given_to_the_saver(tmp_path):
    table = HashTable(2, name="t")
    saver = Saver(nn.ModuleDict({"t": table}), SparseAdagrad([table]), str(tmp_path))
    with pytest.raises(
        ValueError, match=r"'own' is an optimizer of tables, which the saver already saves: do not register it"
    ):
        saver.register_for_checkpointing("own", saver.sparse_optim)
    with pytest.raises(ValueError, match=r"'other' is an optimizer of tables.*pass it to Saver\(model, sparse_optim\)"):
        saver.register_for_checkpointing("other", SparseAdagrad([table]))
    with pytest.raises(ValueError, match=r"'both' is a JointOptimizer.*register its dense optimizer"):
        saver.register_for_checkpointing("both", JointOptimizer(saver.sparse_optim))
    saver.register_for_checkpointing("nothing", None)


# words and steps


def test_save_and_load_take_the_same_word_and_an_id_goes_before_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, other = nn.Linear(1, 1), nn.Linear(1, 1)
    Saver(other, output_dir="best").save("x")
    saver = Saver(own, output_dir="runs", max_keep=None)
    before = tensors(own)
    saver.save("best")
    own.weight.data.zero_()
    saver.load("best")
    assert tensors(own) == before
    saver.load("./best")
    assert tensors(own) == tensors(other)
    with pytest.raises(CheckpointNotFoundError, match=r"nor is it a checkpoint of .*; there are 'best'"):
        saver.load("nothing")
    saver.save("x")
    with pytest.raises(CheckpointNotFoundError, match=r"output dir has a checkpoint 'x': load\(ckpt_id='x'\) loads it"):
        saver.load("x", direct_path=True)
    with pytest.raises(CheckpointNotFoundError) as caught:
        saver.load("y", direct_path=True)
    assert "ckpt_id" not in str(caught.value)


def test_a_save_by_hand_inherits_the_step_of_the_manager_and_leaves_its_newest_checkpoint(tmp_path):
    model = nn.Linear(1, 1)
    saver = Saver(model, output_dir=str(tmp_path), max_keep=1)
    manager = CheckpointManager(saver, 2)
    for _ in range(3):
        manager.step()
    assert saver.save("best").step == 3
    assert saver.save("better").step == 3
    assert saver.save("named", step=7).step == 7
    assert checkpoints(tmp_path) == ["ckpt_2", "named"]
    manager.step()
    assert checkpoints(tmp_path) == ["ckpt_4"]
    saver.save("best")
    resumed = CheckpointManager(Saver(model, output_dir=str(tmp_path)), 2)
    assert resumed.restore() == 4
    assert resumed.restore(4) == 4


@pytest.mark.parametrize("register", ["register_io_state", "register_for_checkpointing"])
def test_what_is_registered_the_wrong_way_is_told_the_right_one(tmp_path, register):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    sgd = torch.optim.SGD(saver.model.parameters())
    for args, said in (
        (("g", torch.Generator()), r"'g' is a torch.Generator, .*generator.get_state\(\)"),
        ((sgd, "x"), "a SGD cannot be registered as a name: pass the name, a string, first"),
    ):
        with pytest.raises(ValueError, match=said):
            getattr(saver, register)(*args)
    getattr(saver, register)("x", Value({}))
    with pytest.raises(ValueError, match="'x' is registered already"):
        getattr(saver, register)("x", Value({}))
