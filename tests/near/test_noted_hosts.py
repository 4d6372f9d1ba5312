"""Hosts on which near saves may lie are noted in the output dir, so that a forgetting knows of them."""

import json
import shutil

import numpy as np
import pytest
from near.test_near_saves import begun, rows
from near.test_ranks import near_names, on_hosts, together, trained
from support.near_runs import NearRun, output_dir
from support.sweeps import mostly_slow

import recckpt
from recckpt.errors import WriterFencedError
from recckpt.inspect.absent import look_for
from recckpt.near.tier import NearTier
from recckpt.output_dir.forget_requests import audit
from recckpt.output_dir.notes import noted_hosts

FORGOTTEN = [3]


def noted(root):
    """Return the near dirs of the hosts on which near saves may lie."""
    return sorted(host.path.rpartition("/")[2] for host in noted_hosts(output_dir(root)))


def with_rows_of(root, host, ids):
    """Return the near saves on a host that hold any of some ids."""
    return [each.directory for each in look_for(str(root / host), np.array(ids), "t").holding]


def notes(root):
    return sorted((root / "runs/.recckpt/near").glob("*.json"))


def test_every_host_is_noted_before_it_has_rows(tmp_path, monkeypatch):
    n_noted = []
    monkeypatch.setattr(NearTier, "seal", lambda tier, *args: n_noted.append(len(notes(tmp_path))))
    on_hosts(tmp_path, ["a", "a", "b"], trained)
    assert set(n_noted) == {2}
    found = [json.loads(note.read_text()) for note in notes(tmp_path)]
    assert sorted(note["path"] for note in found) == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_a_run_on_several_hosts_that_forgets_reaches_all_of_them(tmp_path, caplog):
    def forgetting(run):
        trained(run)
        run.manager.forget("t", FORGOTTEN)
        return rows(run)

    assert 3 not in together(on_hosts(tmp_path, ["a", "b", "b"], forgetting))
    assert near_names(tmp_path, "a") == near_names(tmp_path, "b") == []
    assert noted(tmp_path) == []
    assert "may still have the ids" not in caplog.text


def test_a_host_is_noted_again_by_the_next_near_save_after_a_forgetting_or_in_an_output_dir_made_anew(tmp_path):
    run = begun(tmp_path)
    run.manager.forget("t", FORGOTTEN)
    assert noted(tmp_path) == []
    run.put(_4=4.0).save().put(_5=5.0).step()
    assert noted(tmp_path) == ["near"]
    shutil.rmtree(tmp_path / "runs/.recckpt")
    run.put(_4=4.5).save().put(_5=5.5).step()
    assert len(notes(tmp_path)) == 1


def test_near_saves_have_the_ids_after_a_forgetting_from_outside_until_their_host_is_used_again(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained)
    [done] = recckpt.rewrite.forget(tmp_path / "runs", "t", FORGOTTEN)
    [line] = audit(output_dir(tmp_path))
    named = [sorted(host.path for host in done.near_hosts), sorted(host["path"] for host in line["near_hosts"])]
    assert named == [[str(tmp_path / "a"), str(tmp_path / "b")]] * 2
    assert noted(tmp_path) == ["a", "b"]
    assert [bool(with_rows_of(tmp_path, host, FORGOTTEN)) for host in "ab"] == [True, True]
    on_hosts(tmp_path, ["b"], lambda run: run.restore().put(_9=9.0).save().put(_9=9.5).step())
    assert with_rows_of(tmp_path, "b", FORGOTTEN) == []
    assert len(near_names(tmp_path, "b")) == 1


def test_a_run_without_near_saves_notes_no_host_and_its_audit_names_none(tmp_path):
    NearRun(tmp_path).put(_3=1.0).save()
    assert not (tmp_path / "runs/.recckpt/near").exists()
    [done] = recckpt.rewrite.forget(tmp_path / "runs", "t", FORGOTTEN)
    assert done.near_hosts == ()
    assert "near_hosts" not in audit(output_dir(tmp_path))[0]


def test_a_host_is_named_where_what_it_has_could_not_be_removed(tmp_path, caplog, monkeypatch):
    def forgetting(run):
        trained(run)
        if run.near_path.name == "b":
            storage = run.saver.near_saves.tier.dir.storage
            storage.remove = lambda name: (_ for _ in ()).throw(OSError(30, "read-only", name))
        run.manager.forget("t", FORGOTTEN)

    on_hosts(tmp_path, ["a", "b"], forgetting)
    assert noted(tmp_path) == ["b"]
    assert f":{tmp_path / 'b'} may still have the ids" in caplog.text


def test_a_run_that_a_forgetting_overtakes_says_nothing_of_what_it_keeps(tmp_path):
    run = begun(tmp_path)
    recckpt.rewrite.forget(tmp_path / "runs", "t", [2])
    run.put(_4=4.0).step()
    with pytest.raises(WriterFencedError):
        run.step()
    assert noted(tmp_path) == ["near"]


def test_a_host_to_which_a_restore_brings_files_is_noted(tmp_path):
    on_hosts(tmp_path, ["a", "b"], trained)
    left = on_hosts(tmp_path, ["a", "new"], lambda run: rows(run.restore()))
    assert together(left) == {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}
    assert noted(tmp_path) == ["a", "b", "new"]


@mostly_slow()
@pytest.mark.parametrize("content", ["", "{}", "no json"])
def test_a_damaged_note_is_named_and_written_anew_by_the_next_run(tmp_path, content):
    begun(tmp_path)
    recckpt.rewrite.forget(tmp_path / "runs", "t", [2])
    [note] = notes(tmp_path)
    note.write_text(content)
    [host] = noted_hosts(output_dir(tmp_path))
    assert host.host == note.stem
    assert "the next near save on that host writes it again" in host.damage
    NearRun(tmp_path).restore().put(_4=4.0).save().put(_5=5.0).step()
    assert notes(tmp_path) == [note]
    assert noted(tmp_path) == ["near"]


@mostly_slow()
@pytest.mark.parametrize("content", [b"", b"../../x", b"\xff" * 32, b"0" * 40])
def test_a_host_whose_id_is_damaged_makes_no_near_save_and_says_what_to_do(tmp_path, caplog, content):
    run = begun(tmp_path)
    [host] = run.near_path.rglob("host")
    host.write_bytes(content)
    run.put(_4=4.0).step()
    assert run.counts == (1, 1, 0)
    assert "expected 32 hex digits: remove it" in caplog.text
    host.unlink()
    run.put(_5=5.0).step()
    assert run.counts == (2, 1, 0)
