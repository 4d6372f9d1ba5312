"""``compact``, ``forget`` and ``repair``."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.builders import Run, tree
from support.delta_runs import rows_of, run_with_chain
from support.forge import Forge
from support.sweeps import mostly_slow
from torch import nn

from recckpt import Saver
from recckpt.cli import arguments
from recckpt.format import layout
from recckpt.inspect import repair as repairing
from recckpt.output_dir.checkpoint_dir import Intent, write_intent
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import attempt_dirs, locate
from recckpt.output_dir.rotation import pin
from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    return run_with_chain(tmp_path / "runs")


def test_an_offer_is_made_of_the_newest_waits_and_is_void_once_another_takes_over(recckpt, run):
    answer = recckpt("compact", run.url)
    [directory] = [name for name in attempt_dirs(run) if layout.is_offer_dir(name)]
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("ckpt_3: offered 150 rows of 3 links, ")
    assert directory in answer.out
    assert "the trainer adopts it at its next save" in answer.out
    again = recckpt("compact", run.url)
    assert (again.code, again.err) == (0, "")
    assert f"{directory} is an offer of it" in again.out
    said = recckpt("compact", run.url, "--adopt", "--json").json
    assert (said["committed"], said["removed"]) == (True, ["ckpt_3"])
    assert said["directory"] != directory
    assert directory not in attempt_dirs(run)


def test_with_adopt_it_supersedes_the_delta(recckpt, run):
    expected = rows_of(run, "ckpt_3")
    answer = recckpt("compact", run.url, "--adopt")
    assert answer.out.splitlines()[0].startswith("ckpt_3: wrote 150 rows of 3 links")
    assert answer.out.splitlines()[1] == f"{run.url}: removed 1 delta replaced by it"
    found = locate(run, "ckpt_3")
    assert found.manifest.supersedes
    assert set(attempt_dirs(run)) == {"ckpt_1", "ckpt_2", found.directory}
    assert rows_of(run, "ckpt_3") == expected
    assert run.read(layout.INDEX_FILE, 99) == b"ckpt_1\nckpt_2\nckpt_3\n"
    answer = recckpt("compact", run.url, "--adopt")
    assert answer.lines[0][:4] == ["ckpt_3:", "it", "is", "full"]
    assert len(answer.out.splitlines()) == 1


def test_out_writes_to_another_output_dir(recckpt, run, tmp_path):
    said = recckpt("compact", run.url, "ckpt_2", "--out", tmp_path / "other", "--workers", 2, "--json").json
    assert (said["id"], said["output_dir"], said["directory"]) == ("ckpt_2", str(tmp_path / "other"), "ckpt_2")
    assert (said["links"], said["rows"], said["reason"], said["committed"]) == (2, 149, None, True)
    assert rows_of(open_storage(str(tmp_path / "other")), "ckpt_2") == rows_of(run, "ckpt_2")
    answer = recckpt("compact", run.url, "ckpt_2", "--out", tmp_path / "other")
    assert (answer.code, answer.out) == (1, "")
    assert "is committed already" in answer.err


def test_out_says_where_another_there_is_of_a_later_step(recckpt, tmp_path):
    saver = Saver(nn.Linear(1, 1), output_dir=tmp_path / "run", max_keep=None)
    for step in (2, 3):
        saver.save(f"ckpt_{step}", step=step)
    assert "restore()" not in recckpt("compact", tmp_path / "run", "ckpt_3", "--out", tmp_path / "other").out
    said = recckpt("compact", tmp_path / "run", "ckpt_2", "--out", tmp_path / "other", "--json").json["notes"]
    assert "restore() will use ckpt_2, the newest once it is written, though ckpt_3 has a later step" in said[0]


def test_what_is_full_is_said_to_be_so_and_wrong_usage_is_told_from_a_problem(recckpt, run, tmp_path):
    answer = recckpt("compact", run.url, "ckpt_1")
    assert (answer.code, answer.out) == (0, "ckpt_1: it is full already; nothing to do\n")
    assert recckpt("compact", run.url, "--out", tmp_path / "other", "--adopt").code == 2
    for text in ("much", "", "0", "-1", "1.5GB", "GB", "1iB", "1kb", "MiB1"):
        answer = recckpt("compact", run.url, "--budget", text)
        assert (answer.code, answer.out) == (2, "")
    assert recckpt("compact", run.url, "ckpt_9").code == 1
    answer = recckpt("compact", tmp_path / "nothing", "--adopt")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("7", 7), ("3kB", 3000), ("2MiB", 2 << 20), ("1G", 10**9), ("4Gi", 4 << 30)]
)
def test_sizes_are_read_as_people_write_them(text, n_bytes):
    assert arguments.n_bytes(text) == n_bytes


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
    assert answer.out.startswith("forgot 3 ids of table item: 3 checkpoints rewritten\n  ckpt_1: 2 rows\n")
    assert "recorded in forgotten.jsonl" in answer.out
    after = recckpt("verify", run.url, "--absent", gone, "--table", "item")
    assert (after.code, after.err) == (0, "")
    assert "none of 3 ids is in table item of " in after.out
    assert "3 of them were requested to be forgotten" in after.out
    assert not {5, 9, -3} & set(rows_of(run, "ckpt_3"))
    assert recckpt("verify", run.url).code == 0


def test_ids_are_printed_only_where_asked(recckpt, run, tmp_path):
    (tmp_path / "ids").write_text("500\n")
    quiet = recckpt("verify", run.url, "--absent", tmp_path / "ids", "--json")
    [place] = quiet.json["places"]
    assert place["holding"] == [{"directory": "ckpt_2", "id": "ckpt_2", "table": "item", "rows": 1, "deletes": 0}]
    assert not quiet.json["absent"]
    assert "500" not in (quiet.out + quiet.err).replace(str(tmp_path), "")  # a directory may be called 500
    loud = recckpt("verify", run.url, "--absent", tmp_path / "ids", "--print-ids")
    assert "ckpt_2, item: 500" in loud.out
    assert recckpt("verify", run.url, "--absent", tmp_path / "ids", "--print-ids", "--json").json["places"][0][
        "holding"
    ][0]["ids"] == [500]


def test_any_number_of_places_are_looked_at_and_each_that_has_an_id_is_named(recckpt, run, gone, tmp_path):
    away = tmp_path / "away" / "old"
    away.mkdir(parents=True)
    shutil.copytree(f"{run.url}/ckpt_1", away / "copy")  # one level down, as a person moves it away
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    answer = recckpt("verify", run.url, away.parent, "--absent", gone)
    assert answer.code == 1
    assert answer.out.splitlines()[0] == f"{run.url}: none of 3 ids is in any table of 6 files"
    assert answer.lines[2:] == [
        [f"{away.parent}:"],
        ["DIRECTORY", "CHECKPOINT", "TABLE", "ROWS", "DELETES"],
        ["old/copy", "ckpt_1", "item", "2", "0"],
    ]
    assert answer.err == f"recckpt: {away.parent}: 1 directory holds some of 3 ids in any table\n"
    data = recckpt("verify", run.url, away.parent, "--absent", gone, "--json").json
    assert [len(place["holding"]) for place in data["places"]] == [0, 1]
    assert recckpt("verify", run.url, tmp_path / "none", "--absent", gone).code == 1


def test_one_checkpoint_is_looked_at_with_what_it_stands_on_where_that_lives_now(recckpt, run, gone, tmp_path):
    (tmp_path / "ids").write_text("500\n")
    for name, code in (("ckpt_1", 0), ("ckpt_3", 1)):
        assert recckpt("verify", f"{run.url}/{name}", "--absent", tmp_path / "ids").code == code
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    assert recckpt("verify", f"{run.url}/ckpt_3", "--absent", gone).code == 0


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
    assert "a request to forget 3 ids, unfinished: `recckpt forget DIR` continues it" in told.out
    said = recckpt("verify", run.url, "--absent", gone)
    assert said.code == 1
    assert "a request to forget ids of table 'item', including 3 of these, is unfinished" in said.err
    answer = recckpt("forget", run.url)
    assert answer.code == 0
    assert answer.out.startswith("forgot 3 ids of table item, requested earlier: 3 checkpoints rewritten")
    assert recckpt("verify", run.url, "--absent", gone).code == 0
    assert "no request is unfinished" in recckpt("forget", run.url).out
    assert json.loads(run.read("forgotten.jsonl", 1 << 20))["by"] == "recckpt forget"


def text(content):
    return lambda path: path.write_text(content)


def numpy_file(values, **options):
    return lambda path: np.save(path, values, **options)


def parquet_file(**columns):
    return lambda path: pq.write_table(pa.table(columns), path)


NO_IDS = [
    ("empty", text(""), "found no ids"),
    ("lines", text("\n\n"), "found no ids"),
    ("word", text("1\nx\n"), "line 2: found 'x', expected an int64"),
    ("float", text("1.5\n"), "line 1: found '1.5', expected an int64"),
    ("large", text(f"{2**63}\n"), "expected an int64"),
    ("two", text("1 2\n"), "line 1: found '1 2'"),
    ("signs", text("--1\n"), "line 1: found '--1'"),
    ("floats.npy", numpy_file(np.ones(3)), "found float64[3]"),
    ("square.npy", numpy_file(np.ones((2, 2), np.int64)), "found int64[2, 2]"),
    ("large.npy", numpy_file(np.array([2**63], np.uint64)), "beyond int64"),
    ("pickled.npy", numpy_file(np.array([{}]), allow_pickle=True), "no array of numbers"),
    ("bytes.npy", text("no array"), "no array of numbers"),
    ("bytes.txt", lambda path: path.write_bytes(b"\xff\xfe\x00"), "found no text"),
    ("two.parquet", parquet_file(a=[1], b=[2]), "found the columns ['a', 'b']"),
    ("nulls.parquet", parquet_file(id=[1, None]), "1 nulls"),
    ("text.parquet", parquet_file(id=["1"]), "found string"),
    ("bytes.parquet", text("no parquet"), "no Parquet file"),
]


def test_files_that_hold_no_ids_are_refused_by_what_they_are_before_anything_changes(recckpt, run, tmp_path):
    before = tree(tmp_path / "runs")
    for name, write, said in NO_IDS:
        write(tmp_path / name)
        for command in (("forget", run.url, "--table", "item", "--ids"), ("verify", run.url, "--absent")):
            answer = recckpt(*command, tmp_path / name)
            assert (answer.code, said in answer.err) == (2, True), answer.err
    assert tree(tmp_path / "runs") == before


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
        (2, "did you mean 'item'?", ("forget", run.url, "--table", "itme", "--ids", gone, "--dry-run")),
        (2, "did you mean 'item'?", ("verify", run.url, "--absent", gone, "--table", "itme")),
        (1, "found no committed checkpoint", ("forget", tmp_path / "other", "--table", "item", "--ids", gone)),
        (1, "found no committed checkpoint", ("forget", tmp_path / "other")),
        (1, "No such file", ("forget", run.url, "--table", "item", "--ids", tmp_path / "none")),
        (2, "--table and --print-ids need --absent", ("verify", run.url, "--table", "item")),
        (2, "several places need --absent", ("verify", run.url, run.url)),
        (1, "found no checkpoint", ("verify", tmp_path / "other", "--absent", gone)),
    ]:
        answer = recckpt(*command)
        assert (answer.code, said in answer.err) == (code, True), answer.err
    assert list((tmp_path / "other").iterdir()) == []
    assert "nothing to forget" in recckpt("forget", run.url, "--dry-run").out
    (Path(run.url) / "ckpt_2" / "manifest.json").write_bytes(b'{"format": "recckpt"')
    assert recckpt("forget", run.url, "--table", "item", "--ids", gone, "--dry-run").code == 1


def an_unread_part(root):
    (root / "left" / "sparse").mkdir(parents=True)
    (root / "left" / "sparse" / "00000-of-00001.g0.00.arrow").write_bytes(b"ARROW1\0\0 cut")


def missing_parts(root):
    [directory] = root.glob("ckpt_1*")
    (directory / "sparse").rename(root.parent / "sparse")
    return directory / "sparse"


def linked_parts(root):
    parts = missing_parts(root)
    parts.symlink_to(root.parent / "sparse")
    return parts


def parts_that_no_manifest_lists(root):
    (linked_parts(root).parent / "manifest.json").unlink()


def a_linked_directory(root):
    [directory] = root.glob("ckpt_3*")
    directory.rename(root.parent / "moved")
    directory.symlink_to(root.parent / "moved")


NO_PROOF = {
    an_unread_part: "its contents are unknown",
    missing_parts: "FileNotFoundError",
    linked_parts: "",
    parts_that_no_manifest_lists: "its contents are unknown",
    a_linked_directory: "found a symbolic link",
}


@mostly_slow()
@pytest.mark.parametrize("harm", NO_PROOF)
def test_what_cannot_be_looked_into_is_no_proof(recckpt, run, gone, harm):
    root = Path(run.url)
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    assert recckpt("verify", run.url, "--absent", gone).code == 0
    harm(root)
    answer = recckpt("verify", run.url, "--absent", gone)
    assert (answer.code, NO_PROOF[harm] in answer.err) == (1, True), answer
    if harm is parts_that_no_manifest_lists:
        alone = recckpt("verify", next(root.glob("ckpt_2*")), "--absent", gone)
        assert (alone.code, "one of its bases is damaged or missing" in alone.err) == (1, True)


def test_parts_beside_the_checkpoints_are_looked_at(recckpt, run, gone, tmp_path):
    [part, *_] = (tmp_path / "runs" / "ckpt_1" / "sparse").glob("*.g0.00.arrow")
    (tmp_path / "runs" / "mine.arrow").write_bytes(part.read_bytes())
    recckpt("forget", run.url, "--table", "item", "--ids", gone)
    answer = recckpt("verify", run.url, "--absent", gone)
    assert answer.code == 1
    assert answer.lines[1][:3] == [".", "-", "item"]


def test_a_fence_of_a_trainer_says_nothing_of_forgetting(run):
    first, second = Fence(run), Fence(run)
    first.hold()
    second.hold()
    with pytest.raises(Exception, match="stop one of the two") as caught:
        first.check()
    assert "forget" not in str(caught.value)


def test_mirrors_that_are_named_forget_too_and_one_that_is_not_reached_is_a_problem(recckpt, run, gone, tmp_path):
    to, away, other = tmp_path / "to", tmp_path / "away", tmp_path / "other"
    for place in (to, away, other):
        recckpt("mirror", run.url, place)
    away.rename(tmp_path / "elsewhere")
    forget = "forget", run.url, "--table", "item", "--ids", gone, "--mirrors", to, away
    planned = recckpt(*forget, "--dry-run")
    assert planned.out.splitlines()[-2:] == [f"would make a pass over the mirror {each}" for each in (to, away)]
    answer = recckpt(*forget)
    assert answer.code == 1
    assert answer.out.splitlines()[-1] == f"{to}: forgotten in this mirror, too"
    assert answer.err == f"recckpt: the mirror {away} may still have the ids: {away}: does not exist\n"
    (tmp_path / "elsewhere").rename(away)
    assert recckpt("verify", "--absent", gone, run.url, to).code == 0
    behind = recckpt("verify", run.url, to, away, other, "--absent", gone)
    assert behind.code == 1
    again = recckpt("forget", run.url, "--mirrors", away, other, "--json")
    assert (again.code, again.json["requests"], again.json["mirrors_left"]) == (0, [], {})
    assert recckpt("verify", run.url, to, away, other, "--absent", gone).code == 0


def test_a_dry_run_says_what_would_be_written_again_and_changes_nothing(recckpt, run, gone, tmp_path, monkeypatch):
    before, forget = tree(tmp_path), ("forget", run.url, "--table", "item", "--ids", gone)
    answer = recckpt(*forget, "--mirrors", run.url)
    assert (answer.code, "a mirror must be outside its run" in answer.err) == (2, True)
    answer = recckpt(*forget, "--dry-run")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("would forget 3 ids of table item: 3 checkpoints to rewrite\n  ckpt_1: 2 rows, ")
    assert "would read and write" in answer.out
    assert tree(tmp_path) == before
    data = recckpt(*forget, "--dry-run", "--json").json
    assert data["seconds"] is None, "no timeline says how fast it writes"
    line = {"ckpt_id": "ckpt_1", "n_bytes": 1000, "write_sec": 2.0, "commit_sec": 1.5}
    (Path(run.url) / "timeline.jsonl").write_text(json.dumps(line) + "\n")
    timed = recckpt(*forget, "--dry-run", "--json").json
    assert timed["seconds"] == pytest.approx(timed["bytes"] / 500 + 3 * 1.5)
    assert " s at the pace of the last saves, and fence off a trainer" in recckpt(*forget, "--dry-run").out

    def interrupt(*args, **how):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("recckpt.rewrite.requests._carry_out", interrupt)
        assert recckpt(*forget).code == 130
    answer = recckpt("forget", run.url, "--dry-run")
    assert "would forget 3 ids of table item, requested earlier: 3 checkpoints" in answer.out
    done = recckpt("forget", run.url, "--json").json["requests"][0]
    [plan] = data["requests"]
    assert {each["ckpt_id"]: each["n_rows"] for each in plan["rewritten"]} == done["rows"]
    assert {each["directory"] for each in plan["rewritten"]} == set(done["rewritten"])
    assert data["bytes"] == sum(each["n_bytes"] for each in plan["rewritten"])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An output dir without its index file, with a dead save, one that may be alive, and a late commit."""
    monkeypatch.setattr(repairing, "_LOOKS_APART", 0)
    root = tmp_path / "runs"
    for seed in range(2):
        run = Run(root, max_keep=9, interval=5, seed=seed)
        run.manager.restore()
        run.train(5)
    storage = open_storage(str(root))
    for directory, epoch in (("ckpt_20", 1), ("ckpt_25", 2)):
        storage.make_dir(directory)
        write_intent(storage, Intent(directory, epoch, "0" * 32, None))
    shutil.copytree(root / "ckpt_5", root / "late")
    Forge(root / "late").edit_manifest(lambda values: values.update(save_id="f" * 32, ckpt_id="late"))
    (root / "checkpoint").unlink()
    return root


def states(answer):
    return {line[0]: " ".join(line[1:4]) for line in answer.lines[3:]}


def test_what_would_be_done_is_said_and_not_done(recckpt, runs):
    answer = recckpt("repair", runs, "--dry-run", "--clean")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"{runs}: the index file was missing; would be rewritten, 2 checkpoints\n")
    assert states(answer)["ckpt_20"] == "would be removed"
    assert states(answer)["late"] == "would be removed"
    assert states(answer)["ckpt_25"].startswith("left alone")
    assert not (runs / "checkpoint").exists()
    assert (runs / "ckpt_20").exists()


def test_the_index_is_made_anew_and_leftovers_are_listed_and_removed_where_asked(recckpt, runs):
    for path in (runs / "ckpt_5", runs / "nowhere"):
        answer = recckpt("repair", path, "--clean")
        assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
    assert recckpt("repair", "nosuch://x/y").code == 2
    answer = recckpt("repair", runs)
    assert (answer.code, answer.err) == (0, "")
    assert "was missing; rewritten, 2 checkpoints" in answer.out
    assert states(answer)["ckpt_20"] == "--clean removes it"
    assert (runs / "ckpt_20").exists()
    assert recckpt("repair", runs).out.startswith(f"{runs}: the index file is right, 2 checkpoints\n")
    (runs / "checkpoint").unlink()
    answer = recckpt("repair", runs, "--clean", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert answer.json["removed"] == ["late", "ckpt_20"]
    assert answer.json["index"] == {"problem": "missing", "checkpoints": ["ckpt_5", "ckpt_10"]}
    assert {left["path"]: left["dead"] for left in answer.json["leftovers"]} == {
        "late": True,
        "ckpt_20": True,
        "ckpt_25": False,
    }
    assert not (runs / "late").exists()
    assert (runs / "ckpt_25").exists()
    (runs / "ckpt_5/model.pt").unlink()
    answer = recckpt("repair", runs, "--clean")
    assert answer.code == 1
    assert "ckpt_5 is damaged, and is kept: ckpt_5/model.pt: found no such file" in answer.out
    assert "1 damaged checkpoint" in answer.err


def test_ls_shows_late_commits_and_pins(recckpt, runs):
    pin(open_storage(str(runs)), "ckpt_5")
    answer = recckpt("ls", runs)
    marks = {line[0]: " ".join(line[6:]) for line in answer.lines[1:]}
    assert marks["ckpt_5"].endswith("pinned")
    assert "fenced: committed by the writer of epoch 1" in marks["late"]
    assert answer.code == 0
    data = recckpt("ls", runs, "--json").json
    assert [entry["directory"] for entry in data["fenced"]] == ["late"]
    assert [c["marks"] for c in data["checkpoints"]] == [["pinned"], ["newest"]]
