"""Ranks send each other all they have, in an order that all of them agree on, and no rank gets too much at once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from recckpt.sparse.files.rounds import agreed_rounds


@st.composite
def sends(draw):
    """Return what each of some ranks sends: windows, each with bytes for others."""
    n_ranks = draw(st.integers(1, 6))
    windows = st.dictionaries(st.integers(0, n_ranks - 1), st.integers(0, 12), min_size=1)
    of_rank = st.lists(windows, max_size=6)
    return [[_to_others(window, rank) for window in draw(of_rank)] for rank in range(n_ranks)]


def _to_others(window, rank):
    return {to: n_bytes for to, n_bytes in window.items() if to != rank}


@given(sends(), st.integers(1, 30))
def test_all_windows_are_sent_and_a_rank_gets_no_more_than_it_has_room_for(of_ranks, room):
    windows = [iter(some) for some in of_ranks]
    for senders in agreed_rounds(of_ranks, room):
        assert senders
        sent = [next(windows[rank]) for rank in senders]
        received = sum(map(Counter, sent), Counter())
        assert all(n <= room or max(window.get(to, 0) for window in sent) == n for to, n in received.items())
    assert all(next(some, None) is None for some in windows)


def test_ranks_that_send_evenly_need_as_many_rounds_as_each_has_windows():
    of_ranks = [[dict.fromkeys({0, 1, 2, 3} - {rank}, 4)] * 5 for rank in range(4)]
    assert agreed_rounds(of_ranks, 12) == [{0, 1, 2, 3}] * 5


def test_ranks_that_all_send_to_one_take_turns():
    of_ranks = [[], *[[{0: 10}]] * 4]
    assert agreed_rounds(of_ranks, 20) == [{1, 2}, {3, 4}]
    assert agreed_rounds(of_ranks, 5) == [{1}, {2}, {3}, {4}]


def test_the_rank_with_most_to_send_goes_first():
    assert agreed_rounds([[], [{0: 10}], [{0: 10}] * 2], 10) == [{2}, {1}, {2}]
