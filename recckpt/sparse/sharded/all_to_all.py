"""Messages between the ranks of a sharded table, and agreement on what all ranks do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import torch
import xxhash
from torch import Tensor

from recckpt.errors import LookupFailedError
from recckpt.parallel.ranks import rank_and_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ORDER = "all ranks must look up the same tables in the same order and mode, with losses that depend on all of them"


class Exchange(Protocol):
    """Ranks that send rows to each other; all ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to every rank, and return the rows that all ranks sent to this one, on the same device. Collective.

        The first ``sent[0]`` rows go to rank 0, and so on; the first ``received[0]`` returned rows come from rank 0.
        """


class SoloExchange:
    rank, size = 0, 1

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return rows


@dataclass(frozen=True)
class ProcessExchange:
    """The ranks of a process group. Rows travel as bytes: through the CPU with gloo, between devices with nccl."""

    group: ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        import torch.distributed as dist

        flat = rows.detach().reshape(len(rows), math.prod(rows.shape[1:]))
        carrier = carrier_of(dist.get_backend_config(self.group), rows.device)
        message = flat.to(carrier).contiguous().view(torch.uint8)
        answer = message.new_empty((sum(received), message.shape[1]))
        dist.all_to_all_single(answer, message, list(received), list(sent), group=self.group)
        return answer.view(rows.dtype).view(len(answer), *rows.shape[1:]).to(rows.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessExchange:
        return self  # a copied model communicates with the same ranks


def carrier_of(backends: str, device: torch.device) -> torch.device:
    """Return the device to send from: ``device``, or one with another backend than gloo ("cpu:gloo,cuda:nccl")."""
    pairs = (pair.split(":") for pair in backends.split(","))
    kinds = [kind for kind, backend in pairs if backend != "gloo" or kind == "cpu"]
    return device if device.type in kinds else torch.device("cpu" if "cpu" in kinds else kinds[0])


def exchange_of(group: ProcessGroup | Exchange | None) -> Exchange:
    """Return an exchange between the ranks of a group; None for the default group, or for a single rank without one.

    Raises:
        ValueError: this is one of several processes and has no process group, or does not belong to ``group``.
    """
    import torch.distributed as dist

    if group is None:
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        elif (size := rank_and_size()[1]) > 1:
            raise ValueError(
                f"found one of {size} processes (WORLD_SIZE) and no process group: call "
                "torch.distributed.init_process_group before making sharded tables"
            )
        else:
            return SoloExchange()
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return ProcessExchange(group) if group.size() > 1 else SoloExchange()
    if hasattr(group, "all_to_all"):
        return cast("Exchange", group)
    raise ValueError(f"found group={group!r}, expected a process group that this process belongs to")


def agree(exchange: Exchange, what: str, lengths: Sequence[int], problem: Exception | None) -> list[int]:
    """Send each rank the number of rows that will follow, and return how many will come from each rank. Collective.

    All ranks pass the same ``what``; a rank that cannot take part passes its ``problem``.

    Raises:
        LookupFailedError: on all ranks, if a rank cannot take part or passed another ``what``.
    """
    ones = [1] * exchange.size
    mark = xxhash.xxh3_64_intdigest(what.encode("utf-8")) >> 1
    header = torch.tensor([[problem is not None, mark, length] for length in lengths], dtype=torch.int64, device="cpu")
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
    """Raise the problem of the first rank that has one, on all ranks. Collective."""
    texts = _texts(exchange, "" if problem is None else f"{type(problem).__name__}: {problem}")
    rank = next(rank for rank, text in enumerate(texts) if text)
    raise LookupFailedError(what, rank, texts[rank], remedy) from (problem if rank == exchange.rank else None)


def _texts(exchange: Exchange, text: str) -> list[str]:
    ones = [1] * exchange.size
    data = text.encode("utf-8", "backslashreplace")
    own = torch.full((exchange.size, 1), len(data), device="cpu")
    lengths = exchange.all_to_all(own, ones, ones).flatten().tolist()
    message = torch.tensor(list(data * exchange.size), dtype=torch.uint8, device="cpu")
    received = bytes(exchange.all_to_all(message, [len(data)] * exchange.size, lengths).tolist())
    ends = [sum(lengths[: rank + 1]) for rank in range(exchange.size)]
    return [received[end - length : end].decode("utf-8") for end, length in zip(ends, lengths, strict=True)]


class SharedGradients(Tensor):
    """The gradients of this rank's rows: a plain tensor, but its norm and finiteness are those of all ranks' rows.

    Computing the norm or checking finiteness is collective. So all ranks clip by one factor and skip steps together, as
    they do for dense gradients, which DistributedDataParallel has made equal.
    """

    exchange: Exchange
    table: str

    def __new__(cls, grads: Tensor, exchange: Exchange, table: str) -> SharedGradients:
        self = grads.as_subclass(cls)
        self.exchange, self.table = exchange, table
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        finish = _COLLECTIVE.get(func)
        return result if finish is None else finish(result, *args, **(kwargs or {}))


def _norm(local: Tensor, grads: Tensor, ord: float = 2, *_: Any, **__: Any) -> Tensor:
    if not isinstance(grads, SharedGradients):
        return local
    norms = _from_all(grads.exchange, f"the norm of the gradients of {grads.table!r}", local)
    total: Tensor = torch.linalg.vector_norm(norms, ord)
    return total.to(local.dtype)


def _unscaled(result: None, grads: Sequence[Tensor], found_inf: Tensor, *_: Any) -> None:
    shared = {some.exchange: some.table for some in grads if isinstance(some, SharedGradients)}
    for exchange, table in shared.items():
        flags = _from_all(exchange, f"the check of the gradients of {table!r} and others", found_inf)
        found_inf.copy_(flags.max())


_COLLECTIVE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: lambda local, grads, ord=2, *_, **__: list(map(partial(_norm, ord=ord), local, grads)),
    torch._amp_foreach_non_finite_check_and_unscale_: _unscaled,
}


def _from_all(exchange: Exchange, what: str, value: Tensor) -> Tensor:
    """Return each rank's value, shape (ranks,), in float64. Collective; raises LookupFailedError as :func:`agree`."""
    ones = [1] * exchange.size
    agree(exchange, what, ones, None)
    return exchange.all_to_all(value.detach().double().expand(exchange.size, 1), ones, ones).flatten()
