"""Cases of live tables on two real ranks for test_live_torchrec.py: ``live_torchrec_cases.py ROOT``."""

import logging
import random
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from support import live_torchrec as models
from support.live_rows import Rows
from support.rank_processes import fork_ranks

from recckpt import Saver
from recckpt.dense.keyed_optimizer import KeyedOptimizer


def no_row_changes_unannounced():
    """Random batches in every layout; what a copy announces is the reduced gradient, of all ranks."""
    for number, layout in enumerate(models.LAYOUTS):
        kinds = [kind for kind in models.KINDS if kind != "rowwise" or not models.copies(layout)]
        for kind in kinds:
            is_weighted = bool(number % 2)
            model, optimizer, tables = models.sharded(number, 2, layout, kind, is_weighted=is_weighted)
            with Rows(tables) as rows:
                for step in range(4):
                    seed = 10 * step + dist.get_rank()  # other ids on each rank
                    models.step(
                        model, optimizer, seed, is_weighted=is_weighted, n_ids=random.Random(step).randint(1, 2)
                    )
                missed = {name: some - rows.announced()[name] for name, some in rows.changed().items()}
                assert not any(missed.values()), (layout, kind, missed)
                assert rows.changed() == rows.announced(), (layout, kind)


def look_ups_of_this_rank_miss_rows_of_copies():
    """The planted bug: what this rank has looked up is not all that changes in its copy."""
    model, optimizer, tables = models.sharded(0, 2, "copies", "adagrad")
    with Rows(tables) as rows:
        seed = 5 + dist.get_rank()
        models.step(model, optimizer, seed)
        (bags, _) = models.batch(seed)
        looked_up = set(bags["user"].values().tolist())
        assert rows.changed()["users"] - looked_up
        assert rows.changed()["users"] == rows.announced()["users"]


def tables_by_columns_stay_dense(root):
    """They are saved as before, beside live tables of the same collection."""
    saved = []
    for seed in (0, 1):
        model, optimizer, tables = models.sharded(seed, 2, "rows", "adagrad", columns=("wares", "words"))
        assert sorted(tables) == ["clicks", "shops", "users"]
        assert "bags.embedding_bags.wares: its columns lie apart (column_wise)" in str(tables)
        saver = Saver(model, output_dir=str(root / "columns"), tables=tables)
        saver.register_for_checkpointing("optimizer", optimizer)
        if seed == 0:
            models.step(model, optimizer, 3)
            saver.save("c")
        else:
            optimizer.init_state()
            saver.load()
        wares = [
            shard.tensor.clone() for shard in model.state_dict()["bags.embedding_bags.wares.weight"].local_shards()
        ]
        saved.append((models.whole_state(model, tables), wares))
    assert models.differing(saved[0][0], saved[1][0]) == []
    assert all(torch.equal(one, other) for one, other in zip(saved[0][1], saved[1][1], strict=True))


def nothing_is_saved_twice(root):
    """Neither weights nor states of live tables are dense tensors, or in the states of optimizers."""
    model, optimizer, tables = models.sharded(0, 2, "mixed", "adagrad")
    saver = Saver(model, output_dir=str(root / "once"), tables=tables)
    saver.register_for_checkpointing("optimizer", optimizer)
    models.step(model, optimizer, 3)
    names = [name.text for name in saver.loader.live_state().inventory if name.group in ("dense", "dense_opt")]
    assert not [name for name in names if "embedding" in name], names
    assert sorted(KeyedOptimizer(optimizer, tables.has_key).state_dict()["state"]) == ["top.bias", "top.weight"]


def work(rank, size, root):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    no_row_changes_unannounced()
    look_ups_of_this_rank_miss_rows_of_copies()
    tables_by_columns_stay_dense(root.parent)
    nothing_is_saved_twice(root.parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[1]) / "run").mkdir()
    fork_ranks(2, Path(sys.argv[1]) / "run", work)
