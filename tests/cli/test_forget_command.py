import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.builders import tree
from support.delta_runs import rows_of, run_with_chain
from support.mirrors import out_of_reach

from recckpt.output_dir.fence import Fence
from recckpt.output_dir.known_mirrors import KnownMirror, note_mirror


@pytest.fixture
def run(tmp_path):
    return run_with_chain(tmp_path / "runs")


@pytest.fixture
def gone(tmp_path):
    path = tmp_path / "gone.txt"
    path.write_text("5\n\n 9 \n-3\n")
    return path


def test_the_ids_of_a_file_go_and_absence_is_proven(recckpt, run, gone):
    before = recckpt("verify", run.url, "--absent", gone)
    assert before.code == 1
    assert before.lines[0] == ["DIRECTORY", "CHECKPOINT", "TABLE", "ROWS", "DELETES"]
    assert before.lines[1:] == [
        ["ckpt_1", "ckpt_1", "item", "2", "0"],
        ["ckpt_2", "ckpt_2", "item", "1", "0"],
        ["ckpt_3", "ckpt_3", "item", "1", "1"],
    ]
    assert "3 directories hold some of 3 ids in any table" in before.err
    answer = recckpt("forget", run.url, "--table", "item", "--ids", gone)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("forgot 3 ids of table item: 3 checkpoints written again\n  ckpt_1: 2 rows\n")
    assert "noted in forgotten.jsonl" in answer.out
    after = recckpt("verify", run.url, "--absent", gone, "--table", "item")
    assert (after.code, after.err) == (0, "")
    assert "none of 3 ids is in table item of " in after.out
    assert "3 of them were asked to be forgotten" in after.out
    assert not {5, 9, -3} & set(rows_of(run, "ckpt_3"))
    assert recckpt("verify", run.url).code == 0


def test_ids_are_printed_only_where_asked(recckpt, run, tmp_path):
    (tmp_path / "ids").write_text("500\n")
    quiet = recckpt("verify", run.url, "--absent", tmp_path / "ids", "--json")
    assert quiet.json["holding"] == [{"directory": "ckpt_2", "id": "ckpt_2", "table": "item", "rows": 1, "deletes": 0}]
    assert not quiet.json["absent"]
    assert "500" not in quiet.out + quiet.err
    loud = recckpt("verify", run.url, "--absent", tmp_path / "ids", "--print-ids")
    assert "ckpt_2, item: 500" in loud.out
    assert recckpt("verify", run.url, "--absent", tmp_path / "ids", "--print-ids", "--json").json["holding"][0][
        "ids"
    ] == [500]


def test_one_checkpoint_is_looked_at_with_what_it_stands_on(recckpt, run, tmp_path):
    (tmp_path / "ids").write_text("500\n")
    assert recckpt("verify", f"{run.url}/ckpt_1", "--absent", tmp_path / "ids").code == 0
    assert recckpt("verify", f"{run.url}/ckpt_3", "--absent", tmp_path / "ids").code == 1


@pytest.mark.parametrize("name", ["ids.npy", "ids.parquet", "one.parquet"])
def test_numpy_and_parquet_files_will_do(recckpt, run, tmp_path, name):
    ids, path = np.array([5, 9], np.int32), tmp_path / name
    if name == "ids.npy":
        np.save(path, ids)
    else:
        pq.write_table(pa.table({"id": ids, "why": ["a", "b"]} if name == "ids.parquet" else {"uid": ids}), path)
    said = recckpt("forget", run.url, "--table", "item", "--ids", path, "--json").json
    assert said["requests"][0]["rows"] == {"ckpt_1": 2, "ckpt_2": 2, "ckpt_3": 2}


def test_what_was_begun_is_told_by_repair_and_ended_without_ids(recckpt, run, gone, monkeypatch):
    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Fence, "remove", die)
        assert recckpt("forget", run.url, "--table", "item", "--ids", gone).code == 130
    told = recckpt("repair", run.url, "--clean")
    assert "a request to forget 3 ids, not ended: `recckpt forget DIR` goes on" in told.out
    said = recckpt("verify", run.url, "--absent", gone)
    assert said.code == 1
    assert "a request to forget ids of table 'item', 3 of these among them, is not ended" in said.err
    answer = recckpt("forget", run.url)
    assert answer.code == 0
    assert answer.out.startswith("forgot 3 ids of table item, which was begun earlier: 3 checkpoints written again")
    assert recckpt("verify", run.url, "--absent", gone).code == 0
    assert "nothing was begun" in recckpt("forget", run.url).out
    assert json.loads(run.read("forgotten.jsonl", 1 << 20))["by"] == "recckpt forget"


WRONG = {
    "": "found no ids",
    "\n\n": "found no ids",
    "1\nx\n": "line 2: found 'x', expected an int64",
    "1.5\n": "line 1: found '1.5', expected an int64",
    f"{2**63}\n": "expected an int64",
    "1 2\n": "line 1: found '1 2'",
    "--1\n": "line 1: found '--1'",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_before_anything_changes(recckpt, run, tmp_path, text):
    (tmp_path / "wrong").write_text(text)
    before = tree(tmp_path / "runs")
    for command in (
        ("forget", run.url, "--table", "item", "--ids", tmp_path / "wrong"),
        ("verify", run.url, "--absent", tmp_path / "wrong"),
    ):
        answer = recckpt(*command)
        assert answer.code == 2
        assert WRONG[text] in answer.err
    assert tree(tmp_path / "runs") == before


def wrong_files(tmp_path):
    np.save(tmp_path / "floats.npy", np.ones(3))
    np.save(tmp_path / "square.npy", np.ones((2, 2), np.int64))
    np.save(tmp_path / "large.npy", np.array([2**63], np.uint64))
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "bytes.npy").write_bytes(b"no array")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "two.parquet")
    pq.write_table(pa.table({"id": [1, None]}), tmp_path / "nulls.parquet")
    pq.write_table(pa.table({"id": ["1"]}), tmp_path / "text.parquet")
    (tmp_path / "bytes.parquet").write_bytes(b"no parquet")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("floats.npy", "found float64[3]"),
        ("square.npy", "found int64[2, 2]"),
        ("large.npy", "beyond int64"),
        ("pickled.npy", "no array of numbers"),
        ("bytes.npy", "no array of numbers"),
        ("bytes.txt", "found no text"),
        ("two.parquet", "found the columns ['a', 'b']"),
        ("nulls.parquet", "1 nulls"),
        ("text.parquet", "found string"),
        ("bytes.parquet", "no Parquet file"),
    ],
)
def test_files_that_hold_no_ids_are_refused_by_what_they_are(recckpt, run, tmp_path, name, said):
    wrong_files(tmp_path)
    answer = recckpt("forget", run.url, "--table", "item", "--ids", tmp_path / name)
    assert answer.code == 2
    assert said in answer.err


def test_wrong_options_and_places_are_refused(recckpt, run, gone, tmp_path):
    (tmp_path / "other").mkdir()
    for code, said, command in [
        (2, "--table and --ids go together", ("forget", run.url, "--table", "item")),
        (2, "--table and --ids go together", ("forget", run.url, "--ids", gone)),
        (
            2,
            "no table 'itme' in any checkpoint; there is 'item'; did you mean 'item'",
            ("forget", run.url, "--table", "itme", "--ids", gone),
        ),
        (1, "found no committed checkpoint", ("forget", tmp_path / "other", "--table", "item", "--ids", gone)),
        (1, "found no committed checkpoint", ("forget", tmp_path / "other")),
        (1, "No such file", ("forget", run.url, "--table", "item", "--ids", tmp_path / "none")),
        (2, "--table and --print-ids go with --absent", ("verify", run.url, "--table", "item")),
        (1, "found no checkpoint", ("verify", tmp_path / "other", "--absent", gone)),
    ]:
        answer = recckpt(*command)
        assert (answer.code, said in answer.err) == (code, True), answer.err
    assert list((tmp_path / "other").iterdir()) == []


def test_a_part_that_cannot_be_read_is_no_proof(recckpt, run, gone, tmp_path):
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    (tmp_path / "runs" / "left" / "sparse").mkdir(parents=True)
    (tmp_path / "runs" / "left" / "sparse" / "00000-of-00001.g0.00.arrow").write_bytes(b"ARROW1\0\0 cut")
    answer = recckpt("verify", run.url, "--absent", gone)
    assert answer.code == 1
    assert "nobody can say what it holds" in answer.err


def test_a_table_that_is_nowhere_is_no_proof(recckpt, run, gone):
    answer = recckpt("verify", run.url, "--absent", gone, "--table", "itme")
    assert answer.code == 2
    assert "no table 'itme' in any checkpoint; there is 'item'; did you mean 'item'" in answer.err


def test_parts_that_are_missing_or_behind_a_link_are_no_proof(recckpt, run, gone, tmp_path):
    root = tmp_path / "runs"
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    assert recckpt("verify", run.url, "--absent", gone).code == 0
    [directory] = root.glob("ckpt_1*")
    (directory / "sparse").rename(tmp_path / "sparse")
    missing = recckpt("verify", run.url, "--absent", gone)
    assert (missing.code, "FileNotFoundError" in missing.err) == (1, True)
    (directory / "sparse").symlink_to(tmp_path / "sparse")
    assert recckpt("verify", run.url, "--absent", gone).code == 1
    (directory / "manifest.json").unlink()  # nothing says that it had parts
    elsewhere = recckpt("verify", run.url, "--absent", gone)
    assert (elsewhere.code, "nobody can say what it holds" in elsewhere.err) == (1, True)
    alone = recckpt("verify", str(next(root.glob("ckpt_2*"))), "--absent", gone)
    assert (alone.code, "what it stands on is damaged or missing" in alone.err) == (1, True)


def test_a_directory_that_is_a_link_is_no_proof(recckpt, run, gone, tmp_path):
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    (directory,) = (tmp_path / "runs").glob("ckpt_3*")
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    answer = recckpt("verify", run.url, "--absent", gone)
    assert (answer.code, "found a symbolic link" in answer.err) == (1, True)


def test_parts_beside_the_checkpoints_are_looked_at(recckpt, run, gone, tmp_path):
    [part, *_] = (tmp_path / "runs" / "ckpt_1" / "sparse").glob("*.g0.00.arrow")
    (tmp_path / "runs" / "mine.arrow").write_bytes(part.read_bytes())
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    answer = recckpt("verify", run.url, "--absent", gone)
    assert answer.code == 1
    assert answer.lines[1][:3] == [".", "-", "item"]


def test_an_id_is_looked_up_where_it_lives_now(recckpt, run, gone):
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    assert recckpt("verify", f"{run.url}/ckpt_3", "--absent", gone).code == 0


def test_a_fence_of_a_trainer_says_nothing_of_forgetting(run):
    first, second = Fence(run), Fence(run)
    first.hold()
    second.hold()
    with pytest.raises(Exception, match="stop one of the two") as caught:
        first.check()
    assert "forget" not in str(caught.value)


def test_a_mirror_of_a_mirror_that_is_not_reached_is_named(recckpt, run, gone, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    recckpt("mirror", run.url, first)
    recckpt("mirror", first, second)
    with out_of_reach(second):
        answer = recckpt("forget", run.url, "--table", "item", "--ids", gone, "--json")
    assert (answer.code, answer.json["mirrors_behind"]) == (1, [str(second)])
    what = f"the mirror {second} may have what was forgotten until its next pass: `recckpt mirror {first} {second}`"
    assert what in answer.err
    recckpt("mirror", first, second)
    answer = recckpt("forget", run.url)
    assert (answer.code, answer.err) == (0, "")


def test_absence_is_no_proof_while_a_mirror_may_have_what_was_forgotten(recckpt, run, gone, tmp_path):
    recckpt("mirror", run.url, to := tmp_path / "to")
    with out_of_reach(to):
        recckpt("forget", run.url, "--table", "item", "--ids", gone)
    answer = recckpt("verify", run.url, "--absent", gone)
    assert (answer.code, "none of 3 ids is in any table of " in answer.out) == (1, True)
    what = f"the mirror {to} may have what was forgotten until its next pass: `recckpt mirror {run.url} {to}`"
    assert what in answer.err
    data = recckpt("verify", run.url, "--absent", gone, "--json").json
    assert (data["absent"], data["mirrors_behind"], data["holding"]) == (False, [str(to)], [])
    recckpt("mirror", run.url, to)
    assert recckpt("verify", run.url, "--absent", gone).code == 0
    assert recckpt("verify", run.url, "--absent", gone, "--json").json["absent"]


def test_a_dry_run_names_the_mirrors_that_would_be_reached_and_those_that_would_not(recckpt, run, gone, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    recckpt("mirror", run.url, first)
    recckpt("mirror", first, second)
    note_mirror(run, KnownMirror(run.url, "/data/third", "elsewhere", frozenset()))
    answer = recckpt("forget", run.url, "--table", "item", "--ids", gone, "--dry-run")
    assert answer.code == 0
    command = f"`recckpt mirror {run.url} /data/third` there"
    assert sorted(answer.out.splitlines()[-3:]) == [
        f"would leave the mirror /data/third on elsewhere to its next pass: {command}",
        f"would make a pass over the mirror {first}",
        f"would make a pass over the mirror {second}",
    ]
    data = recckpt("forget", run.url, "--table", "item", "--ids", gone, "--dry-run", "--json").json
    assert sorted(data["mirrors"]) == ["/data/third", str(first), str(second)]
    assert data["hosts"] == []


def test_a_dry_run_says_what_would_be_written_again_and_changes_nothing(recckpt, run, gone):
    before = tree(run_path := Path(run.url))
    answer = recckpt("forget", run.url, "--table", "item", "--ids", gone, "--dry-run")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("would forget 3 ids of table item: 3 checkpoints to write again\n  ckpt_1: 2 rows, ")
    assert "it would read and write" in answer.out
    assert tree(run_path) == before
    data = recckpt("forget", run.url, "--table", "item", "--ids", gone, "--dry-run", "--json").json
    done = recckpt("forget", run.url, "--table", "item", "--ids", gone, "--json").json["requests"][0]
    [plan] = data["requests"]
    assert {each["ckpt_id"]: each["n_rows"] for each in plan["rewritten"]} == done["rows"]
    assert {each["directory"] for each in plan["rewritten"]} == set(done["revised"])
    assert data["bytes"] == sum(each["n_bytes"] for each in plan["rewritten"])
    assert data["seconds"] is None, "no timeline says how fast it writes"


def test_a_dry_run_goes_by_the_pace_of_the_last_saves(recckpt, run, gone):
    line = {"ckpt_id": "ckpt_1", "n_bytes": 1000, "write_sec": 2.0, "commit_sec": 1.5}
    (Path(run.url) / "timeline.jsonl").write_text(json.dumps(line) + "\n")
    dry_run = "forget", run.url, "--table", "item", "--ids", gone, "--dry-run"
    data = recckpt(*dry_run, "--json").json
    assert data["seconds"] == pytest.approx(data["bytes"] / 500 + 3 * 1.5)
    assert " s at the pace of the last saves, and fence a trainer off" in recckpt(*dry_run).out


def test_a_dry_run_of_what_is_not_there_or_damaged_is_refused_alike(recckpt, run, gone):
    assert "nothing is to be forgotten" in recckpt("forget", run.url, "--dry-run").out
    answer = recckpt("forget", run.url, "--table", "itme", "--ids", gone, "--dry-run")
    assert (answer.code, "did you mean 'item'?" in answer.err) == (2, True)
    (Path(run.url) / "ckpt_2" / "manifest.json").write_bytes(b'{"format": "recckpt"')
    assert recckpt("forget", run.url, "--table", "item", "--ids", gone, "--dry-run").code == 1


def test_a_dry_run_names_what_was_asked_earlier(recckpt, run, gone, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("recckpt.forgetting.forgetting._carry_out", lambda *args, **how: interrupt())
        assert recckpt("forget", run.url, "--table", "item", "--ids", gone).code == 130
    answer = recckpt("forget", run.url, "--dry-run")
    assert "would forget 3 ids of table item, as was asked earlier: 3 checkpoints" in answer.out


def interrupt():
    raise KeyboardInterrupt
