"""T5: a process dies before or after each request of a save to an object store; nothing is ever lost."""

import json
import os
import signal
from pathlib import Path

import pytest
from faults.http_proxy import Proxy
from faults.store_scene import Scene, Store, as_json, options_of
from faults.store_worker import JOBS
from fsspec.config import conf
from support.sweeps import SWEEP_STRIDE, some_of
from support.warm_python import Piped

MOST_REQUESTS = 1000  # of a save
SWEEPS = {  # scene, job, whether deaths begin with the process: which requests, of those that SWEEP_STRIDE leaves
    ("first", "small", True): 2,
    ("rotation", "small", False): 1,
    ("again", "small", False): 3,
    ("rotation", "large", False): 3,
}


class Worker:
    """The process that forks the children."""

    def __init__(self):
        self.process = Piped(Path(__file__).with_name("store_worker.py"))
        assert self.process.stdout.readline() == "ready\n"

    def save(self, order, armed):
        """Save in a child; ``armed(pid)`` is called when it is about to begin. Return its wait status."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        armed(pid)
        os.kill(pid, signal.SIGCONT)
        return int(self.process.stdout.readline())

    def close(self):
        self.process.terminate()  # not by closing stdin: a child forked meanwhile, such as a data worker, has it too
        self.process.wait()


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def proxy(s3_options):
    proxy = Proxy(int(s3_options["endpoint_url"].rpartition(":")[2]))
    yield proxy
    proxy.stop()


def death(pid, *, arrives):
    """A fault that kills the client, before its request has reached the server or after it has had its effect."""

    def die(exchange):
        if arrives:
            exchange.ask()
        os.kill(pid, signal.SIGKILL)

    return die


class Deaths:
    """Kills the process that saves into copies of one scene."""

    def __init__(self, scene, job, from_start, worker, proxy, server, figures):
        self.scene, self.worker, self.proxy, self.figures = scene, worker, proxy, figures
        options = json.loads(as_json(options_of(server, proxy.port)))
        common = {"job": job, "options": options, "from_start": from_start}
        self.order = {**common, "max_keep": scene.max_keep, "restore_step": scene.restore_step}

    def die_at(self, k, *, arrives, about=b"", plant=None):
        """Kill at the k-th request and check what is left; return whether there were so many."""
        prefix = self.scene.copy()
        order = {**self.order, "url": self.scene.url(prefix), "plant": plant}
        status = self.worker.save(order, lambda pid: self.proxy.arm(death(pid, arrives=arrives), at=k, about=about))
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        note = f"death {'after' if arrives else 'before'} request {k}"
        assert killed or status == 0, f"{note}: wait status {status}"
        assert killed == (self.proxy.n_faults > 0), note
        job = self.scene.check_loss(prefix, "killed" if killed else "saved", note)
        self.scene.check_next_save(prefix, job, note)
        self.figures.add("T5", points=int(killed), lost=0)
        return killed

    def sweep(self, stride, number):
        """Kill before and after every ``stride``-th request, from one on that follows from the number of the sweep."""
        assert not self.die_at(MOST_REQUESTS, arrives=False)
        for k in some_of(self.proxy.n_requests, stride, number):
            for arrives in (False, True):
                assert self.die_at(k, arrives=arrives), k


@pytest.fixture
def deaths(worker, proxy, s3_options, monkeypatch, figures):
    def make(scene, job, from_start):
        monkeypatch.setitem(conf, "s3", s3_options)
        store = Store(s3_options)
        return Deaths(Scene(store, scene, JOBS[job]), job, from_start, worker, proxy, s3_options, figures)

    return make


@pytest.mark.slow
def test_a_death_in_a_save_that_rotates_loses_nothing(deaths):
    assert deaths("rotation", "small", False).die_at(23, arrives=True)


@pytest.mark.slow
def test_a_rotation_before_the_commit_is_found(deaths, finding):
    with finding("death before request 1: killed, restored 0, expected 1"):
        deaths("rotation", "small", False).die_at(
            1, arrives=False, about=rb"PUT .*/manifest\.json", plant="rotation before the commit"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "job", "from_start"), SWEEPS)
def test_a_death_at_any_request_loses_nothing(deaths, scene, job, from_start):
    number = list(SWEEPS).index((scene, job, from_start))
    deaths(scene, job, from_start).sweep(SWEEP_STRIDE * SWEEPS[scene, job, from_start], number)
