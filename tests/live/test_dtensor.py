"""Embeddings whose rows FSDP2 and tensor parallelism spread over ranks: saved by rows, restored on any ranks."""

from itertools import product
from pathlib import Path

import pytest
import torch
from support import spec_reader
from support.rank_processes import results, run_script
from support.sweeps import SWEEP_STRIDE

from recckpt import Saver
from recckpt.sparse import HashTable, SparseAdagrad

SCRIPT = Path(__file__).with_name("dtensor_ranks.py")
N_ROWS = {"users": 61, "items": 4}
LAYOUTS, RULES = ("fsdp", "hybrid", "rows", "copies"), ("Adagrad", "Adam", "momentum", "foreach", "fused")
ALL = [*product(LAYOUTS[:2], RULES), *product(LAYOUTS[2:], RULES[:3])]  # torch refuses the others beside plain tensors
CASES = ALL[:: 1 if SWEEP_STRIDE < 20 else 3]  # each layout and each rule


def joined(ranks):
    """Return the rows of all ranks by table and id; copies of one are equal."""
    rows = {table: {} for table in N_ROWS}
    for rank in ranks:
        for table, own in rank["rows"].items():
            assert all(rows[table].get(row, values) == values for row, values in own.items())
            rows[table].update(own)
    return rows


def check(root, cases, sizes):
    """Check what the ranks have done against each other, and against the files, read by the page alone."""
    before = {}
    for number, size in enumerate(sizes, 1):
        outcomes = results(root / f"run-{number}", size)
        for case in cases:
            ranks = [of_rank[case] for of_rank in outcomes if case in of_rank]
            if not ranks:
                continue
            saved = joined([rank["saved"] for rank in ranks])
            assert {table: len(rows) for table, rows in saved.items()} == N_ROWS
            for table, rows in saved.items():
                assert spec_reader.read(root / "-".join(case), f"{number}-2", table) == rows
            if case in before:
                step, rows, steps = before[case]
                assert {rank["found"] for rank in ranks} == {step}
                assert joined([rank["restored"] for rank in ranks]) == rows
                assert all(rank["restored"]["steps"] == steps for rank in ranks)
            before[case] = 10 * number + 2, saved, ranks[0]["saved"]["steps"]
            for rank in ranks:
                assert rank["kinds"][1:] == ["delta", "delta"]
                assert not [name for name in rank["dense"] if "users" in name or "items" in name]
                assert case[1] != "Adagrad" or max(rank["upserts"][2].values()) <= 8
    return before


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("dtensor")
    run_script(SCRIPT, root, "fsdp-Adagrad", 3, 1, 2)
    return root


@pytest.mark.slow
def test_fsdp_rows_are_restored_on_other_ranks_and_without_any_and_train_on_with_the_same_bits(runs):
    check(runs, [("fsdp", "Adagrad")], [3, 1, 2])


@pytest.mark.slow
def test_a_hash_table_takes_over_what_ranks_have_saved(runs):
    table = HashTable(3, name="users")
    optimizer = SparseAdagrad([table], lr=0.1)
    model = torch.nn.ModuleDict({"users": table})
    saver = Saver(model, optimizer, str(runs / "ours"))
    saver.load_by_config({"path": str(runs / "fsdp-Adagrad"), "load": ["users@*"]})
    rows = spec_reader.read(runs / "fsdp-Adagrad", "3-2", "users")
    ids = table.ids().tolist()
    assert sorted(ids) == list(range(N_ROWS["users"]))
    for at, id_ in enumerate(ids):
        assert table.embeddings()[at].detach().numpy().tobytes() == rows[id_]["embedding"]
        assert table.slots["sparse_adagrad_sum"][at].numpy().tobytes() == rows[id_]["sparse_adagrad_sum"]


@pytest.mark.slow
def test_every_layout_and_optimizer_on_one_to_four_ranks(tmp_path):
    sizes = [2, 1, 3, 4]
    run_script(SCRIPT, tmp_path, " ".join(map("-".join, CASES)), *sizes, seconds=550)
    assert check(tmp_path, CASES, sizes).keys() == {*CASES}
    layouts, rules = zip(*CASES, strict=True)
    assert ({*layouts}, {*rules}) == ({*LAYOUTS}, {*RULES})


@pytest.mark.slow
def test_what_is_not_rows_stays_dense_and_says_why(tmp_path):
    run_script(SCRIPT.with_name("dtensor_cases.py"), tmp_path)
