"""A store that speaks S3 and answers every request that the credentials have expired."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Expired(BaseHTTPRequestHandler):
    """A store whose credentials have expired."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        said = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else said)

    do_HEAD = do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def expired_s3() -> Iterator[str]:
    """Yield its URL while it answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Expired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
