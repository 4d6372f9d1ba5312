import pytest
from support.builders import Run, flip_bit
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    """An output dir with a full checkpoint and a delta with a row that is not finite."""
    save_tables(open_storage(str(tmp_path)), [filled("item", [-5, 7])], ckpt_id="ckpt_10", step=10)
    write_delta(counting(tmp_path)[0], "ckpt_20", 2, [({-5: (float("nan"), 4)}, [])], step=20)
    return tmp_path


def test_what_is_found_ends_with_0_and_says_where(recckpt, run):
    answer = recckpt("first", run)
    assert (answer.code, answer.err) == (0, "")
    first, second = answer.out.splitlines()[:2]
    assert first == "not finite: first in ckpt_20 of step 20; not yet in ckpt_10, the one before"
    assert second == "1 row of table item"
    assert answer.lines[-1] == ["item", "-5", "1"]


def test_what_is_in_none_ends_with_1(recckpt, run):
    answer = recckpt("first", run, "--where", "table=item norm>1e9")
    assert answer == (1, "table=item norm>1e9: in none of 2 checkpoints\n", "")
    assert recckpt("first", run, "--where", "norm > 9", "--json").json["ckpt_id"] == "ckpt_10"


def test_errors_end_with_2(recckpt, run):
    for args, what in (((run, "--where", "norm>"), "found 'norm>'"), ((run / "nowhere",), "does not exist")):
        answer = recckpt("first", *args)
        assert (answer.code, answer.out, what in answer.err) == (2, "", True), answer.err


def test_damage_that_was_passed_over_is_said_beside_what_was_found(recckpt, run):
    save_tables(open_storage(str(run)), [filled("item", [9])], ckpt_id="ckpt_30", step=30)
    flip_bit(run / "ckpt_20" / "manifest.json")
    answer = recckpt("first", run, "--where", "id=9")
    assert (answer.code, "ckpt_30" in answer.out) == (0, True)
    assert answer.err == f"recckpt: {run}: passed over 1 damaged checkpoint\n"


def test_registered_objects_whose_pickles_are_not_looked_at_are_named(recckpt, tmp_path):
    Run(tmp_path, interval=2).train(2)
    answer = recckpt("first", tmp_path)
    assert answer.code == 1
    assert answer.out.endswith("\n\nnot looked at: what is pickled of dense_optim\n")
    assert "not looked at" not in recckpt("first", tmp_path, "--where", "table=item not finite").out
    assert recckpt("first", tmp_path, "--json").json["unread"] == ["dense_optim"]
