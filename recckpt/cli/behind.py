"""What may have ids that were forgotten, as commands name it: mirrors, and hosts with near saves."""

from __future__ import annotations

from collections.abc import Iterable

from recckpt.cli.near import may_have_forgotten
from recckpt.output_dir.known_mirrors import KnownMirror
from recckpt.output_dir.near_hosts import NearHost
from recckpt.text import escaped, one_line


def problems_behind(url: str, mirrors: Iterable[KnownMirror], hosts: Iterable[NearHost]) -> list[str]:
    """Return a line for each mirror and host that may have what was forgotten in an output dir."""
    lines = [f"{url}: {_of_mirror(mirror)}" for mirror in mirrors] + [f"{url}: {may_have_forgotten(h)}" for h in hosts]
    return list(dict.fromkeys(lines))  # one place may be the mirror of several


def lines_to_reach(mirrors: Iterable[KnownMirror], hosts: Iterable[NearHost]) -> list[str]:
    """Return a line for each mirror and host that is to forget, too, before anything is forgotten."""
    lines = [_to_reach(mirror) for mirror in mirrors]
    lines += [f"would leave near saves on {escaped(host.shown)} to `recckpt near clear` there" for host in hosts]
    return list(dict.fromkeys(lines))


def urls_of(mirrors: Iterable[KnownMirror]) -> list[str]:
    """Return where mirrors are, each place once."""
    return list(dict.fromkeys(mirror.url for mirror in mirrors))


def _of_mirror(mirror: KnownMirror) -> str:
    if mirror.problem:
        place = one_line(mirror.url)
        return f"mirrors of {place} may have what was forgotten, and cannot be listed: {one_line(mirror.problem)}"
    return f"the mirror {_place(mirror)} may have what was forgotten until its next pass: {_pass(mirror)}"


def _to_reach(mirror: KnownMirror) -> str:
    if mirror.problem:
        return f"would not reach mirrors of {one_line(mirror.url)}, which cannot be listed: {one_line(mirror.problem)}"
    if mirror.is_here:
        return f"would make a pass over the mirror {one_line(mirror.url)}"
    return f"would leave the mirror {_place(mirror)} to its next pass: {_pass(mirror)}"


def _place(mirror: KnownMirror) -> str:
    return one_line(mirror.url) if mirror.is_here else f"{one_line(mirror.url)} on {one_line(mirror.host)}"


def _pass(mirror: KnownMirror) -> str:
    return f"`recckpt mirror {one_line(mirror.run_url)} {one_line(mirror.url)}`{'' if mirror.is_here else ' there'}"
