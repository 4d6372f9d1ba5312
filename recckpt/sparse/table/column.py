"""A column of a table. Rows are stored in blocks, so growing moves no row and needs no second copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.sparse.table.kernels import gather_rows, lay_over, scatter_rows
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
BLOCK_BYTES = 32 << 20  # large enough for huge pages, small compared with a table that grows step by step
_FIRST_ROWS = 64
_LINE_BYTES, _HUGE_BYTES = 64, 2 << 20  # a cache line, a huge page
_ONE_BLOCK = 62  # shift of a column with a single block, however many rows it has


def aligned_bytes(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return uninitialized memory, aligned so that a row of 64 bytes fits one cache line and huge pages are not split.

    From 4 MiB on numpy requests huge pages, which reduces TLB misses on random rows. The extra bytes for the alignment
    are never touched, so they take no physical memory.
    """
    align = _HUGE_BYTES if n_bytes >= 2 * _HUGE_BYTES else _LINE_BYTES
    memory = np.empty(n_bytes + align, np.uint8)
    begin = -memory.__array_interface__["data"][0] % align
    return memory[begin : begin + n_bytes]


class ColumnMemory(NamedTuple):
    """The blocks of a column and their addresses. A reader with a reference to this keeps the memory alive."""

    tensors: list[Tensor]
    addresses: Int64s

    @classmethod
    def of(cls, tensors: list[Tensor]) -> ColumnMemory:
        return cls(tensors, np.array([tensor.data_ptr() for tensor in tensors], np.int64))

    def check_unmoved(self) -> None:
        """Raise LiveTableError if another owner has freed the memory of a tensor, as stashing weights does."""
        if any(tensor.data_ptr() != address for tensor, address in zip(self.tensors, self.addresses, strict=True)):
            raise LiveTableError(
                "the memory of its rows was freed while they were being saved, as happens when weights or states of an "
                "optimizer are stashed: call saver.settle() before that, or save without save_async"
            )


_NO_MEMORY = ColumnMemory.of([])


class Column:
    """The rows of one slot, addressed as (row >> shift, row & mask).

    The first block doubles by copying until it has full size; after that no block moves. ``memory`` is replaced, never
    changed in place, so readers may continue with an old one. New rows are uninitialized.
    """

    def __init__(self, spec: SlotSpec, device: torch.device) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.device = device
        self.shift = max((BLOCK_BYTES // max(spec.row_bytes, 1)).bit_length() - 1, 6)
        self.memory = _NO_MEMORY
        self._written: torch.cuda.Event | None = None  # recorded after the writes of the thread that made this column

    @classmethod
    def over(cls, spec: SlotSpec, values: Tensor) -> Column:
        """Wrap a tensor of another owner, without a copy if the tensor is contiguous."""
        column = cls(spec, values.device)
        column.shift = _ONE_BLOCK
        column.memory = ColumnMemory.of([values.detach().resolve_neg().contiguous()])
        return column

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def blocks(self) -> list[Tensor]:
        return self.memory.tensors

    @property
    def capacity(self) -> int:
        return sum(len(block) for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return self.capacity * self.spec.row_bytes

    def reserve(self, n_rows: int) -> None:
        if n_rows <= sum(map(len, self.memory.tensors)):
            return
        full = 1 << self.shift
        blocks = list(self.memory.tensors)
        if not blocks or len(blocks[0]) < full:
            first = self._new_block(min(full, max(_FIRST_ROWS, 1 << (n_rows - 1).bit_length())))
            if blocks:
                first[: len(blocks[0])] = blocks[0]
            blocks[:1] = [first]
        while sum(map(len, blocks)) < n_rows:
            blocks.append(self._new_block(full))
        self.memory = ColumnMemory.of(blocks)

    def gather(self, rows: Int64s) -> Tensor:
        memory = self.memory
        if not self.is_on_cpu:
            memory.check_unmoved()
            self.wait_for_writes()
            if len(memory.tensors) == 1:
                return memory.tensors[0].index_select(0, self._on_device(rows))
        out = torch.empty((len(rows), *self.spec.shape), dtype=self.dtype, device=self.device)
        if self.is_on_cpu:
            gather_rows(memory.addresses, self.shift, self.spec.row_bytes, rows, out.data_ptr())
        else:
            for block, at, inside in self._by_block(memory, rows):
                out[at] = block[inside]
        return out

    def wait_for_writes(self) -> None:
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)

    def gather_or(self, rows: Int64s, value: float) -> Tensor:
        absent = np.flatnonzero(rows < 0)
        if len(absent) == 0:
            return self.gather(rows)
        if len(absent) == len(rows):
            return torch.full((len(rows), *self.spec.shape), value, dtype=self.dtype, device=self.device)
        out = self.gather(np.maximum(rows, 0))
        return out.index_fill_(0, torch.from_numpy(absent).to(self.device), value)

    def gather_into(self, rows: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of ``rows`` to ``target``; on the CPU without the GIL and without extra memory.

        On CUDA, the copy is complete on return. Rows are copied aside before the kernels that change them are queued,
        so a caller who checks only after the return which rows were copied aside knows which bytes may be too new.
        """
        memory = self.memory
        if self.is_on_cpu:
            gather_rows(memory.addresses, self.shift, self.spec.row_bytes, rows, target.ctypes.data)
        else:
            values = self.gather(rows.astype(np.int64))
            torch.from_numpy(target).copy_(values.view(-1).view(torch.uint8))  # no temporary copy: fresh memory is slow
            memory.check_unmoved()

    def copy_rows(self, rows: Int64s, target: Column, begin: int) -> None:
        """Copy ``rows`` to a CPU column, from row ``begin`` on; the copy is complete on return."""
        memory, done = self.memory, 0
        for piece in target.pieces(begin, begin + len(rows)):
            some = rows[done : done + len(piece)]
            if self.is_on_cpu:
                gather_rows(memory.addresses, self.shift, self.spec.row_bytes, some, piece.data_ptr())
            else:
                piece.copy_(self.gather(some))
                memory.check_unmoved()
            done += len(piece)

    def lay_over(self, rows: Int64s, at: Int64s, target: npt.NDArray[np.uint8]) -> None:
        memory = self.memory
        lay_over(memory.addresses, self.shift, self.spec.row_bytes, rows, at, target.ctypes.data)

    def scatter(self, rows: Int64s, values: Tensor) -> None:
        values, memory = self.fitting(values), self.memory
        if self.is_on_cpu:
            scatter_rows(memory.addresses, self.shift, self.spec.row_bytes, rows, values.data_ptr())
        elif len(memory.tensors) == 1:
            memory.tensors[0].index_copy_(0, self._on_device(rows), values)
        else:
            for block, at, inside in self._by_block(memory, rows):
                block[inside] = values[at]

    def fitting(self, values: Tensor) -> Tensor:
        # resolve_neg: the memory of a lazily negated view, such as x.conj().imag, has the opposite sign.
        return values.detach().to(self.device, self.dtype).resolve_neg().contiguous()

    def write(self, begin: int, values: Tensor) -> None:
        done = 0
        for piece in self.pieces(begin, begin + len(values)):
            piece.copy_(values[done : done + len(piece)].detach())
            done += len(piece)

    def write_some(self, begin: int, values: Tensor, rows: Int64s) -> None:
        if values.dtype == self.dtype and values.device == self.device:
            Column.over(self.spec, values).copy_rows(rows, self, begin)
        else:
            self.write(begin, values[torch.from_numpy(rows).to(values.device)])

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield views of the rows [begin, end), one per block."""
        blocks = self.memory.tensors
        while begin < end:
            block, inside = begin >> self.shift, begin & ((1 << self.shift) - 1)
            n_rows = min(end - begin, (1 << self.shift) - inside)
            yield blocks[block][inside : inside + n_rows]
            begin += n_rows

    def to_tensor(self, n_rows: int) -> Tensor:
        pieces = list(self.pieces(0, n_rows))
        if not pieces:
            return torch.empty((0, *self.spec.shape), dtype=self.dtype, device=self.device)
        return torch.cat(pieces)

    def frozen(self) -> Column:
        """Return a column over the current blocks, which does not change when this column grows or is cleared."""
        twin = Column.__new__(Column)
        twin.spec, twin.dtype, twin.device, twin.shift = self.spec, self.dtype, self.device, self.shift
        twin.memory, twin._written = self.memory, self._written
        if self.device.type == "cuda":  # readers use other CUDA streams
            twin._written = torch.cuda.current_stream(self.device).record_event()
        return twin

    def fitted(self, n_rows: int) -> Column:
        """Return the first ``n_rows`` as a column without spare memory, which shares whole blocks with this column."""
        twin = Column(self.spec, self.device)
        twin.shift = self.shift
        if n_rows <= 1 << self.shift:
            twin.reserve(max(1, n_rows))
        if 0 < twin.capacity < len(self.blocks[0]):
            twin.blocks[0].copy_(self.blocks[0][: twin.capacity])
        else:
            twin.memory = ColumnMemory.of(self.blocks[: max(1, -(-n_rows >> self.shift))])
        return twin

    def shrink(self, n_blocks: int) -> None:
        self.memory = ColumnMemory.of(self.blocks[:n_blocks])

    def to(self, device: torch.device) -> Column:
        column = Column(self.spec, device)
        column.shift = self.shift
        with torch.inference_mode(False):
            column.memory = ColumnMemory.of([block.to(device, copy=True) for block in self.blocks])
        return column

    @torch.inference_mode(False)  # a block outlives an inference mode in which it happens to be made
    def _new_block(self, n_rows: int) -> Tensor:
        if self.device.type == "cpu":
            memory = torch.from_numpy(aligned_bytes(n_rows * self.spec.row_bytes))
            return memory.view(self.dtype).view(n_rows, *self.spec.shape)
        return torch.empty((n_rows, *self.spec.shape), dtype=self.dtype, device=self.device)

    def _by_block(self, memory: ColumnMemory, rows: Int64s) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        numbers = rows >> self.shift
        for number in np.flatnonzero(np.bincount(numbers)):
            at = np.flatnonzero(numbers == number)
            inside = rows[at] & ((1 << self.shift) - 1)
            yield memory.tensors[number], self._on_device(at), self._on_device(inside)

    def _on_device(self, rows: Int64s) -> Tensor:
        # copy(): torch.from_numpy takes no array that is read-only or has negative strides.
        return torch.from_numpy(rows.copy()).to(self.device)


class Addresses(NamedTuple):
    """Addresses of the blocks of several columns in one array; those of column i begin at index ``starts[i]``."""

    blocks: Int64s
    starts: Int64s
    shifts: Int64s
    row_bytes: Int64s

    @classmethod
    def of(cls, columns: Sequence[Column]) -> Addresses:
        blocks = [np.empty(0, np.int64), *(column.memory.addresses for column in columns)]
        return cls(
            np.concatenate(blocks),
            np.cumsum([len(some) for some in blocks]),
            np.array([column.shift for column in columns], np.int64),
            np.array([column.spec.row_bytes for column in columns], np.int64),
        )
