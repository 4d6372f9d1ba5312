"""The counts of near saves, and what a line of the timeline says of those before it."""

from recckpt.near.counts import NearCounts, NearTally
from recckpt.save.save_info import SaveInfo


def made(step, n_bytes=100):
    info = SaveInfo(f"near_{step}", step)
    info.n_bytes = n_bytes
    info.note_unblocked()
    return info


def failed(step):
    info = SaveInfo(f"near_{step}", step)
    info.note_failure(OSError("no room"))
    return info


def test_a_line_says_what_became_of_near_saves_since_the_one_before():
    tally = NearTally()
    tally.note_made(made(20), 2, 1)
    tally.note_made(made(40, 50), 2, 1)
    tally.note_failed(failed(60))
    tally.note_skipped(80, "under_way")
    tally.note_skipped(100, "under_way")
    said = tally.take(110)["near"]
    assert 0 <= said.pop("blocked_sec") <= said.pop("total_sec")
    assert said == {
        **{"made": 2, "failed": 1, "skipped": {"under_way": 2}, "steps": (20, 100), "hosts": 2, "copies": 1},
        **{"gap_steps": 70, "n_bytes": 150, "error": "OSError: no room"},
    }
    tally.note_made(made(120), 2, 1)
    assert tally.take(None)["near"]["steps"] == (120,)
    assert tally.counts == NearCounts(made=3, failed=1, skipped=2)


def test_where_no_near_save_was_due_a_line_says_nothing_of_them():
    assert NearTally().take(5) == {}


def test_a_line_says_how_many_steps_there_were_at_most_from_what_counts_to_the_next():
    tally = NearTally()
    tally.note_made(made(20), 1, 0)
    assert tally.take(30)["near"]["gap_steps"] == 10
    tally.note_skipped(40, "too_much_changed")
    tally.note_made(made(90), 1, 0)
    tally.note_made(made(110), 1, 0)
    assert tally.take(100)["near"]["gap_steps"] == 60  # the checkpoint counts later than a near save after it
    tally.note_made(made(120), 1, 0)
    assert tally.take(130)["near"]["gap_steps"] == 10
    tally.note_skipped(140, "too_much_changed")
    assert tally.take(1130)["near"]["gap_steps"] == 1000


def test_where_no_step_is_known_a_line_says_no_steps_between():
    tally = NearTally()
    tally.note_failed(failed(60))
    assert "gap_steps" not in tally.take(70)["near"]


def test_a_run_that_goes_back_counts_from_there():
    tally = NearTally()
    tally.take(100)
    tally.go_on(20)
    tally.note_made(made(55), 1, 0)
    tally.note_failed(failed(60))
    tally.note_made(made(95), 1, 0)
    assert tally.take(100)["near"]["gap_steps"] == 40


def test_what_counts_late_ends_no_gap():
    tally = NearTally()
    tally.note_made(made(60), 1, 0)
    assert "gap_steps" not in tally.take(50)["near"]
    tally.note_made(made(80), 1, 0)
    assert tally.take(None)["near"]["gap_steps"] == 20
