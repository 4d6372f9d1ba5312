"""Words for people."""

import pytest

from recckpt.text import cell, duration, sparkline


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1_790_000_123.5, "1790000123.5"),  # seconds since 1970
        (1_790_000_000.0, "1790000000"),
        (-2.5e6, "-2500000"),
        (0.0000123456789, "1.23457e-05"),
        (1e30, "1e+30"),
        (float("nan"), "nan"),
        ([1.0, 0.25], "[1, 0.25]"),
    ],
)
def test_a_time_is_shown_to_the_second_and_other_numbers_with_six_digits(value, shown):
    assert cell(value) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0.0123, "12.3 ms"), (1.5, "1.5 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (3600, "1 h")],
        *[(3 * 3600 + 130, "3 h 2 min"), (86400 * 1200 + 7200, "1,200 d 2 h")],
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_each_number_is_a_bar_as_high_as_its_share_of_the_largest():
    assert sparkline([0, 1, 2, 4, 7.9, 8]) == "▁▂▃▅██"
    assert sparkline([1.0, None, 2.0]) == "▅·█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([None]) == "·"
    assert sparkline([]) == ""
