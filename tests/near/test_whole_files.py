"""What the log says of a damaged file of a near save: where it lies, and what becomes of the restore."""

import shutil
import socket

from near.test_near_saves import begun, rows
from near.test_ranks import near_names, on_hosts, trained
from support.builders import flip_bit
from support.near_runs import NearRun, parts_of

from recckpt.near.views import look_together


def of_near_saves(caplog):
    return [record.message for record in caplog.records if record.message.startswith("near save")]


def test_damage_is_named_with_its_host_and_near_dir(tmp_path, caplog):
    damaged = parts_of(begun(tmp_path).put(_3=3.0).step().near_dirs[-1])[0]
    flip_bit(damaged, 700)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0, 2: 2.0}
    [message] = of_near_saves(caplog)
    assert f" is damaged and passed over: {socket.gethostname()}:{damaged}" in message
    assert message.endswith("else an older near save or checkpoint is restored")
    assert "recckpt verify" not in message


def test_damage_on_one_host_of_several_is_named_with_its_near_dir(tmp_path, caplog):
    on_hosts(tmp_path, ["a", "b"], trained)
    damaged = parts_of(tmp_path / "b" / near_names(tmp_path, "b")[-1])[0]
    flip_bit(damaged, 700)
    on_hosts(tmp_path, ["a", "b"], lambda run: run.restore())
    [message] = of_near_saves(caplog)
    assert f"another host has what is damaged on one: {socket.gethostname()}:{damaged}" in message
    assert "it is taken from another host that has it whole" in message


def test_near_saves_that_a_living_process_removes_are_told_of_as_such(tmp_path, caplog, monkeypatch):
    begun(tmp_path)
    caplog.set_level("INFO", "recckpt")
    shutil.copytree(tmp_path / "near", tmp_path / "before")

    def looks(*args):
        shutil.copytree(tmp_path / "before", tmp_path / "near", dirs_exist_ok=True)
        views = look_together(*args)
        shutil.rmtree(tmp_path / "near")
        return views

    monkeypatch.setattr("recckpt.near.finder.look_together", looks)
    assert rows(NearRun(tmp_path).restore()) == {1: 1.0}
    again = [record.message for record in caplog.records if record.message.endswith("; looking again")]
    assert len(again) == 3
    assert all("the process that makes near saves there is probably alive: end it" in message for message in again)
    assert "max_keep" not in caplog.text
    assert "the process that makes them is probably alive; end it, and restore again" in caplog.text
