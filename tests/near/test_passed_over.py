"""A restore that takes something older than the newest near save says so, and why; any other says nothing new."""

import shutil

import pytest
from near.test_near_saves import begun, rows
from near.test_ranks import on_hosts, together, trained
from support.near_runs import NearRun, output_dir

import recckpt
from recckpt.output_dir.fence import VOIDED, Fence


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def notices(caplog):
    return [record.message for record in caplog.records if "no near save in" in record.message]


def named(near_dir):
    return ".".join(near_dir.parts[-2:])


@pytest.fixture(autouse=True)
def at_info(caplog):
    caplog.set_level("INFO", "recckpt")


def removed(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [removed, cut])
def test_files_that_are_on_no_host_are_counted_and_what_is_restored_is_named(tmp_path, caplog, damage):
    older, newer = begun(tmp_path).put(_3=3.0).step().near_dirs
    damage(newer / "model.pt")
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}
    n_files = len([path for path in older.rglob("*") if path.is_file() and path.name not in ("near.json", "INTENT")])
    [warning] = warnings(caplog)
    assert warning == (
        f"near save {named(newer)} of step 3 is passed over for near_2: 1 of its {n_files} files is on no host that "
        "takes part, or cut short"
    )


def test_one_warning_tells_of_each_near_save(tmp_path, caplog):
    run = begun(tmp_path).put(_3=3.0).step()
    for near_dir in run.near_dirs:
        removed(near_dir / "model.pt")
    restored = NearRun(tmp_path).restore().restore()
    assert rows(restored) == {1: 1.0}
    assert [warning.partition(": ")[0] for warning in warnings(caplog)] == [
        f"near save {named(near_dir)} of step {step} is passed over for ckpt_1"
        for step, near_dir in zip((2, 3), run.near_dirs, strict=True)
    ]


def test_files_on_a_host_that_is_not_there_are_missing(tmp_path, caplog):
    on_hosts(tmp_path, ["a", "b"], trained, copies=0)
    assert together(on_hosts(tmp_path, ["a", "a"], lambda run: rows(run.restore()))) == {1: 1.0, 2: 2.0}
    assert len(warnings(caplog)) == 2, "rank 0 speaks for all"
    assert all("files are on no host that takes part" in warning for warning in warnings(caplog))


def test_ids_that_were_forgotten_since_are_a_reason(tmp_path, caplog):
    begun(tmp_path).put(_3=3.0).step()
    recckpt.rewrite.forget(tmp_path / "runs", "t", [3])
    caplog.clear()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    assert len(warnings(caplog)) == 2
    assert all("is passed over for ckpt_1: it is no longer valid" in each for each in warnings(caplog))


def test_another_process_that_took_over_without_near_saves_is_a_reason(tmp_path, caplog):
    run = begun(tmp_path)
    Fence(output_dir(tmp_path), near=VOIDED).hold()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    [warning] = warnings(caplog)
    assert warning.startswith(f"near save {named(run.near_dirs[0])} of step 2 is passed over for ckpt_1: it is no ")


def test_a_base_that_is_damaged_is_a_reason(tmp_path, caplog):
    run = begun(tmp_path, max_keep=2).put(_3=3.0).save().put(_4=4.0).step()
    (tmp_path / "runs/ckpt_2/model.pt").unlink()
    assert NearRun(tmp_path).restore().manager.global_step == 2
    assert (
        f"near save {named(run.near_dirs[-1])} of step 3 is passed over for near_2: "
        "its base checkpoint is damaged, missing or unreadable"
    ) in warnings(caplog)


def test_what_a_newer_checkpoint_has_made_needless_is_not_spoken_of(tmp_path, caplog):
    run = begun(tmp_path).put(_3=3.0).step()
    removed(run.near_dirs[-1] / "model.pt")
    shutil.copytree(tmp_path / "near", tmp_path / "before")
    NearRun(tmp_path).restore(near=False).put(_4=4.0).step().save()
    shutil.rmtree(tmp_path / "near")
    (tmp_path / "before").rename(tmp_path / "near")
    caplog.clear()
    NearRun(tmp_path).restore()
    assert (warnings(caplog), notices(caplog)) == ([], [])


@pytest.mark.parametrize("hosts", [["a"], ["a", "b"]])
def test_a_restore_of_the_newest_says_nothing_of_others(tmp_path, caplog, hosts):
    on_hosts(tmp_path, hosts, trained)
    on_hosts(tmp_path, hosts, lambda run: run.restore())
    assert (warnings(caplog), notices(caplog)) == ([], [])


def test_what_another_output_dir_in_this_place_has_left_is_not_spoken_of(tmp_path, caplog):
    begun(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    NearRun(tmp_path).restore()
    assert warnings(caplog) == []


def test_where_there_is_no_near_save_a_host_is_named_that_had_some(tmp_path, caplog):
    on_hosts(tmp_path, ["a", "b"], trained)
    NearRun(tmp_path, near="new").restore()
    [notice] = notices(caplog)
    assert notice.startswith(f"no near save in {tmp_path / 'new'}; there have been some on ")
    assert f":{tmp_path / 'a'} and on 1 other host" in notice or f":{tmp_path / 'b'} and on 1 other host" in notice


def test_a_run_that_begins_is_told_of_no_host(tmp_path, caplog):
    NearRun(tmp_path).restore()
    NearRun(tmp_path).save().restore()
    assert notices(caplog) == []
