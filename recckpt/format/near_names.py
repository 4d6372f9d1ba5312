"""The names in the near dir of a host, and of its note in an output dir. Part of the format."""

from __future__ import annotations

import re

from recckpt.format.layout import OWN_DIR

NEAR_NOTES = f"{OWN_DIR}/near"
NEAR_ROOT = "recckpt-near"
NEAR_HOST = "host"
NEAR_URL = "output_dir"
NEAR_JSON = "near.json"
_PLACE = re.compile(r"[0-9a-f]{16}", re.ASCII)
_HOST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NEAR = re.compile(r"([1-9]\d{0,17})\.([0-9a-f]{32})[./]([1-9]\d{0,17})", re.ASCII)


def is_place(name: str) -> bool:
    """Say whether a directory is named for an output dir, by its checksum."""
    return _PLACE.fullmatch(name) is not None


def is_host(text: str) -> bool:
    """Say whether a text is the id of a host."""
    return _HOST.fullmatch(text) is not None


def host_note(host: str) -> str:
    """Return the path of the note of a host in an output dir."""
    return f"{NEAR_NOTES}/{host}.json"


def host_of_note(path: str) -> str:
    """Return the host that a note is of, by its path."""
    return path.rpartition("/")[2].removesuffix(".json")


def near_name(epoch: int, nonce: str, cut: int) -> str:
    """Return the name of a near save, which its files repeat in place of a save id."""
    return f"{epoch}.{nonce}.{cut}"


def near_dir(name: str) -> str:
    """Return the directory of the near save of a name."""
    return "/".join(name.rsplit(".", 1))


def parse_near(name: str) -> tuple[int, str, int] | None:
    """Return epoch, nonce and cut in the name or the directory of a near save, None for any other name."""
    match = _NEAR.fullmatch(name)
    return (int(match[1]), match[2], int(match[3])) if match else None
