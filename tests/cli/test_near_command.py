"""What the command line shows of near saves, and removes."""

import shutil

import pytest
from near.test_ranks import on_hosts, trained
from support.near_runs import NearRun, parts_of

from recckpt import Near
from recckpt.near.here import counting_here
from recckpt.output_dir.listing import look_around
from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    run = NearRun(tmp_path).put(**{f"_{id_}": 0.5 for id_ in range(10)}).step()
    return run.put(_1=1.0).step().put(_2=2.0).step()


def test_the_near_saves_of_a_host_are_listed_and_those_that_died_are_named(recckpt, run):
    left = run.near_dirs[0].parent / "99"
    left.mkdir()
    (left / "INTENT").write_text("{}")
    answer = recckpt("near", "ls", run.near_path)
    assert (answer.code, answer.err) == (0, "")
    head, older, newer, died = answer.out.splitlines()
    assert head.split()[:4] == ["OUTPUT", "DIR", "NEAR", "SAVE"]
    assert older.split()[2] == "2"
    assert newer.split()[2] == "3"
    assert older.split()[0] == newer.split()[0] == run.saver.storage.url
    assert newer.split()[-2:] == ["all", "ckpt_1"]
    assert died.endswith("/99: not sealed: of a save that died, or is being written")
    values = recckpt("near", "ls", run.near_path, "--json").json
    assert [(each["step"], each["rows"], each["parent"]) for each in values["near_saves"]] == [
        (2, 1, "ckpt_1"),
        (3, 2, "ckpt_1"),
    ]
    assert {each["output_dir"] for each in values["near_saves"]} == {run.saver.storage.url}
    assert len(values["unsealed"]) == 1


def test_all_are_removed(recckpt, run, tmp_path):
    answer = recckpt("near", "clear", run.near_path)
    assert (answer.code, answer.out) == (0, f"{run.near_path}: 2 near saves removed\n")
    assert run.near_dirs == []
    assert recckpt("near", "ls", run.near_path).out == f"{run.near_path}: no near saves\n"
    assert NearRun(tmp_path).restore().manager.global_step == 1
    run.put(_3=3.0).step()
    assert run.counts == (3, 0, 0)


def test_a_place_that_is_not_there_is_told_from_one_without_near_saves(recckpt, tmp_path):
    answer = recckpt("near", "ls", tmp_path / "mistyped")
    assert (answer.code, answer.out) == (0, f"{tmp_path / 'mistyped'}: no near saves: does not exist\n")
    answer = recckpt("near", "clear", tmp_path / "mistyped")
    assert (answer.code, answer.out) == (0, f"{tmp_path / 'mistyped'}: 0 near saves removed: does not exist\n")


def test_a_near_dir_of_which_the_output_dir_is_not_known_is_listed_by_its_place(recckpt, run):
    (run.near_dirs[0].parent.parent / "output_dir").unlink()
    assert recckpt("near", "ls", run.near_path).out.splitlines()[1].split()[0] == run.near_dirs[0].parent.parent.name
    assert recckpt("near", "ls", run.near_path, "--json").json["near_saves"][0]["output_dir"] is None


def test_a_list_of_checkpoints_says_that_there_are_no_near_saves_where_one_asked_for_them(recckpt, run, tmp_path):
    said = recckpt("ls", tmp_path / "runs", "--near", tmp_path / "mistyped").out.splitlines()
    assert said[-1] == f"{tmp_path / 'mistyped'}: no near saves of this output dir that count: does not exist"
    assert "no near saves" not in recckpt("ls", tmp_path / "runs", "--near", run.near_path).out
    assert "no near saves" not in recckpt("ls", tmp_path / "runs").out


def test_what_was_forgotten_is_named_until_it_is_cleared_on_that_host(recckpt, run, tmp_path):
    (tmp_path / "gone").write_text("2\n")
    of_run = tmp_path / "runs"
    forgotten = recckpt("forget", of_run, "--table", "t", "--ids", tmp_path / "gone")
    [host] = recckpt("verify", of_run, "--absent", tmp_path / "gone", "--json").json["hosts_behind"]
    assert host["path"] == str(run.near_path)
    what = f"near saves on {host['name']} in {run.near_path} may have what was forgotten: run `recckpt near clear "
    assert forgotten.code == 1
    assert what in forgotten.err
    verified = recckpt("verify", of_run, "--absent", tmp_path / "gone")
    assert verified.code == 1
    assert what in verified.err
    note = of_run / verified.err.rpartition("remove ")[2].strip()
    assert note.exists()

    cleared = recckpt("near", "clear", run.near_path)
    assert cleared.out.splitlines()[1:] == [f"{of_run}: noted that nothing which was forgotten is on this host"]
    verified = recckpt("verify", of_run, "--absent", tmp_path / "gone", "--json")
    assert (verified.code, verified.json["hosts_behind"], verified.json["absent"]) == (0, [], True)
    assert len(recckpt("near", "clear", run.near_path).out.splitlines()) == 1, "it is noted once"


def test_a_dry_run_of_a_forgetting_names_the_hosts_whose_near_saves_would_have_the_ids(recckpt, run, tmp_path):
    (tmp_path / "gone").write_text("2\n")
    answer = recckpt("forget", tmp_path / "runs", "--table", "t", "--ids", tmp_path / "gone", "--dry-run")
    assert answer.code == 0
    assert answer.lines[-1][:5] == ["would", "leave", "near", "saves", "on"]
    assert answer.out.endswith(f":{run.near_path} to `recckpt near clear` there\n")


def test_where_the_output_dir_cannot_be_told_that_is_said_and_all_go(recckpt, run, tmp_path):
    (tmp_path / "gone").write_text("2\n")
    recckpt("forget", tmp_path / "runs", "--table", "t", "--ids", tmp_path / "gone")
    [note] = (tmp_path / "runs/.recckpt/near").iterdir()
    note.write_text("{}")
    cleared = recckpt("near", "clear", run.near_path)
    assert cleared.code == 0
    assert f"{tmp_path / 'runs'}: not noted there: " in cleared.out
    assert run.near_dirs == []
    shutil.rmtree(tmp_path / "runs")
    assert recckpt("near", "clear", run.near_path).out == f"{run.near_path}: 0 near saves removed\n"


def test_what_is_not_ours_stays(recckpt, tmp_path):
    (tmp_path / "recckpt-near/notes").mkdir(parents=True)
    (tmp_path / "recckpt-near/notes/kept").write_text("")
    assert recckpt("near", "clear", tmp_path).out == f"{tmp_path}: 0 near saves removed\n"
    assert (tmp_path / "recckpt-near/notes/kept").exists()
    assert recckpt("near", "ls", tmp_path / "nowhere").code == 0
    assert recckpt("near", "ls", "s3://bucket").code == 2


def test_the_list_of_an_output_dir_shows_those_that_count(recckpt, run, tmp_path):
    answer = recckpt("ls", tmp_path / "runs", "--near", run.near_path)
    assert answer.code == 0
    assert [line.split()[2] for line in answer.out.splitlines() if "runs " in line] == ["3", "2"], "the newest first"
    values = recckpt("ls", tmp_path / "runs", "--near", run.near_path, "--json").json
    assert [each["step"] for each in values["near"]] == [3, 2]
    NearRun(tmp_path).restore(near=False)
    shutil.rmtree(run.near_path)
    assert recckpt("ls", tmp_path / "runs", "--near", run.near_path, "--json").json["near"] == []
    assert "near" not in recckpt("ls", tmp_path / "runs", "--json").json


@pytest.mark.parametrize(("copies", "n_here"), [(0, 2), (1, 3)])
def test_of_a_near_save_of_several_hosts_it_is_said_what_is_here(recckpt, tmp_path, copies, n_here):
    on_hosts(tmp_path, ["a", "a", "b"], trained, copies=copies)
    ls, of_run = recckpt("near", "ls", tmp_path / "a"), ("ls", tmp_path / "runs", "--near", tmp_path / "a")
    for answer in (ls, recckpt(*of_run)):
        lines = [line for line in answer.out.splitlines() if line.endswith("ckpt_1")]
        assert len(lines) == 2
        assert all(("2 of 3 shards" in line) == (copies == 0) for line in lines)
    found = recckpt(*of_run, "--json").json["near"]
    assert [(each["shards"], each["shards_here"]) for each in found] == [(3, n_here)] * 2
    now = recckpt("watch", tmp_path / "runs", "--near", tmp_path / "a", "--once", "--json").json["near"]
    assert (now["newest"]["shards"], now["newest"]["shards_here"], now["n_saves"]) == (3, n_here, 2)
    storage = open_storage(str(tmp_path / "runs"))
    here = counting_here(storage, look_around(storage), Near(tmp_path / "a"))
    assert [each.is_elsewhere for each in here] == [copies == 1] * 2


def test_a_near_save_of_which_no_host_has_a_file_does_not_count(recckpt, run, tmp_path):
    parts_of(run.near_dirs[-1])[0].unlink()
    assert [
        each["step"] for each in recckpt("ls", tmp_path / "runs", "--near", run.near_path, "--json").json["near"]
    ] == [2]
    assert "0 of 1 shard" in recckpt("near", "ls", run.near_path).out


def test_a_watch_shows_what_near_saves_would_give_back(recckpt, run, tmp_path):
    answer = recckpt("watch", tmp_path / "runs", "--near", run.near_path, "--once")
    assert answer.code == 0
    [near] = [line for line in answer.out.splitlines() if line.startswith("near ")]
    assert "step 3, 2 rows" in near
    found = recckpt("watch", tmp_path / "runs", "--near", run.near_path, "--once", "--json").json
    assert (found["near"]["n_saves"], found["near"]["newest"]["step"]) == (2, 3)
    assert recckpt("watch", tmp_path / "runs", "--near", "s3://bucket", "--once").code == 2
