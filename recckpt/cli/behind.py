"""What may have ids that were forgotten, as commands name it: mirrors, and hosts with near saves."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from recckpt.cli.near import may_have_forgotten
from recckpt.output_dir.known_mirrors import KnownMirror
from recckpt.output_dir.near_hosts import NearHost
from recckpt.text import one_line


def problems_behind(url: str, mirrors: Iterable[KnownMirror], hosts: Iterable[NearHost]) -> list[str]:
    """Return a line for each mirror and host that may have what was forgotten in an output dir."""
    lines = [f"{url}: {_of_mirror(mirror)}" for mirror in mirrors] + [f"{url}: {may_have_forgotten(h)}" for h in hosts]
    return list(dict.fromkeys(lines))  # one place may be the mirror of several


def urls_of(mirrors: Iterable[KnownMirror]) -> list[str]:
    """Return where mirrors are, each place once."""
    return list(dict.fromkeys(mirror.url for mirror in mirrors))


def _of_mirror(mirror: KnownMirror) -> str:
    place, host = one_line(mirror.url), mirror.host
    if mirror.problem:
        return f"mirrors of {place} may have what was forgotten, and cannot be listed: {one_line(mirror.problem)}"
    where = f" on {one_line(host)}" if host not in ("", socket.gethostname()) else ""
    command = f"`recckpt mirror {one_line(mirror.run_url)} {place}`{where}"
    return f"the mirror {place}{where} may have what was forgotten until its next pass: {command}"
