import errno
import socket
import ssl

import pytest

from recckpt.storage.retry import Retries, RetryPolicy, TryAgainError, is_answer, is_conflict, is_transient, os_error


class ClientError(Exception):
    """As botocore's: what a server answered."""

    def __init__(self, status, code=""):
        super().__init__(f"An error occurred ({code or status})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class HttpResponseError(Exception):
    """As those of azure-core and aiohttp."""

    def __init__(self, status):
        super().__init__("for a test")
        self.status_code = status


class ServerDisconnectedError(ConnectionError):
    """As aiohttp's, which is an OSError in some versions and none in others."""


class HTTPClientError(Exception):
    """As botocore's, the root of what a client sees of a bad network."""


class BrokenAnswerError(Exception):
    """As aiohttp's BadHttpMessage: a broken answer, numbered as if the server had refused the request."""

    code = 400


def led_by(error, cause):
    """Return an error with a cause, as backends translate those of a server."""
    try:
        raise error from cause
    except type(error) as raised:
        return raised


def met_while(error, context):
    """Return an error that was raised while another was handled."""
    try:
        try:
            raise context
        except type(context):
            raise error  # noqa: B904
    except type(error) as raised:
        return raised


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("late"),
        TryAgainError("now"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        BrokenPipeError(errno.EPIPE, "pipe"),
        OSError(errno.ENETUNREACH, "away"),
        socket.gaierror(socket.EAI_AGAIN, "later"),
        EOFError(),
        ServerDisconnectedError(),
        HTTPClientError("closed"),
        led_by(HTTPClientError("closed"), BrokenAnswerError("garbage")),
        *(ClientError(status) for status in (408, 429, 500, 502, 503, 504)),
        ClientError(503, "SlowDown"),
        ClientError(400, "RequestTimeout"),
        HttpResponseError(503),
        led_by(OSError(errno.EBUSY, "reduce your request rate"), ClientError(503, "SlowDown")),
        met_while(OSError(errno.EREMOTEIO, "internal"), ClientError(500, "InternalError")),
    ],
    ids=repr,
)
def test_the_network_and_a_busy_server_are_tried_again(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        *(ClientError(status) for status in (400, 401, 403, 404, 409, 412, 416, 501)),
        led_by(PermissionError("denied"), ClientError(403, "AccessDenied")),
        led_by(FileNotFoundError("no bucket"), ClientError(404, "NoSuchBucket")),
        met_while(FileNotFoundError("gone"), ConnectionResetError()),
        HttpResponseError(403),
        *(OSError(code, "disk") for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EINVAL)),
        socket.gaierror(socket.EAI_NONAME, "unknown"),
        led_by(HTTPClientError("tls"), ssl.SSLCertVerificationError("self-signed")),
        KeyError("bug"),
        ValueError("bug"),
    ],
    ids=repr,
)
def test_what_will_not_get_better_is_not_tried_again(error):
    assert not is_transient(error)


REFUSALS = [FileNotFoundError("404"), FileExistsError("412"), PermissionError("403")]
REFUSALS += [*map(ClientError, (400, 404, 412, 503)), led_by(OSError(errno.EINVAL, "bad"), HttpResponseError(400))]
NO_ANSWERS = [TimeoutError("late"), ConnectionRefusedError(errno.ECONNREFUSED, "refused"), KeyError("bug")]
NO_ANSWERS += [led_by(FileNotFoundError("no size"), socket.gaierror(socket.EAI_AGAIN, "later"))]  # as HTTP of fsspec


@pytest.mark.parametrize("error", [*REFUSALS, *NO_ANSWERS], ids=repr)
def test_a_refusal_is_an_answer_and_what_never_came_to_a_server_is_none(error):
    assert is_answer(error) == (error in REFUSALS)
    if error in NO_ANSWERS:
        assert not is_answer(met_while(error, (handled := ClientError(404))), handled)


def test_what_was_being_handled_before_is_no_cause():
    handled = ConnectionResetError()
    error = met_while(ValueError("bug"), handled)
    assert is_transient(error)
    assert not is_transient(error, handled)

    calls = []

    def work():
        calls.append(1)
        raise KeyError("bug")

    try:
        raise handled
    except ConnectionResetError:
        with pytest.raises(OSError, match="KeyError"):
            Retries(RetryPolicy(sleep=lambda seconds: None), "s3://b/x").call("working", work)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (FileNotFoundError("b/x"), FileNotFoundError, errno.ENOENT),
        (PermissionError("no"), PermissionError, errno.EACCES),
        (ClientError(403), PermissionError, errno.EACCES),
        (HttpResponseError(404), FileNotFoundError, errno.ENOENT),
        (OSError(errno.ENOSPC, "No space left"), OSError, errno.ENOSPC),
        (OSError("Failure"), OSError, errno.EIO),
        (TimeoutError(), TimeoutError, errno.ETIMEDOUT),
        (KeyError("x"), OSError, errno.EIO),
    ],
    ids=repr,
)
def test_an_error_says_what_was_done_where_and_whether_a_condition_was_not_met(error, kind, code):
    said = os_error(error, "writing", "s3://b/x")
    assert (type(said), said.errno, said.filename) == (kind, code, "s3://b/x")
    assert str(said).startswith(f"[Errno {code}] writing failed: ")
    assert "s3://b/x" in str(said)
    assert not is_conflict(error)
    for met in (FileExistsError("x"), led_by(OSError(errno.EINVAL, "x"), ClientError(412)), ClientError(409)):
        assert is_conflict(met)
    assert not is_conflict(OSError(errno.EINVAL, "x"))


def test_waits_double_up_to_the_cap_and_are_spread_over_their_whole_range():
    policy = RetryPolicy(first_sec=0.2, cap_sec=20)
    for n_failures, longest in ((1, 0.2), (2, 0.4), (5, 3.2), (8, 20), (1000, 20)):
        waits = [policy.wait_sec(n_failures) for _ in range(500)]
        assert 0 <= min(waits) < 0.05 * longest
        assert 0.95 * longest < max(waits) <= longest


def test_the_attempts_at_one_file_share_a_deadline():
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    retries = Retries(RetryPolicy(deadline_sec=100, sleep=sleep, clock=lambda: now[0]), "s3://b/x")
    failing = [True]

    def work():
        now[0] += 1
        if failing[0]:
            failing[0] = False
            raise TimeoutError
        failing[0] = True
        now[0] += 1000  # what works may take its time
        return now[0]

    def work_on():
        while True:
            retries.call("working", work)

    with pytest.raises(TimeoutError, match="working failed"):
        work_on()
    spent = now[0] % 1000
    assert 50 < spent <= 220
