"""What is whole on a host, and what is brought to one that lacks it."""

import shutil
import socket

import pytest
from faults.test_full_disk import PAGE, Disk
from near.test_near_saves import begun, rows
from near.test_ranks import near_names, on_hosts, together, trained
from support.builders import flip_bit
from support.near_runs import NearRun, parts_of
from support.sweeps import mostly_slow

from recckpt.near.near_dir import NearStorage
from recckpt.near.views import look_together

NEWEST, BASE = {1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0}, {1: 1.0, 2: 2.0}
NEW = "disk/new"
HOST = socket.gethostname()


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
    assert f"another host has an intact copy of a file: {socket.gethostname()}:{damaged}" in message
    assert "it is taken from another host with an intact copy" in message


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
    assert all("makes near saves there is probably still running: end it" in message for message in again)
    assert "max_keep" not in caplog.text
    assert "the process that makes them is probably still running; end it, and restore again" in caplog.text


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.close()


def restored(root, hosts):
    return together(on_hosts(root, hosts, lambda run: rows(run.restore())))


def files_of_near_saves(host):
    return [path for path in host.glob("recckpt-near/*/*/*/**/*") if path.is_file()]


def errors(caplog):
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


@mostly_slow()
@pytest.mark.parametrize("is_known", [True, False], ids=["before it begins", "as it is written"])
def test_a_host_without_room_for_what_it_lacks_is_named_and_keeps_nothing_of_it(
    tmp_path, caplog, monkeypatch, disk, is_known
):
    on_hosts(tmp_path, ["a", "b"], trained)
    if not is_known:
        monkeypatch.setattr(NearStorage, "free_on_disk", lambda self: None)
    disk.leave(6 * PAGE)
    assert restored(tmp_path, ["a", NEW]) == BASE
    assert len(errors(caplog)) == 2, "one of each near save"
    for message in errors(caplog):
        assert "is passed over: it cannot be copied to " in message
        assert f":{tmp_path / NEW}, which needs " in message
        assert ("free there: make room" if is_known else "No space left on device") in message
        assert "damage" not in message
    assert files_of_near_saves(tmp_path / NEW) == []

    monkeypatch.undo()
    disk.leave()
    assert restored(tmp_path, ["a", NEW]) == NEWEST
    assert files_of_near_saves(tmp_path / NEW)


def test_a_host_without_room_for_what_is_damaged_there_keeps_what_is_whole(tmp_path, caplog, disk):
    disk.leave()
    on_hosts(tmp_path, ["a", NEW], trained)
    names = near_names(tmp_path, NEW)
    for name in names:
        part = parts_of(tmp_path / NEW / name)[-1]  # which its own rank reads
        part.write_bytes(part.read_bytes()[:-1] + b"!")
    before = files_of_near_saves(tmp_path / NEW)
    disk.leave(0)
    assert restored(tmp_path, ["a", NEW]) == BASE
    assert all("cannot be copied to" in message for message in errors(caplog))
    assert files_of_near_saves(tmp_path / NEW) == before
    disk.leave()
    assert restored(tmp_path, ["a", NEW]) == NEWEST


def test_what_comes_to_a_host_is_told_once(tmp_path, caplog):
    caplog.set_level("INFO", "recckpt")
    on_hosts(tmp_path, ["a", "b"], trained)
    caplog.clear()
    assert restored(tmp_path, ["a", "new", "new"]) == NEWEST
    [message] = [record.message for record in caplog.records if ": copied " in record.message]
    assert message.partition(": copied ")[0] == f"near save {'.'.join(near_names(tmp_path, 'a')[-1].split('/')[-2:])}"
    assert f" kB to {HOST}:{tmp_path / 'new'} from {HOST}:{tmp_path / 'a'}" in message


def test_where_nothing_comes_to_a_host_nothing_is_told(tmp_path, caplog):
    caplog.set_level("INFO", "recckpt")
    on_hosts(tmp_path, ["a", "b"], trained)
    assert restored(tmp_path, ["a", "b"]) == NEWEST
    assert ": copied " not in caplog.text
