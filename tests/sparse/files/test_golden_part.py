"""A part that was written once and for all: the format stays what it is, whoever writes it and whoever reads it.

``golden_part.arrow``, which :func:`write` wrote, changes only when docs/format.md does.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from recckpt.format.catalog import Batch, Part
from recckpt.sparse.files.arrow_format import ID, column_values
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import ColumnBytes, PartWriter, RowBatch
from recckpt.storage import Storage, open_storage
from recckpt.types import SlotSpec

GOLDEN = Path(__file__).with_name("golden_part.arrow")
SLOTS = (
    SlotSpec("embedding", "float32", (2,)),
    SlotSpec("sparse_half", "float16", (3,)),
    SlotSpec("sparse_matrix", "bfloat16", (2, 2)),
    SlotSpec("sparse_step", "int64", ()),
)
ITEM, USER = [5, -7, 2**63 - 1], [-(2**63), 0]
CHECKSUMS = {
    "item": {
        "table": 0x06DF73813892FDE7,
        "id": 0x46A7805EF6D3C18B,
        "embedding": 0xDCD21C42CCAA9D2A,
        "sparse_half": 0x773C9BE6C2DC62B3,
        "sparse_matrix": 0x7EC78A15C122DA16,
        "sparse_step": 0x7FB6F0C094F81C5D,
    },
    "ü/user": {
        "table": 0x71940A272A674686,
        "id": 0x597D8D53443C6129,
        "embedding": 0x0AEE2086D517557E,
        "sparse_half": 0xC28D8A54E5CC669A,
        "sparse_matrix": 0x9E15B0DFDFA76B3C,
        "sparse_step": 0x0CFBAEA74A8CC0E5,
    },
}
IDS = {"item": (-7, 2**63 - 1), "ü/user": (-(2**63), 0)}
FRAME = 0x4FE694233D66DC7D


def batch(table: str, ids: list[int]) -> RowBatch:
    """Return rows with slots whose values count up from the position of the row."""
    n_rows = len(ids)
    half, matrix = np.arange(n_rows * 3, dtype=np.float16), np.arange(n_rows * 4, dtype=np.float32)
    values = [
        np.arange(n_rows * 2, dtype=np.float32),
        half,
        (matrix.view(np.uint32) >> 16).astype(np.uint16),
        np.arange(n_rows, dtype=np.int64),
    ]
    slots = [ColumnBytes(spec, n_rows, [value.view(np.uint8)]) for spec, value in zip(SLOTS, values, strict=True)]
    return RowBatch(table, np.array(ids, np.int64), slots)


def write(storage: Storage, file: str) -> Part:
    with storage.create(file) as sink:
        writer = PartWriter(sink, file, ["item", "ü/user"], SLOTS)
        writer.write(batch("item", ITEM))
        writer.write(batch("ü/user", USER))
        return writer.finish()


def test_the_golden_part_is_read_by_its_checksums():
    batches = (
        Batch("item", 3, (1, 9), IDS["item"], CHECKSUMS["item"]),
        Batch("ü/user", 2, (3, 4), IDS["ü/user"], CHECKSUMS["ü/user"]),
    )
    part = Part(GOLDEN.name, GOLDEN.stat().st_size, FRAME, ("item", "ü/user"), batches)
    reader = PartReader(open_storage(str(GOLDEN.parent.parent)), GOLDEN.parent.name, part, SLOTS)
    for number, ids in enumerate((ITEM, USER)):
        found, n_rows = reader.read(number), len(ids)
        assert found[ID].to_pylist() == ids
        values = {spec.name: column_values(found[spec.name], spec) for spec in SLOTS}
        assert values["embedding"].tolist() == np.arange(n_rows * 2).reshape(n_rows, 2).tolist()
        assert values["sparse_half"].tolist() == np.arange(n_rows * 3).reshape(n_rows, 3).tolist()
        assert values["sparse_matrix"].tolist() == np.arange(n_rows * 4).reshape(n_rows, 2, 2).tolist()
        assert values["sparse_step"].tolist() == list(range(n_rows))
    reader.check_frame()


def test_what_is_written_today_is_the_golden_part_but_for_what_arrow_chooses(tmp_path):
    part = write(open_storage(str(tmp_path)), "part.arrow")
    assert {batch.table: batch.xxh3 for batch in part.batches} == CHECKSUMS
    assert {batch.table: batch.ids for batch in part.batches} == IDS
    mine, golden = (pa.ipc.open_file(str(path)) for path in (tmp_path / "part.arrow", GOLDEN))
    assert mine.schema.equals(golden.schema, check_metadata=True)
    assert mine.read_all().equals(golden.read_all(), check_metadata=True)
