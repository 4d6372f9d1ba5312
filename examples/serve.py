"""Serve embeddings over HTTP beside the training run that makes them; an answer is all of one checkpoint.

python examples/train_ctr.py --deltas --save-interval 100 --steps 100000 --output-dir runs/clicks &
python examples/serve.py runs/clicks --port 8000 &
curl -s localhost:8000/lookup -d '{"user": [1, 2, 3], "item": [17]}'

The answer names its checkpoint: {"checkpoint": "ckpt_300", "tables": {"user": {"vectors": [...], "found": [...]}}}.
The server imports no torch, and listens on the loopback interface alone.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from recckpt import CheckpointReader
from recckpt.errors import CheckpointNotFoundError, RecckptError

MAX_BODY_BYTES = 1 << 20


def look_up(reader: CheckpointReader, asked: dict[str, list[int]]) -> dict[str, Any]:
    """Return the rows of ids of some tables, all of one checkpoint though the reader moves on meanwhile."""
    here = reader.at_this_checkpoint()
    tables = {}
    for table, ids in asked.items():
        values, found = here.lookup(table, ids)
        tables[table] = {"vectors": values.tolist(), "found": found.tolist()}
    return {"checkpoint": here.manifest.ckpt_id, "tables": tables}


class Handler(BaseHTTPRequestHandler):
    """Answers POST /lookup with a JSON object of ids by table."""

    protocol_version = "HTTP/1.1"

    def __init__(self, reader: CheckpointReader, *args: Any) -> None:
        self.reader = reader
        super().__init__(*args)

    def do_POST(self) -> None:
        """Answer a request."""
        n_bytes = int(self.headers.get("Content-Length", 0))
        if self.path != "/lookup" or n_bytes > MAX_BODY_BYTES:
            self.close_connection = True
            return self.answer(404, {"error": f"POST /lookup with at most {MAX_BODY_BYTES} bytes"})
        try:
            asked = json.loads(self.rfile.read(n_bytes))
            self.answer(200, look_up(self.reader, dict(asked)))
        except RecckptError as error:
            self.answer(503, {"error": str(error)})
        except (KeyError, TypeError, ValueError) as error:  # an unknown table, ids that are none, no JSON
            self.answer(400, {"error": str(error)})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        """Send a JSON object."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def follow(reader: CheckpointReader, every_sec: float, is_over: threading.Event) -> None:
    """Move to newer checkpoints as they come; stay where one cannot be read, and try again."""
    while not is_over.wait(every_sec):
        try:
            if reader.refresh():
                print(f"now at {reader.manifest.ckpt_id}", flush=True)
        except (RecckptError, OSError) as error:
            print(f"staying at {reader.manifest.ckpt_id}: {error}", flush=True)


def opened(output_dir: str, every_sec: float) -> CheckpointReader:
    """Return a reader of an output dir, once there is a checkpoint."""
    while True:
        try:
            return CheckpointReader(output_dir)
        except CheckpointNotFoundError as error:
            print(f"waiting: {error}", flush=True)
            time.sleep(every_sec)


def serve(output_dir: str, port: int, every_sec: float) -> tuple[ThreadingHTTPServer, threading.Event]:
    """Return a server, yet to be run, and what ends its following."""
    reader, is_over = opened(output_dir, every_sec), threading.Event()
    threading.Thread(target=follow, args=(reader, every_sec, is_over), daemon=True).start()
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, reader)), is_over


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--every-sec", type=float, default=1.0, help="how often to look for a newer checkpoint")
    args = parser.parse_args()
    server, is_over = serve(args.output_dir, args.port, args.every_sec)
    print(f"serving {args.output_dir} at http://127.0.0.1:{server.server_port}/lookup", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        is_over.set()
        server.server_close()


if __name__ == "__main__":
    main()
