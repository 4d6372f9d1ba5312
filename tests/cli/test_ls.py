"""``ls`` and ``near``."""

from __future__ import annotations

import shutil

import pytest
from near.test_ranks import on_hosts, trained
from support.builders import Run
from support.forge import Forge, filled, save_tables
from support.near_runs import NearRun, parts_of
from support.spec_reader import counting
from support.spec_writer import write_compacted, write_delta

from recckpt import Near
from recckpt.format import layout
from recckpt.near.views import counting_here
from recckpt.output_dir.listing import look_around
from recckpt.output_dir.rotation import pin
from recckpt.storage import open_storage


def saved(url, *numbers, **fields):
    storage = open_storage(str(url))
    storage.prepare()
    for number in numbers:
        tables = [filled("item", range(number)), filled("user", range(2))]
        save_tables(storage, tables, ckpt_id=f"ckpt_{number}", step=number, **fields)
    return storage


def test_checkpoints_are_listed_oldest_first_in_aligned_columns_and_the_newest_is_marked(recckpt, url):
    saved(url, 900, 1000, 20)
    answer = recckpt("ls", url)
    assert answer.code == 0
    assert answer.err == ""
    assert answer.lines[0] == ["ID", "STEP", "KIND", "TIME", "ROWS", "SIZE", "TABLES", "MARKS"]
    assert [line[0] for line in answer.lines[1:]] == ["ckpt_900", "ckpt_1000", "ckpt_20"]
    assert [line[1] for line in answer.lines[1:]] == ["900", "1000", "20"]
    assert [line[-1] for line in answer.lines[1:]] == ["2", "2", "newest"]
    lines = answer.out.splitlines()[1:]
    assert len({line.index("ckpt") for line in lines}) == 1
    rows = (" 902 ", " 1,002 ", " 22 ")
    assert len({line.index(number) + len(number) for line, number in zip(lines, rows, strict=True)}) == 1


def test_json_has_the_numbers_as_they_are(recckpt, tmp_path):
    Run(tmp_path, max_keep=2).train(30)
    answer = recckpt("ls", tmp_path, "--json").json
    assert answer["output_dir"] == str(tmp_path)
    assert [c["id"] for c in answer["checkpoints"]] == ["ckpt_20", "ckpt_30"]
    last = answer["checkpoints"][-1]
    files = (tmp_path / "ckpt_30").rglob("*")
    listed = sum(f.stat().st_size for f in files if f.is_file() and f.name not in ("manifest.json", "INTENT"))
    assert (last["step"], last["tables"], last["bytes"], last["marks"]) == (30, 2, listed, ["newest"])
    assert last["rows"] > 0
    assert (answer["damaged"], answer["leftovers"]) == ([], [])


def test_a_damaged_checkpoint_is_listed_with_the_reason_and_is_a_problem(recckpt, tmp_path):
    saved(tmp_path, 10, 20)
    (tmp_path / "ckpt_20" / Forge(tmp_path / "ckpt_20").parts[0]).unlink()
    answer = recckpt("ls", tmp_path)
    assert answer.code == 1
    assert answer.lines[1][-1] == "newest"
    assert answer.lines[2][0] == "ckpt_20"
    assert "damaged: ckpt_20/sparse/00000-of-00001.g0.00.arrow: found no such file" in answer.out
    assert answer.err.count("\n") == 1
    assert "1 of 2 checkpoints damaged" in answer.err
    assert recckpt("ls", tmp_path, "--json").json["damaged"][0]["directory"] == "ckpt_20"


def test_directories_without_a_manifest_are_leftovers_if_recckpt_wrote_them(recckpt, url):
    storage = saved(url, 10)
    begun = ("ckpt_5", layout.temporary("INTENT"))  # a save that died as it began
    left = [begun, ("ckpt_20", "INTENT"), ("ckpt_30", "sparse/00000-of-00001.g0.00.arrow"), ("logs", "events")]
    for name, file in left:
        with storage.create(f"{name}/{file}") as sink:
            sink.write(b"{}")
    answer = recckpt("ls", url)
    assert answer.code == 0
    assert [line[0] for line in answer.lines[1:]] == ["ckpt_10", "ckpt_20", "ckpt_30", "ckpt_5"]
    assert answer.out.count("no manifest.json") == 3
    assert answer.out.count("a save that died, or still runs") == 2
    assert "files with names of recckpt, without INTENT: their writer is unknown" in answer.out
    assert recckpt("ls", url, "--json").json["leftovers"] == ["ckpt_20", "ckpt_30", "ckpt_5"]


def test_superseded_and_flagged_checkpoints_are_marked_and_their_directory_is_named(recckpt, tmp_path):
    storage = saved(tmp_path, 10)
    pin(storage, "ckpt_10")
    save_tables(storage, [filled("item", [1])], ckpt_id="ckpt_10", overwrite=True, ephemeral=True)
    answer = recckpt("ls", tmp_path)
    assert "overwritten, pinned" in answer.out.splitlines()[1]
    assert "newest, pinned, ephemeral, in ckpt_10.1/" in answer.out.splitlines()[2]


def test_deltas_say_what_they_stand_on_and_links_for_whom_they_are_kept(recckpt, tmp_path):
    save_tables(open_storage(str(tmp_path)), [filled("item", range(3))], ckpt_id="ckpt_10")
    [full] = counting(tmp_path)
    delta = write_delta(full, "ckpt_20", 3, [({1: (1, 1)}, [])])
    write_delta(delta, "ckpt_30", 3, [({1: (1, 1)}, [])])
    first, second, third = recckpt("ls", tmp_path).out.splitlines()[1:]
    assert " full " in first
    assert first.endswith("  base of 2 deltas")
    assert " delta on ckpt_10 " in second
    assert second.endswith("  link of ckpt_30")
    assert " delta on ckpt_20 " in third
    assert third.endswith("  newest")
    form = write_compacted(delta, {1: (1, 1)}).directory.name
    offer = tmp_path / ("ckpt_20." + "0f" * 16)
    offer.mkdir()
    (offer / "INTENT").touch()
    base, replaced, kept, _, offered = recckpt("ls", tmp_path).out.splitlines()[1:]
    assert base.endswith("  second chain"), "nothing stands on it any more"
    assert replaced.endswith("  superseded")
    assert kept.endswith(f"  base of 1 delta, in {form}/")
    assert offered.endswith("no manifest.json: an offer that is not adopted")
    found = {each["directory"]: each for each in recckpt("ls", tmp_path, "--json").json["checkpoints"]}
    told = ("kind", "parent", "links", "kept_for", "supersedes")
    assert [found[form][key] for key in told] == ["full", None, [form], ["ckpt_30"], delta.name[0]]
    assert [found["ckpt_30"][key] for key in told] == ["delta", "ckpt_20", ["ckpt_30", form], [], None]


def test_where_nothing_was_saved_nothing_is_found_and_a_checkpoint_is_no_output_dir(recckpt, tmp_path):
    (tmp_path / "file").touch()
    places = {"": "found no committed checkpoint", "nowhere": "does not exist", "file": "not a directory"}
    for name, what in places.items():
        answer = recckpt("ls", tmp_path / name)
        assert (answer.code, answer.out) == (1, "")
        assert answer.err == f"recckpt: {tmp_path / name}: {what}\n"
    assert recckpt("ls", tmp_path, "--json").json["checkpoints"] == []
    saved(tmp_path, 10)
    answer = recckpt("ls", tmp_path / "ckpt_10")
    assert (answer.code, "recckpt show" in answer.err) == (1, True)


def test_labels_are_among_the_marks_and_the_whole_state_in_json_and_an_odd_id_does_not_break_the_line(
    recckpt, tmp_path
):
    storage = saved(tmp_path, 10, state={"day": "2026-11-22", "auc": 0.5, "why": "x" * 99})
    assert f"newest, day=2026-11-22, why={'x' * 40}\n" in recckpt("ls", tmp_path).out
    save_tables(storage, [filled("item", [1])], ckpt_id="a\nb/ü")
    answer = recckpt("ls", tmp_path)
    assert len(answer.lines) == 3
    assert answer.lines[2][0] == '"a\\nb/\\u00fc"'
    found, odd = recckpt("ls", tmp_path, "--json").json["checkpoints"]
    assert found["state"] == {"day": "2026-11-22", "auc": 0.5, "why": "x" * 99}
    assert odd["id"] == "a\nb/ü"


def test_the_chain_that_is_kept_beside_that_of_the_newest_is_marked(recckpt, tmp_path):
    storage = open_storage(str(tmp_path))
    save_tables(storage, [filled("item", range(3))], ckpt_id="ckpt_10")
    older = write_delta(counting(tmp_path)[0], "ckpt_20", 3, [({1: (1, 1)}, [])])
    save_tables(storage, [filled("item", range(3))], ckpt_id="ckpt_30")
    assert older.manifest["kind"] == "delta"
    assert "second chain" not in recckpt("ls", tmp_path).out, "the newest is full: nothing else is needed"
    write_delta(counting(tmp_path)[-1], "ckpt_40", 3, [({1: (1, 1)}, [])])
    lines = recckpt("ls", tmp_path).out.splitlines()[1:]
    assert [line.split("  ")[-1] for line in lines] == ["base of 1 delta", "second chain", "base of 1 delta", "newest"]
    found = {each["id"]: each["marks"] for each in recckpt("ls", tmp_path, "--json").json["checkpoints"]}
    assert found == {"ckpt_10": [], "ckpt_20": ["second chain"], "ckpt_30": [], "ckpt_40": ["newest"]}


def test_metrics_of_checkpoints_are_columns(recckpt, tmp_path):
    saved(tmp_path, 10, state={"auc": 0.71, "event_time": 5.0, "sparse_lr_0": 0.1, "day": "mon"})
    saved(tmp_path, 20, state={"auc": 0.725, "loss": 0.5})
    answer = recckpt("ls", tmp_path)
    assert answer.lines[0][-3:] == ["AUC", "LOSS", "MARKS"]
    assert answer.lines[1][-3:] == ["0.71", "-", "day=mon"]
    assert answer.lines[2][-3:] == ["0.725", "0.5", "newest"]


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
    assert died.endswith("/99: not sealed: its save died, or is still writing")
    values = recckpt("near", "ls", run.near_path, "--json").json
    assert [(each["step"], each["rows"], each["parent"]) for each in values["near_saves"]] == [
        (2, 1, "ckpt_1"),
        (3, 2, "ckpt_1"),
    ]
    assert {each["output_dir"] for each in values["near_saves"]} == {run.saver.storage.url}
    assert len(values["unsealed"]) == 1
    place = left.parent.parent
    (place / "output_dir").unlink()  # without which it is listed by its place
    assert recckpt("near", "ls", run.near_path).out.splitlines()[1].split()[0] == place.name
    assert recckpt("near", "ls", run.near_path, "--json").json["near_saves"][0]["output_dir"] is None


def test_all_are_removed(recckpt, run, tmp_path):
    answer = recckpt("near", "clear", run.near_path)
    assert (answer.code, answer.out) == (0, f"{run.near_path}: 2 near saves removed\n")
    assert run.near_dirs == []
    assert recckpt("near", "ls", run.near_path).out == f"{run.near_path}: no near saves\n"
    assert NearRun(tmp_path).restore().manager.global_step == 1
    run.put(_3=3.0).step()
    assert run.counts == (3, 0, 0)


def test_a_place_that_is_not_there_is_told_from_one_without_near_saves_and_what_is_not_ours_stays(recckpt, tmp_path):
    nowhere = tmp_path / "mistyped"
    answer = recckpt("near", "ls", nowhere)
    assert (answer.code, answer.out) == (0, f"{nowhere}: no near saves: does not exist\n")
    answer = recckpt("near", "clear", nowhere)
    assert (answer.code, answer.out) == (0, f"{nowhere}: 0 near saves removed: does not exist\n")
    assert recckpt("near", "ls", "s3://bucket").code == 2
    (tmp_path / "recckpt-near/notes").mkdir(parents=True)
    (tmp_path / "recckpt-near/notes/kept").write_text("")
    assert recckpt("near", "clear", tmp_path).out == f"{tmp_path}: 0 near saves removed\n"
    assert (tmp_path / "recckpt-near/notes/kept").exists()


def test_the_list_of_an_output_dir_shows_those_that_count_where_one_asked_for_them(recckpt, run, tmp_path):
    ls = "ls", tmp_path / "runs", "--near", run.near_path
    answer = recckpt(*ls)
    assert (answer.code, "no near saves" in answer.out) == (0, False)
    assert [line.split()[2] for line in answer.out.splitlines() if "runs " in line] == ["3", "2"], "the newest first"
    assert [each["step"] for each in recckpt(*ls, "--json").json["near"]] == [3, 2]
    parts_of(run.near_dirs[-1])[0].unlink()  # what no host has does not count
    assert [each["step"] for each in recckpt(*ls, "--json").json["near"]] == [2]
    assert "0 of 1 shard" in recckpt("near", "ls", run.near_path).out
    NearRun(tmp_path).restore(near=False)
    shutil.rmtree(run.near_path)
    assert recckpt(*ls, "--json").json["near"] == []
    assert "near" not in recckpt("ls", tmp_path / "runs", "--json").json
    said = recckpt(*ls).out.splitlines()
    assert said[-1] == f"{run.near_path}: no valid near saves of this output dir: does not exist"
    assert "no near saves" not in recckpt("ls", tmp_path / "runs").out


def test_what_was_forgotten_may_lie_on_hosts_that_are_named_and_is_found_there_until_it_is_cleared(
    recckpt, run, tmp_path
):
    (tmp_path / "gone").write_text("2\n")
    of_run = tmp_path / "runs"
    forget = "forget", of_run, "--table", "t", "--ids", tmp_path / "gone"
    planned = recckpt(*forget, "--dry-run")
    assert (planned.code, planned.lines[-1][:5]) == (0, ["would", "leave", "near", "saves", "on"])
    assert planned.out.endswith(f":{run.near_path} to `recckpt near clear` there\n")
    forgotten = recckpt(*forget)
    assert forgotten.code == 1
    assert f" in {run.near_path} may have forgotten ids: run `recckpt near clear " in forgotten.err
    assert (of_run / forgotten.err.rpartition("remove ")[2].strip()).exists(), "the note"
    verify = "verify", "--absent", tmp_path / "gone", of_run, run.near_path
    found = recckpt(*verify)
    assert (found.code, found.lines[-1][1:3]) == (1, ["-", "t"])
    assert found.lines[-1][0].endswith(f"/{run.near_dirs[-1].parent.name}/{run.near_dirs[-1].name}")
    recckpt("near", "clear", run.near_path)
    cleared = recckpt("verify", "--absent", tmp_path / "gone", of_run)
    assert (cleared.code, cleared.err) == (0, "")
    assert recckpt("forget", of_run).code == 0, "no request is unfinished"


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


def test_a_watch_shows_what_near_saves_would_give_back(recckpt, run, tmp_path):
    answer = recckpt("watch", tmp_path / "runs", "--near", run.near_path, "--once")
    assert answer.code == 0
    [near] = [line for line in answer.out.splitlines() if line.startswith("near ")]
    assert "step 3, 2 rows" in near
    found = recckpt("watch", tmp_path / "runs", "--near", run.near_path, "--once", "--json").json
    assert (found["near"]["n_saves"], found["near"]["newest"]["step"]) == (2, 3)
    assert recckpt("watch", tmp_path / "runs", "--near", "s3://bucket", "--once").code == 2
