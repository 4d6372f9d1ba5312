"""How often a run would best save, by its timeline."""

import dataclasses
from datetime import datetime, timedelta, timezone

from recckpt.inspect.report.intervals import advice_of, words_of
from recckpt.inspect.save_times import SaveTimes

BEGIN = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)


def saves(n, every_sec, **fields):
    nothing = {field.name: None for field in dataclasses.fields(SaveTimes)}
    times = [(BEGIN + timedelta(seconds=every_sec * number)).isoformat() for number in range(n)]
    return [SaveTimes(**{**nothing, "time": time.replace("+00:00", "Z"), **fields}) for time in times]


def test_who_saves_too_rarely_reads_how_often_would_cost_less():
    advice = advice_of(saves(9, 1000, blocked_sec=0.556, total_sec=2.0), 1.0)
    assert round(advice.best_sec) == 310
    assert words_of(advice) == (
        "at one failure a day, saving every 5 min 10 s would cost 0.36 % of the time; you save every 16 min 40 s, "
        "which costs 0.64 % (a save holds training up for 556 ms and takes 2 s)"
    )


def test_an_interval_is_not_shorter_than_a_save():
    assert advice_of(saves(3, 1000, blocked_sec=0.001, total_sec=60.0), 24.0).best_sec == 60.0


def test_of_one_save_it_is_not_known_how_often_there_are_any():
    advice = advice_of(saves(1, 0, blocked_sec=1.0, total_sec=2.0), 0.5)
    assert (advice.every_sec, advice.every_share) == (None, None)
    assert words_of(advice).startswith("at 0.5 failures a day, saving every 9 min 48 s would cost 0.34 % of the time (")


def test_without_figures_of_saves_there_is_no_advice():
    failed = saves(5, 100, blocked_sec=1.0, total_sec=2.0, error="OSError")
    assert advice_of([], 1.0) is None
    assert advice_of([*failed, *saves(5, 100, total_sec=2.0)], 1.0) is None
