"""A process that forks mirrors which are killed at one of their calls of a storage, while a trainer saves elsewhere.

One JSON line in is one mirror, with ``number`` 0 one that is not killed; a line says what became of it once it is over.
"""

import json
import os
import sys
import traceback

from fsspec.config import conf
from support.killed import CALLS, kill_at

from recckpt.rewrite.mirroring import Mirror
from recckpt.storage.objects import ObjectStorage
from recckpt.storage.upload import Upload

STORE_CALLS = [
    *(
        (ObjectStorage, name)
        for name in ("put_if_absent", "replace", "draft", "list_files", "listed", "remove", "size")
    ),
    (Upload, "write"),
    (Upload, "close"),
]


def mirrored(run, to, number, options, keep=None):
    if options is not None:
        conf["s3"] = options
    made = Mirror(run, to, keep=keep)
    if number:
        kill_at(number, STORE_CALLS if "://" in to else CALLS)
    return made.update()


def main():
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                done = mirrored(**json.loads(line))
                os.write(write, f"copied {len(done.copied)}, damaged {len(done.damaged)}".encode())
                os._exit(0)
            except BaseException:
                os.write(write, traceback.format_exc()[-1500:].encode())
                os._exit(1)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        with os.fdopen(read) as said:
            text = said.read()
        print(json.dumps("killed" if os.WIFSIGNALED(status) else text), flush=True)


if __name__ == "__main__":
    main()
