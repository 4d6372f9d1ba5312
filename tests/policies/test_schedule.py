"""When a manager saves: decided without a disk, by a clock that is set by hand."""

import pytest

from recckpt.policies.schedule import SaveCounts, Schedule, best_interval, lost_share
from recckpt.policies.when import (
    AtSteps,
    EveryEpochs,
    EveryEventTime,
    EverySeconds,
    EverySteps,
    EveryWindows,
    Moment,
    WhenTrue,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def never(ask):
    raise AssertionError("nobody is to be asked")


def alone(ask):
    return ask()


def idle():
    return False


def busy():
    return True


class Ticks:
    """A run of a schedule, step by step."""

    def __init__(self, regular, ephemeral=None, backpressure="wait", agreed=alone):
        self.clock = Clock()
        self.agreed, self.step, self.windows, self.epochs = agreed, 0, 0, 0
        self.schedule = Schedule(regular, ephemeral, backpressure, self.moment())

    def moment(self, event_time=None, metrics=None, ends="step"):
        counts = {"windows": self.windows, "epochs": self.epochs}
        return Moment(self.step, self.clock(), event_time, metrics or {}, **counts, ends=ends)

    def start(self, step, event_time=None):
        self.step = step
        self.schedule.start(self.moment(event_time))

    def due(self, event_time=None, metrics=None):
        """Go one step on and say what is due."""
        self.step += 1
        return self.schedule.due(self.moment(event_time, metrics), self.agreed)

    def tick(self, running=idle, event_time=None):
        """Go one step on, and begin what is due."""
        return self.begin(self.due(event_time), running, event_time)

    def end(self, ends, running=idle):
        """End a window or an epoch, and begin what is due."""
        self.windows += ends == "window"
        self.epochs += ends == "epoch"
        return self.begin(self.schedule.due(self.moment(ends=ends), self.agreed), running)

    def begin(self, due, running, event_time=None):
        kind = self.schedule.admit(due, running)
        if kind is not None:
            self.schedule.begun(kind, self.moment(event_time))
        return kind

    def ticks(self, n_steps, running=idle):
        return [self.tick(running) for _ in range(n_steps)]


def test_saves_are_due_at_their_steps_ephemeral_ones_give_way_and_nobody_is_asked():
    run = Ticks(EverySteps(3), agreed=never)
    assert run.ticks(7) == [None, None, "regular", None, None, "regular", None]
    assert run.schedule.counts == SaveCounts(begun=2)
    run = Ticks(EverySteps(4), EverySteps(2), agreed=never)
    assert run.ticks(8) == [None, "ephemeral", None, "regular"] * 2
    run = Ticks(AtSteps([3, 12]))
    run.start(10)  # by a restore
    assert run.ticks(3) == [None, "regular", None]


def test_seconds_count_from_the_start_and_from_each_save_by_hand_too():
    run = Ticks(EverySeconds(60))
    run.clock.now += 59
    assert run.tick() is None
    run.clock.now += 1
    assert run.tick() == "regular"
    run.clock.now += 59.5
    assert run.tick() is None
    run.schedule.begun("regular", run.moment())
    run.clock.now += 59
    assert run.tick() is None
    run.clock.now += 1
    assert run.tick() == "regular"


def test_a_regular_save_counts_for_the_ephemeral_ones_but_not_the_other_way_round():
    run = Ticks(EverySeconds(100), EverySeconds(30))
    saved = []
    for _ in range(24):
        run.clock.now += 10
        saved.append((run.tick() or "-")[0])
    assert "".join(saved) == "--e--e--er--e--e--er--e-"


def test_after_a_restore_everything_counts_from_there():
    run = Ticks(EverySeconds(60), backpressure="latest")
    run.clock.now += 60
    assert run.tick(busy) is None
    run.start(500)
    assert run.tick() is None, "what was put off before the restore is forgotten"
    run.clock.now += 60
    assert run.tick() == "regular"


# windows and epochs


def test_windows_and_epochs_are_due_at_their_ends_and_nobody_is_asked():
    run = Ticks(EverySteps(3) | EveryWindows(2) | EveryEpochs(1), agreed=never)
    assert [run.tick(), run.end("window"), run.tick(), run.end("window"), run.end("epoch")] == [
        *(None, None, None, "regular", "regular")
    ]
    assert [*run.ticks(2), run.end("window")] == ["regular", None, None]


def test_at_the_end_of_a_window_no_ephemeral_save_takes_the_place_of_the_regular_one_of_its_step():
    run = Ticks(EverySteps(2), EveryWindows(1), agreed=never)
    assert [run.tick(), run.end("window"), run.tick(), run.end("window")] == [None, "ephemeral", "regular", "regular"]


def test_back_pressure_treats_the_end_of_a_window_as_that_of_a_step():
    skip, latest = (Ticks(EveryWindows(1), backpressure=pressure) for pressure in ("skip", "latest"))
    for run, then in ((skip, None), (latest, "regular")):
        assert [run.end("window", busy), run.tick()] == [None, then]
    assert (skip.schedule.counts, latest.schedule.counts) == (SaveCounts(skipped=1), SaveCounts(begun=1))


# event time


def test_event_time_counts_from_the_first_that_is_known_and_over_a_restart_no_boundary_is_missed_or_comes_twice():
    run = Ticks(EveryEventTime(3600))
    assert [run.tick(event_time=time) for time in (None, 3599.0, 3599.5, 3600.0, 3601.0, 9000.0)] == [
        *(None, None, None, "regular", None, "regular")
    ]
    run.start(70, 3500.0)  # saved before the hour was full
    assert run.tick(event_time=3700.0) == "regular"
    run.start(80, 3700.0)
    assert run.tick(event_time=3800.0) is None


# metrics


def test_predicates_see_the_step_and_what_was_measured():
    run = Ticks(WhenTrue(lambda now: now.metrics.get("loss", 0) > 2 and now.step > 1))
    assert [run.due(metrics=metrics) for metrics in ({"loss": 3.0}, {"loss": 3.0}, {"loss": 1.0}, None)] == [
        *(None, "regular", None, None)
    ]


# ranks


def test_ranks_are_asked_only_where_they_may_differ_and_whether_a_save_is_running_where_one_is_due():
    asked = []

    def agreed(ask):
        asked.append(ask())
        return asked[-1]

    run = Ticks(EverySteps(2), EverySeconds(10), agreed=agreed)
    run.ticks(2)
    assert asked == [False], "at the second step the regular one is due, and ephemeral ones are not looked at"
    run.clock.now += 10
    run.ticks(1)
    assert asked == [False, True]
    assert Ticks(EverySeconds(10), agreed=lambda ask: True).due() == "regular", "another rank finds it due"
    run = Ticks(EverySteps(2))
    assert [run.tick(running) for running in (lambda: never(None), idle)] == [None, "regular"]


# back-pressure


@pytest.mark.parametrize(
    ("backpressure", "whens", "start", "while_busy", "then", "counts"),
    [
        ("wait", (2, None), 0, "-r-r", "", SaveCounts(begun=2, waited=2)),  # it is made, and waits
        ("skip", (2, None), 0, "----", "-r", SaveCounts(begun=1, skipped=2)),  # it is left out until the next is due
        ("latest", (3, None), 0, "----", "rr", SaveCounts(begun=2)),  # it is made as soon as the other is over
        ("latest", (2, None), 0, "-------", "r-", SaveCounts(begun=1, dropped=3)),  # all but the newest are dropped
        ("latest", (4, 2), 3, "---", "r", SaveCounts(begun=1, dropped=1)),  # regular at 4 stays that, ephemeral at 6
        ("latest", (4, 2), 0, "---", "r-", SaveCounts(begun=1, dropped=1)),  # ephemeral at 2 gives way
    ],
)
def test_what_is_due_while_a_save_is_under_way(backpressure, whens, start, while_busy, then, counts):
    regular, ephemeral = (None if n is None else EverySteps(n) for n in whens)
    run = Ticks(regular, ephemeral, backpressure)
    if start:
        run.start(start)
    assert "".join((kind or "-")[0] for kind in run.ticks(len(while_busy), busy)) == while_busy
    assert "".join((kind or "-")[0] for kind in run.ticks(len(then))) == then
    assert run.schedule.counts == counts


# how often: the figures of the papers, and that no other interval costs less


def test_the_best_interval_is_that_of_the_figures_in_the_papers_of_daly_and_young():
    """Daly's 3 to 5, for saves of 5 minutes, which he counts from the end of one to the begin of the next."""
    for failure_sec, minutes in ((24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)):
        between = best_interval(5 * MINUTE, failure_sec) - 5 * MINUTE
        assert between / MINUTE == pytest.approx(minutes, rel=0.01)
    assert best_interval(0.5, DAY) == pytest.approx((2 * 0.5 * DAY) ** 0.5, rel=1e-3)
    assert best_interval(100.0, 50.0) == 150.0  # one between two failures
    assert lost_share(10 * DAY, 1.0, 0.0, DAY) == 1.0


@pytest.mark.parametrize("pause_sec", [0.001, 0.5, 30.0])
def test_no_other_interval_costs_less(pause_sec):
    best = best_interval(pause_sec, DAY)
    least = lost_share(best, pause_sec, 60.0, DAY)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost_share(factor * best, pause_sec, 60.0, DAY) > least
