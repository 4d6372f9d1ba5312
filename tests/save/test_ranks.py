"""Deltas and reduced saves of real ranks."""

import pickle
from pathlib import Path

import pytest
from support import spec_reader
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow

from recckpt.inspect.verify import verify

SIZES, REDUCED_SIZES = (2, 3, 1), (2, 1)
FIRST = "there is no checkpoint to count changes from"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    run_script(Path(__file__).parent / "delta_ranks.py", root)
    return root


@mostly_slow()
@pytest.mark.parametrize("number", range(len(SIZES)))
def test_all_ranks_write_the_same_kind_and_the_reader_finds_what_they_had(root, number):
    size, here = SIZES[number], root / str(number)
    of_ranks = results(here, size)
    assert all(seen[:3] == of_ranks[0][:3] for seen in of_ranks)
    for ckpt_id in sorted({path.name.partition("-")[0] for path in here.glob("ckpt_*")}):
        held = [pickle.loads((here / f"{ckpt_id}-of-{rank}").read_bytes()) for rank in range(size)]
        for table in ("a", "b"):
            expected = {id_: row for each in held for id_, row in each[table].items()}
            assert sum(len(each[table]) for each in held) == len(expected)
            if (root / "saved" / ckpt_id / "manifest.json").exists():  # or it was ephemeral
                assert spec_reader.read(root / "saved", ckpt_id, table) == expected


def test_ranks_that_restored_what_others_saved_go_on_with_deltas(root):
    for number, size in enumerate(SIZES):
        first, changed, cleared, failed, mended, disagree, *_ = results(root / str(number), size)[0]
        assert first[1] == ("full" if number == 0 else "delta")
        assert changed[1:3] == ("delta", (11, 6, False))
        assert (cleared[1], cleared[2][1:]) == ("delta", (0, True)), "replaced on one rank is replaced on all"
        assert failed == size - 1
        assert mended[1] == "delta"
        assert mended[2][0] == 2, "what the failed save would have held is in the next"
        reason = "rank 1 counts changes since another checkpoint, or does not count them"
        assert (disagree[1], disagree[3]) == (("full", reason) if size > 1 else ("delta", None))


def test_the_chains_of_all_ranks_are_whole(root, reduced):
    assert verify(str(root / "saved")) + verify(str(reduced / "saved")) == []


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    root = tmp_path_factory.mktemp("reduced_ranks")
    run_script(Path(__file__).parent / "reduced_ranks.py", root)
    return root


def together(of_ranks):
    """Return the rows of all ranks, their counts of ids that wait, and how many rows they have in all."""
    rows = {id_: row for rows, _, _ in of_ranks for id_, row in rows.items()}
    waiting = {id_: count for _, counts, _ in of_ranks for id_, count in counts.items()}
    return rows, waiting, sum(n_rows for _, _, n_rows in of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(REDUCED_SIZES)))
def test_a_checkpoint_has_the_rows_of_all_ranks_that_meet_the_conditions(reduced, number):
    of_ranks = results(reduced / str(number), REDUCED_SIZES[number])
    for saves in zip(*(found[1:] for found in of_ranks), strict=True):
        ckpt_id = saves[0][0]
        rows, waiting, n_rows = together([expected for _, expected, _, _ in saves])
        assert spec_reader.read(reduced / "saved", ckpt_id, "t") == rows
        candidates = spec_reader.read(reduced / "saved", ckpt_id, "t.candidates")
        assert {id_: int.from_bytes(row["embedding"], "little") for id_, row in candidates.items()} == waiting
        is_first = (number, ckpt_id) == (0, of_ranks[0][1][0])
        assert {why_full for _, _, why_full, _ in saves} == {FIRST if is_first else None}
        assert saves[0][3] == n_rows - len(rows), "rank 0 says how many rows all ranks have left out"


@pytest.mark.parametrize("number", [1])
def test_another_number_of_ranks_resumes_what_was_saved(reduced, number):
    before = [found[-1][1] for found in results(reduced / str(number - 1), REDUCED_SIZES[number - 1])]
    after = [found[0][1] for found in results(reduced / str(number), REDUCED_SIZES[number])]
    assert together(after)[:2] == together(before)[:2]
