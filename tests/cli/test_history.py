import pytest
from support.builders import flip_bit
from support.forge import filled, save_tables
from support.spec_reader import counting
from support.spec_writer import write_delta

from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    """An output dir with a full checkpoint and a delta, in which the row of -5 has changed and that of 7 is gone."""
    table = filled("item", [-5, 7, 9])
    save_tables(open_storage(str(tmp_path)), [table], ckpt_id="ckpt_10", step=10)
    write_delta(counting(tmp_path)[0], "ckpt_20", 2, [({-5: (3, 4)}, [7])], step=20)
    return tmp_path


def test_a_row_is_shown_in_each_checkpoint(recckpt, run):
    answer = recckpt("history", run, "item", -5, 7)
    assert (answer.code, answer.err) == (0, "")
    assert [" ".join(line) for line in answer.lines] == [
        "item -5",
        "CHECKPOINT STEP ROW SINCE STEP NORM MOVED",
        "ckpt_10 10 there 10 7.07107 -",
        "ckpt_20 20 changed 20 5 12.0416",
        "",
        "item 7",
        "CHECKPOINT STEP ROW SINCE STEP NORM MOVED",
        "ckpt_10 10 there 10 9.89949 -",
        "ckpt_20 20 gone - - -",
    ]


def test_json_has_all_of_it(recckpt, run):
    answer = recckpt("history", run, "item", 9, "--json").json
    assert (answer["table"], answer["rows"][0]["id"], answer["damage"]) == ("item", 9, {})
    told = [(state["ckpt_id"], state["change"], state["since"]) for state in answer["rows"][0]["states"]]
    assert told == [("ckpt_10", "there", "ckpt_10"), ("ckpt_20", "same", "ckpt_10")]


def test_an_id_that_no_checkpoint_has_is_a_problem(recckpt, run):
    answer = recckpt("history", run, "item", 8, 9)
    assert answer.code == 1
    assert answer.err == f"recckpt: {run}: no checkpoint has a row of id 8 in table item\n"
    assert "in none of 2 checkpoints" in answer.out


def test_an_unknown_table_is_a_problem_and_damage_is_one(recckpt, run):
    assert "did you mean 'item'?" in recckpt("history", run, "itme", 9).err
    flip_bit(run / "ckpt_20" / "manifest.json")
    answer = recckpt("history", run, "item", 9)
    assert (answer.code, "found damage in 1 place" in answer.err) == (1, True)
    assert "ckpt_20: " in answer.out
