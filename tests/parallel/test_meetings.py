"""Ranks that meet in the midst of work: what fails on one of them is raised on all, wherever they are by then."""

import numpy as np
import pytest
from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt.errors import CorruptCheckpointError, PartlyLoadedError, RecckptError
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.ranks import RanksNow
from recckpt.parallel.threads import run_all

SIZE = 3


def in_meetings(work, failed=None):
    """Return what ``work(meetings)`` gave or raised on each rank."""
    wire = Wire(SIZE)

    def on_rank(rank):
        ranks = alone(ThreadGroup(rank, wire))
        try:
            return (ranks if failed is None else ranks.raising(failed)).in_meetings(work)
        except RecckptError as error:
            return error

    return run_all(on_rank, range(SIZE), SIZE)


def damage(rank):
    return CorruptCheckpointError(f"file-{rank}", "", found="a", expected="b")


def restoring(rank, cause):
    return RecckptError(f"restoring failed on rank {rank}: {cause}")


def test_each_rank_gets_what_every_other_one_sends_it_and_nothing_from_itself():
    def work(meetings):
        parcels = [np.full(to + 1, 10 * meetings.rank + to, np.uint8) for to in range(meetings.size)]
        return [parcel.tolist() for parcel in meetings.exchange(parcels)]

    assert in_meetings(work) == [
        [[] if sender == rank else [10 * sender + rank] * (rank + 1) for sender in range(SIZE)] for rank in range(SIZE)
    ]


def test_the_values_of_all_ranks_are_gathered_in_their_order():
    assert (
        in_meetings(lambda meetings: meetings.gather({"rank": meetings.rank}))
        == [[{"rank": rank} for rank in range(SIZE)]] * SIZE
    )


def test_a_rank_alone_meets_itself():
    meetings = Meetings()
    assert meetings.gather(7) == [7]
    assert [parcel.tolist() for parcel in meetings.exchange([np.ones(3, np.uint8)])] == [[]]
    assert RanksNow(1.0).of(0, 1).in_meetings(lambda meetings: meetings.size) == 1


@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_an_error_of_one_rank_is_raised_on_all_at_whichever_meeting_they_are(n_before):
    n_met = []

    def work(meetings):
        for _ in range(n_before if meetings.rank == 1 else 3):
            meetings.wait()
            n_met.append(meetings.rank)
        if meetings.rank == 1:
            raise damage(1)

    for error in in_meetings(work):
        assert isinstance(error, CorruptCheckpointError)
        assert error.path == "file-1"
    assert n_met.count(0) == n_met.count(2) == n_before


def test_errors_of_several_ranks_at_once_are_those_of_the_first():
    def work(meetings):
        if meetings.rank:
            raise damage(meetings.rank)
        meetings.wait()

    assert [error.path for error in in_meetings(work)] == ["file-1"] * SIZE


def test_an_error_that_is_not_ours_names_the_rank_that_had_it():
    def work(meetings):
        if meetings.rank == 2:
            raise OSError("no such bucket")
        meetings.wait()

    errors = in_meetings(work, restoring)
    assert [str(error) for error in errors] == ["restoring failed on rank 2: OSError: no such bucket"] * SIZE
    assert isinstance(errors[2].__cause__, OSError)
    assert "rank 2 failed: OSError" in str(in_meetings(work)[0])


def test_a_rank_makes_up_for_an_error_only_once_the_others_have_it_as_it_was():
    """What changed tables goes before what did not, or some ranks would go on from another checkpoint."""

    def work(meetings):
        try:
            with meetings.ended_by_errors():
                if meetings.rank == 1:
                    raise damage(1)
                meetings.wait()
        except CorruptCheckpointError as error:
            if meetings.rank == 2:
                raise PartlyLoadedError(str(error), mixed=["t"]) from error
            raise

    for error in in_meetings(work):
        assert isinstance(error, PartlyLoadedError)
        assert "file-1" in str(error)


def test_a_rank_that_is_through_raises_what_another_one_fails_with_in_the_end():
    def work(meetings):
        meetings.wait()
        if meetings.rank == 0:
            raise damage(0)
        return "through"

    assert [type(error) for error in in_meetings(work)] == [CorruptCheckpointError] * SIZE
