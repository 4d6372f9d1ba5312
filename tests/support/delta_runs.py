"""Output dirs on the disk with a chain: a full checkpoint by recckpt, and deltas by docs/format.md."""

from pathlib import Path

from recckpt.storage import Storage, open_storage
from support.forge import filled, save_tables
from support.spec_reader import Rows, counting, read
from support.spec_writer import write_delta


def run_with_chain(path: Path) -> Storage:
    """Return an output dir of two shards in which ``ckpt_3`` stands on ``ckpt_2``, and that on ``ckpt_1``."""
    storage = open_storage(str(path))
    storage.prepare()
    save_tables(storage, [filled("item", range(100))], [filled("item", range(100, 150))], ckpt_id="ckpt_1")
    [base] = counting(path)
    below = write_delta(base, "ckpt_2", 149, [({5: [1, 2], 500: [3, 4]}, [7]), ({}, [8])])
    write_delta(below, "ckpt_3", 150, [({}, [9]), ({7: [1, 2], 9: [5, 6]}, [])])  # 9 has moved between the shards
    return storage


def rows_of(storage: Storage, ckpt_id: str) -> Rows:
    """Return what docs/format.md says that a checkpoint holds."""
    return read(Path(storage.url), ckpt_id, "item")
