"""The commands on deltas."""

import pytest
from forge import filled, save_tables
from spec_reader import counting
from spec_writer import write_delta

from recckpt.storage import open_storage


@pytest.fixture
def runs(tmp_path):
    """Of a full checkpoint with the ids 0 to 5 and a delta: 1 has changed, 9 is new, 2 and 77 were deleted."""
    storage = open_storage(str(tmp_path / "runs"))
    storage.prepare()
    save_tables(storage, [filled("t", range(6))], concurrency=1)
    write_delta(counting(tmp_path / "runs")[0], "ckpt_2", 6, [({1: (7, 7), 9: (9, 9)}, [2, 77])])
    return tmp_path / "runs"


def test_verify_counts_deletes_of_ids_that_are_not_there(recckpt, runs):
    answer = recckpt("verify", runs)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "ckpt_2: 1 delete of ids that are not there, which means nothing"
    found = recckpt("verify", runs, "--json").json["checkpoints"]
    assert {entry["directory"]: entry["absent_deletes"] for entry in found} == {"ckpt_1": 0, "ckpt_2": 1}


def test_get_and_head_give_the_rows_of_the_chain(recckpt, runs):
    rows = recckpt("head", runs, "t", "--json").json["rows"]
    assert {row["id"]: row["embedding"][0] for row in rows} == {0: 0, 1: 7, 3: 3, 4: 4, 5: 5, 9: 9}
    answer = recckpt("get", runs, "t", "9", "2", "1", "--json")
    assert [row["id"] for row in answer.json["rows"]] == [9, 1]
    assert (answer.code, answer.json["missing"]) == (1, [2])
