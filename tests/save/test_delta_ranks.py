"""Deltas of several real ranks: written by one number, gone on from by another, one answer to what a save is."""

import pickle
from pathlib import Path

import pytest
from support import spec_reader
from support.rank_processes import results, run_script
from support.sweeps import mostly_slow

from recckpt.inspect.verify import verify

SIZES = (2, 3, 1)


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
        reason = "rank 1 counts changes from another checkpoint, or none"
        assert (disagree[1], disagree[3]) == (("full", reason) if size > 1 else ("delta", None))


def test_the_chains_of_all_ranks_are_whole(root):
    assert verify(str(root / "saved")) == []
