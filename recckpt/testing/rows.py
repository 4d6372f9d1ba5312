"""Helpers of the contracts: rows of tables and checkpoints as bytes, to compare them; and a way to delay a writer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recckpt.checkpoint.chain import OpenChain
from recckpt.output_dir.at_path import locate_path
from recckpt.save.job import SparseSaver
from recckpt.types import EMBEDDING, SavableTable

Rows = dict[int, dict[str, bytes]]  # id -> slot -> the bytes of its value


class ModelOf(nn.Module):
    """A model whose state dict has only these tables."""

    def __init__(self, *tables: SavableTable) -> None:
        super().__init__()
        self._own_tables = tables

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the tables."""
        return {f"table.{number}": table for number, table in enumerate(self._own_tables)}


def rows_of(table: SavableTable) -> Rows:
    return rows_by_id(table.ids().tolist(), {EMBEDDING: table.embeddings(), **table.slots})


def rows_by_id(ids: Sequence[int], slots: Mapping[str, Tensor]) -> Rows:
    """Return id -> row; row n of each slot belongs to the n-th id. Ids are distinct."""
    columns = {name: bytes_of(values) for name, values in slots.items()}
    sizes = {name: len(column) for name, column in columns.items()}
    assert {*sizes.values()} == {len(ids)}, f"expected a row for each of {len(ids)} ids, found {sizes}"
    return {id_: {name: column[row] for name, column in columns.items()} for row, id_ in enumerate(ids)}


def bytes_of(values: Tensor) -> list[bytes]:
    there = values.detach().cpu().contiguous()
    matrix = there[:, None] if there.dim() == 1 else there.flatten(1)
    return [row.tobytes() for row in matrix.view(torch.uint8).numpy()]


def saved_rows(output_dir: Path, ckpt_id: str, table: str, slots: Sequence[str]) -> Rows:
    """Return all rows of a table in a checkpoint, read both in sequence and by id."""
    with closing(OpenChain.open(*locate_path(str(output_dir / ckpt_id)))) as chain:
        ids = [id_ for batch in chain.table(table, []).all_rows() for id_ in batch.column("id").to_pylist()]
        rows: Rows = {id_: {} for id_ in ids}
        kinds = {spec.name: spec for spec in chain.manifest.named_table(table).slots}
        assert kinds.keys() == {*slots}, f"expected the slots {sorted(slots)}, found {sorted(kinds)} in the checkpoint"
        for slot in slots:
            values, is_there = chain.find(table, np.asarray(ids, np.int64), kinds[slot], 0)
            assert is_there.all(), f"{table}@{slot}: a reader finds no row for the ids {np.asarray(ids)[~is_there]}"
            own = torch.from_numpy(values).to(getattr(torch, kinds[slot].dtype))  # readers return bfloat16 as float32
            for id_, value in zip(ids, bytes_of(own), strict=True):
                rows[id_][slot] = value
    assert len(rows) == len(ids), f"table {table!r}: an id is in the checkpoint twice"
    return rows


def some_values(like: Tensor, n_rows: int, seed: int) -> Tensor:
    """Return random rows with the dtype and row shape of ``like``, with infinities, -0.0 and subnormals."""
    random = torch.Generator().manual_seed(seed)
    shape = (n_rows, *like.shape[1:])
    n_bytes = like.element_size() * like[:0].new_empty(shape, device="meta").numel()
    bits = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=random)
    values = bits.view(like.dtype).reshape(shape)
    if values.is_floating_point():
        values = values.nan_to_num(nan=1.5, posinf=torch.inf, neginf=-torch.inf)
        special = torch.tensor([-0.0, torch.inf, -torch.inf, torch.finfo(like.dtype).smallest_normal / 4])
        values.view(-1)[: len(special)] = special.to(like.dtype)[: values.numel()]
    return values


@contextmanager
def writer_held() -> Iterator[Callable[[], None]]:
    """Delay saves before they write rows, until the yielded function is called or the block ends."""
    opened, write = threading.Event(), SparseSaver.save

    def waiting(*args: Any, **kwargs: Any) -> Any:
        assert opened.wait(60), "the test did not let the writer continue within 60 s"
        return write(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseSaver, "save", waiting)
        try:
            yield opened.set
        finally:
            opened.set()
