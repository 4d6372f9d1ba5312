"""Which name is taken from where, by names and shapes alone."""

import pytest

from recckpt.errors import LoadConfError, RecckptError, StateMismatchError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import Name, slot_name
from recckpt.load.conf import Entry, parse_bank, parse_load_conf
from recckpt.load.inventory import PLAIN, LoadCandidate, Thing, list_inventory, listed_inventory
from recckpt.load.plan import plan_load, resolve
from recckpt.load.problems import Problems

OWN = Entry(label="output_dir", is_own=True)


def table(name, *slots, dim=4, dtype="float32", rows=10):
    """Return the names of a table."""
    things = {slot_name(name, "id"): Thing("int64", (), rows), slot_name(name, "embedding"): Thing(dtype, (dim,), rows)}
    return things | {slot_name(name, slot): Thing("float32", (dim,), rows) for slot in slots}


def dense(*names, shape=(2,), dtype="float32"):
    return {Name("dense", name): Thing(dtype, shape) for name in names}


def others(group, *names):
    return {Name(group, name): Thing(PLAIN) for name in names}


def planned(model, *offers):
    """Resolve (entry or conf, inventory) pairs; return the items by name, and what is wrong."""
    problems = Problems()
    made = []
    for number, (conf, inventory) in enumerate(offers):
        if not isinstance(conf, Entry):
            [conf] = parse_bank([{"path": "x", **conf}], problems.conf)
        made.append(LoadCandidate(conf, f"ckpt{number}", inventory))
    return {item.name.text: item for item in resolve(model, made, problems)}, problems


def sources(model, *offers):
    """Return name -> (offer, name there) of what is taken, where nothing is wrong."""
    items, problems = planned(model, *offers)
    assert not any((problems.conf, problems.missing, problems.unexpected, problems.mismatched))
    return {name: (item.offer, item.source) for name, item in items.items() if item.offer is not None}


# priorities


def test_an_entry_that_does_not_ask_leaves_a_name_to_those_before():
    model = {**table("t"), **dense("a")}
    here = {**table("t"), **dense("a")}
    found = sources(model, ({"exclude": ["a"]}, here), ({"load": ["a"]}, here), ({"load": ["t@embedding"]}, here))
    assert found == {"t@id": (2, "t@id"), "t@embedding": (2, "t@embedding"), "a": (1, "a")}


# renames


def test_a_star_renames_dense_names_and_strict_looks_at_their_new_ones():
    rename = {"oname": {"dense.*.weight": "layer.*.weight"}}
    model = dense("dense.0.weight", "dense.1.weight")
    there = dense("layer.0.weight", "layer.1.weight")
    assert len(sources(model, ({"load": ["dense"], **rename}, there))) == 2
    _, problems = planned(model, ({"load": ["dense"], **rename}, {**there, **dense("layer.2.weight")}))
    assert problems.unexpected == ["layer.2.weight"]
    _, problems = planned(others("extra", "x"), ({"strict": True}, {**others("extra", "x"), **dense("x")}))
    assert problems.unexpected == ["x"], "names of one kind do not hide those of another"


def test_an_ambiguous_rename_is_an_error_where_the_name_is_wanted():
    rename = {"oname": {"a.*": "x.*", "*.b": "y.*"}}
    _, problems = planned(dense("a.b"), (rename, dense("a.b")))
    assert len(problems.conf) == 1
    assert "ckpt" not in problems.conf[0]
    assert "'a.b' is ambiguous" in problems.conf[0]
    assert not planned(dense("a.b", "c"), ({**rename, "load": ["c"]}, dense("c")))[1].conf


# explicit names against patterns


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"load": ["tt"]}, "'load': 'tt' is neither in the model nor a group"),
        ({"load": ["dens"]}, "did you mean 'dense'"),
        ({"load": ["t@sparse_v"]}, "did you mean 't@sparse_m'"),
        ({"exclude": ["nothing"]}, "'exclude': 'nothing' is neither"),
        ({"oname": {"nothing": "u"}}, "'oname': 'nothing' is neither"),
        ({"on_mismatch": {"nothing": "skip"}}, "'on_mismatch': 'nothing' is neither"),
        ({"load": ["only_here"]}, "ckpt0 has no 'only_here'"),
        ({"load": ["t@sparse_m"]}, "ckpt0 has no 't@sparse_m'"),
        ({"load": ["a"]}, "ckpt0 has no 'a'"),
        ({"oname": {"t": "gone"}}, "ckpt0 has no 'gone'"),
        ({"oname": {"a": "gone"}}, "ckpt0 has no 'gone'"),
        ({"oname": {"t@embedding": "t@gone"}}, "ckpt0 has no 't@gone'"),
    ],
)
def test_a_name_that_model_or_checkpoint_lack_is_an_error(conf, message):
    model = {**table("t", "sparse_m"), **table("only_here"), **dense("a")}
    _, problems = planned(model, (conf, {**table("t"), **table("there")}))
    assert [message in problem for problem in problems.conf] == [True]
    assert problems.conf[0].startswith("bank[0]: ")
    _, problems = planned(model, ({**conf, "ignore_error": True}, {**table("t"), **table("there")}))
    assert not problems.conf
    assert any(message in warning for warning in problems.warnings)


@pytest.mark.parametrize(
    "conf",
    [
        {"load": ["tt*"]},
        {"load": ["t@*v"]},
        {"exclude": ["nothing.*"]},
        {"oname": {"nothing.*": "x.*"}},
        {"on_mismatch": {"x*": "skip"}},
    ],
)
def test_a_pattern_that_matches_nothing_is_a_warning(conf):
    _, problems = planned(table("t", "sparse_m"), (conf, table("t")))
    assert not problems.conf
    assert ["matches nothing in the model" in warning for warning in problems.warnings] == [True]


def test_a_name_is_an_error_whatever_the_other_entries_offer():
    model = {**table("t"), **dense("a")}
    _, problems = planned(model, ({"load": ["t"]}, dense("a")), ({}, table("t")))
    assert problems.conf == ["bank[0]: ckpt0 has no 't'"]


def test_optimizer_slots_of_a_table_that_is_named_may_be_missing_and_what_is_left_out_may_be_there_alone():
    items, problems = planned({**dense("a"), **table("t", "sparse_m", "frequency")}, ({"load": ["t"]}, table("t")))
    assert not problems.conf
    assert items["t@sparse_m"].reason == "not in ckpt0"
    assert list(items) == ["t@id", "t@embedding", "t@frequency", "t@sparse_m", "a"]
    for left_out in ("old.*", "old.weight"):
        conf = {"load": ["dense"], "exclude": [left_out]}
        assert sources(dense("a"), (conf, dense("a", "old.weight"))) == {"a": (0, "a")}


# strict


def test_where_dense_is_named_names_match_both_ways():
    model, there = {**table("t"), **dense("a", "b")}, {**table("u"), **dense("a", "c")}
    for conf in ({"load": ["dense"]}, {"load": ["dense"], "strict": True}):
        _, problems = planned(model, (conf, there))
        assert (problems.missing, problems.unexpected) == (["b"], ["c"])
    for conf in ({}, {"load": ["*"]}, {"load": ["dense"], "strict": False}):
        items, problems = planned(model, (conf, there))
        assert not [*problems.missing, *problems.unexpected]
        assert items["b"].offer is None
    _, problems = planned(model, ({"strict": True}, there))
    assert (problems.missing, sorted(problems.unexpected)) == (["t", "b"], ["c", "u"])


def test_what_the_checkpoint_has_beyond_the_model_is_a_warning():
    _, problems = planned(dense("a"), ({}, {**table("u"), **dense("a", *(f"x{i}" for i in range(9)))}))
    assert problems.warnings == [
        "bank[0]: ckpt0 has names that are not in the model: 'u', 'x0', 'x1', 'x2', 'x3' and 5 more"
    ]


def test_a_strict_entry_is_content_where_another_has_the_name_and_where_another_wins():
    model = dense("a", "b")
    strict = {"load": ["dense"]}
    assert sources(model, ({}, model), (strict, dense("a"))) == {"a": (1, "a"), "b": (0, "b")}
    assert sources(model, (strict, model), (OWN, model)) == {"a": (1, "a"), "b": (1, "b")}


def test_an_own_load_is_strict_about_tables_too():
    problems = Problems()
    entry = parse_load_conf(None, own=True)
    resolve({**table("t"), **table("v")}, [LoadCandidate(entry, "c", {**table("t"), **table("u")})], problems)
    assert (problems.missing, problems.unexpected) == (["v"], ["u"])


# dtypes and shapes


@pytest.mark.parametrize(
    ("action", "there", "conversion"),
    [
        ("cast", {"dtype": "float16"}, "cast float16 -> float32"),
        ("resize", {"shape": (3,)}, "resize 3 -> 2"),
        ("resize", {"shape": (3,), "dtype": "float64"}, "cast float64 -> float32, resize 3 -> 2"),
        ("error", {}, ""),
    ],
)
def test_what_is_allowed_is_converted(action, there, conversion):
    items, problems = planned(dense("a"), ({"on_mismatch": action}, dense("a", **there)))
    assert not problems.mismatched
    assert (items["a"].offer, items["a"].conversion) == (0, conversion)


@pytest.mark.parametrize(
    ("action", "there"),
    [
        ("error", {"dtype": "float16"}),
        ("error", {"shape": (3,)}),
        ("cast", {"shape": (3,)}),
        ("cast", {"shape": (3,), "dtype": "float16"}),
        ("resize", {"shape": (2, 2)}),
        ("resize", {"shape": ()}),
        ("cast", {"dtype": PLAIN, "shape": ()}),
        ("resize", {"dtype": PLAIN, "shape": ()}),
    ],
)
def test_what_is_not_is_a_mismatch(action, there):
    _, problems = planned(dense("a"), ({"on_mismatch": action}, dense("a", **there)))
    [found] = dense("a", **there).values()
    assert problems.mismatched == {"a": (str(found), "float32 (2,)")}


def test_tensors_are_resized_in_any_dimension_and_rows_of_tables_in_the_last_one():
    items, problems = planned(dense("a", shape=(3, 2)), ({"on_mismatch": "resize"}, dense("a", shape=(4, 5))))
    assert (items["a"].conversion, problems.mismatched) == ("resize 4x5 -> 3x2", {})
    matrices = [{slot_name("t", "embedding"): Thing("float32", shape)} for shape in ((3, 2), (4, 2))]
    _, problems = planned(matrices[0], ({"on_mismatch": "resize"}, matrices[1]))
    assert problems.mismatched == {"t@embedding": ("float32 (4, 2)", "float32 (3, 2)")}


def test_the_state_of_a_parameter_that_is_resized_starts_fresh_whatever_else_is_converted():
    state = Name("dense_opt", "a@adam")
    there = dense("a", shape=(4, 2), dtype="float64") | {state: Thing()}
    items, _ = planned(dense("a", shape=(3, 2)) | {state: Thing()}, ({"on_mismatch": "resize"}, there))
    assert items["a"].conversion == "cast float64 -> float32, resize 4x2 -> 3x2"
    assert (items["a@adam"].offer, items["a@adam"].reason) == (None, "its parameter is resized")


def test_a_table_whose_embeddings_are_skipped_is_skipped_whole():
    model = {**table("t", "sparse_m"), **table("u")}
    there = {**table("t", "sparse_m", dim=8), **table("u", dim=8)}
    there[slot_name("t", "sparse_m")] = model[slot_name("t", "sparse_m")]
    items, problems = planned(model, ({"on_mismatch": {"t": "skip", "u": "resize"}}, there))
    assert not problems.mismatched
    assert {item.reason for item in items.values() if item.name.table == "t"} == {
        "ckpt0 has float32 (8,), the model float32 (4,): skipped"
    }
    assert items["u@embedding"].conversion == "resize 8 -> 4"
    assert items["u@id"].offer == 0


def test_a_slot_alone_may_be_skipped_and_what_one_entry_skips_an_earlier_one_may_have():
    model, there = table("t", "sparse_m"), {**table("t"), slot_name("t", "sparse_m"): Thing("float64", (4,))}
    items, problems = planned(model, ({"on_mismatch": {"t@sparse_m": "skip"}}, there))
    assert not problems.mismatched
    assert [items[f"t@{slot}"].offer for slot in ("id", "embedding", "sparse_m")] == [0, 0, None]
    items, _ = planned(table("t"), ({}, table("t")), ({"on_mismatch": "skip"}, table("t", dim=8)))
    assert {item.offer for item in items.values()} == {0}


def test_what_is_not_known_fits_and_a_module_takes_back_its_extra_state():
    assert sources({Name("dense", "a"): Thing()}, ({}, dense("a"))) == {"a": (0, "a")}
    state = "top._extra_state"
    assert sources(dense(state), ({}, dense(state, shape=(7,)))) == {state: (0, state)}
    assert sources(others("dense", state), ({}, dense(state))) == {state: (0, state)}


# the sparse optimizer, filters


def test_the_scalars_of_another_sparse_optimizer_stay_out():
    scalars = others("sparse_opt", SPARSE_OPTIM)
    model = {**table("t", "sparse_adagrad_sum"), **scalars}
    named = {"load": ["*", "sparse_optim"]}
    items, problems = planned(model, (named, {**table("t", "sparse_adam_exp_avg"), **scalars}))
    assert not problems.mismatched
    assert items["sparse_optim"].reason == (
        "saved by an optimizer with slots ['sparse_adam_exp_avg'], this one has ['sparse_adagrad_sum']"
    )
    assert (items["t@embedding"].offer, items["t@sparse_adagrad_sum"].offer) == (0, None)
    assert sources(model, (named, model))["sparse_optim"] == (0, "sparse_optim")


def test_a_filter_looks_at_one_number_a_row_of_the_tables_that_are_taken():
    model = {**table("t"), **table("u")}
    there = {**table("t"), **table("u"), slot_name("t", "frequency"): Thing("int64", ())}
    where = {"where": {"frequency": {"min": 5}}}
    assert not planned(model, ({**where, "load": ["t"]}, there))[1].conf
    assert planned(model, (where, there))[1].conf == ["bank[0]: 'where': ckpt0 has no 'u@frequency'"]
    assert not planned(model, ({**where, "ignore_error": True}, there))[1].conf
    _, problems = planned(model, ({"where": {"embedding": {"min": 0}}, "load": ["t"], "ignore_error": True}, there))
    assert problems.conf == ["bank[0]: 'where': 't@embedding' is float32 (4,), expected one number per row"]


# slots with one value for each range of columns, between tables that were divided otherwise

SUM = slot_name("t", "sparse_rowwise_adagrad_sum")
TWO, OTHER = ((0, 8), (8, 12)), ((0, 4), (4, 12))


def divided(columns, dtype="float32", shape=None):
    of_ranges = Thing(dtype, ((len(columns),) if columns else ()) if shape is None else shape, 5, columns=columns)
    return {slot_name("t", "id"): Thing("int64"), slot_name("t", "embedding"): Thing("float32", (12,)), SUM: of_ranges}


def regrouped(saved, live, **conf):
    offer = LoadCandidate(parse_load_conf(conf), "there", saved)
    [item] = [item for item in plan_load(live, [offer], Problems()).items if item.name == SUM]
    return item


def test_the_same_ranges_need_no_conversion_nor_do_states_by_columns():
    assert regrouped(divided(TWO), divided(TWO)).conversion == ""
    saved = divided(((0, 1), (1, 2)), shape=(2,))
    assert regrouped(saved, divided((), shape=(2,))).conversion == "", "as many columns as ranges"


def test_a_cast_is_asked_for_beside_and_values_of_ranges_that_nobody_has_named_are_refused():
    with pytest.raises(StateMismatchError):
        regrouped(divided(TWO), divided((), "float16"), convert=True)
    item = regrouped(divided(TWO), divided((), "float16"), convert=True, on_mismatch="cast")
    assert item.conversion.endswith(", cast float32 -> float16")
    with pytest.raises(StateMismatchError, match="in unknown ranges of columns"):
        regrouped(divided((), shape=(2,)), divided(TWO), convert=True)


@pytest.mark.parametrize(("saved", "live"), [(TWO, ()), ((), TWO), (TWO, OTHER)])
def test_others_are_converted_where_that_is_allowed(saved, live):
    with pytest.raises(StateMismatchError, match="'convert': True in load_conf"):
        regrouped(divided(saved), divided(live))
    item = regrouped(divided(saved), divided(live), convert=True)
    assert item.conversion.startswith("one value")
    assert " -> one value" in item.conversion
    skipped = regrouped(divided(saved), divided(live), on_mismatch="skip")
    assert skipped.offer is None
    assert "skipped" in skipped.reason


def test_a_list_of_names_has_the_ranges():
    live = divided(TWO)
    assert listed_inventory(list_inventory(live))[SUM].columns == TWO
    with pytest.raises(LoadConfError, match="write columns 0:4,4:8"):
        listed_inventory(["t@sparse_sum\tsparse_opt\tfloat32\t2\tcolumns 0-4"])


# problems


def raised(problems):
    with pytest.raises(RecckptError) as caught:
        problems.raise_if_any("c")
    return caught.value


def test_what_differs_is_not_mended_by_passing_over_names():
    assert "strict" not in str(raised(Problems(mismatched={"x": (1, 2)})))
    assert "on_mismatch" not in str(raised(Problems(missing=["m"])))
    both = str(raised(Problems(missing=["m"], mismatched={"x": (1, 2)})))
    assert both.index("'strict': False") < both.index("on_mismatch")


def test_one_kind_of_problem_has_its_own_error_and_several_come_as_one():
    Problems(warnings=["w"]).raise_if_any("c")
    misfit = {"missing": ["m"], "unexpected": ["u"], "mismatched": {"x": (1, 2)}}
    assert isinstance(raised(Problems(**misfit)), StateMismatchError)
    gone = FileNotFoundError("gone")
    assert raised(Problems(not_found=[(OWN, RecckptError("gone"))])).args == ("gone",)
    error = raised(Problems(conf=["a", "b"], not_found=[(OWN, gone), (OWN, gone)], **misfit))
    assert isinstance(error, LoadConfError)
    assert len(error.problems) == 5
    assert error.problems[:3] == ["a", "b", "output_dir: gone"]
    assert all(name in error.problems[4] for name in ("'m'", "'u'", "'x'"))
