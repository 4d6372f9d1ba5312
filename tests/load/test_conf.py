"""What a load takes, as people, other tools and RecIS write it, is checked in full before anything is read."""

import types
from collections import UserDict, UserList
from pathlib import Path

import pytest
import torch
from support.bank_runs import run, saved, slots_of, table, values_of
from torch import nn

from recckpt import CheckpointManager
from recckpt.errors import LoadConfError, StateMismatchError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import Name, slot_name, state_name
from recckpt.load.conf import Entry, parse_bank, parse_load_conf
from recckpt.policies.row_filter import RowFilter

ID, EMBEDDING, MOMENT = (slot_name("t", slot) for slot in ("id", "embedding", "sparse_m"))
NAMES = [
    *(ID, EMBEDDING, MOMENT),
    Name("sparse_opt", SPARSE_OPTIM),
    Name("dense", "top.weight"),
    state_name("top.weight", "adam"),
    Name("dense_opt", "adam"),
    Name("extra", "lr"),
    Name("extra", "train_epoch"),
    Name("io_state", "reader"),
    Name("global_step", "global_step"),
]
DENSE, POSITIONS = {"top.weight", "top.weight@adam"}, {"reader", "train_epoch"}
SPARSE, OPTIM = {"t@id", "t@embedding"}, {"t@sparse_m", "sparse_optim"}
EVERYTHING = {name.text for name in NAMES}
OF_A_RESUME = {*POSITIONS, "global_step", "sparse_optim", "adam"}
CONF = {
    "load": ["t*", "dense"],
    "exclude": ["*avg*"],
    "oname": [{"t": "u"}],
    "where": {"ids": [1, 2], "frequency": {"min": 1}},
    "on_mismatch": {"t": "cast"},
}


def wanted(conf, *, own=True):
    entry = parse_load_conf(conf, own=own)
    return {name.text for name in NAMES if entry.wants(name)}


@pytest.mark.parametrize(
    ("conf", "names"),
    [
        (None, EVERYTHING),
        ({}, EVERYTHING),
        ({"load": ["*"]}, EVERYTHING),
        ({"load": []}, {"global_step"}),
        ({"skip": True}, {"global_step"}),
        ({"load": ["dense"]}, DENSE | {"global_step"}),
        ({"load": ["top.*"]}, DENSE | {"global_step"}),
        ({"load": ["top.weight"]}, DENSE | {"global_step"}),
        ({"load": ["adam"]}, {"adam", "global_step"}),
        ({"load": ["dense_opt"]}, {"adam", "global_step"}),
        ({"load": ["top.weight@adam"]}, {"global_step"}),
        ({"exclude": ["dense"]}, EVERYTHING - DENSE),
        ({"exclude": ["dense_opt"]}, EVERYTHING - {"adam", "top.weight@adam"}),
        ({"exclude": ["ad*"]}, EVERYTHING - {"adam", "top.weight@adam"}),
        ({"exclude": ["extra"]}, EVERYTHING - {"adam", "top.weight@adam", "lr", "train_epoch"}),
        ({"exclude": ["top.*@adam"]}, EVERYTHING - {"top.weight@adam"}),
        ({"exclude": ["io_state"]}, EVERYTHING - POSITIONS),
        ({"load": ("sparse", "extra")}, SPARSE | {"lr", "train_epoch", "adam", "global_step"}),
        ({"load": ["t"]}, SPARSE | {"t@sparse_m", "global_step"}),
        ({"load": ["t@embedding"]}, SPARSE | {"global_step"}),
        ({"load": ["t@id"]}, {"t@id", "global_step"}),
        ({"load": ["t@embedding"], "exclude": ["t@id"]}, {"t@embedding", "global_step"}),
        ({"load": ["t@sparse_m"]}, {"t@sparse_m", "global_step"}),
        ({"exclude": ["sparse_opt"]}, EVERYTHING - OPTIM),
        ({"exclude": ["t@*m*"]}, EVERYTHING - {"t@sparse_m", "t@embedding"}),
        ({"exclude": ["t@sparse_*"]}, EVERYTHING - {"t@sparse_m"}),
        ({"exclude": ["sparse"]}, EVERYTHING - SPARSE),
        ({"exclude": ["global_step"]}, EVERYTHING - {"global_step"}),
        ({"exclude": ["io_state", "t"]}, {"sparse_optim", *DENSE, "adam", "lr", "global_step"}),
        ({"load": ["dense", "extra"], "exclude": ["*"]}, set()),
        ({"load": ["top.*"], "exclude": ["*.weight"]}, {"global_step"}),
    ],
)
def test_a_selection_is_load_minus_exclude(conf, names):
    assert wanted(conf) == names


@pytest.mark.parametrize(
    ("conf", "names"),
    [
        (None, EVERYTHING - OF_A_RESUME),
        ({"load": ["*"]}, EVERYTHING - OF_A_RESUME),
        ({"load": ["**"]}, EVERYTHING - OF_A_RESUME),
        ({"load": ["*", "global_step"]}, EVERYTHING - OF_A_RESUME | {"global_step"}),
        ({"load": ["*", "sparse_optim"]}, EVERYTHING - OF_A_RESUME | {"sparse_optim"}),
        ({"load": ["*", "adam"]}, EVERYTHING - OF_A_RESUME | {"adam"}),
        ({"load": ["sparse_opt", "dense_opt"]}, {"t@sparse_m"}),
        ({"load": ["io_state"]}, POSITIONS),
        ({"load": ["train_epoch"]}, {"train_epoch"}),
        ({"load": ["reader"]}, {"reader"}),
        ({"load": ["read*"]}, {"reader"}),
        ({"load": ["*o*"]}, {*DENSE, "train_epoch"}),
        ({"load": ["global_*"]}, set()),
        ({"load": ["global_step", "io_state"], "exclude": ["reader"]}, {"global_step", "train_epoch"}),
        ({"load": []}, set()),
    ],
)
def test_step_positions_and_settings_of_optimizers_of_another_run_are_taken_where_they_are_named(conf, names):
    assert wanted(conf, own=False) == names


@pytest.mark.parametrize(
    ("conf", "groups"),
    [
        (None, {"dense", "sparse"}),
        ({}, set()),
        ({"load": ["*"]}, set()),
        ({"load": ["dense"]}, {"dense"}),
        ({"load": ["dense", "*"]}, {"dense"}),
        ({"load": ["top.*"]}, set()),
        ({"load": ["dense"], "strict": False}, set()),
        ({"strict": True}, {"dense", "sparse"}),
    ],
)
def test_names_match_both_ways_where_dense_is_named(conf, groups):
    assert parse_load_conf(conf).strict_groups == groups


@pytest.mark.parametrize(
    ("value", "action"),
    [
        ("skip", "skip"),
        ({"t": "cast"}, "cast"),
        ({"t@embedding": "resize"}, "resize"),
        ({"sparse": "resize"}, "resize"),
        ({"u": "skip"}, "error"),
        ({"*": "skip", "t": "cast"}, "cast"),
        ({"t*": "skip", "*": "cast"}, "skip"),
        ({}, "error"),
    ],
)
def test_what_is_said_of_one_name_goes_before_what_is_said_of_many(value, action):
    assert parse_load_conf({"on_mismatch": value}).action(EMBEDDING) == action


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"lod": ["dense"]}, r"unknown key 'lod'; allowed are load, exclude, .*; did you mean 'load'\?"),
        ({"path": "x"}, "unknown key 'path'"),
        ({1: 2}, "unknown key 1"),
        ({"exclude": "dense"}, r"\['exclude'\]: found 'dense', expected a list of names"),
        ({"load": None}, "expected a list of names"),
        ({"load": [1]}, "expected a list of names"),
        ({"load": [""]}, "expected a list of names"),
        ({"load": {"dense", 1}}, "expected a list of names"),
        ({"strict": 1}, r"\['strict'\]: found 1, expected true or false"),
        ({"convert": 1}, r"\['convert'\]: found 1, expected true or false"),
        *(
            ({"load": value}, "expected a list of names")
            for value in (b"dense", {b"dense"}, 3, [b"dense"], {"dense": 1})
        ),
        ({"hashtable_clear": "no"}, r"\['hashtable_clear'\]: found 'no', expected true or false"),
        ({"on_mismatch": "ignore"}, "found 'ignore', expected one of error, skip, cast, resize"),
        ({"on_mismatch": "resise"}, "did you mean 'resize'"),
        ({"on_mismatch": {"t": "casts"}}, "did you mean 'cast'"),
        ({"on_mismatch": {"t": ["skip"]}}, "expected one of error"),
        ({"on_mismatch": 3}, "expected one of error, skip, cast, resize, or a dict"),
        ({"oname": {"a*": "b"}}, r"\['oname'\]: 'a\*': 'b': the two sides need the same wildcards in the same order"),
        ({"where": "x"}, r"\['where'\]: found 'x', expected a dict"),
        (["dense"], "found list, expected a dict"),
        ("dense", "found str, expected a dict"),
        (3, "found int, expected a dict"),
    ],
)
def test_what_means_nothing_is_refused_with_what_is_allowed(conf, message):
    with pytest.raises(LoadConfError, match=message):
        parse_load_conf(conf)
    with pytest.raises(LoadConfError, match="3 problems; nothing was loaded") as caught:
        parse_load_conf({"lod": [], "strict": 1, "load": "x"})
    assert len(caught.value.problems) == 3


def parsed(bank):
    problems = []
    return parse_bank(bank, problems), problems


def test_an_entry_has_a_path_and_the_defaults_of_the_table():
    [entry], problems = parsed([{"path": "x"}])
    assert not problems
    assert parsed([]) == ([], [])
    assert entry == Entry(label="bank[0]", path="x")
    assert (entry.hashtable_clear, entry.ignore_error, entry.is_dynamic, entry.strict) == (True, False, False, None)
    assert entry.where == RowFilter()
    assert parsed([{"path": Path("a/b")}])[0][0].path == "a/b"
    entries, problems = parsed([{"path": "x", "skip": True}, {"path": "y", "skip": False}])
    assert [(entry.label, entry.path) for entry in entries] == [("bank[1]", "y")], "the others keep their numbers"
    assert not problems
    entry = Entry(only=frozenset({MOMENT}))
    assert [name for name in NAMES if entry.wants(name)] == [MOMENT], "what was won before is wanted again"


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({}, "no 'path', expected a checkpoint or an output dir"),
        ({"path": ""}, "found '', expected a checkpoint or an output dir"),
        ({"path": 3}, "found 3, expected a checkpoint"),
        ({"path": None}, "found None"),
        ({"path": "x", "exlude": []}, "did you mean 'exclude'"),
        ("x", "found str, expected a dict"),
    ],
)
def test_a_bank_is_a_list_and_an_entry_that_means_nothing_is_named_by_its_number(conf, message):
    _, [problem] = parsed([{"path": "fine"}, conf])
    assert problem.startswith("bank[1]")
    assert message in problem
    for bank in (None, 3, "x", {"path": "x"}):
        assert parsed(bank) == ([], [f"bank: found {type(bank).__name__}, expected a list of dicts"])


def frozen(value):
    """Return nested configuration in mappings and sequences that are neither dicts nor lists."""
    if isinstance(value, dict):
        return types.MappingProxyType({key: frozen(item) for key, item in value.items()})
    return UserList(frozen(item) for item in value) if isinstance(value, list) else value


def of_omegaconf(value):
    return pytest.importorskip("omegaconf").OmegaConf.create(value)


@pytest.mark.parametrize("make", [of_omegaconf, frozen, UserDict])
def test_any_mapping_and_sequence_is_a_configuration(make):
    assert parse_load_conf(make(CONF)) == parse_load_conf(CONF)
    bank = [{"path": "a", **CONF}, {"path": "b", "skip": False, "where": [1]}]
    found, expected = ([], []), ([], [])
    assert parse_bank(make({"bank": bank})["bank"], found[0]) == parse_bank(bank, expected[0])
    assert found == expected


def test_a_bank_of_omegaconf_is_loaded_with_its_references(tmp_path):
    url = saved(tmp_path / "a", table("u", range(3), 2.0))
    made = of_omegaconf({"root": str(tmp_path), "bank": [{"path": "${root}/a", "oname": [{"t": "u"}]}]})
    t = table("t")
    manager = CheckpointManager(run(tmp_path / "own", t), 1)
    assert manager.load_model_bank(made.bank).sources == (f"{url}/c",)
    assert len(t) == 3
    t = table("t")
    run(tmp_path / "own", t).load(url, load_conf=of_omegaconf({"oname": {"t": "u"}, "load": ["t"]}))
    assert len(t) == 3


def test_the_call_of_recis_takes_a_path_and_the_rest_of_the_entry(tmp_path):
    url = saved(tmp_path / "a", table("t", [1], 2.0), value=3.0, top=nn.Linear(1, 1))
    for args, rows, weight in (
        ((url,), 1, 3.0),
        ((url, {"load": ["sparse"]}), 1, 0.0),
        ((url, {"load": ["*"], "exclude": ["sparse"], "strict": False}), 0, 3.0),
        ((tmp_path / "a", None), 1, 3.0),
    ):
        t, top = table("t"), nn.Linear(1, 1)
        saver = run(tmp_path / "own", t, top=top)
        saver.plan(*args)
        saver.load_by_config(*args)
        assert (len(t), top.weight.item()) == (rows, weight)
    for args in ((url, ["sparse"]), ({"path": url}, {"load": []}), ([{"path": url}], {"load": []})):
        with pytest.raises(LoadConfError, match="conf: found"):
            saver.load_by_config(*args)


@pytest.mark.parametrize(
    "oname", [[{"t@id": "u@id"}, {"t@embedding": "u@embedding"}], [{"*t@embedding": "*u@embedding"}]]
)
def test_a_rename_of_ids_and_embeddings_renames_the_table(tmp_path, oname):
    trained = table("u", range(3), 1.0)
    url = saved(tmp_path / "a", trained, table("t", [9], 9.0), optimizer="adam", steps=2)
    t = table("t")
    saver = run(tmp_path / "own", t, optimizer="adam")
    saver.load_by_config(url, {"load": ["t"], "oname": oname})
    assert (values_of(t), slots_of(t)) == (values_of(trained), slots_of(trained))
    assert saver.sparse_optim.state_dict()["state"] == {"t": {"step": 2}}


def test_the_objects_that_recis_counts_among_the_positions_are_left_with_them(tmp_path):
    def made(url, value):
        saver = run(url, table("t"), top=nn.Linear(1, 1))
        for name in ("train_window_io", "eval_window_io", "train_epoch", "note"):
            saver.register_for_checkpointing(name, torch.tensor(value))
        return saver

    made(tmp_path / "a", 5).save("c")

    def taken(**conf):
        saver = made(tmp_path / "own", 0)
        saver.load_by_config(str(tmp_path / "a"), conf)
        return {name for name in saver._extra if int(saver.get_extra_data(name)) == 5}

    assert taken(exclude=["io_state"]) == taken() == {"note"}
    assert taken(load=["io_state"]) == {"train_window_io", "eval_window_io", "train_epoch"}
    assert taken(load=["*", "train_epoch"]) == {"note", "train_epoch"}
    own = made(tmp_path / "a", 0)
    own.load()
    assert int(own.get_extra_data("train_epoch")) == 5


def test_a_misfit_of_a_bank_names_the_entry(tmp_path):
    urls = [saved(tmp_path / name, table(f"t{name}", [1], dim=6), top=nn.Linear(3, 1)) for name in "ab"]
    saver = run(tmp_path / "own", table("ta"), table("tb"), top=nn.Linear(3, 1))
    with pytest.raises(StateMismatchError) as caught:
        saver.load_by_config([{"path": urls[0]}, {"path": urls[1], "exclude": ["tb"]}])
    assert str(caught.value).startswith(
        f"bank[0] ({urls[0]}/c) does not fit the model:\n  'ta@embedding': found float32"
    )
    assert caught.value.mismatched == {"ta@embedding": ("float32 (6,)", "float32 (4,)")}
    with pytest.raises(StateMismatchError) as caught:
        saver.load_by_config([{"path": url} for url in urls])
    text = str(caught.value)
    assert text.startswith(f"bank[0] ({urls[0]}/c) and bank[1] ({urls[1]}/c) do not fit the model:")
    assert "'ta@embedding': found float32 (6,) in bank[0], expected" in text
    assert "'tb@embedding': found float32 (6,) in bank[1], expected" in text
    with pytest.raises(StateMismatchError, match=r"bank\[1\] .* does not fit the model:\n  missing"):
        saver.load_by_config([{"path": urls[0], "load": []}, {"path": urls[1], "strict": True}])
