"""When to save: each object is asked about moments, without a disk or a clock."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recckpt.policies.when import (
    AnyOf,
    AtSteps,
    EveryEpochs,
    EveryEventTime,
    EverySeconds,
    EverySteps,
    EveryWindows,
    Moment,
    When,
    WhenTrue,
    as_when,
    check_ephemeral,
)

START = Moment(0, 0.0)


def moments(n_steps: int, seconds_a_step: float = 1.0) -> list[Moment]:
    return [Moment(step, step * seconds_a_step, event_time=100.0 * step) for step in range(1, n_steps + 1)]


def saved(when: When, passed: list[Moment], start: Moment = START) -> list[int]:
    """The steps that a run saves which goes through these moments, and saves whenever it is due."""
    last, steps = start, []
    for now in passed:
        if when.due(now, last):
            last = now
            steps.append(now.step)
    return steps


@given(st.integers(1, 50), st.integers(0, 200))
def test_every_steps_is_due_at_the_multiples_whatever_was_saved_between(n, last):
    due = [now.step for now in moments(200) if EverySteps(n).due(now, Moment(last, 0.0))]
    assert due == list(range(n, 201, n))


@given(st.lists(st.integers(1, 60), min_size=1))
def test_at_steps_is_due_at_these_and_no_others(steps):
    assert saved(AtSteps(steps), moments(60)) == sorted(set(steps))
    assert AtSteps(steps) == AtSteps(tuple(reversed(steps)))


def test_the_ends_of_windows_and_epochs_are_told_from_the_steps_that_they_follow():
    ends = [
        *(Moment(3, 0.0, windows=0, epochs=0), Moment(3, 0.0, windows=1, ends="window")),
        *(Moment(6, 0.0, windows=1), Moment(6, 0.0, windows=2, ends="window")),
        Moment(6, 0.0, windows=2, epochs=1, ends="epoch"),
    ]

    def due(when):
        return [number for number, now in enumerate(ends) if when.due(now, START)]

    assert [due(EverySteps(3)), due(AtSteps([6])), due(EveryWindows(1))] == [[0, 2], [2], [1, 3]]
    assert [due(EveryWindows(2)), due(EveryEpochs(1)), due(EveryWindows(2) | EveryEpochs(1))] == [[3], [4], [3, 4]]


def test_seconds_are_counted_from_the_last_save_whatever_made_it_on_a_clock_that_begins_anywhere():
    assert saved(EverySeconds(10), moments(10, seconds_a_step=4)) == [3, 6, 9]
    assert saved(EverySeconds(10) | AtSteps([4]), moments(10, seconds_a_step=4)) == [3, 4, 7, 10]
    assert saved(EverySeconds(0.5), moments(3)) == [1, 2, 3]
    passed = [Moment(step, 1e6 + step) for step in range(1, 8)]
    assert saved(EverySeconds(3), passed, start=Moment(0, 1e6)) == [3, 6]
    assert saved(EverySteps(4) | AtSteps([3]) | AtSteps([5]), moments(9)) == [3, 4, 5, 8]


def test_event_time_is_due_once_it_has_passed_a_boundary_and_never_where_it_is_not_known_or_goes_back():
    hours = EveryEventTime(3600)
    times = [3599.0, 3600.0, 7199.0, 7200.5, 7300.0, 20_000.0, 20_001.0]
    passed = [Moment(step, 0.0, event_time=time) for step, time in enumerate(times, 1)]
    assert saved(hours, passed, start=Moment(0, 0.0, event_time=100.0)) == [2, 4, 6]
    for now, last, is_due in (
        *((3601.0, 3599.0, True), (3599.5, 3599.0, False), (5000.0, 50.0, True), (None, 50.0, False)),
        *((5000.0, None, False), (50.0, 5000.0, False), (float("nan"), 50.0, False)),
    ):
        assert hours.due(Moment(8, 0.0, event_time=now), Moment(7, 0.0, event_time=last)) == is_due


@given(st.floats(0, 1e9), st.floats(0, 1e5), st.floats(1e-2, 1e5))
def test_event_time_is_due_where_a_multiple_lies_between(last, gone, seconds):
    now = last + gone
    due = EveryEventTime(seconds).due(Moment(2, 0.0, event_time=now), Moment(1, 0.0, event_time=last))
    if gone > seconds * 1.001:
        assert due
    if due:
        assert now > last
        assert now // seconds * seconds > last - 1e-6


def test_a_predicate_sees_the_moment():
    spike = WhenTrue(lambda now: now.metrics.get("loss", 0.0) > 2)
    assert spike.due(Moment(5, 0.0, metrics={"loss": 3.0}), START)
    assert not spike.due(Moment(5, 0.0, metrics={"loss": 1.0}), START)
    assert WhenTrue(lambda now: now.step).due(Moment(5, 0.0), START) is True


def test_joining_is_flat_and_takes_objects_that_are_not_ours():
    class Odd:
        same_on_all_ranks = True

        def due(self, now, last):
            return now.step % 2 == 1

    odd, two, ten = Odd(), EverySteps(2), EverySeconds(10)
    assert (two | odd | ten).whens == (two, odd, ten)
    assert (odd | (two | ten)).whens == (odd, two, ten)
    assert saved(odd | AtSteps([4]), moments(5)) == [1, 3, 4, 5]
    assert as_when(odd) is odd


def test_ranks_agree_by_themselves_only_where_steps_decide_alone():
    by_step, by_rank = (
        [EverySteps(2), AtSteps([7]), EveryWindows(1), EveryEpochs(1)],
        [EverySeconds(1), EveryEventTime(1), WhenTrue(bool)],
    )
    assert all(when.same_on_all_ranks for when in [*by_step, AnyOf(*by_step)])
    assert not any(when.same_on_all_ranks for when in [*by_rank, *(when | by_step[0] for when in by_rank)])


@given(st.integers(1, 300), st.lists(st.floats(allow_nan=True) | st.none(), min_size=4, max_size=4))
def test_what_is_the_same_on_all_ranks_looks_at_nothing_but_the_step(step, values):
    seconds, event_time, last_seconds, last_event_time = values
    for when in (EverySteps(7), AtSteps([7, 70]), EverySteps(7) | AtSteps([3])):
        here = Moment(step, seconds, event_time, {"loss": 1.0})
        assert when.due(here, Moment(0, last_seconds, last_event_time)) == when.due(Moment(step, 0.0), START)


def test_they_print_compare_and_pickle_as_they_were_made():
    when = EverySteps(100) | EverySeconds(2.5) | AtSteps([9, 3, 9]) | EveryEventTime(3600)
    assert repr(when) == (
        "AnyOf(EverySteps(n=100), EverySeconds(seconds=2.5), AtSteps(steps=(3, 9)), EveryEventTime(seconds=3600))"
    )
    assert pickle.loads(pickle.dumps(when)) == when == eval(repr(when))
    assert len({when, eval(repr(when))}) == 1
    assert when != EverySteps(100)


def test_ephemeral_checkpoints_are_taken_where_they_are_between_the_regular_ones():
    assert (as_when(100), as_when(EverySeconds(3))) == (EverySteps(100), EverySeconds(3))
    for regular, ephemeral in (
        *((10, 10), (10, 20), (EverySteps(10) | EverySeconds(60), 10), (EverySeconds(60), EverySeconds(60))),
        *((EveryWindows(2), EveryWindows(2)), (EveryEpochs(1), EveryEpochs(3))),
        (EveryEventTime(3600), EveryEventTime(7200)),
    ):
        with pytest.raises(ValueError, match="ephemeral must be below save_interval, found Every"):
            check_ephemeral(as_when(ephemeral), as_when(regular))
    for regular, ephemeral in ((10, 9), (10, EverySeconds(60)), (AtSteps([5]), 10), (EverySeconds(60), EverySteps(99))):
        check_ephemeral(as_when(ephemeral), as_when(regular))
