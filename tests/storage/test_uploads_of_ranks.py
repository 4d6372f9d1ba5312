"""Two real ranks that save to one server: how much they send at once, what fails them both, what they see late."""

import json
import threading
from pathlib import Path

import pytest
from faults.http_proxy import Proxy
from faults.store_scene import as_json, options_of
from support.warm_python import Piped

from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage

FILES = rb"(PUT|POST) .*/ckpt[^/]*/(?!INTENT|manifest)"
ALL = 1 << 30

pytestmark = pytest.mark.slow  # two interpreters that import torch, and a server


class Ranks:
    """The processes; each call is one save and one load."""

    def __init__(self, port, options, tmp):
        script, reach = Path(__file__).with_name("upload_ranks.py"), as_json(options_of(options, port))
        self.processes = [Piped(script, rank, tmp, reach, env={"TMPDIR": str(tmp)}) for rank in range(2)]
        assert [process.stdout.readline() for process in self.processes] == ["ready\n"] * 2

    def run(self, url, late=({}, {}), **transfers):
        for process, own in zip(self.processes, late, strict=True):
            process.stdin.write(json.dumps({"url": str(url), "step": 1, "late": own, **transfers}) + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def close(self):
        for process in self.processes:
            process.stdin.close()
        assert [process.wait(60) for process in self.processes] == [0, 0]


@pytest.fixture(scope="module")
def proxy(s3_options):
    proxy = Proxy(int(s3_options["endpoint_url"].rpartition(":")[2]))
    yield proxy
    proxy.stop()


@pytest.fixture(scope="module")
def ranks(proxy, s3_options, tmp_path_factory):
    ranks = Ranks(proxy.port, s3_options, tmp_path_factory.mktemp("tmp"))
    yield ranks
    ranks.close()


class Crowd:
    """Counts the files that are on their way at once, and lets the first ones wait for as many as are expected."""

    def __init__(self, expected):
        self._expected, self._changed = expected, threading.Condition()
        self.now = self.most = self.total = 0

    def pass_on(self, exchange):
        with self._changed:
            self.now += 1
            self.total += 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self._expected, 60)
        answer = exchange.ask()
        with self._changed:
            self.now -= 1  # first: whoever gets the answer may send the next at once
        exchange.answer(answer)
        return True


@pytest.mark.parametrize(
    ("max_uploads", "at_least", "at_most", "staged"),
    [
        (None, 3, 8, False),
        (1, 1, 1, True),
        pytest.param(None, 3, 8, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, False, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, True, marks=pytest.mark.slow),
        pytest.param(1, 1, 1, False, marks=pytest.mark.slow),
    ],
)
def test_no_more_files_go_up_at_once_than_was_said(
    ranks, proxy, s3_url, tmp_path, max_uploads, at_least, at_most, staged
):
    crowd = Crowd(at_least)
    proxy.arm(crowd.pass_on, times=ALL, about=FILES)
    options = {"work_dir": str(tmp_path / "work"), "pre_download": True} if staged else {}
    found = ranks.run(s3_url, max_uploads=max_uploads, **options)
    assert found == [{"failed": None, "equal": [True, True], "step": 1}] * 2
    assert at_least <= crowd.most <= at_most
    assert verify(s3_url, threads=1) == []
    assert not staged or list((tmp_path / "work").iterdir()) == []


def test_an_upload_of_one_rank_that_fails_fails_both_and_the_next_save_works(ranks, proxy, s3_url, tmp_path):
    proxy.arm(refuse, times=ALL, about=rb"PUT .*/ckpt/sparse/00001-of-00002\.json")
    options = {"work_dir": str(tmp_path / "work"), "max_uploads": 1}
    found = ranks.run(s3_url, **options)
    assert [one["failed"][:2] for one in found] == [["SaveFailedError", 1]] * 2
    assert list_checkpoints(open_storage(s3_url)).committed == ()
    proxy.arm(None)
    assert [one["failed"] for one in ranks.run(s3_url, **options)] == [None, None]


def refuse(exchange):
    exchange.client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
    return True


def test_ranks_wait_for_what_they_see_late_of_each_other(ranks, tmp_path):
    late = {"sparse/00001-of-00002.json": [None, 1, 2], "rng_1.pt": [None]}, {"INTENT": [None, None]}
    found = ranks.run(tmp_path / "runs", late=late, visible_sec=60)
    assert found == [{"failed": None, "equal": [True, True], "step": 1}] * 2


def test_a_rank_that_never_sees_what_was_written_fails_both(ranks, tmp_path):
    late = {"rng_1.pt": [None] * 10_000}, {"INTENT": [None]}
    found = ranks.run(tmp_path / "runs", late=late, visible_sec=3)
    for _, error, text in (one["failed"] for one in found):
        assert error == 0
        assert "rng_1.pt" in text
        assert "looking for up to 3 s for written files failed: found no such file" in text
