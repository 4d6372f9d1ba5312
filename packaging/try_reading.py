"""Read, query, convert and rewrite a run with an installed recckpt, in an environment that has no torch.

Run by packaging/matrix.py in the working directory in which the README's training left ``runs/clicks``. It imports
nothing but recckpt and what that brings along: the environment has nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

import recckpt
from recckpt.convert import export_checkpoint, import_checkpoint
from recckpt.errors import CheckpointNotFoundError

RUN, TABLE = "runs/clicks", "item"
COMES_BACK = ("parquet", "npy", "dynamicemb")  # formats that are written and read without torch
GOES_OUT = ("safetensors", "embedding")  # and those of which only the way out does without it
COMMANDS = (  # of each, what comes behind `recckpt`
    *(("ls", RUN), ("show", RUN), ("head", RUN, TABLE), ("get", RUN, TABLE, "17", "42"), ("verify", RUN)),
    *(("history", RUN, TABLE, "17"), ("report", RUN, "--json"), ("sql", RUN, "select count(*) from item")),
    *(("mirror", RUN, "runs/mirrored"), ("verify", "runs/mirrored"), ("compact", RUN, "--out", "runs/whole")),
    *(("verify", "runs/whole"), ("forget", "runs/from_npy", "--table", TABLE, "--ids", "ids.txt")),
)


def rows_of(run: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the vectors of ids in the one table of a run, all of which it has."""
    reader = recckpt.CheckpointReader(run)
    vectors, found = reader.lookup(TABLE, ids)
    assert found.all(), f"{run}: {(~found).sum()} of {len(ids)} ids are missing"
    return np.asarray(vectors, np.float32)


def try_reader() -> npt.NDArray[np.int64]:
    """Read rows, a tensor and what is listed; return the ids of the table."""
    newest = recckpt.list_checkpoints(RUN)[-1]
    assert recckpt.find_checkpoint(RUN, "latest") == newest
    with recckpt.CheckpointReader(RUN) as reader:
        assert reader.read_tensor("dense.weight").shape == tuple(reader.tensor_shape("dense.weight"))
        ids: npt.NDArray[np.int64] = recckpt.inspect.dataset(RUN, TABLE).to_table(columns=["id"])["id"].to_numpy()
        assert sum(batch.num_rows for batch in reader.table(TABLE)) == len(ids) > 0
    assert recckpt.diff(f"{RUN}/latest", f"{RUN}/latest").is_equal
    assert recckpt.report(RUN).is_healthy
    try:
        recckpt.CheckpointReader("runs/nowhere")
    except CheckpointNotFoundError:
        return ids
    raise AssertionError("a run that is not there was opened")


def try_queries(n_rows: int) -> None:
    """Count the rows by duckdb and by polars."""
    with recckpt.inspect.connect(RUN) as connection:
        assert connection.sql(f"select count(*) from {TABLE}").fetchall() == [(n_rows,)]
    assert recckpt.inspect.scan(RUN, TABLE).collect().height == n_rows


def try_formats(ids: npt.NDArray[np.int64]) -> None:
    """Export to each format and import what came of it, to the same bits."""
    expected = rows_of(RUN, ids)
    for name in (*COMES_BACK, *GOES_OUT):
        export_checkpoint(RUN, f"exported/{name}", to=name, tables=[TABLE])
        assert Path(f"exported/{name}").exists()
    for name in COMES_BACK:
        import_checkpoint(f"exported/{name}", f"runs/from_{name}", format=name)
        assert rows_of(f"runs/from_{name}", ids).tobytes() == expected.tobytes(), f"{name}: other rows came back"


def try_commands() -> None:
    """Run each command as a shell does."""
    program = str(Path(sys.executable).with_name("recckpt"))
    for arguments in COMMANDS:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"recckpt {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"


def main() -> None:
    """Try all of it, and show with what."""
    assert find_spec("torch") is None, "this environment has torch"
    home = Path(recckpt.__file__).parent
    assert home.is_relative_to(sys.prefix), f"recckpt comes from {home}, expected the wheel that was installed"
    for left in (Path("exported"), *Path("runs").glob("from_*"), Path("runs/mirrored"), Path("runs/whole")):
        shutil.rmtree(left, ignore_errors=True)
    Path("exported").mkdir()
    Path("ids.txt").write_text("17\n", encoding="utf-8")
    ids = try_reader()
    try_queries(len(ids))
    try_formats(ids)
    try_commands()
    print(
        f"recckpt {recckpt.__version__}: {len(ids)} rows read, queried, converted {len(COMES_BACK)} ways, without torch"
    )


if __name__ == "__main__":
    main()
