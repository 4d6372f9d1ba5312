"""Notes in an output dir of what lies elsewhere and follows it: sealed JSON files, one for each place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from recckpt.errors import CorruptCheckpointError
from recckpt.format import drafts, layout
from recckpt.format.json_fields import Fields, check_seal, parse
from recckpt.storage import ABSENT, Storage
from recckpt.storage.read_again import read_twice

_MAX_BYTES = 64 << 20
_T = TypeVar("_T")


def put_note(storage: Storage, path: str, data: bytes) -> None:
    """Put a note in place of the one that is there, unless it is the same."""
    with suppress(*ABSENT):
        if storage.read(path, _MAX_BYTES) == data:
            return
    for directory in (layout.OWN_DIR, path.rpartition("/")[0]):
        with suppress(FileExistsError):
            storage.make_dir(directory)
    storage.replace(path, data)


def note_paths(storage: Storage, directory: str) -> list[str]:
    """Return the paths of all notes in a directory."""
    return [layout.join(directory, name) for name in storage.list_files(directory) if not drafts.is_draft(name)]


def read_note(
    storage: Storage, path: str, kind: tuple[str, int, str], decode: Callable[[Fields], _T], remedy: str
) -> _T | None:
    """Return what a note says; None where it is not there.

    Args:
        storage: the output dir.
        path: that of the note.
        kind: its format, the newest version of that, and the field with its checksum.
        decode: what to make of its fields.
        remedy: what to do about a damaged one.

    Raises:
        CorruptCheckpointError: it is damaged.
        FormatVersionError: a newer recckpt wrote it.
    """
    format_, version, seal = kind

    def read() -> _T:
        data = storage.read(path, _MAX_BYTES)
        fields = parse(data, path)
        fields.check_format(format_, version)
        check_seal(data, seal, path)
        return decode(fields)

    try:
        return read_twice(storage, path, read)
    except ABSENT:
        return None
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            path, error.where, found=error.found, expected=error.expected, remedy=remedy
        ) from error
