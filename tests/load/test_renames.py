"""oname: what a name of the model is called in a checkpoint."""

import pytest

from recckpt.load.names import Name, Renames, parse_renames, slot_name


def dense(value, name):
    return parse_renames(value).source(Name("dense", name))


def slot(value, table, name="embedding"):
    return parse_renames(value).source(slot_name(table, name))


def test_what_no_rule_speaks_of_keeps_its_name():
    assert Renames().source(Name("dense", "a")) == "a"
    assert dense({"b": "c"}, "a") == "a"
    assert slot({"b": "c"}, "a") == "a@embedding"


@pytest.mark.parametrize("value", [{"a": "x", "b": "y"}, [{"a": "x"}, {"b": "y"}], ({"a": "x", "b": "y"},)])
def test_rules_are_a_dict_or_a_list_of_dicts(value):
    assert (dense(value, "a"), dense(value, "b"), dense(value, "x")) == ("x", "y", "x")


def test_a_rule_for_a_table_renames_all_of_its_slots():
    for name in ("id", "embedding", "sparse_adam_exp_avg"):
        assert slot({"t": "u"}, "t", name) == f"u@{name}"


def test_a_rule_for_a_slot_renames_that_slot_and_goes_before_the_one_for_its_table():
    rules = {"t": "u", "t@sparse_m": "w@sparse_v"}
    assert slot(rules, "t", "sparse_m") == "w@sparse_v"
    assert slot(rules, "t", "embedding") == "u@embedding"


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


def test_rules_are_not_applied_twice_so_names_can_be_swapped():
    rules = {"a": "b", "b": "a"}
    assert (slot(rules, "a"), slot(rules, "b")) == ("b@embedding", "a@embedding")


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
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
    ],
)
def test_a_star_carries_over_what_it_stands_for(rule, name, source):
    assert dense(rule, name) == source


def test_a_star_renames_tables_and_leaves_their_slots_alone():
    assert slot({"*": "*_old"}, "t") == "t_old@embedding"
    assert slot({"user_*": "u*"}, "user_7", "id") == "u7@id"
    assert slot({"*@sparse_m": "*@sparse_v"}, "t", "sparse_m") == "t@sparse_v"
    assert slot({"*@sparse_m": "*@sparse_v"}, "t", "embedding") == "t@embedding"


@pytest.mark.parametrize("name", ["a@b", "a.b", "line\nbreak"])
def test_a_table_of_any_name_can_be_renamed(name):
    assert slot({name: "u"}, name) == "u@embedding"
    assert slot({"t": name}, "t") == f"{name}@embedding"


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


def test_rules_that_agree_are_no_conflict():
    assert dense([{"a": "x"}, {"a": "x"}, {"a*": "x*"}], "a") == "x"


@pytest.mark.parametrize(
    "rule", [{"a*": "b"}, {"a": "b*"}, {"*a*": "*b"}, {"**": "*"}, {"a?": "b*"}, {"*?": "?*"}, {"[ab]": "[ac]"}]
)
def test_both_sides_have_the_same_wildcards(rule):
    with pytest.raises(ValueError, match="the same wildcards in the same order"):
        parse_renames(rule)


@pytest.mark.parametrize(
    "value", ["a", 3, None, [3], ["ab"], [[]], {"a": 3}, {3: "a"}, {"": "a"}, {"a": ""}, {"a": None}]
)
def test_what_is_no_rule_is_refused(value):
    with pytest.raises(ValueError, match="expected"):
        parse_renames(value)


def test_a_rule_without_a_star_is_explicit():
    rules = parse_renames({"t": "u", "a*": "b*"})
    assert rules.is_explicit("t")
    assert not rules.is_explicit("ab")
    assert not rules.is_explicit("u")
