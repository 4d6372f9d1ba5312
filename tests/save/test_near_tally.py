"""What a saver counts of its near saves, and what the line of a checkpoint says of those before it."""

from recckpt.save.near_tally import NearCounts, NearTally
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
    said = tally.take()["near"]
    assert 0 <= said.pop("blocked_sec") <= said.pop("total_sec")
    assert said == {
        **{"made": 2, "failed": 1, "skipped": {"under_way": 2}, "steps": (20, 100), "hosts": 2, "copies": 1},
        **{"n_bytes": 150, "error": "OSError: no room"},
    }
    tally.note_made(made(120), 2, 1)
    assert tally.take()["near"]["steps"] == (120,)
    assert tally.counts == NearCounts(made=3, failed=1, skipped=2)


def test_where_no_near_save_was_due_a_line_says_nothing_of_them():
    assert NearTally().take() == {}
