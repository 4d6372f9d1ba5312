"""What a load takes, as people write it, is checked in full before anything is read."""

from pathlib import Path

import pytest

from recckpt.errors import LoadConfError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import Name, slot_name, state_name
from recckpt.load.conf import Entry, parse_bank, parse_load_conf
from recckpt.sparse.files.row_filter import RowFilter

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


def test_only_what_was_won_before_is_wanted_again():
    entry = Entry(only=frozenset({MOMENT}))
    assert [name for name in NAMES if entry.wants(name)] == [MOMENT]


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


def test_all_faults_of_an_entry_come_at_once():
    with pytest.raises(LoadConfError, match="3 problems; nothing was loaded") as caught:
        parse_load_conf({"lod": [], "strict": 1, "load": "x"})
    assert len(caught.value.problems) == 3


# banks


def parsed(bank):
    problems = []
    return parse_bank(bank, problems), problems


def test_an_entry_has_a_path_and_the_defaults_of_the_table():
    [entry], problems = parsed([{"path": "x"}])
    assert not problems
    assert entry == Entry(label="bank[0]", path="x")
    assert (entry.hashtable_clear, entry.ignore_error, entry.is_dynamic, entry.strict) == (True, False, False, None)
    assert entry.where == RowFilter()
    assert parsed([{"path": Path("a/b")}])[0][0].path == "a/b"


def test_an_entry_to_skip_is_left_out_and_the_others_keep_their_numbers():
    entries, problems = parsed([{"path": "x", "skip": True}, {"path": "y", "skip": False}])
    assert [(entry.label, entry.path) for entry in entries] == [("bank[1]", "y")]
    assert not problems


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
def test_a_bank_entry_that_means_nothing_is_named_by_its_number(conf, message):
    _, [problem] = parsed([{"path": "fine"}, conf])
    assert problem.startswith("bank[1]")
    assert message in problem


@pytest.mark.parametrize("bank", [None, 3, "x", {"path": "x"}])
def test_a_bank_is_a_list(bank):
    assert parsed(bank) == ([], [f"bank: found {type(bank).__name__}, expected a list of dicts"])


def test_an_empty_bank_is_one():
    assert parsed([]) == ([], [])
