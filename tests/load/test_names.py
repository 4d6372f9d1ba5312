"""What a pattern means among the names of a checkpoint, and what a name of the model is called in it (oname)."""

import pickle
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import (
    GROUPS,
    WILDCARD,
    Name,
    Pattern,
    slot_name,
    state_name,
    wildcard_regex,
)
from recckpt.load.conf import parse_renames

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
LISTS = {"a": "x", "b": "y"}, [{"a": "x"}, {"b": "y"}], ({"a": "x", "b": "y"},)  # rules are a dict or a list of dicts


def meant(text):
    return {name.text for name in NAMES if Pattern(text).matches(name)}


def all_of(group):
    return {name.text for name in NAMES if name.group == group}


def test_a_slot_of_the_sparse_optimizer_is_of_its_group_and_any_other_of_its_table():
    assert slot_name("t", "sparse_adam_exp_avg").group == "sparse_opt"
    assert {slot_name("t", slot).group for slot in ("id", "embedding", "frequency")} == {"sparse"}
    assert (slot_name("a@b", "id").table, slot_name("a@b", "id").slot) == ("a@b", "id")
    for name in NAMES:
        assert bool(name.table) == bool(name.slot) == name.is_slot == ("@" in name.text)
    assert Name("dense", "a@b").table == ""
    name = slot_name("t", "id")
    assert name.table == "t"
    assert pickle.loads(pickle.dumps((name, Pattern("t*")))) == (name, Pattern("t*")), "names cross ranks"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_means_what_belongs_to_it(group):
    assert meant(group) == all_of(group)


def test_what_names_one_thing_is_explicit():
    texts = ("t", "t@id", "*", "t*", "t?", "t[0]", "t[!0]", "t[", "t[]", "t[!]", "dense", "global_step")
    assert {text for text in texts if Pattern(text).is_explicit} == {"t", "t@id", "t[", "t[]", "t[!]"}
    rules = parse_renames({"t": "u", "a*": "b*"})
    assert [rules.is_explicit(name) for name in ("t", "ab", "u")] == [True, False, False]


@pytest.mark.parametrize(
    ("pattern", "name", "is_meant"),
    [
        ("dense", slot_name("dense", "embedding"), False),  # a group goes before whatever else is called so
        ("extra", Name("dense", "extra"), False),
        ("*id", slot_name("item_id", "embedding"), True),  # a pattern of tables does not mean the ids of all
        ("*id", slot_name("item_id", "id"), True),
        ("*id", slot_name("item", "id"), False),
        *((pattern, Name("dense_opt", "adam"), True) for pattern in ("dense_opt", "extra", "*")),
        *((pattern, state_name("top.weight", "adam"), True) for pattern in ("dense_opt", "extra", "*")),
        ("dense", state_name("top.weight", "adam"), False),
    ],
)
def test_a_pattern_means_groups_tables_and_objects_and_not_what_ends_alike(pattern, name, is_meant):
    assert Pattern(pattern).matches(name) == is_meant


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


@pytest.mark.parametrize("table", ["a.b", "a+b", "(a", "[x", "x]", "line\nbreak", "a@b", "表", "a\\d", "^$"])
def test_nothing_but_the_wildcards_is_special(table):
    assert Pattern(table).matches(slot_name(table, "embedding"))
    assert Pattern("*").matches(slot_name(table, "embedding"))
    assert Pattern(f"{table}@*").matches(slot_name(table, "embedding"))
    assert Pattern(f"{table}*").matches(slot_name(f"{table}2", "id"))
    assert not Pattern(table).matches(slot_name("axb", "embedding"))


@given(st.text("ab[]!-*?\\", min_size=1, max_size=8), st.text("ab[]!-", max_size=6))
def test_patterns_are_those_of_fnmatch(pattern, name):
    assert bool(wildcard_regex(pattern).fullmatch(name)) == fnmatchcase(name, pattern)
    assert len(WILDCARD.findall(pattern)) == wildcard_regex(pattern).groups
    assert bool(WILDCARD.findall(pattern)) == (not Pattern(pattern).is_explicit)
    if name:
        meant = name == pattern or fnmatchcase(name, pattern)
        assert Pattern(pattern).matches(Name("dense", name)) == meant


def test_an_optimizer_is_a_registered_object_and_its_state_of_a_parameter_is_of_its_group():
    settings, state = Name("dense_opt", "adam"), state_name("top.weight", "adam")
    assert (settings.is_settings, settings.parameter) == (True, "")
    assert (state.is_settings, state.parameter) == (False, "top.weight")
    assert [text for text in ("*", "**", "a*", "dense") if Pattern(text).is_everything] == ["*", "**"]
    assert wildcard_regex("*.*").fullmatch("a.b.c").groups() == ("a.b", "c")
    assert wildcard_regex("*.*", lazy=True).fullmatch("a.b.c").groups() == ("a", "b.c")


# renames


def dense(value, name):
    return parse_renames(value).source(Name("dense", name))


def slot(value, table, name="embedding"):
    return parse_renames(value).source(slot_name(table, name))


@pytest.mark.parametrize(
    ("rules", "name", "source"),
    [
        ({}, "a", "a"),
        ({"b": "c"}, "a", "a"),
        ({"b": "c"}, "a@embedding", "a@embedding"),
        *((rules, name, {"a": "x", "b": "y"}.get(name, name)) for rules in LISTS for name in "abx"),
        *(({"t": "u"}, f"t@{slot}", f"u@{slot}") for slot in ("id", "embedding", "sparse_adam_exp_avg")),
        ({"t": "u", "t@sparse_m": "w@sparse_v"}, "t@sparse_m", "w@sparse_v"),  # it goes before that for its table
        ({"t": "u", "t@sparse_m": "w@sparse_v"}, "t@embedding", "u@embedding"),
        ({"a": "b", "b": "a"}, "a@embedding", "b@embedding"),  # rules are not applied twice, so names can be swapped
        ({"a": "b", "b": "a"}, "b@embedding", "a@embedding"),
        ([{"a": "x"}, {"a": "x"}, {"a*": "x*"}], "a", "x"),  # rules that agree are no conflict
        *(({name: "u"}, f"{name}@embedding", "u@embedding") for name in ("a@b", "a.b", "line\nbreak")),
        *(({"t": name}, "t@embedding", f"{name}@embedding") for name in ("a@b", "a.b", "line\nbreak")),
        ({"dense.*.weight": "layer.*.weight"}, "dense.3.weight", "layer.3.weight"),
        ({"dense.*.weight": "layer.*.weight"}, "dense.3.bias", "dense.3.bias"),
        ({"*": "old.*"}, "a.b", "old.a.b"),
        ({"*.*": "*/*"}, "a.b", "a/b"),
        ({"x.*.*": "y.*.*"}, "x.1.2.3", "y.1.2.3"),
        ({"a*": "b*"}, "a", "b"),
        ({"top.?.w": "layer.?.w"}, "top.3.w", "layer.3.w"),
        ({"top.?.w": "layer.?.w"}, "top.33.w", "top.33.w"),
        ({"[ab]_*": "x[ab]*"}, "b_1", "xb1"),
        ({"[!a]": "x[!a]"}, "a", "a"),
        ({"top\n*": "x*"}, "top\ny\nz", "xy\nz"),
        ({"*": "*_old"}, "t@embedding", "t_old@embedding"),  # a star renames tables and leaves their slots alone
        ({"user_*": "u*"}, "user_7@id", "u7@id"),
        ({"*@sparse_m": "*@sparse_v"}, "t@sparse_m", "t@sparse_v"),
        ({"*@sparse_m": "*@sparse_v"}, "t@embedding", "t@embedding"),
    ],
)
def test_a_rule_says_what_a_name_of_the_model_is_called_there(rules, name, source):
    of_model = slot_name(*name.rsplit("@", 1)) if "@" in name else Name("dense", name)
    assert parse_renames(rules).source(of_model) == source


def test_what_counts_the_ids_of_a_table_is_renamed_with_it():
    renames = parse_renames({"user_a": "user", "*_b": "*", "own.candidates": "mine"})
    for table, source in (("user_a", "user"), ("user_b", "user"), ("item", "item"), ("own", "own")):
        for counts in (".candidates", ".candidates_1000x7"):
            expected = "mine@id" if table + counts == "own.candidates" else f"{source}{counts}@id"
            assert renames.source(slot_name(table + counts, "id")) == expected


@pytest.mark.parametrize("side", ["id", "embedding"])
def test_a_rule_for_ids_or_embeddings_renames_the_table(side):
    rules = {f"t@{side}": f"u@{side}", "t@sparse_m": "t@sparse_v"}
    for name in ("id", "embedding", "sparse_w"):
        assert slot(rules, "t", name) == f"u@{name}"
    assert slot(rules, "t", "sparse_m") == "t@sparse_v"
    assert slot({f"*@{side}": f"*_old@{side}"}, "t", "id") == "t_old@id"


@pytest.mark.parametrize(
    "rules", [{"t@id": "u@id", "t@embedding": "v@embedding"}, {"t": "u", "t@embedding": "v@embedding"}]
)
def test_a_table_whose_ids_and_embeddings_would_come_from_two_is_ambiguous(rules):
    for name in ("id", "embedding", "sparse_m"):
        with pytest.raises(ValueError, match="'t' is ambiguous: 'u' or 'v'"):
            slot(rules, "t", name)


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"a.*": "x.*", "*.b": "y.*"}, "a.b"),
        ([{"a.b": "x"}, {"a.b": "y"}], "a.b"),
        ({"a.b": "x", "a.*": "y.*"}, "a.b"),
        ({"*-*": "*+*"}, "a-b-c"),  # one rule whose stars can share the name out in two ways
    ],
)
def test_different_names_for_one_thing_are_refused(rules, name):
    with pytest.raises(ValueError, match=r"is ambiguous: '.*' or '.*', by "):
        dense(rules, name)


UNEQUAL = ({"a*": "b"}, {"a": "b*"}, {"*a*": "*b"}, {"**": "*"}, {"a?": "b*"}, {"*?": "?*"}, {"[ab]": "[ac]"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((rule, "the same wildcards in the same order") for rule in UNEQUAL),
        *((value, "expected a dict or a list of dicts") for value in ("a", 3, None, [3], ["ab"], [[]])),
        *((rule, "expected two names") for rule in ({"a": 3}, {3: "a"}, {"": "a"}, {"a": ""}, {"a": None})),
    ],
)
def test_what_is_no_rule_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        parse_renames(value)
