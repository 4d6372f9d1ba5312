"""A limit on uploads over the processes of one host."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager

import pytest
from support.crowd import crowd

from recckpt.storage.transfers import UploadSlots


@contextmanager
def taken(slots):
    """Hold a slot for as long as the block takes."""
    slot = slots.take()
    try:
        yield
    finally:
        slots.free(slot)


HOLD = """
import os, sys
from recckpt.storage.transfers import UploadSlots
slots = UploadSlots(1, sys.argv[1], 60)
slot = slots.take()
read, write = os.pipe()
if os.fork() == 0:  # as a worker of a data loader; ends with its parent
    os.close(write)
    os.read(read, 1)
    os._exit(0)
print("held", flush=True)
sys.stdin.readline()
slots.free(slot)
print("free", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def own_tmp(tmp_path, monkeypatch):
    """A temporary directory of this test, also for the processes that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def holder(own_tmp):
    """Start a process that holds the only slot of a URL."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, "s3://bucket/runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def slots(count=1, timeout_sec=60.0, url="s3://bucket/runs"):
    return UploadSlots(count, url, timeout_sec)


def is_free(of):
    try:
        of.free(of.take())
    except TimeoutError:
        return False
    return True


def test_there_are_as_many_slots_as_were_asked_for(own_tmp):
    two = slots(2, timeout_sec=0)
    held = [two.take(), two.take()]
    with pytest.raises(
        TimeoutError, match=f"one of 2 upload slots: held by the processes {os.getpid()}, {os.getpid()}"
    ):
        two.take()
    two.free(held[0])
    with taken(two):
        assert not is_free(two)
    assert is_free(two)
    two.free(held[1])


def test_slots_of_another_url_are_others(own_tmp):
    with taken(slots()):
        assert not is_free(slots(timeout_sec=0))
        assert is_free(slots(timeout_sec=0, url="s3://bucket/other"))


def test_whoever_waits_gets_a_slot_once_one_is_free(own_tmp):
    one, order = slots(), []

    def wait():
        with taken(one):
            order.append("second")

    with taken(one):
        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_a_process_holds_a_slot_until_it_gives_it_back_whatever_children_it_has(holder):
    process = holder()
    with pytest.raises(TimeoutError, match=f"held by the processes {process.pid}: 's3://bucket/runs'"):
        slots(timeout_sec=0).take()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "free\n"
    assert is_free(slots(timeout_sec=0))


def test_a_process_that_is_killed_gives_its_slot_back(holder):
    process = holder()
    assert not is_free(slots(timeout_sec=0))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert is_free(slots())  # its child lets go a moment later


def test_a_directory_of_another_user_is_not_trusted(own_tmp, monkeypatch):
    foreign = slots()
    foreign.directory.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="expected one of user 12345; set TMPDIR"):
        foreign.take()


def test_a_link_is_not_followed(own_tmp):
    linked = slots()
    linked.directory.mkdir()
    (linked.directory / "0").symlink_to(own_tmp / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        linked.take()
    assert not (own_tmp / "elsewhere").exists()


def test_nothing_is_left_in_the_temporary_directory_when_the_last_slot_is_given_back(holder, own_tmp):
    process = holder()
    process.kill()
    process.wait()
    many = slots(4)
    held = [many.take() for _ in range(4)]
    for slot in held:
        assert many.directory.exists()
        many.free(slot)
    assert list(own_tmp.iterdir()) == []


def test_a_slot_is_held_by_one_however_many_take_and_give_it_back_at_once(own_tmp):
    holders, seen = [], []

    def work(number):
        own = slots()
        for _ in range(50):
            slot = own.take()
            holders.append(number)
            seen.append(list(holders))
            holders.remove(number)
            own.free(slot)

    assert crowd(4, work) == [None] * 4
    assert {len(found) for found in seen} == {1}
    assert list(own_tmp.iterdir()) == []
