import pytest

from recckpt.format import drafts, layout


def test_a_name_for_what_is_being_written_is_fresh_and_known_as_one():
    first, second = drafts.temporary(layout.INTENT), drafts.temporary(layout.INTENT)
    assert first != second
    assert drafts.is_draft(first)
    assert drafts.is_draft(first, layout.INTENT)
    assert not drafts.is_draft(first, layout.OFFER)
    assert not drafts.is_draft(layout.INTENT)
    assert layout.is_ours(first)


@pytest.mark.parametrize(
    "name", [layout.INDEX_FILE, layout.TIMELINE, layout.FORGOTTEN, layout.claim(1), layout.pin("a")]
)
def test_what_crashes_leave_in_an_output_dir_is_known(name):
    assert drafts.is_temporary(drafts.temporary(name))
    assert not drafts.is_temporary(name)


def test_a_probe_is_known_whatever_a_crash_left_of_it():
    assert drafts.is_temporary(drafts.probe())
    assert drafts.is_temporary(drafts.temporary(drafts.probe()))
