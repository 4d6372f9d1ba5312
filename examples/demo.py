"""Show that nothing is lost: train, die by SIGKILL between two saves, resume, and be equal to a run that never died.

    python examples/demo.py                                       # made-up clicks; this is ``make demo``
    python examples/demo.py --ratings ratings.csv.gz --steps 2000

Both runs save deltas: what has changed since the checkpoint before. Their last checkpoints are compared bit for bit:
the tables with their optimizer slots and the dense weights through ``CheckpointReader``, then the dense optimizer, the
position in the data and the random generator. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recckpt import CheckpointReader
from recckpt.cli import main as recckpt

TRAIN = Path(__file__).with_name("train_ctr.py")
Column = npt.NDArray[np.uint8]


def main() -> int:
    """Run the demo and return its exit code."""
    args = parse_args()
    straight, crashed = Path(args.output_dir, "straight"), Path(args.output_dir, "crashed")
    for directory in (straight, crashed):
        shutil.rmtree(directory, ignore_errors=True)
    save_before = args.steps // 2 // args.save_interval * args.save_interval
    crash_at = args.crash_at or save_before + args.save_interval // 2

    title(f"train {args.steps} steps without a break")
    train(args, straight)
    title(f"train again, and die at step {crash_at}, between two saves")
    train(args, crashed, crash_at=crash_at)
    title("run the same command again")
    train(args, crashed)

    title("what is there")
    recckpt(["ls", str(crashed)])
    print()
    recckpt(["show", str(crashed / f"ckpt_{args.steps}")])

    title("what the saves of the straight run cost")
    print_costs(straight)

    title(f"compare ckpt_{args.steps} of the two runs")
    differing = compare(straight / f"ckpt_{args.steps}", crashed / f"ckpt_{args.steps}")
    print(f"{len(differing)} differ, such as {differing[:8]}" if differing else "equal, every bit")
    return 1 if differing else 0


def train(args: argparse.Namespace, output_dir: Path, *, crash_at: int | None = None) -> None:
    """Run train_ctr.py in a process of its own, which must end as asked."""
    command = [sys.executable, str(TRAIN), "--output-dir", str(output_dir), "--steps", str(args.steps)]
    command += ["--save-interval", str(args.save_interval), "--batch-size", str(args.batch_size), "--deltas"]
    command += ["--ratings", args.ratings] if args.ratings else []
    command += ["--crash-at", str(crash_at)] if crash_at else []
    ended = subprocess.run(command, stderr=subprocess.STDOUT, check=False).returncode
    expected = -signal.SIGKILL if crash_at else 0
    if ended != expected:
        sys.exit(f"train_ctr.py ended with {ended}, expected {expected}")


def print_costs(output_dir: Path) -> None:
    """Print what each save wrote, as the timeline tells it."""
    for line in (output_dir / "timeline.jsonl").read_text().splitlines():
        save = json.loads(line)
        of_all = f"{save['n_upserts']:7,} of {save['n_rows']:7,} rows"
        print(f"{save['ckpt_id']}  {save['kind']:5}  {of_all}  {save['n_bytes'] / 1e6:6.2f} MB")


def compare(left: Path, right: Path) -> list[str]:
    """Print what was compared, and return the names of all that differs in any bit."""
    differing, readers = [], (CheckpointReader(str(left)), CheckpointReader(str(right)))
    for name in readers[0].tables():
        a, b = (columns(reader, name) for reader in readers)
        print(f"table {name}: {len(a['id']):,} rows with {', '.join(a)}")
        differing += [f"{name}@{column}" for column in sorted(a.keys() | b.keys()) if not same(a, b, column)]
    a, b = ({name: as_bytes(reader.read_tensor(name)) for name in reader.tensor_names()} for reader in readers)
    print(f"model.pt: {len(a)} tensors, {sum(tensor.size for tensor in a.values()):,} bytes")
    differing += [name for name in sorted(a.keys() | b.keys()) if not same(a, b, name)]
    c, d = (dict(small_state(path)) for path in (left, right))
    n_tensors = sum(isinstance(value, bytes) for value in c.values())
    print(f"dense optimizer, position in the data, random generator: {n_tensors} tensors, {len(c) - n_tensors} numbers")
    differing += [name for name in sorted(c.keys() | d.keys()) if c.get(name) != d.get(name)]
    return differing


def columns(reader: CheckpointReader, table: str) -> dict[str, Column]:
    """Return the columns of a table, one row of bytes an id, in the order of the ids."""
    batches = list(reader.table(table))
    ids = np.concatenate([batch.column("id").to_numpy() for batch in batches])
    order = np.argsort(ids)
    found = {"id": as_bytes(ids[order])}
    for field in reader.schema(table):
        if field.name != "id":
            values = np.concatenate([batch.column(field.name).flatten().to_numpy() for batch in batches])
            values = values.reshape(len(ids), -1)
            found[field.name] = as_bytes(values[order])
    return found


def small_state(checkpoint: Path) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of what lies beside tables and dense weights."""
    for file in ("extra.pt", "io_state_0.pt"):
        yield from leaves(torch.load(checkpoint / file, weights_only=True), file)
    generators = torch.load(checkpoint / "rng_0.pt", weights_only=True)
    yield from leaves(generators["torch"], "rng_0.pt/torch")  # the one that the training draws from


def as_bytes(values: npt.NDArray[Any]) -> Column:
    """Return the bits of the values, for NaN is not equal to NaN and 0.0 is to -0.0."""
    return np.ascontiguousarray(values).reshape(len(values) if values.ndim else 1, -1).view(np.uint8)


def same(left: dict[str, Column], right: dict[str, Column], name: str) -> bool:
    return name in left and name in right and np.array_equal(left[name], right[name])


def leaves(state: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of all that lies in nested dicts and lists; of tensors, the dtype and the bytes."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from leaves(value, f"{path}/{number}")
    elif isinstance(state, torch.Tensor):
        yield f"{path} {state.dtype} {tuple(state.shape)}", state.numpy().tobytes()
    else:
        yield path, state


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", metavar="FILE", help="MovieLens ratings.csv[.gz]; made-up clicks without it")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-interval", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--crash-at", type=int, metavar="STEP", help="halfway, and between two saves, unless told")
    parser.add_argument("--output-dir", default="demo_output/demo", help="its runs of an earlier demo are removed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
