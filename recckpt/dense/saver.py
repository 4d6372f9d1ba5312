"""Dense state to ``.pt`` files that plain ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.storage import HashingSink, NewFiles


def save_state(state: Mapping[str, Any], storage: NewFiles, directory: str, name: str) -> FileEntry:
    """Write a dict of portable state and return its entry for the manifest.

    Args:
        state: name -> tensor or plain data, as :func:`recckpt.dense.portable.portable` returns it.
        storage: where the checkpoint goes.
        directory: the checkpoint's directory in it.
        name: the file.

    Raises:
        OSError: the storage failed; the file is not there then.
    """
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        try:
            torch.save(dict(state), hashing)  # type: ignore[arg-type]  # torch asks for IO[bytes], uses write alone
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch closes its archive after a failed write, in vain
                raise error.__context__ from None
            raise
    return FileEntry(name, sink.n_bytes, hashing.xxh3)
