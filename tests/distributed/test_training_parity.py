"""Any number of ranks learns the same from the same batches: sharded tables, dense layers under DDP."""

from pathlib import Path

import pytest
import torch
from support.rank_processes import results, run_script

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def run(root, n_steps, sizes):
    run_script(Path(__file__).with_name("parity_ranks.py"), root, n_steps, *sizes)
    return [merged(results(root, size)) for size in sizes]


def merged(ranks):
    """Return one run in place of the ranks of one: of each table the rows of all, in the order of their ids."""
    tables = {}
    for name, columns in ranks[0]["tables"].items():
        whole = {column: torch.cat([rank["tables"][name][column] for rank in ranks]) for column in columns}
        order = whole["id"].argsort()
        tables[name] = {column: values[order] for column, values in whole.items()}
        assert len(whole["id"].unique()) == len(order)
    for rank in ranks:
        assert rank["steps"] == ranks[0]["steps"]
        torch.testing.assert_close((rank["dense"], rank["moments"]), (ranks[0]["dense"], ranks[0]["moments"]))
    return {**ranks[0], "tables": tables, "losses": torch.stack([rank["losses"] for rank in ranks]).mean(0)}


def agree(runs):
    first, *others = runs
    assert first["losses"][-10:].mean() < first["losses"][:10].mean() - 0.01  # there is something to agree on
    for other in others:
        assert other["steps"] == first["steps"]
        for part in ("losses", "tables", "dense", "moments"):
            torch.testing.assert_close(other[part], first[part], **TOLERANCE)


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path):
    agree(run(tmp_path, 30, [1, 2]))


@pytest.mark.slow
def test_200_steps_of_one_two_and_four_ranks_agree(tmp_path):
    agree(run(tmp_path, 200, [1, 2, 4]))
