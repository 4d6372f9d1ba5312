"""What real ranks do for test_ranks.py: run it as ``reduced_ranks.py ROOT``.

Each run of ranks restores what those before it have saved, and goes on with deltas.
"""

import sys
from pathlib import Path

import torch
from support.rank_processes import fork_ranks

from recckpt import CheckpointManager, Deltas, Saver
from recckpt.policies import Choose, MinCount
from recckpt.sparse import ShardedHashTable, SparseAdam

AVG, SQ = "sparse_adam_exp_avg", "sparse_adam_exp_avg_sq"
CHOOSE = Choose(slots=[f"!*@{AVG}"], where={"*": {"count": {"min": 4}}}, store={f"*@{SQ}": "bfloat16"})


def go_on(rank, size, root):
    table = ShardedHashTable(2 if size == 2 else 3, name="t", track=("count",), admit=MinCount(2))
    model, infos = torch.nn.ModuleDict({"t": table}), []
    optimizer = SparseAdam([table], lr=0.1)
    policy = Deltas(full_every=100, max_chain_bytes=1e6, max_dirty=1.0)
    said = {"deltas": policy, "on_save": infos.append, "choose": CHOOSE}
    saver = Saver(model, optimizer, str(root.parent / "saved"), None, **said)
    manager = CheckpointManager(saver, 10**9, shard_id=rank, shard_num=size)
    restored = manager.restore()
    found = [(restored, held(table, all_rows=True))]

    def train(*ids):
        table(torch.tensor(ids)[rank::size]).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step()

    def save(in_background=False):
        ckpt_id, expected = f"of_{size}_{manager.global_step}", held(table)
        if in_background:
            handle = saver.save_async(ckpt_id)
            train(*range(30))
            handle.wait()
        else:
            saver.save(ckpt_id)
        found.append((ckpt_id, expected, infos[-1].why_full, infos[-1].n_left_out))

    for _ in range(4):
        train(*range(60), *range(60, 120, 2), *range(60, 120, 2))
    save()
    train(*range(20), 200, 200, 201)
    save(in_background=True)
    table.erase(torch.arange(3))
    train(*range(10, 20))
    save()
    if size == 2:
        table.resize(3)
        train(*range(5))
        save()
    return found


def held(table, *, all_rows=False):
    """Return the rows of this rank that are to be saved, and its counts of ids that wait."""
    columns = {"embedding": table.embeddings(), "count": table.slots["count"], SQ: table.slots[SQ].bfloat16()}
    as_bytes = {name: list(map(bytes_of, column)) for name, column in columns.items()}
    counts = columns["count"].tolist()
    rows = {
        id_: {name: column[row] for name, column in as_bytes.items()}
        for row, id_ in enumerate(table.ids().tolist())
        if counts[row] >= 4 or all_rows
    }
    waiting = table.candidates
    return rows, dict(zip(waiting.ids().tolist(), waiting.embeddings()[:, 0].tolist(), strict=True)), len(table)


def bytes_of(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for number, size in enumerate((2, 1)):
        (root / str(number)).mkdir()
        fork_ranks(size, root / str(number), go_on)
