"""Near saves beside training: one at a time, left out alike on all ranks."""

import threading

from support.thread_ranks import ThreadGroup, Wire, alone

from recckpt.near.saves import LeftOutNear
from recckpt.parallel.threads import run_all


def test_all_ranks_leave_out_as_much_as_the_one_that_has_left_out_most():
    wire, turns = Wire(3), [LeftOutNear() for _ in range(3)]
    for rank, n_left_out in enumerate((2, 0, 3)):
        assert all(turns[rank].leaves_out() for _ in range(n_left_out))
    run_all(lambda rank: (turns[rank].agree(alone(ThreadGroup(rank, wire))), turns[rank].end()), range(3), 3)
    assert [[turn.leaves_out() for _ in range(3)] for turn in turns] == [
        [True, False, False],
        [True, True, True],
        [False, False, False],
    ]
    assert not turns[1].leaves_out()


def test_what_is_due_while_the_ranks_meet_waits_until_they_have():
    wire, turns, is_at_it = Wire(2), [LeftOutNear(), LeftOutNear()], threading.Event()

    class Meeting(ThreadGroup):
        def all_gather(self, value):
            is_at_it.set()
            return super().all_gather(value)

    def end(rank, group):
        turns[rank].agree(alone(group(rank, wire)))
        turns[rank].end()

    threads = [threading.Thread(target=end, args=args) for args in ((0, Meeting), (1, ThreadGroup))]
    assert turns[1].leaves_out()
    threads[0].start()
    assert is_at_it.wait(60)
    threads[1].start()
    assert turns[0].leaves_out(), "rank 1 has left out one more"
    assert not turns[0].leaves_out()
    for thread in threads:
        thread.join()


def test_nothing_more_is_left_out_where_the_ranks_have_not_met():
    turn = LeftOutNear()
    assert turn.leaves_out()
    turn.end()
    assert not turn.leaves_out()
