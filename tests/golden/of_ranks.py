"""Writes the families that take real ranks and TorchRec: run it as ``of_ranks.py ROOT``, for write.py."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from golden.families import ALWAYS, Json, Scene, drawn, table_json, tensor_json
from support import live_collisions, live_torchrec
from support.rank_processes import fork_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from recckpt import Saver

LAYOUTS = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}


def sharded_dense(rank: int, size: int, scene: Scene) -> None:
    """Tensors over ranks by rows, by columns and in copies, beside a plain one."""
    mesh, model = init_device_mesh("cpu", (size,)), nn.Module()
    whole = {name: drawn(5, 7, seed=number) for number, name in enumerate(LAYOUTS)} | {"plain": drawn(3)}
    for name, value in whole.items():
        laid_out = distribute_tensor(value, mesh, LAYOUTS[name]) if name in LAYOUTS else value
        model.register_buffer(name, laid_out)
    Saver(model, output_dir=str(scene.run)).save("ckpt_1", rank, size)
    dense = {name: tensor_json(value) for name, value in whole.items()}
    scene.note("ckpt_1", {"tables": {}, "dense": dense, "objects": {}})


def live_columns(rank: int, size: int, scene: Scene) -> None:
    """Tables of TorchRec by columns, with deltas."""
    model, optimizer, tables = live_torchrec.sharded(0, size, "columns", "adagrad")
    with Saver(model, output_dir=str(scene.run), tables=tables, deltas=ALWAYS, max_keep=None) as saver:
        saver.register_for_checkpointing("optimizer", optimizer)
        for number in (1, 2):
            live_torchrec.step(model, optimizer, number)
            saver.save(f"ckpt_{number}", rank, size, step=number)
            whole = live_torchrec.whole_state(model, tables)
            found = {}
            for name, table in tables.items():
                slots = {spec.name: whole[f"{name} {spec.name}"] for spec in table.specs}
                found[name] = table_json(torch.arange(table.live.n_rows), slots)
            scene.note(f"ckpt_{number}", {"tables": found, "dense": dense_json(model.module.top), "objects": {}})


def live_collisions_of_ids(rank: int, size: int, scene: Scene) -> None:
    """A table of TorchRec behind managed collision, whose ids are the raw ones, and a delta after evictions."""
    model, top, tables = live_collisions.sharded(0, size)
    with Saver(model, output_dir=str(scene.run), tables=tables, deltas=ALWAYS, max_keep=None) as saver:
        saver.register_for_checkpointing("top", top)
        for number in (1, 2):
            for seed in range(8 * number, 8 * number + 8):
                live_collisions.step(model, [top], seed)
            saver.save(f"ckpt_{number}", rank, size, step=number)
            rows = live_collisions.of_all_ranks(tables)
            found = {}
            for name, of_table in rows.items():
                ids = sorted(of_table)
                found[name] = {"ids": ids, "slots": {}}
                for spec in tables[name].specs:
                    values = b"".join(of_table[id_][spec.name] for id_ in ids).hex()
                    found[name]["slots"][spec.name] = {
                        "dtype": spec.dtype,
                        "shape": [len(ids), *spec.shape],
                        "hex": values,
                    }
            dense = dense_json(model.module.top)
            steps = "sparse._managed_collision_collection._managed_collision_modules.users._current_iter_tensor"
            dense[steps] = tensor_json(model.state_dict()[steps])
            scene.note(f"ckpt_{number}", {"tables": found, "dense": dense, "objects": {}})


def dense_json(top: nn.Module) -> Json:
    return {name: tensor_json(value) for name, value in top.state_dict(prefix="top.").items()}


FAMILIES = {each.__name__: each for each in (sharded_dense, live_columns, live_collisions_of_ids)}
RANKS = 2


def main(root: Path) -> None:
    def work(rank: int, size: int, _: Path) -> None:
        for name, write in FAMILIES.items():
            (root / name).mkdir(exist_ok=True)
            scene = Scene(root / name)
            write(rank, size, scene)
            if rank == 0:
                scene.save(root / name / "expected.json")
            dist.barrier()

    fork_ranks(RANKS, root, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
