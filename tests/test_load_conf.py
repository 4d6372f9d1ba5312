"""What a load takes is checked in full before anything is read."""

import pytest

from recckpt.errors import LoadConfError
from recckpt.load_conf import GROUPS, parse_entry, parse_load_conf


@pytest.mark.parametrize(
    ("conf", "groups"),
    [
        (None, GROUPS),
        ({}, GROUPS),
        ({"load": ["*"]}, GROUPS),
        ({"load": []}, ()),
        ({"load": ["dense"]}, ("dense",)),
        ({"load": ("sparse", "extra")}, ("sparse", "extra")),
        ({"exclude": ["sparse_opt"]}, ("sparse", "dense", "extra", "io_state")),
        ({"load": ["*", "dense"], "exclude": ["*"]}, ()),
        ({"load": ["dense"], "exclude": ["sparse"]}, ("dense",)),
        ({"load": ["dense", "extra"], "exclude": ["dense"]}, ("extra",)),
    ],
)
def test_a_selection_is_load_minus_exclude(conf, groups):
    selection = parse_load_conf(conf)
    assert selection.groups == frozenset(groups)
    assert selection.strict


def test_strict_can_be_given_up():
    assert not parse_load_conf({"strict": False}).strict


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"lod": ["dense"]}, r"unknown key 'lod'; allowed are load, exclude, strict; did you mean 'load'\?"),
        ({"load": ["dens"]}, r"\['load'\]: unknown group 'dens'; allowed are sparse, .* did you mean 'dense'\?"),
        ({"exclude": ["sparse_optim"]}, r"\['exclude'\]: unknown group .* did you mean 'sparse_opt'\?"),
        ({"exclude": "dense"}, r"\['exclude'\]: found 'dense', expected a list"),
        ({"load": None}, "expected a list of group names"),
        ({"load": [1]}, "expected a list of group names"),
        ({"load": {"dense"}}, "expected a list of group names"),
        ({"strict": 1}, r"\['strict'\]: found 1, expected true or false"),
        ({"path": "x"}, "unknown key 'path'"),
        ({1: 2}, "unknown key 1"),
        (["dense"], "found list, expected a dict"),
        ("dense", "found str, expected a dict"),
    ],
)
def test_what_means_nothing_is_refused_with_what_is_allowed(conf, message):
    with pytest.raises(LoadConfError, match=message):
        parse_load_conf(conf)


def test_a_bank_entry_leaves_dataset_positions_out_unless_they_are_named():
    assert "io_state" not in parse_entry({"path": "x"}).selection
    assert "io_state" not in parse_entry({"path": "x", "load": ["*"]}).selection
    assert "io_state" in parse_entry({"path": "x", "load": ["*", "io_state"]}).selection
    assert parse_entry({"path": "x", "load": ["dense"], "strict": False}).selection.strict is False


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({}, "'path' must be"),
        ({"path": ""}, "'path' must be"),
        ({"path": 3}, "'path' must be .* found 3"),
        ({"path": "x", "exlude": []}, "did you mean 'exclude'"),
        ({"path": "x", "load": 5}, "expected a list"),
        ("x", "found str, expected a dict"),
    ],
)
def test_a_bank_entry_that_means_nothing_is_refused(conf, message):
    with pytest.raises(LoadConfError, match=message):
        parse_entry(conf)
