"""Before rows are sent, the ranks make sure that all of them are about the same thing, and able to do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import xxhash

from recckpt.errors import LookupFailedError
from recckpt.sparse.sharded.all_to_all import Exchange

_ORDER = "all ranks must look up the same tables in the same order and mode, with losses that depend on all of them"


def agree(exchange: Exchange, what: str, lengths: Sequence[int], problem: Exception | None) -> list[int]:
    """Tell every rank how much will come, and return how much comes from each. Collective.

    Args:
        exchange: the ranks.
        what: what they are about, in words that are the same on all ranks.
        lengths: of the messages that this rank will send.
        problem: why this rank cannot take part.

    Raises:
        LookupFailedError: a rank cannot take part, or is about something else; all ranks raise it.
    """
    ones = [1] * exchange.size
    mark = xxhash.xxh3_64_intdigest(what.encode("utf-8")) >> 1
    header = torch.tensor([[problem is not None, mark, length] for length in lengths], dtype=torch.int64)
    failed, marks, coming = exchange.all_to_all(header, ones, ones).T.tolist()
    if any(failed):
        raise_alike(exchange, what, problem, "no table has changed: mend the cause on that rank")
    if marks != [mark] * exchange.size:
        calls = _texts(exchange, what)
        rank = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise LookupFailedError(calls[0], rank, f"it is at {calls[rank]}", _ORDER)
    lengths_coming: list[int] = coming
    return lengths_coming


def raise_alike(exchange: Exchange, what: str, problem: Exception | None, remedy: str) -> NoReturn:
    """Raise the problem of the first rank that has one, on all of them. Collective."""
    texts = _texts(exchange, "" if problem is None else f"{type(problem).__name__}: {problem}")
    rank = next(rank for rank, text in enumerate(texts) if text)
    raise LookupFailedError(what, rank, texts[rank], remedy) from (problem if rank == exchange.rank else None)


def _texts(exchange: Exchange, text: str) -> list[str]:
    """Return the text of every rank. Collective."""
    ones = [1] * exchange.size
    data = text.encode("utf-8", "backslashreplace")
    lengths = exchange.all_to_all(torch.full((exchange.size, 1), len(data)), ones, ones).flatten().tolist()
    message = torch.tensor(list(data * exchange.size), dtype=torch.uint8)
    received = bytes(exchange.all_to_all(message, [len(data)] * exchange.size, lengths).tolist())
    ends = [sum(lengths[: rank + 1]) for rank in range(exchange.size)]
    return [received[end - length : end].decode("utf-8") for end, length in zip(ends, lengths, strict=True)]
