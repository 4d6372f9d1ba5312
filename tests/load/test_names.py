"""What a pattern means among the names of a checkpoint."""

import pickle
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.load.names import GROUPS, Name, Pattern, slot_name, state_name, wildcard_regex, wildcards

NAMES = [
    slot_name("user", "id"),
    slot_name("user", "embedding"),
    slot_name("user", "frequency"),
    slot_name("user", "sparse_adam_exp_avg"),
    slot_name("user", "sparse_adam_exp_avg_sq"),
    slot_name("user_2", "id"),
    slot_name("user_2", "embedding"),
    Name("sparse_opt", SPARSE_OPTIM),
    Name("dense", "user.weight"),
    Name("dense", "top.0.weight"),
    Name("dense", "top.0.bias"),
    Name("extra", "lr"),
    Name("io_state", "reader"),
    Name("global_step", "global_step"),
]


def meant(text):
    return {name.text for name in NAMES if Pattern(text).matches(name)}


def all_of(group):
    return {name.text for name in NAMES if name.group == group}


def test_a_slot_of_the_sparse_optimizer_is_of_its_group_and_any_other_of_its_table():
    assert slot_name("t", "sparse_adam_exp_avg").group == "sparse_opt"
    assert {slot_name("t", slot).group for slot in ("id", "embedding", "frequency")} == {"sparse"}
    assert (slot_name("a@b", "id").table, slot_name("a@b", "id").slot) == ("a@b", "id")


def test_only_slots_have_a_table():
    for name in NAMES:
        assert bool(name.table) == bool(name.slot) == name.is_slot == ("@" in name.text)
    assert Name("dense", "a@b").table == ""


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_means_what_belongs_to_it(group):
    assert meant(group) == all_of(group)


def test_a_group_goes_before_whatever_else_is_called_so():
    assert not Pattern("dense").matches(slot_name("dense", "embedding"))
    assert not Pattern("extra").matches(Name("dense", "extra"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", {name.text for name in NAMES}),
        ("user", {name.text for name in NAMES if name.table == "user"}),
        ("user*", {name.text for name in NAMES if name.text.startswith("user")}),
        ("user@*", {name.text for name in NAMES if name.table == "user"}),
        ("user@*avg*", {"user@sparse_adam_exp_avg", "user@sparse_adam_exp_avg_sq"}),
        ("user@*avg", {"user@sparse_adam_exp_avg"}),
        ("*avg*", {"user@sparse_adam_exp_avg", "user@sparse_adam_exp_avg_sq"}),
        ("*@embedding", {"user@embedding", "user_2@embedding"}),
        ("*@id", {"user@id", "user_2@id"}),
        ("user@embedding", {"user@embedding"}),
        ("top.*.weight", {"top.0.weight"}),
        ("*.weight", {"user.weight", "top.0.weight"}),
        ("*weight", {"user.weight", "top.0.weight"}),
        ("t*p*t", {"top.0.weight"}),
        ("sparse_optim", {"sparse_optim"}),
        ("lr", {"lr"}),
        ("User", set()),
        ("use", set()),
        ("ser_2", set()),
        ("top.0", set()),
    ],
)
def test_a_pattern_matches_whole_names_with_any_run_of_characters_for_a_star(pattern, names):
    assert meant(pattern) == names


def test_a_pattern_of_tables_does_not_mean_the_ids_of_all_because_they_end_alike():
    assert meant("*id") == set()
    assert Pattern("*id").matches(slot_name("item_id", "embedding"))
    assert Pattern("*id").matches(slot_name("item_id", "id"))


@pytest.mark.parametrize("table", ["a.b", "a+b", "(a", "[x", "x]", "line\nbreak", "a@b", "表", "a\\d", "^$"])
def test_nothing_but_the_wildcards_is_special(table):
    assert Pattern(table).matches(slot_name(table, "embedding"))
    assert Pattern("*").matches(slot_name(table, "embedding"))
    assert Pattern(f"{table}@*").matches(slot_name(table, "embedding"))
    assert Pattern(f"{table}*").matches(slot_name(f"{table}2", "id"))
    assert not Pattern(table).matches(slot_name("axb", "embedding"))


def test_what_names_one_thing_is_explicit():
    texts = ("t", "t@id", "*", "t*", "t?", "t[0]", "t[!0]", "t[", "t[]", "t[!]", "dense", "global_step")
    assert {text for text in texts if Pattern(text).is_explicit} == {"t", "t@id", "t[", "t[]", "t[!]"}


@given(st.text("ab[]!-*?\\", min_size=1, max_size=8), st.text("ab[]!-", max_size=6))
def test_patterns_are_those_of_fnmatch(pattern, name):
    assert bool(wildcard_regex(pattern).fullmatch(name)) == fnmatchcase(name, pattern)
    assert len(wildcards(pattern)) == wildcard_regex(pattern).groups
    assert bool(wildcards(pattern)) == (not Pattern(pattern).is_explicit)
    if name:
        meant = name == pattern or fnmatchcase(name, pattern)
        assert Pattern(pattern).matches(Name("dense", name)) == meant


def test_an_optimizer_is_a_registered_object_and_its_state_of_a_parameter_is_of_its_group():
    settings, state = Name("dense_opt", "adam"), state_name("top.weight", "adam")
    assert (settings.is_settings, settings.parameter, state.is_settings, state.parameter) == (
        True,
        "",
        False,
        "top.weight",
    )
    for pattern in ("dense_opt", "extra", "*"):
        assert Pattern(pattern).matches(settings)
        assert Pattern(pattern).matches(state)
    assert not Pattern("dense").matches(state)
    assert [text for text in ("*", "**", "a*", "dense") if Pattern(text).is_everything] == ["*", "**"]


def test_a_star_takes_as_much_as_it_can_or_as_little():
    assert wildcard_regex("*.*").fullmatch("a.b.c").groups() == ("a.b", "c")
    assert wildcard_regex("*.*", lazy=True).fullmatch("a.b.c").groups() == ("a", "b.c")


def test_names_cross_ranks():
    name = slot_name("t", "id")
    assert name.table == "t"
    assert pickle.loads(pickle.dumps((name, Pattern("t*")))) == (name, Pattern("t*"))
