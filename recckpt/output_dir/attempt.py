"""What a directory that is being written says of its writer."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.json_fields import parse
from recckpt.storage import NOT_READABLE, Storage

_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Intent:
    """One try at a checkpoint.

    Attributes:
        directory: that nobody else writes.
        epoch: of the writer.
        save_id: 32 hex digits, fresh for each attempt.
        step: global step, None where the writer counts none.
    """

    directory: str
    epoch: int
    save_id: str
    step: int | None


def write_intent(storage: Storage, intent: Intent) -> None:
    """Mark a directory as this attempt's.

    Raises:
        FileExistsError: it is another's.
    """
    storage.put_if_absent(layout.join(intent.directory, layout.INTENT), encode_intent(intent))


def encode_intent(intent: Intent) -> bytes:
    """Return the bytes of the file that marks an attempt's directory."""
    return json.dumps({"epoch": intent.epoch, "save_id": intent.save_id, "step": intent.step}).encode()


def read_intent(storage: Storage, directory: str, file: str = layout.INTENT) -> Intent | None:
    """Return whose attempt a directory is, by a file in it, None where that cannot be told."""
    name = layout.join(directory, file)
    with suppress(*NOT_READABLE, CorruptCheckpointError):
        fields = parse(storage.read(name, _MAX_BYTES), name)
        return Intent(directory, fields.count("epoch"), fields.text("save_id"), fields.maybe_count("step"))
    return None
