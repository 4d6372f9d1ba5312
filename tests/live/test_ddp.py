"""Tables that each rank has a copy of, under DDP: each row is saved once, and every rank gets all of them."""

from pathlib import Path

import pytest
from support import spec_reader
from support.live_runs import N_ROWS, Run
from support.rank_processes import results, run_script

from recckpt.save.decide import why_missing, why_shared
from recckpt.types import RowShare


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("ddp")
    run_script(Path(__file__).with_name("ddp_ranks.py"), root, 2, 1, 3)
    return root, {size: results(root, size) for size in (2, 1, 3)}


@pytest.mark.slow
def test_all_ranks_together_save_each_row_of_the_moment_once(runs):
    root, outcomes = runs
    for size, ranks in outcomes.items():
        for rule, first in ranks[0].items():
            assert all(rank[rule]["saved"] == first["saved"] for rank in ranks)  # DDP keeps them alike
            assert sum(rank[rule]["own"] for rank in ranks) == N_ROWS
            for table, rows in first["saved"]["rows"].items():
                assert spec_reader.read(root / rule, f"last-{size}", table) == rows


@pytest.mark.slow
def test_every_rank_gets_all_rows_on_any_number_of_ranks(runs):
    _, outcomes = runs
    for size, before in ((1, 2), (3, 1)):
        for rank in outcomes[size]:
            for rule, of_rule in rank.items():
                assert of_rule["loaded"] == outcomes[before][0][rule]["saved"]
                assert of_rule["taken"] == {"users": N_ROWS, "items": N_ROWS}


@pytest.mark.slow
def test_each_rank_marks_what_the_gradients_of_all_change(runs):
    _, outcomes = runs
    for size, ranks in outcomes.items():
        for rule in ("sparse Adagrad", "Adagrad", "SparseAdam"):
            own = [rank[rule]["upserts"]["users"] for rank in ranks]
            assert ranks[0][rule]["kinds"][1] == "delta"
            assert 0 < max(own) <= 8, (size, rule, own)


@pytest.mark.slow
def test_copies_that_differ_are_named_once(runs):
    _, outcomes = runs
    for size, ranks in outcomes.items():
        for rank, of_rules in enumerate(ranks):
            for of_rule in of_rules.values():
                others = {1: [], 2: ["rank 1"], 3: ["ranks 1, 2"]}[size] if rank == 0 else []
                assert [text.partition(" from the")[0] for text in of_rule["said"]] == [
                    f"table 'users' from row 0 to {N_ROWS - 1} differs on {some}" for some in others
                ]


def test_rows_that_no_rank_saves_are_refused():
    halves = [{RowShare(0, 5, 10): ("t",)}, {RowShare(5, 10, 10): ("t",)}]
    assert why_shared(halves) is None
    assert why_missing(halves) is None
    assert why_missing(halves[:1]).startswith(
        "table 't': found 5 rows on 1 ranks, expected 10: start the process group"
    )


def test_copies_that_know_nothing_of_each_other_are_refused():
    whole = [{RowShare(0, 10, 10): ("t",)}] * 2
    assert why_shared(whole).startswith("table 't': ranks 0 and 1 own the same ids: start the process group")


def test_one_of_several_copies_alone_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = Run(tmp_path)
    with pytest.raises(ValueError, match=r"table 'users': found 30 rows on 1 ranks, expected 60"):
        run.saver.save("a", 0, 1)
