"""T6: the network fails at each request of a save; it is made up for, or said, and nothing is ever lost."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
from faults.http_proxy import Message, Proxy
from faults.job import Job
from faults.plants import plant
from faults.store_scene import Scene, Store, options_of
from faults.store_worker import LargeJob
from fsspec.config import conf
from support.sweeps import SWEEP_STRIDE, some_of

from recckpt.errors import SaveFailedError
from recckpt.storage import upload
from recckpt.storage.retry import RetryPolicy

NAMED = re.compile(r"\b[a-z ]+ failed: .*s3://faults-\d+/try-\d+")
PATIENCE_SEC = {"stall before": 2.0, "stall after": 2.0}  # which are waited for; else the server may take its time


def reset_before(exchange):
    exchange.reset()


def reset_within(exchange):
    exchange.pass_half()
    exchange.reset()


def reset_after(exchange):
    exchange.ask()
    exchange.reset()


def stall_before(exchange):
    exchange.stall()


def stall_after(exchange):
    exchange.ask()
    exchange.stall()


def truncated(exchange):
    answer = exchange.ask()
    whole = answer.head + answer.body
    exchange.client.sendall(whole[: len(whole) - 1 - len(answer.body) // 2])


def refused(status, code, exchange):
    body = f"<Error><Code>{code}</Code><Message>for a test</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    exchange.answer(Message(head, b"" if exchange.request.head.startswith(b"HEAD ") else body))
    return True


FAULTS = {
    "reset before": reset_before,
    "reset within": reset_within,
    "reset after": reset_after,
    "stall before": stall_before,
    "stall after": stall_after,
    "truncated": truncated,
    "500": partial(refused, 500, "InternalError"),
    "503": partial(refused, 503, "SlowDown"),
    "server killed": None,
}
FOR_EVER = ("reset before", "reset after", "truncated", "500", "server killed")


class Network:
    """A proxy to the store, and time that passes only while somebody waits; a killed server is back after a while."""

    def __init__(self, server, monkeypatch):
        self.proxy = Proxy(int(server["endpoint_url"].rpartition(":")[2]))
        self._through = options_of(server, self.proxy.port)
        self._monkeypatch, self._server = monkeypatch, server
        self._now, self._back_at = 0.0, None
        self.policy = RetryPolicy(deadline_sec=30, sleep=self._sleep, clock=lambda: self._now)

    def run(self, make, url, max_keep, fault):
        """Return a job that reaches the store through the proxy."""
        patience = {"read_timeout": PATIENCE_SEC.get(fault, 60.0)}
        self._monkeypatch.setitem(conf, "s3", {**self._through, "config_kwargs": patience})
        job = make(url, max_keep)
        self._monkeypatch.setitem(conf, "s3", self._server)
        job.saver.storage.policy = self.policy
        return job

    def spoil(self, fault, at, times, about):
        self.proxy.arm(FAULTS[fault] or self._killed(times), at, times, about)

    def mend(self):
        self._back_at = None
        self.proxy.down()
        self.proxy.up()
        self.proxy.arm(None)

    def _killed(self, times):
        def kill(exchange):
            self._back_at = self._now + (2 if times == 1 else 1000)
            self.proxy.down()

        return kill

    def _sleep(self, seconds):
        self._now += seconds
        if self._back_at is not None and self._now > self._back_at:
            self._back_at = None
            self.proxy.up()


class Faults:
    """Disturbs saves into copies of one scene; ``whole`` are the files of a save that nothing disturbs."""

    def __init__(self, scene, whole, n_requests, network, figures):
        self.scene, self.network, self.figures = scene, network, figures
        self._whole, self.n_requests = whole, n_requests

    def disturb(self, fault, at, times, about=b""):
        """Spoil ``times`` requests of a save from the ``at``-th on, and check what is left.

        Returns:
            Whether there were so many requests.
        """
        note = f"{fault} {'once' if times == 1 else 'for ever'} from request {at}"
        prefix, job = ready(self.scene, self.network, fault)
        self.network.spoil(fault, at, times, about)
        failure = failure_of(job.manager.save)
        outcome = "saved" if failure is None else "failed"
        n_faults = self.network.proxy.n_faults
        self.network.mend()
        assert failure is None or times > 1, f"{note}: the save failed: {failure}"
        assert failure is None or NAMED.search(str(failure)), f"{note}: neither URL nor operation in {failure}"
        published = self.scene.new_files(prefix)
        half = {(name, size) for name, size in published if self._whole.get(name, size) != size}
        assert not half, f"{note}: half published {half}"
        self.scene.check_loss(prefix, outcome, note)

        if outcome == "failed":
            job.manager.save()
        else:
            job.advance()
            job.manager.save()
        step = job.manager.global_step
        after = self.scene.make(self.scene.url(prefix), self.scene.max_keep)
        assert after.manager.restore() == step, f"{note}: it did not recover"
        assert after.is_of_step(step), note
        self.figures.add("T6", points=int(n_faults > 0), failed=int(outcome == "failed"), lost=0)
        self.scene.store.fs.rm(f"{self.scene.store.bucket}/{prefix}", recursive=True)
        return n_faults > 0

    def sweep(self, fault, times, number, stride):
        """Disturb some requests of a save, from one on that follows from the number of the sweep."""
        for at in some_of(self.n_requests, stride, number):
            assert self.disturb(fault, at, times), f"a save makes no request {at}"


def ready(scene, network, fault=None):
    """Return a copy of a scene, and a job that is about to save there."""
    prefix = scene.copy()
    job = network.run(scene.make, scene.url(prefix), scene.max_keep, fault)
    job.manager.restore(scene.restore_step)
    job.advance()
    return prefix, job


def undisturbed(scene, network):
    """Return name -> size of the files of a save, which are the same in each of one process, and its requests."""
    prefix, job = ready(scene, network)
    network.proxy.arm(None)
    job.manager.save()
    return dict(scene.new_files(prefix)), network.proxy.n_requests


def failure_of(save):
    try:
        save()
    except SaveFailedError as error:
        return error
    return None


@pytest.fixture(scope="module")
def made():
    """The scenes of this file and what a save does there, by scene and job: making one takes as long as a try."""
    return {}


@pytest.fixture
def faults(s3_options, monkeypatch, figures, made):
    network = Network(s3_options, monkeypatch)

    def make(scene, job=Job):
        monkeypatch.setattr(upload, "BLOCK_BYTES", 5 << 20)  # the least that S3 takes
        monkeypatch.setitem(conf, "s3", s3_options)
        if (scene, job) not in made:
            found = Scene(Store(s3_options), scene, job)
            made[scene, job] = found, *undisturbed(found, network)
        return Faults(*made[scene, job], network, figures)

    yield make
    network.proxy.stop()


@pytest.mark.slow
def test_a_network_that_fails_is_made_up_for_or_said_and_loses_nothing(faults):
    disturbed = faults("rotation")
    for fault, at, times in (("reset after", 31, 1), ("truncated", 25, 10**9)):
        assert disturbed.disturb(fault, at, times), fault


@pytest.mark.slow
def test_a_commit_that_is_not_read_back_is_found(faults, finding, monkeypatch):
    disturbed = faults("rotation")
    plant("a manifest that was put is not read back", monkeypatch.setattr)
    with finding(r"reset after once from request 1: the save failed: .*FileExistsError"):
        disturbed.disturb("reset after", 1, 1, about=rb"PUT .*/manifest\.json")


@pytest.mark.slow
@pytest.mark.parametrize("is_planted", [False, True])
def test_an_error_publishes_nothing_of_a_large_file_and_that_would_be_found(faults, finding, monkeypatch, is_planted):
    disturbed = faults("first", LargeJob)
    second_part_or_removal = rb"PUT .*partNumber=2|DELETE [^?]* HTTP"
    if is_planted:
        plant("an error publishes a large object", monkeypatch.setattr)
    with finding("half published .*extra.pt") if is_planted else nullcontext():
        assert disturbed.disturb("500", 1, 10**9, about=second_part_or_removal)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fault"), [*enumerate(FAULTS)])
def test_a_fault_at_any_request_is_made_up_for(faults, number, fault):
    faults("rotation").sweep(fault, 1, number, 4 * SWEEP_STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fault"), [*enumerate(FAULTS)])
def test_a_fault_while_a_large_file_goes_up_is_made_up_for(faults, number, fault):
    faults("first", LargeJob).sweep(fault, 1, number, len(FAULTS) * SWEEP_STRIDE)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FOR_EVER)
def test_a_network_that_stays_away_from_any_request_on_loses_nothing(faults, fault):
    faults("rotation").sweep(fault, 10**9, FOR_EVER.index(fault), 8 * SWEEP_STRIDE)
