"""How often to save: the figures of the papers, and that no other interval costs less."""

import pytest

from recckpt.policies.intervals import best_interval, lost_share

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@pytest.mark.parametrize(("failure_sec", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_best_interval_is_that_of_the_figures_in_dalys_paper(failure_sec, minutes):
    """Figures 3 to 5, for saves of 5 minutes; the paper counts from the end of one to the begin of the next."""
    between = best_interval(5 * MINUTE, failure_sec) - 5 * MINUTE
    assert between / MINUTE == pytest.approx(minutes, rel=0.01)


def test_short_saves_are_best_made_as_youngs_paper_says():
    assert best_interval(0.5, DAY) == pytest.approx((2 * 0.5 * DAY) ** 0.5, rel=1e-3)


def test_where_a_save_takes_longer_than_two_failures_are_apart_one_is_made_between_two_failures():
    assert best_interval(100.0, 50.0) == 150.0


@pytest.mark.parametrize("pause_sec", [0.001, 0.5, 30.0])
def test_no_other_interval_costs_less(pause_sec):
    best = best_interval(pause_sec, DAY)
    least = lost_share(best, pause_sec, 60.0, DAY)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost_share(factor * best, pause_sec, 60.0, DAY) > least


def test_a_share_is_never_more_than_all_of_the_time():
    assert lost_share(10 * DAY, 1.0, 0.0, DAY) == 1.0
