"""A limit on bytes a second over the processes of one host."""

import os
import struct
import tempfile
from multiprocessing import get_context

import pytest
import torch
from support.sweeps import mostly_slow

from recckpt import Saver
from recckpt.storage.upload_rate import UploadRate


@pytest.fixture(autouse=True)
def own_tmp(tmp_path, monkeypatch):
    """A temporary directory of this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, now=1000.0):
        self.now = now

    def sleep(self, seconds):
        self.now += seconds

    def read(self):
        return self.now


def rate_of(clock, bytes_per_sec=1000, url="s3://bucket/run"):
    return UploadRate(bytes_per_sec, url, clock.sleep, clock.read)


def test_bytes_go_at_the_rate_that_was_asked_for():
    clock = Clock()
    rate = rate_of(clock)
    for _ in range(10):
        rate.wait(500)
    assert clock.now == pytest.approx(1000 + 9 * 0.5), "the last piece need not wait for a next one"
    clock.now += 100
    rate.wait(500)
    rate.wait(500)
    assert clock.now == pytest.approx(1104.5 + 0.5), "what was not used in a pause is not made up for"


def moments_of_pieces(n_pieces):
    """Return when pieces may be sent on a host whose clock stands, counted in pieces."""
    moments = []
    for _ in range(n_pieces):
        clock = Clock()
        rate_of(clock).wait(500)
        moments.append(round((clock.now - 1000.0) / 0.5))
    return moments


def test_processes_share_a_rate_and_other_urls_have_their_own(own_tmp):
    with get_context("fork").Pool(4) as pool:
        moments = [moment for some in pool.map(moments_of_pieces, [20] * 4, chunksize=1) for moment in some]
    assert sorted(moments) == list(range(80)), "each piece has a moment of its own"
    other = Clock()
    rate_of(other, url="s3://bucket/other").wait(500)
    assert other.now == 1000.0


def test_a_moment_of_before_a_reboot_and_a_torn_file_do_not_stop_uploads():
    clock = Clock(now=5.0)
    rate = rate_of(clock)
    for record in (struct.pack("<d", 1e6), b"abc", struct.pack("<d", float("nan"))):
        rate.path.write_bytes(record)
        rate.wait(500)
        assert clock.now == 5.0


def test_a_file_of_another_user_is_refused(monkeypatch):
    rate = rate_of(Clock())
    rate.wait(1)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match="a file of another user"):
        rate.wait(1)


@mostly_slow()
@pytest.mark.parametrize("work_dir", [False, True])
def test_a_save_sends_all_its_files_at_the_rate(own_tmp, monkeypatch, memory_url, work_dir):
    sent, slept = [], []
    real = UploadRate.wait
    monkeypatch.setattr(UploadRate, "wait", lambda self, n_bytes: sent.append(n_bytes) or real(self, n_bytes))
    monkeypatch.setattr("time.sleep", slept.append)
    model = torch.nn.Linear(1000, 300)
    saver = Saver(model, output_dir=memory_url, max_upload_rate="1 MB", work_dir=own_tmp / "w" if work_dir else None)
    manifest = saver.save("a")
    assert sum(sent) == sum(file.n_bytes for file in manifest.files)
    assert max(sent) <= 250_000
    saver.load("a")
