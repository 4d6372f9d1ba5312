"""Sharded tables of several real ranks, saved without some slots and rows, and gone on from by another number."""

from pathlib import Path

import pytest
from support import spec_reader
from support.rank_processes import results, run_script

from recckpt.inspect.verify import verify

SIZES = (2, 1)
FIRST = "there is no checkpoint to count changes from"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    run_script(Path(__file__).parent / "reduced_ranks.py", root)
    return root


def together(of_ranks):
    """Return the rows of all ranks, their counts of ids that wait, and how many rows they have in all."""
    rows = {id_: row for rows, _, _ in of_ranks for id_, row in rows.items()}
    waiting = {id_: count for _, counts, _ in of_ranks for id_, count in counts.items()}
    return rows, waiting, sum(n_rows for _, _, n_rows in of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_a_checkpoint_has_the_rows_of_all_ranks_that_meet_the_conditions(root, number):
    of_ranks = results(root / str(number), SIZES[number])
    for saves in zip(*(found[1:] for found in of_ranks), strict=True):
        ckpt_id = saves[0][0]
        rows, waiting, n_rows = together([expected for _, expected, _, _ in saves])
        assert spec_reader.read(root / "saved", ckpt_id, "t") == rows
        candidates = spec_reader.read(root / "saved", ckpt_id, "t.candidates")
        assert {id_: int.from_bytes(row["embedding"], "little") for id_, row in candidates.items()} == waiting
        is_first = (number, ckpt_id) == (0, of_ranks[0][1][0])
        assert {why_full for _, _, why_full, _ in saves} == {FIRST if is_first else None}
        assert saves[0][3] == n_rows - len(rows), "rank 0 says how many rows all ranks have left out"


@pytest.mark.parametrize("number", [1])
def test_another_number_of_ranks_resumes_what_was_saved(root, number):
    before = [found[-1][1] for found in results(root / str(number - 1), SIZES[number - 1])]
    after = [found[0][1] for found in results(root / str(number), SIZES[number])]
    assert together(after)[:2] == together(before)[:2]


def test_the_chain_of_all_ranks_is_whole(root):
    assert verify(str(root / "saved")) == []
