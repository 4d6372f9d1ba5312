"""The names of files that are still being written; :mod:`recckpt.format.layout` has those of all others."""

from __future__ import annotations

import re
import secrets

_DRAFT = ".tmp"
_TEMPORARY = re.compile(
    r"(checkpoint|(timeline|forgotten)\.jsonl|\.recckpt/((owner|pins|forget|mirrors)/[^/]+\.json|forget/key))\.[0-9a-f]{16}\.tmp"
    r"|\.probe-[0-9a-f]{16}(\.tmp)?(\.[0-9a-f]{16}\.tmp)?"
)


def temporary(name: str) -> str:
    """Return a fresh name beside a file, for what is being written and takes its place."""
    return f"{name}.{secrets.token_hex(8)}{_DRAFT}"


def probe() -> str:
    """Return a fresh name for a file that shows what a storage can do."""
    return f".probe-{secrets.token_hex(8)}{_DRAFT}"


def is_draft(name: str, of: str | None = None) -> bool:
    """Say whether a name is one of :func:`temporary`: beside any file, or beside the file ``of``."""
    return name.endswith(_DRAFT) and (of is None or name.startswith(f"{of}."))


def is_temporary(name: str) -> bool:
    """Say whether a name in the output dir is that of a file that is still being written."""
    return _TEMPORARY.fullmatch(name) is not None
