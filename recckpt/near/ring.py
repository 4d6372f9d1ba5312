"""Which hosts copy the files of which others, and by which ranks: hosts are a ring, in order of their ids. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def copies_of(hosts: Sequence[str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return of each host the ``copies`` hosts that follow it, all others where there are fewer; {} without copies.

    Args:
        hosts: the host of each rank.
        copies: how many other hosts are to have the files of a host.
    """
    ring = sorted(set(hosts))
    n_copies = min(copies, len(ring) - 1)
    if not n_copies:
        return {}
    return {host: tuple((ring * 2)[at + 1 : at + 1 + n_copies]) for at, host in enumerate(ring)}


def receivers(hosts: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """Return of each rank the ranks that take its files, one on each host that is to have a copy.

    The ranks of a host share that by their order: the second takes the files of the second of the other host.

    Args:
        hosts: the host of each rank.
        copies: as for :func:`copies_of`.
    """
    targets = copies_of(hosts, copies)
    ranks_on = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in set(hosts)}
    places = [ranks_on[host].index(rank) for rank, host in enumerate(hosts)]
    return [
        tuple(ranks_on[target][place % len(ranks_on[target])] for target in targets.get(host, ()))
        for host, place in zip(hosts, places, strict=True)
    ]


def writers(hosts: Sequence[str], copies: int) -> list[frozenset[int]]:
    """Return of each rank those whose files lie on its host: of its own ranks, and copies.

    Args:
        hosts: the host of each rank.
        copies: as for :func:`copies_of`.
    """
    targets = copies_of(hosts, copies)
    return [
        frozenset(rank for rank, host in enumerate(hosts) if here in (host, *targets.get(host, ()))) for here in hosts
    ]
