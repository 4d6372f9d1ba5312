"""A proxy in front of a store that counts requests and spoils the one it is told to."""

import os
import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field

_NO_BODY = (b"204", b"304")


@dataclass
class Message:
    """A request or an answer, as it goes over the wire; the body as it is framed."""

    head: bytes
    body: bytes

    @property
    def first_line(self) -> bytes:
        return self.head.partition(b"\r\n")[0]


@dataclass
class Exchange:
    """One request on its way. A fault looks at it, passes it on or not, and answers, resets or stays silent."""

    client: socket.socket
    server: socket.socket
    reader: object
    request: Message
    _sent: bool = field(default=False)

    def ask(self) -> Message:
        """Pass the request on and return the answer."""
        self.server.sendall(self.request.head + self.request.body)
        return _read_answer(self.reader, self.request)

    def answer(self, answer: Message) -> None:
        """Send an answer to the client."""
        self.client.sendall(answer.head + answer.body)

    def pass_half(self) -> None:
        """Begin to pass the request on, and let the server see how it is cut off."""
        whole = self.request.head + self.request.body
        self.server.sendall(whole[: max(1, len(whole) - 1 - len(self.request.body) // 2)])
        _reset(self.server)

    def reset(self) -> None:
        """Reset the client's connection."""
        _reset(self.client)

    def stall(self) -> None:
        """Say nothing until the client gives up."""
        with suppress(OSError):
            while self.client.recv(65536):
                pass


class Proxy:
    """Listens on 127.0.0.1 and passes all requests on, but for those that a fault was armed for.

    Attributes:
        n_requests: requests since :meth:`arm`, of those that it is about.
        n_faults: how many of them were spoiled.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.arm(None)
        self.up()

    def arm(self, fault, at: int = 1, times: int = 1, about: bytes = b"") -> None:
        """Count from 1 again, and spoil ``times`` requests from the one numbered ``at``; None passes all on.

        ``fault(exchange)`` returns true where the connection may go on. Where ``about`` is given, only requests count
        whose first line matches that pattern.
        """
        with self._lock:
            self.n_requests = self.n_faults = 0
            self._fault, self._at, self._times, self._about = fault, at, times, re.compile(about)

    def up(self) -> None:
        """Listen, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    def down(self) -> None:
        """Refuse and reset all connections, as a server does that is killed."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections, self._open = self._open, set()
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for connection in connections:
            _reset(connection)

    def stop(self) -> None:
        """End it for good."""
        self.down()
        for thread in self._threads:
            thread.join(60)

    def _start(self, work, *args) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with self._lock:
                    self._open.add(client)
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = None
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.create_connection(("127.0.0.1", self._server_port))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with client.makefile("rb") as requests, server.makefile("rb") as answers:
                while request := _read_request(requests, client):
                    if not self._pass(Exchange(client, server, answers, request)):
                        return
        except (OSError, ValueError):
            pass  # one side has gone away
        finally:
            with self._lock:
                self._open.discard(client)
            client.close()
            if server is not None:
                server.close()

    def _pass(self, exchange: Exchange) -> bool:
        with self._lock:
            counts = self._about.match(exchange.request.first_line) is not None
            self.n_requests += counts
            spoiled = counts and self._at <= self.n_requests < self._at + self._times
            spoil = self._fault if spoiled else None
            self.n_faults += spoil is not None
        if spoil is not None:
            return bool(spoil(exchange))
        exchange.answer(exchange.ask())
        return True


def _reset(connection: socket.socket) -> None:
    """Send RST instead of FIN, at once, though file objects hold the socket open."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)  # wakes the thread that reads
    with suppress(OSError):
        os.close(connection.detach())


def _headers(head: bytes) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def _read_head(reader) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline()
        if not line:
            return b""
        head += line
    return head


def _read_request(reader, client: socket.socket) -> Message | None:
    head = _read_head(reader)
    if not head:
        return None
    headers = _headers(head)
    if b"expect" in headers:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        lines = head.split(b"\r\n")
        head = b"\r\n".join(line for line in lines if not line.lower().startswith(b"expect:"))
    return Message(head, _read_body(reader, headers))


def _read_answer(reader, request: Message) -> Message:
    head = _read_head(reader)
    if not head:
        raise ConnectionError("the server went away")
    if request.head.startswith(b"HEAD ") or head.split(b" ", 2)[1] in _NO_BODY:
        return Message(head, b"")
    return Message(head, _read_body(reader, _headers(head)))


def _read_body(reader, headers: dict[bytes, bytes]) -> bytes:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        body = b""
        while True:
            size = reader.readline()
            body += size + reader.read(int(size, 16) + 2)
            if int(size, 16) == 0:
                return body
    return reader.read(int(headers.get(b"content-length", b"0")))
