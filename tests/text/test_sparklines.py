from recckpt.text import sparkline


def test_each_number_is_a_bar_as_high_as_its_share_of_the_largest():
    assert sparkline([0, 1, 2, 4, 7.9, 8]) == "▁▂▃▅██"
    assert sparkline([1.0, None, 2.0]) == "▅·█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([None]) == "·"
    assert sparkline([]) == ""
