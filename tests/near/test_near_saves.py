"""What near saves give back, and when; each run here is a process of its own, as far as the files can say."""

import json
import logging
import os
import shutil
from dataclasses import replace

import pytest
from support.builders import Run, flip_bit, state_of
from support.gate import Gate
from support.live_runs import LiveRun
from support.near_runs import ALL, NearRun, newest_list, output_dir, parts_of
from support.sweeps import mostly_slow

import recckpt
from recckpt import CheckpointManager, Near, Saver
from recckpt.errors import WriterFencedError
from recckpt.output_dir.fence import PASSED_ON, Fence
from recckpt.output_dir.listing import list_checkpoints
from recckpt.save.job import SparseSaver

OTHERS = {f"_{id_}": 0.5 for id_ in range(100, 110)}


def begun(root, **options):
    """Return a run with a checkpoint of step 1, and a near save of step 2."""
    return NearRun(root, **options).put(_1=1.0, **OTHERS).step().put(_2=2.0).step()


def rows(run):
    """Return the rows of a run, but for those that every run here has."""
    return {id_: value for id_, value in run.rows.items() if id_ < 100}


@mostly_slow()
@pytest.mark.parametrize("of", [Run, LiveRun])
def test_a_restore_takes_the_newest_near_save_with_all_that_a_checkpoint_has(tmp_path, of):
    """Tables of ours, live ones with hooks, and live ones with fingerprints."""

    def begin():
        run = of(tmp_path / "runs", deltas=ALL, near=Near(tmp_path / "near", 2))
        run.manager = CheckpointManager(run.saver, 50)
        return run

    one, other, last = begin(), begin(), begin()
    for _ in range(8):
        one.train(1)
        one.saver.near_saves.settle()  # or one is left out while another is under way
    assert (one.manager.counts.begun, one.manager.counts.near) == (1, 3)
    assert other.manager.restore() == 8
    assert state_of(other) == state_of(one)
    record = other.train(2).manager.save()
    assert (record.kind, record.step) == ("delta", 10)
    assert last.manager.restore(near=False) == 10
    assert state_of(last) == state_of(other)


def test_where_nothing_is_there_to_stand_on_a_checkpoint_is_made_first_and_after_a_restore_it_is_the_same(tmp_path):
    run = begun(tmp_path)
    assert [c.ckpt_id for c in list_checkpoints(output_dir(tmp_path)).committed] == ["ckpt_1"]
    assert run.counts == (1, 0, 0)
    run = NearRun(tmp_path).restore().put(_3=3.0).step()
    assert run.counts == (1, 0, 0)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_near_save_keeps_the_marks_for_the_next_checkpoint(tmp_path):
    begun(tmp_path).put(_3=3.0).step().save()
    assert rows(NearRun(tmp_path).restore(near=False)) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_what_a_near_save_held_is_in_the_next_checkpoint(tmp_path):
    begun(tmp_path).put(_3=3.0).erase(1).step()
    restored = NearRun(tmp_path).restore()
    assert rows(restored) == {2: 2.0, 3: 3.0}, "all since its base"
    restored.put(_4=4.0).save()
    last = NearRun(tmp_path).restore(near=False)
    assert rows(last) == {2: 2.0, 3: 3.0, 4: 4.0}
    assert list_checkpoints(output_dir(tmp_path)).committed[-1].manifest.kind == "delta"


def test_a_newer_checkpoint_goes_before_an_older_near_save(tmp_path):
    begun(tmp_path).put(_2=9.0).save()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 9.0}


def test_who_goes_back_and_trains_again_counts_by_cut_and_not_by_step(tmp_path):
    run = begun(tmp_path).put(_3=3.0).step().put(_4=4.0).step()
    run.restore(1).put(_5=5.0).step()
    assert run.manager.global_step == 2
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 5: 5.0}


def test_only_the_two_newest_stay_and_are_for_their_user_alone(tmp_path):
    run = begun(tmp_path)
    for value in range(5):
        run.put(_9=float(value)).step()
    assert len(run.near_dirs) == 2
    place = run.near_dirs[0].parent
    assert sorted(path.name for path in place.parent.iterdir()) == [place.name, "host", "output_dir"]
    assert (run.near_path / "recckpt-near").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("n_damaged", "left"), [(1, {1: 1.0, 2: 2.0}), (2, {1: 1.0})])
def test_damage_is_passed_over_for_the_one_before(tmp_path, caplog, n_damaged, left):
    run = begun(tmp_path).put(_3=3.0).step()
    for near_dir in run.near_dirs[-n_damaged:]:
        flip_bit(parts_of(near_dir)[0], 700)
    assert rows(NearRun(tmp_path).restore()) == left
    assert len([r for r in caplog.records if "is damaged and passed over" in r.message]) == n_damaged


def test_damage_of_the_newest_is_passed_over_for_the_one_before(tmp_path):
    run = begun(tmp_path).put(_3=3.0).step()
    flip_bit(parts_of(run.near_dirs[-1])[0], 700)
    restored = NearRun(tmp_path)
    taken = restored.saver.loader
    real = taken.load_sources
    opened = []
    taken.load_sources = lambda live, sources, *rest, **more: (
        opened.append(len(sources)),
        real(live, sources, *rest, **more),
    )[1]
    assert rows(restored.restore()) == {1: 1.0, 2: 2.0}
    assert opened == [1], "nothing was loaded of what is damaged"


def test_pieces_of_another_near_save_are_refused(tmp_path):
    run = begun(tmp_path).put(_2=3.0).step()
    older, newer = run.near_dirs
    shutil.rmtree(newer / "sparse")
    shutil.copytree(older / "sparse", newer / "sparse")
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}
    assert NearRun(tmp_path).restore().manager.global_step == 2


def test_what_is_restored_and_not_the_newest_is_no_base_of_near_saves(tmp_path):
    run = begun(tmp_path, max_keep=2).put(_3=3.0).step().put(_4=4.0).save()
    run.saver.save("ckpt_100", step=100)
    flip_bit(parts_of(tmp_path / "runs/ckpt_3")[0], 700)
    restored = NearRun(tmp_path, max_keep=2).restore()
    assert rows(restored) == {1: 1.0, 2: 2.0, 3: 3.0}, "the near save goes before an older checkpoint"
    restored.step()
    assert restored.counts == (0, 0, 0)
    assert restored.manager.counts.begun == 1


def test_an_incomplete_one_does_not_count(tmp_path):
    run = begun(tmp_path)
    (run.near_dirs[-1] / "model.pt").unlink()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}


def test_nothing_of_a_writer_that_was_overtaken_counts(tmp_path):
    zombie = begun(tmp_path)
    successor = NearRun(tmp_path).restore().put(_3=3.0).save()
    seen_by_none = zombie.put(_6=6.0).step()
    assert seen_by_none.counts == (1, 1, 0)
    assert rows(NearRun(tmp_path).restore()) == rows(successor) == {1: 1.0, 2: 2.0, 3: 3.0}
    with pytest.raises(WriterFencedError):
        zombie.manager.step()


def test_one_that_is_sealed_after_the_list_of_a_successor_is_not_acknowledged_and_does_not_count(tmp_path):
    zombie, successor = begun(tmp_path), NearRun(tmp_path).restore()
    tier = zombie.saver.near_saves.tier
    seal = tier.seal
    tier.seal = lambda *args: (successor.fence.hold(), seal(*args))
    zombie.put(_6=6.0).step()
    assert zombie.counts == (1, 1, 0)
    assert len(zombie.near_dirs) == 2
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}


def test_a_successor_that_dies_before_its_first_save_has_named_what_counted(tmp_path):
    first = begun(tmp_path)
    NearRun(tmp_path).restore(near=False).fence.hold()
    assert newest_list(tmp_path)["near"] == [".".join(first.near_dirs[0].parts[-2:])]
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}


def test_a_tool_that_takes_over_lets_count_what_counted(tmp_path):
    begun(tmp_path)
    Fence(output_dir(tmp_path), near=PASSED_ON).hold()
    assert newest_list(tmp_path)["near_by"].startswith("1.")
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}


def test_a_forgetting_from_outside_takes_all_near_saves_back(tmp_path):
    begun(tmp_path).put(_3=3.0).step()
    recckpt.rewrite.forget(tmp_path / "runs", "t", [3])
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}


def test_a_run_that_forgets_removes_them_and_goes_on(tmp_path):
    run = begun(tmp_path).put(_3=3.0).step()
    run.manager.forget("t", [3])
    assert run.near_dirs == []
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    run.put(_4=4.0).step().put(_5=5.0).step()
    Fence(output_dir(tmp_path), near=PASSED_ON).hold()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 4: 4.0, 5: 5.0}


def test_a_run_that_forgets_takes_near_saves_back_though_they_are_there_still(tmp_path):
    run = begun(tmp_path).put(_3=3.0).step()
    shutil.copytree(tmp_path / "near", tmp_path / "away")
    run.manager.forget("t", [3])
    shutil.rmtree(tmp_path / "near")
    (tmp_path / "away").rename(tmp_path / "near")
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}


def test_who_makes_no_near_saves_takes_those_before_back(tmp_path):
    begun(tmp_path)
    saver = Saver(NearRun(tmp_path).saver.model, output_dir=str(tmp_path / "runs"), deltas=True)
    saver.save("by_hand")
    assert NearRun(tmp_path).restore().manager.global_step == 0


def test_rotation_keeps_what_a_newer_near_save_stands_on(tmp_path, monkeypatch):
    run = begun(tmp_path, deltas=replace(ALL, full_every=1)).put(_2=2.5).save()
    gate = Gate(monkeypatch, SparseSaver, "save")
    handle = run.put(_3=3.0).saver.save_async("ckpt_100", step=100)
    gate.wait()
    monkeypatch.undo()
    run.put(_4=4.0).step()
    gate.open()
    handle.wait()
    assert [c.ckpt_id for c in list_checkpoints(output_dir(tmp_path)).current] == ["ckpt_1", "ckpt_2", "ckpt_100"]
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.5, 3: 3.0, 4: 4.0}


@pytest.mark.parametrize(
    ("max_bytes", "remedy"), [(1000, "three times the largest"), (10, "save checkpoints more often")]
)
def test_without_room_training_goes_on_and_a_warning_says_so_once(tmp_path, caplog, max_bytes, remedy):
    """Whether that is seen before one is written, or after."""
    run = begun(tmp_path, max_bytes=max_bytes)
    run.put(_3=3.0).step()
    assert run.counts == (0, 2, 0)
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "near save failed" in warning.message
    assert "expected" in warning.message
    assert remedy in warning.message
    assert warning.message.endswith("; no near save was made; training goes on")
    assert "max_keep" not in warning.message
    run.save()
    lines = [json.loads(line) for line in (tmp_path / "runs/timeline.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["full", "near", "delta"]
    assert (lines[-1]["near"]["failed"], lines[-1]["near"]["steps"]) == (2, [2, 3])


def test_a_path_that_cannot_be_written_fails_no_step(tmp_path):
    (tmp_path / "near").write_text("a file")
    run = begun(tmp_path)
    assert run.counts[1] == 2
    run.save()
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}


def test_while_the_output_dir_is_away_near_saves_fail_and_those_before_stay(tmp_path, monkeypatch):
    def is_away(fence):
        raise OSError(5, "the store is away")

    run = begun(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Fence, "check", is_away)
        run.put(_3=3.0).step().put(_4=4.0).step()
    assert run.counts == (1, 2, 0)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}
    assert [each.name for each in NearRun(tmp_path).near_dirs] == ["2"]


def test_a_near_dir_that_is_gone_leaves_the_checkpoint_and_is_made_anew(tmp_path):
    run = begun(tmp_path)
    shutil.rmtree(tmp_path / "near")
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    run.put(_3=3.0).step()
    assert run.counts == (2, 0, 0)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0, 3: 3.0}
    shutil.rmtree(tmp_path / "runs")  # and an output dir that was made anew sees none of the one before
    NearRun(tmp_path).put(_7=7.0).step()
    assert rows(NearRun(tmp_path).restore()) == {7: 7.0}


def test_a_copy_of_an_output_dir_sees_no_near_saves_of_the_first(tmp_path):
    begun(tmp_path / "a", near="../near")
    shutil.copytree(tmp_path / "a/runs", tmp_path / "b/runs")
    assert rows(NearRun(tmp_path / "b", near="../near").restore()) == {1: 1.0}
    assert rows(NearRun(tmp_path / "a", near="../near").restore()) == {1: 1.0, 2: 2.0}


def test_without_near_no_byte_says_anything_of_it(tmp_path):
    run = Run(tmp_path / "runs", deltas=True).train(1)
    run.manager.save()
    record = json.loads((tmp_path / "runs/ckpt_1/manifest.json").read_bytes())
    assert "cut" not in record
    assert not {"near", "near_by"} & newest_list(tmp_path).keys()
    begun(tmp_path / "with")
    assert json.loads((tmp_path / "with/runs/ckpt_1/manifest.json").read_bytes())["cut"] == 1
    assert newest_list(tmp_path / "with")["near"] == []


def test_what_cannot_be_is_refused(tmp_path):
    model = NearRun(tmp_path).saver.model
    with pytest.raises(ValueError, match="near= is for savers that write deltas, found deltas=False"):
        Saver(model, output_dir=str(tmp_path / "runs"), near=Near(tmp_path / "near"))
    with pytest.raises(TypeError, match=r"near must be a recckpt\.Near, or None, found '/dev/shm'"):
        Saver(model, output_dir=str(tmp_path / "runs"), deltas=True, near="/dev/shm")
    for wrong in ("", "s3://bucket/near", 7):
        with pytest.raises(ValueError, match="Near: path must be a directory of this host"):
            Near(wrong)
    with pytest.raises(ValueError, match="Near: max_bytes must be a number of bytes"):
        Near(tmp_path, max_bytes="much")
    with pytest.raises(ValueError, match="Near: interval must be an int of at least 1, found 0"):
        Near(tmp_path, 0)


def link(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to("elsewhere")


def others(tmp_path, name):
    (tmp_path / name).mkdir()
    os.chown(tmp_path / name, 12345, 12345)


@pytest.mark.parametrize("name", ["near", "near/recckpt-near"])
@pytest.mark.parametrize(
    ("put", "what"),
    [
        (link, "a symbolic link.* expected a directory"),
        pytest.param(
            others,
            "of user 12345, expected one of user 0",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="NEEDS ROOT, to give a directory away"),
        ),
    ],
)
def test_a_near_dir_that_others_could_change_is_refused_by_name(tmp_path, name, put, what):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    put(tmp_path, name)
    with pytest.raises(PermissionError, match=rf"{what}; give Near\(\.\.\.\) a directory of your own.*{name}"):
        NearRun(tmp_path)
