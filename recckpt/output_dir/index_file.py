"""The index file and the timeline: files for people and scripts, on which no code depends.

RecIS has an index file of the same name. An index file of RecIS is recognised, logged, and left unchanged.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from recckpt.format import layout
from recckpt.storage import ABSENT, NotPlainError, Storage, open_parent

log = logging.getLogger("recckpt")
NOTE = "this is an output dir of RecIS, whose checkpoints `recckpt import` converts"
_FILES = ("tensorkey.json", "index")  # in every checkpoint of RecIS, and in no checkpoint of recckpt
_OF_OTHERS = {  # file in every checkpoint of another format, and in none of recckpt -> the program that wrote it
    ".metadata": "torch.distributed.checkpoint",
    "model.safetensors": "Hugging Face",
    "model.safetensors.index.json": "Hugging Face",
    "pytorch_model.bin": "Hugging Face",
}
_SHARDS = ".safetensors"  # a directory may have several of these and no other files; each name contains their number
_FILES_OF_OTHERS = (".pt", ".pth", ".bin", ".ckpt", _SHARDS, ".parquet", ".arrow", ".feather", ".npy", ".npz")
_LOOSE_FILES = {  # endings of files that are not checkpoints by themselves -> what wrote them, and how to read them
    (".distcp",): "torch.distributed.checkpoint writes these, and .metadata last, which is missing here: that save did "
    "not end, or was copied in part; with .metadata, `recckpt ls` and `import` read them",
    (".parquet", ".arrow", ".feather", ".npy", ".npz"): "`recckpt import` makes tables from the files of a directory, "
    "and `recckpt ls {}` reads one",
    (".pt", ".pth", ".bin", ".ckpt"): "`recckpt ls {}` reads a file of torch.save, `recckpt import` takes one",
}
_AS_IT_IS = "`recckpt ls`, `get`, `verify` and `sql`, and recckpt.convert.SourceReader, read it unconverted"
_MAX_BYTES = 1 << 20
_MISSING, _STALE = "missing", "stale"  # after a crash in a save, or during a save
_TIMELINE_BYTES = 1 << 20  # beyond this, the oldest lines are dropped
ENDED = "ended"  # the kind of the line of a run that ended successfully


def index_problem(storage: Storage, ckpt_ids: Sequence[str]) -> str:
    expected = layout.encode_index(ckpt_ids)
    try:
        content = storage.read(layout.INDEX_FILE, 2 * len(expected) + layout.MAX_ID_BYTES)
    except FileNotFoundError:
        return _MISSING if expected else ""
    except NotPlainError as error:
        return error.found.removeprefix("unsafe path: ")
    except OSError as error:
        return f"not readable ({error})"
    if content == expected:
        return ""
    if not content.endswith(b"\n"):
        return "torn" if content else "empty"
    committed = expected.splitlines()
    strange = [line for line in content.splitlines() if line not in committed]
    return f"naming {strange[0][:99].decode(errors='replace')!r}, which is not committed" if strange else _STALE


def warn_of_index(
    storage: Storage, ckpt_ids: Sequence[str], look_again: Callable[[], Sequence[str]] | None = None
) -> None:
    """Log problems of the index file. No error is raised, because nothing depends on the file.

    ``look_again`` lists the ids again if another process may be saving, because an unfinished update is not a
    problem.
    """
    problem = index_problem(storage, ckpt_ids)
    if problem not in ("", _MISSING, _STALE) and look_again:
        with suppress(OSError):
            problem = index_problem(storage, look_again())
    if problem.startswith("naming") and is_of_recis(storage):
        warn_of_recis(storage)
    elif problem and problem != _MISSING and not (look_again and problem == _STALE):
        log.warning(
            "%s/%s is %s; only the manifests count; the next save, or `recckpt repair`, rewrites it",
            storage.url,
            layout.INDEX_FILE,
            problem,
        )


def warn_of_recis(storage: Storage) -> None:
    log.warning("%s: %s; its file %r is left alone", storage.url, NOTE, layout.INDEX_FILE)


def is_of_recis(storage: Storage) -> bool:
    try:
        lines = storage.read(layout.INDEX_FILE, _MAX_BYTES).decode(errors="replace").split()
    except OSError:
        lines = []
    newest = [line for line in lines[-1:] if re.fullmatch(r"\w[\w.-]*", line, re.ASCII)]
    return any(all(_has(storage, layout.join(place, name)) for name in _FILES) for place in ("", *newest))


def why_nothing(storage: Storage) -> str:
    reason, others = storage.why_empty() or "found no committed checkpoint", of_others(storage)
    if others is not None:
        return f"{reason}; {others}: {_AS_IT_IS}, `recckpt import` makes a checkpoint of it"
    if storage.why_empty():
        return reason
    if _has(storage, layout.MANIFEST):
        return f"{reason} in it: this is itself the directory of a checkpoint"
    if _has(storage, layout.INTENT):
        return f"{reason}: this is the directory of a save that has not ended, or of a partly removed checkpoint"
    if is_of_recis(storage):
        return f"{reason}; {NOTE}; {_AS_IT_IS}"
    names = [] if storage.list_dirs() else sorted(storage.list_files(""))
    kinds = ((name, what) for endings, what in _LOOSE_FILES.items() for name in names if name.endswith(endings))
    name, what = next(kinds, ("", ""))
    return f"{reason}; there is {name}: {what.format(storage.url_of(name))}" if name else reason


def of_others(storage: Storage) -> str | None:
    if storage.url.endswith(_FILES_OF_OTHERS) and _has(*open_parent(storage.url)):
        return "this is a file of another program"
    program = next((program for name, program in _OF_OTHERS.items() if _has(storage, name)), None)
    if program is None and not (storage.why_empty() or storage.list_dirs() or is_of_recis(storage)):
        program = "Hugging Face" if any(name.endswith(_SHARDS) for name in storage.list_files("")) else None
    return None if program is None else f"this is a checkpoint of {program}"


def _has(storage: Storage, name: str) -> bool:
    try:
        return storage.size(name) >= 0
    except OSError:
        return False


def append_timeline(storage: Storage, lines: Sequence[str]) -> None:
    """Add lines that the timeline does not have yet. Only the owner of the output dir may call this.

    After an OSError the lines may still have been added.
    """
    try:
        before = storage.read(layout.TIMELINE, 2 * _TIMELINE_BYTES)
    except FileNotFoundError:
        before = b""
    there = before[-_TIMELINE_BYTES:].splitlines(keepends=True)
    kept = there[1:] if len(before) > _TIMELINE_BYTES else there
    new = [line for line in map(str.encode, lines) if line not in there]
    storage.replace(layout.TIMELINE, b"".join([*kept, *new]))


def read_timeline(storage: Storage) -> list[dict[str, Any]]:
    """Return the saves in the timeline, oldest first; [] without a timeline. Skips lines that are not JSON objects."""
    try:
        lines = storage.read(layout.TIMELINE, 2 * _TIMELINE_BYTES).splitlines()
    except ABSENT:
        return []
    values = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]
