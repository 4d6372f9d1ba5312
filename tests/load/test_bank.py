"""The keys of a bank entry, alone and together, from real checkpoints into live models."""

import logging

import pytest
import torch
from support.bank_runs import INITIAL, Model, live_bytes, run, saved, slots_of, table, values_of
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.errors import LoadConfError, StateMismatchError
from recckpt.sparse import HashTable, Normal, SparseAdam

FRESH = {"sparse_adam_exp_avg": [0.0] * 3, "sparse_adam_exp_avg_sq": [0.0] * 3}


def one(url, name="t", value=1.0, ids=range(3), **options):
    """Save a run of one table and return where it is."""
    return saved(url, table(name, ids, value), **options)


@pytest.fixture
def adam(tmp_path):
    """A run of one trained table, and its table."""
    made = table("t", range(3))
    return saved(tmp_path / "adam", made, optimizer="adam", steps=2, value=2.0, top=nn.Linear(2, 1)), made


# path, load, exclude, skip


def test_a_path_is_an_output_dir_or_a_checkpoint_or_a_url(tmp_path, memory_url):
    one(tmp_path / "a", value=1.0, ckpt_id="first")
    for path, value in ((tmp_path / "a", 1.0), (f"{tmp_path}/a/first", 1.0), (f"file://{tmp_path}/a", 1.0)):
        t = table("t")
        run(tmp_path / "own", t).load_by_config([{"path": path}])
        assert values_of(t) == {0: value, 1: value, 2: value}
    one(memory_url, value=5.0)
    t = table("t")
    report = run(tmp_path / "own", t).load_by_config({"path": memory_url})
    assert values_of(t)[0] == 5.0
    assert report.sources == (f"{memory_url}/c",)


def test_only_what_is_asked_for_is_loaded(tmp_path):
    url = saved(tmp_path / "a", table("t", [1]), table("u", [1]), value=3.0, top=nn.Linear(1, 1), low=nn.Linear(1, 1))
    for conf, expected in [
        ({"load": ["t"]}, (1, 0, 0.0, 0.0)),
        ({"load": ["*"], "exclude": ["u", "low.*"]}, (1, 0, 3.0, 0.0)),
        ({"load": ["dense"]}, (0, 0, 3.0, 3.0)),
        ({"load": ["*.weight"], "exclude": ["top.*"]}, (0, 0, 0.0, 3.0)),
        ({"load": []}, (0, 0, 0.0, 0.0)),
        ({"skip": True}, (0, 0, 0.0, 0.0)),
    ]:
        t, u, top, low = table("t"), table("u"), nn.Linear(1, 1), nn.Linear(1, 1)
        run(tmp_path / "own", t, u, top=top, low=low).load_by_config([{"path": url, **conf}])
        assert (len(t), len(u), top.weight.item(), low.weight.item()) == expected


@mostly_slow()
@pytest.mark.parametrize("exclude", ["sparse_opt", "t@*avg*", "*avg*"])
def test_optimizer_slots_that_are_left_out_stay_at_their_initial_values(tmp_path, adam, exclude):
    url, source = adam
    t = table("t", [1, 99], value=9.0)
    saver = run(tmp_path / "own", t, optimizer="adam", steps=5, top=nn.Linear(2, 1))
    saver.load_by_config([{"path": url, "exclude": [exclude]}])
    assert values_of(t) == values_of(source)
    assert slots_of(t) == FRESH
    assert saver.sparse_optim.state_dict()["state"] == {}, "nor is the step that of moments which are not there"
    everything = table("t")
    run(tmp_path / "own", everything, optimizer="adam", top=nn.Linear(2, 1)).load_by_config([{"path": url}])
    assert slots_of(everything) == slots_of(source) != FRESH


def test_embeddings_bring_their_ids_and_ids_alone_start_with_the_initializer(tmp_path, adam):
    url, source = adam
    for names, expected in (("t@embedding", values_of(source)), ("t@id", dict.fromkeys(range(3), INITIAL))):
        t = table("t", [1], value=9.0)
        report = run(tmp_path / "own", t, optimizer="adam").load_by_config([{"path": url, "load": [names]}])
        assert values_of(t) == expected
        assert slots_of(t) == FRESH
        assert report.rows_taken == {"t": 3}


def test_without_the_ids_only_rows_that_are_there_are_set(tmp_path, adam):
    url, source = adam
    t = table("t", [1, 99], value=9.0)
    conf = {"path": url, "load": ["t"], "exclude": ["t@id"]}
    report = run(tmp_path / "own", t, optimizer="adam").load_by_config([conf])
    assert values_of(t) == {1: values_of(source)[1], 99: 9.0}
    assert report.rows_taken == {"t": 1}
    for name, sums in slots_of(t).items():
        assert sums == [slots_of(source)[name][1], 0.0]


# oname


def test_two_tables_are_swapped_and_back(tmp_path):
    url = saved(tmp_path / "a", table("table_1", range(2), 1.0), table("table_2", range(3), 2.0))
    swap = {"oname": {"table_1": "table_2", "table_2": "table_1"}}
    one_, two = table("table_1"), table("table_2")
    swapped = run(tmp_path / "b", one_, two)
    swapped.load_by_config([{"path": url, **swap}])
    assert (values_of(one_), values_of(two)) == ({0: 2.0, 1: 2.0, 2: 2.0}, {0: 1.0, 1: 1.0})
    swapped.save("c")
    swapped.load_by_config([{"path": str(tmp_path / "b"), **swap}])
    assert (values_of(one_), values_of(two)) == ({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0, 2: 2.0})


@mostly_slow()
@pytest.mark.parametrize(
    ("load", "rate"), [(["sparse", "sparse_opt"], 0.9), (["*"], 0.9), (["renamed"], 0.9), (["*", "sparse_optim"], 0.01)]
)
def test_a_renamed_table_keeps_its_step_and_the_run_its_settings_unless_they_are_named(tmp_path, adam, load, rate):
    t, source = table("renamed"), adam[1]
    saver = run(tmp_path / "own", t, optimizer="adam", top=nn.Linear(2, 1))
    saver.sparse_optim.param_groups[0]["lr"] = 0.9
    saver.load_by_config([{"path": adam[0], "oname": {"renamed": "t"}, "load": load}])
    assert slots_of(t) == slots_of(source)
    assert saver.sparse_optim.state_dict()["state"] == {"renamed": {"step": 2}}
    assert saver.sparse_optim.param_groups[0]["lr"] == rate


def test_a_resume_brings_the_settings_of_the_sparse_optimizer_back(tmp_path, adam):
    for conf in (None, {"load": ["*"]}, {"exclude": ["dense"]}):
        saver = run(adam[0], table("t"), optimizer="adam", top=nn.Linear(2, 1))
        saver.sparse_optim.param_groups[0]["lr"] = 0.9
        saver.load(load_conf=conf)
        assert saver.sparse_optim.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(("exclude", "steps"), [([], {"t": {"step": 2}}), (["sparse_opt"], {}), (["sparse_optim"], {})])
def test_the_step_of_a_rule_without_slots_comes_with_the_rows(tmp_path, exclude, steps):
    url = saved(tmp_path / "a", table("t", range(3)), optimizer="sgd", steps=2)
    saver = run(tmp_path / "own", table("t"), optimizer="sgd")
    saver.load_by_config([{"path": url, "exclude": exclude}])
    assert saver.sparse_optim.state_dict()["state"] == steps


def test_each_table_has_the_step_of_the_run_that_its_slots_are_from(tmp_path):
    urls = [
        saved(tmp_path / str(steps), table("a", [1]), table("b", [1]), optimizer="adam", steps=steps)
        for steps in (2, 5)
    ]
    saver = run(tmp_path / "own", table("a"), table("b"), optimizer="adam")
    saver.load_by_config([{"path": urls[0]}, {"path": urls[1], "load": ["b"]}])
    assert saver.sparse_optim.state_dict()["state"] == {"a": {"step": 2}, "b": {"step": 5}}


def test_tables_of_two_groups_come_from_one_and_settings_without_a_home_stay(tmp_path, caplog):
    a, b = table("a", [1]), table("b", [1])
    source = run(tmp_path / "a", a, b, optimizer="adam", steps=3)
    source.sparse_optim.param_groups[0]["lr"] = 0.5
    source.save("c")
    c, d, e = table("c"), table("d"), table("e")
    groups = SparseAdam([{"tables": [c], "lr": 0.1}, {"tables": [d, e], "lr": 0.2}])
    saver = Saver(Model(c, d, e), groups, str(tmp_path / "own"))
    bank = [{"path": str(tmp_path / "a"), "oname": {"c": "a", "d": "b"}, "load": ["*", "sparse_optim"]}]
    saver.load_by_config(bank)
    assert saver.sparse_optim.state_dict()["state"] == {"c": {"step": 3}, "d": {"step": 3}}
    assert [group["lr"] for group in saver.sparse_optim.param_groups] == [0.5, 0.2]
    assert "['b', 'e'] were not in one group; this run's hyper-parameters stay" in caplog.text


def test_one_slot_may_be_renamed(tmp_path):
    source = HashTable(2, name="t")
    source.add_slot("clicks", ())
    source.insert(torch.tensor([7]), torch.ones(1, 2), {"clicks": torch.tensor([5.0])})
    url = saved(tmp_path / "a", source)
    t = HashTable(2, name="t")
    t.add_slot("views", ())
    run(tmp_path / "own", t).load_by_config([{"path": url, "oname": {"t@views": "t@clicks"}}])
    assert t.slots["views"].tolist() == [5.0]


@mostly_slow()
@pytest.mark.parametrize("name", ["a*b", "a@b", "a\nb\tc", "表/x", "@", "t@embedding"])
def test_tables_of_odd_names_are_selected_and_renamed(tmp_path, name):
    url = saved(tmp_path / "a", table(name, range(2)), table("other", range(5)))
    odd, other = table(name), table("other")
    run(tmp_path / "own", odd, other).load_by_config([{"path": url, "load": [name]}])
    assert (len(odd), len(other)) == (2, 0)
    if "*" not in name:
        renamed = table("renamed")
        run(tmp_path / "own", renamed).load_by_config([{"path": url, "oname": {"renamed": name}}])
        assert len(renamed) == 2


# hashtable_clear


def test_merged_rows_keep_the_slots_that_are_not_loaded(tmp_path, adam):
    url, source = adam
    t = table("t", [2, 99], value=9.0)
    saver = run(tmp_path / "own", t, optimizer="adam", steps=5)
    before = slots_of(t)
    conf = {"path": url, "load": ["sparse"], "hashtable_clear": False}
    saver.load_by_config([conf])
    assert values_of(t)[2] == values_of(source)[2]
    for name, sums in slots_of(t).items():
        assert sums == [0.0, 0.0, *before[name]], "of ids 0, 1, 2 and 99"
    assert saver.sparse_optim.state_dict()["state"] == {"t": {"step": 5}}


def test_of_merged_rows_and_those_that_stay_the_higher_step_counts(tmp_path, adam):
    url, _ = adam
    for steps in (1, 5):
        saver = run(tmp_path / "own", table("t", [2, 99]), optimizer="adam", steps=steps)
        saver.load_by_config([{"path": url, "load": ["t"], "hashtable_clear": False}])
        assert saver.sparse_optim.state_dict()["state"] == {"t": {"step": max(2, steps)}}
        saver.load_by_config([{"path": url, "load": ["t"]}])  # no row stays
        assert saver.sparse_optim.state_dict()["state"] == {"t": {"step": 2}}


# on_mismatch


def test_state_that_does_not_fit_is_an_error_unless_something_is_said_of_it(tmp_path):
    url = saved(tmp_path / "a", table("t", [1], dim=6), table("u", [1]), value=1.0, top=nn.Linear(3, 1))
    t, u = table("t", [5], 9.0), table("u", dtype=torch.float64)
    saver = run(tmp_path / "own", t, u, top=nn.Linear(2, 1))
    before = live_bytes(saver)
    with pytest.raises(StateMismatchError) as caught:
        saver.load_by_config([{"path": url}])
    assert caught.value.mismatched == {
        "t@embedding": ("float32 (6,)", "float32 (4,)"),
        "u@embedding": ("float32 (4,)", "float64 (4,)"),
        "top.weight": ("float32 (1, 3)", "float32 (1, 2)"),
    }
    assert live_bytes(saver) == before
    report = saver.load_by_config([{"path": url, "on_mismatch": {"t": "resize", "u": "cast", "top.*": "skip"}}])
    assert (values_of(t), values_of(u)) == ({1: 1.0}, {1: 1.0})
    assert u.embeddings().dtype == torch.float64
    assert saver.model.top.weight.tolist() == [[0.0, 0.0]]
    assert saver.model.top.bias.item() == 1.0
    notes = {item.name.text: item.conversion or item.reason for item in report.items}
    assert (notes["t@embedding"], notes["u@embedding"]) == ("resize 6 -> 4", "cast float32 -> float64")
    assert notes["top.weight"].endswith("has float32 (1, 3), the model float32 (1, 2): skipped")


@pytest.mark.parametrize("clear", [True, False])
def test_a_wider_table_is_padded_by_its_initializer_and_its_slots_by_their_initial_values(tmp_path, clear):
    source = table("t", [1, 2], dim=2)
    url = saved(tmp_path / "a", source, optimizer="adagrad", steps=1)
    sums = source.slots["sparse_adagrad_sum"][0, 0].item()
    wide, plain = (HashTable(5, name="t", initializer=Normal(0.0, 1.0)) for _ in range(2))
    wide(torch.tensor([9]))
    conf = {"path": url, "on_mismatch": "resize", "hashtable_clear": clear}
    run(tmp_path / "own", wide, optimizer="adagrad").load_by_config([conf])
    plain(torch.tensor([2, 7, 1]))
    found, expected = (each.lookup(torch.tensor([1, 2]))[0] for each in (wide, plain))
    assert found[:, :2].tolist() == source.embeddings().tolist()
    assert torch.equal(found[:, 2:], expected[:, 2:]), "what a new row of that id would have"
    of_slots = wide.slots["sparse_adagrad_sum"][-2:]
    assert of_slots[:, :2].tolist() == [[sums] * 2] * 2
    assert of_slots[:, 2:].tolist() == [[pytest.approx(0.1)] * 3] * 2
    assert len(wide) == (2 if clear else 3)


def test_a_dense_tensor_is_cut_or_padded_by_what_it_was(tmp_path):
    url = saved(tmp_path / "a", value=1.0, words=nn.Embedding(10, 3), top=nn.Linear(3, 2))
    for width, n_rows, expected in ((2, 4, [1.0, 1.0]), (5, 16, [1.0, 1.0, 1.0, -7.0, -7.0])):
        top, words = nn.Linear(width, 2).to(torch.float64), nn.Embedding(n_rows, width)
        saver = run(tmp_path / "own", value=-7.0, top=top, words=words)
        with pytest.raises(StateMismatchError):
            saver.load_by_config([{"path": url}])
        report = saver.load_by_config([{"path": url, "on_mismatch": {"*": "resize"}}])
        assert top.weight.tolist() == [expected] * 2
        assert top.weight.dtype == torch.float64
        assert words.weight.tolist() == [expected] * min(n_rows, 10) + [[-7.0] * width] * (n_rows - 10)
        noted = [item.conversion for item in report.items if item.name.text == "words.weight"]
        assert noted == [f"resize 10x3 -> {n_rows}x{width}"]


def test_rows_that_a_table_made_of_an_embedding_has_more_stay_where_rows_are_merged(tmp_path):
    def embedding(n_rows, value):
        weight = torch.full((n_rows, 4), value)
        return HashTable.from_embedding(nn.Embedding.from_pretrained(weight, freeze=False), name="t")

    url = saved(tmp_path / "a", embedding(10, 1.0))
    grown = embedding(16, -7.0)
    run(tmp_path / "own", grown).load_by_config([{"path": url, "hashtable_clear": False}])
    assert values_of(grown) == {id_: 1.0 if id_ < 10 else -7.0 for id_ in range(16)}


def test_a_table_that_is_skipped_is_as_it_was_or_comes_from_an_earlier_entry(tmp_path):
    wide = saved(tmp_path / "wide", table("t", [1], value=1.0, dim=8), optimizer="rowwise_adagrad", steps=1)
    fits = saved(tmp_path / "fits", table("t", [2], value=2.0))
    skip = {"path": wide, "on_mismatch": "skip"}
    t = table("t", [5], value=9.0)
    run(tmp_path / "own", t, optimizer="rowwise_adagrad").load_by_config([skip])
    assert values_of(t) == {5: 9.0}
    run(tmp_path / "own", t).load_by_config([{"path": fits}, skip])
    assert values_of(t) == {2: 2.0}


# where


def counted(name, counts):
    made = HashTable(2, name=name)
    made.add_slot("frequency", (), torch.int64)
    ids = torch.arange(len(counts))
    made.insert(ids, torch.ones(len(counts), 2), {"frequency": torch.tensor(counts, dtype=torch.int64)})
    return made


@mostly_slow()
@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({"frequency": {"min": 5}}, [2, 3]),
        ({"ids": [0, 3, 77]}, [0, 3]),
        ([0, 3, 77], [0, 3]),
        ({"frequency": {"min": 5}, "ids": [0, 3]}, [3]),
        ({"sample": 1.0}, [0, 1, 2, 3]),
        ({"sample": 0}, []),
        ({"frequency": {"min": 2**41}}, []),
    ],
)
def test_rows_are_filtered_also_by_slots_that_the_model_does_not_have(tmp_path, where, ids):
    url = saved(tmp_path / "a", counted("t", [1, 4, 5, 2**40]))
    t = HashTable(2, name="t")
    report = run(tmp_path / "own", t).load_by_config([{"path": url, "where": where}])
    assert sorted(t.ids().tolist()) == ids
    assert report.rows_taken.get("t", 0) == len(ids)
    assert report.rows_filtered["t"] == 4 - len(ids)
    assert f"{len(ids)} rows taken, {4 - len(ids)} filtered".replace("1 rows", "1 row") in str(report)


def test_a_sample_of_a_large_table_is_loaded_by_several_threads(tmp_path):
    url = saved(tmp_path / "a", table("t", range(100_000), dim=16))
    t = table("t", dim=16)
    report = run(tmp_path / "own", t).load_by_config([{"path": url, "where": {"sample": 0.1}}])
    assert report.rows_taken["t"] == len(t)
    assert report.rows_filtered["t"] == 100_000 - len(t)
    assert abs(len(t) - 10_000) < 500
    assert t.store.columns["embedding"].capacity < 50_000, "there is no room for rows that were not taken"
    assert bool((t.embeddings() == 1).all())


# another sparse optimizer


def test_adams_table_under_adagrad_keeps_ids_and_embeddings_and_starts_the_slots_fresh(tmp_path, adam, caplog):
    url, source = adam
    t = table("t")
    saver = run(tmp_path / "own", t, optimizer="adagrad")
    report = saver.load_by_config([{"path": url}])
    assert values_of(t) == values_of(source)
    assert slots_of(t) == {"sparse_adagrad_sum": [pytest.approx(0.4)] * 3}
    assert saver.sparse_optim.state_dict()["state"] == {}
    assert "'t@sparse_adagrad_sum'" in caplog.text
    reasons = {item.name.text: item.reason for item in report.fresh}
    assert reasons["t@sparse_adagrad_sum"] == f"not in {url}/c"
    t(torch.arange(4)).sum().backward()
    saver.sparse_optim.step()


# the bank as a whole


def test_priorities_over_three_entries_and_an_empty_bank_loads_nothing(tmp_path):
    urls = [
        saved(tmp_path / str(n), *(table(name, [n], float(n)) for name in names), value=float(n), top=nn.Linear(1, 1))
        for n, names in enumerate(["abc", "bc", "c"])
    ]
    a, b, c, top = table("a"), table("b"), table("c"), nn.Linear(1, 1)
    saver = run(tmp_path / "own", a, b, c, top=top)
    report = saver.load_by_config([])
    assert (len(a), report.sources, report.rows_taken, report.bytes_read) == (0, (), {}, 0)
    bank = [{"path": urls[0]}, {"path": urls[1]}, {"path": urls[2], "exclude": ["dense"]}]
    report = saver.load_by_config(bank)
    assert [values_of(each) for each in (a, b, c)] == [{0: 0.0}, {1: 1.0}, {2: 2.0}]
    assert top.weight.item() == 1.0
    assert {item.name.text: item.offer for item in report.taken} == {
        **{"a@id": 0, "a@embedding": 0, "b@id": 1, "b@embedding": 1},
        **{"c@id": 2, "c@embedding": 2, "top.weight": 1, "top.bias": 1},
    }
    assert report.sources == tuple(f"{url}/c" for url in urls)


def test_the_slots_of_one_table_may_come_from_two_checkpoints(tmp_path, adam):
    url, trained = adam
    newer = one(tmp_path / "b", ids=[1, 2, 99], value=7.0)
    t = table("t")
    saver = run(tmp_path / "own", t, optimizer="adam")
    report = saver.load_by_config([{"path": url, "load": ["sparse_opt"]}, {"path": newer, "load": ["t@embedding"]}])
    assert values_of(t) == {1: 7.0, 2: 7.0, 99: 7.0}
    for name, sums in slots_of(t).items():
        assert sums == [*slots_of(trained)[name][1:], 0.0]
    assert report.rows_taken == {"t": 3}
    assert saver.sparse_optim.state_dict()["state"] == {"t": {"step": 2}}


def test_a_plan_changes_nothing_and_says_what_the_load_then_does(tmp_path, adam, caplog):
    caplog.set_level(logging.INFO, "recckpt")
    t, new = table("t", [5], 9.0), table("new", [1])
    saver = run(tmp_path / "own", t, new, optimizer="adam", steps=3, value=6.0, top=nn.Linear(2, 1))
    saver.register_for_checkpointing("opt", torch.optim.Adam(saver.model.top.parameters()))
    bank = [{"path": adam[0]}]
    before = live_bytes(saver)
    plan = saver.plan(bank)
    assert live_bytes(saver) == before
    assert not caplog.records
    report = saver.load_by_config(bank)
    assert live_bytes(saver) != before
    assert (report.items, report.sources, report.warnings) == (plan.items, plan.sources, plan.warnings)
    assert f"{adam[0]}/c: 1 table, 3 rows, 2 tensors" in caplog.text
    assert {item.name.text for item in plan.fresh} == {
        *("new@id", "new@embedding", "new@sparse_adam_exp_avg", "new@sparse_adam_exp_avg_sq", "opt", "global_step"),
        *("top.weight@opt", "top.bias@opt", "sparse_optim"),
    }


def test_five_planted_problems_come_in_one_error_before_anything_is_changed(tmp_path, adam):
    url, _ = adam
    saver = run(tmp_path / "own", table("t", [5], 9.0, dim=3), optimizer="adam", top=nn.Linear(2, 1))
    before = live_bytes(saver)
    bank = [
        {"path": url, "exlude": ["dense"]},
        {"path": url, "load": ["tt"]},
        {"path": str(tmp_path / "nowhere")},
        {"path": url, "load": ["dense"], "oname": {"top.weight": "gone"}},
        {"path": url, "load": ["t"]},
    ]
    for call in (saver.plan, saver.load_by_config):
        with pytest.raises(LoadConfError) as caught:
            call(bank)
        text = str(caught.value)
        for found in (
            "did you mean 'exclude'",
            "'tt' is neither",
            "nowhere",
            "no 'gone'",
            "'t@embedding': found float32",
        ):
            assert found in text
        assert len(caught.value.problems) == 5
    assert live_bytes(saver) == before
    assert not (tmp_path / "nowhere").exists()


# reading costs what is asked for


@pytest.fixture
def hundred(tmp_path):
    """100 tables of an Adam model."""
    return saved(tmp_path / "a", *(table(f"t{n}", range(500), dim=32) for n in range(100)), optimizer="adam", steps=1)


def bytes_read(tmp_path, url, tables, **conf):
    saver = run(tmp_path / "own", *tables, optimizer="adam")
    return saver.load_by_config([{"path": url, **conf}]).bytes_read


def test_what_is_not_selected_is_not_read(tmp_path, hundred):
    def tables():
        return [table(f"t{n}", dim=32) for n in range(100)]

    everything = bytes_read(tmp_path, hundred, tables())
    row = 8 + 3 * 32 * 4
    assert 100 * 500 * row < everything < 1.05 * 100 * 500 * row, "column values, catalogs and extra.pt"
    assert bytes_read(tmp_path, hundred, tables(), exclude=["sparse_opt"]) <= 0.4 * everything
    assert bytes_read(tmp_path, hundred, tables(), load=["t7"]) <= 0.02 * everything
    assert bytes_read(tmp_path, hundred, [table("t7", dim=32)]) <= 0.02 * everything
    assert bytes_read(tmp_path, hundred, tables(), load=[]) == 0


def test_ids_are_read_once_and_a_table_for_two_once(tmp_path, adam):
    reports = []
    for conf in ({"load": ["sparse"]}, {"load": ["t@embedding"]}):
        t = table("t", dim=4)
        reports.append(run(tmp_path / "own", t).load_by_config([{"path": adam[0], **conf}]).bytes_read)
    assert reports[0] == reports[1]
    a, b = table("a"), table("b")
    both = run(tmp_path / "own", a, b).load_by_config([{"path": adam[0], "oname": {"a": "t", "b": "t"}}])
    assert values_of(a) == values_of(b) == values_of(adam[1])
    assert (both.bytes_read, both.rows_taken) == (reports[0], {"a": 3, "b": 3})
