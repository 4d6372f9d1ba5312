"""Cases of live tables on two real ranks for test_live_torchrec.py: ``live_torchrec_cases.py ROOT``."""

import logging
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import live_torchrec as models
from support.live_runs import Rows
from support.rank_processes import fork_ranks

from recckpt import CheckpointManager, CheckpointReader, Saver
from recckpt.dense.keyed_optimizer import KeyedOptimizer
from recckpt.errors import SaveFailedError
from recckpt.live import live_tables


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


def columns_of_which_a_rank_has_several_ranges_stay_dense(root):
    """They are saved as before, beside live tables of the same collection."""
    saved, how = [], dict.fromkeys(("wares", "words"), "columns on one rank")
    for seed in (0, 1):
        model, optimizer, tables = models.sharded(seed, 2, "rows", "adagrad", **how)
        assert sorted(tables) == ["clicks", "shops", "users"]
        assert "of its shards are on one rank, expected one: plan one shard per rank" in str(tables)
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


def dense_tensors_of_before_become_rows(root, kind, layout):
    """What was saved before the tables were live ones, weights and sums, is loaded under another plan."""
    url = str(root / f"before-{kind}")
    model, optimizer, tables = models.sharded(0, 2, "rows", kind)
    saver = Saver(model, output_dir=url)
    saver.register_for_checkpointing("optimizer", optimizer)
    for number in range(2):
        models.step(model, optimizer, number)
    saver.save("ckpt_2", step=2)
    truth = models.whole_state(model, tables)
    model, optimizer, tables = models.sharded(1, 2, layout, kind)
    models.step(model, optimizer, 7)
    saver = Saver(model, output_dir=url, tables=tables)
    saver.register_for_checkpointing("optimizer", optimizer)
    assert CheckpointManager(saver, 10).restore() == 2
    assert models.differing(models.whole_state(model, tables), truth) == []


def rows_become_dense_tensors_again(root):
    """Without live tables their weights are sharded tensors, which take the rows; states start fresh if so asked."""
    url = str(root / "again")
    model, optimizer, tables = models.sharded(0, 2, "rows", "adagrad")
    models.step(model, optimizer, 0)
    Saver(model, output_dir=url, tables=tables).save("a")
    truth = models.whole_state(model, tables)
    model, optimizer, tables = models.sharded(1, 2, "tables", "adagrad")
    Saver(model, output_dir=url).load()
    other = models.whole_state(model, tables)
    assert all("sum" in name for name in models.differing(other, truth))


def an_optimizer_that_is_not_registered_is_known_to_be_missing(root):
    """TorchRec's has none of the hooks by which those of torch are watched while registered objects are asked."""
    model, optimizer, tables = models.sharded(0, 2, "tables", "adagrad")
    saver = Saver(model, output_dir=str(root / "alone"), tables=tables)
    models.step(model, optimizer, 3)
    saver.save("c")
    with CheckpointReader(str(root / "alone")) as reader:
        assert reader.manifest.training.unsaved.parameters


def sums_of_a_small_table_that_nobody_registered_are_known_to_be_missing(root):
    """A fused optimizer steps in backward passes, without hooks: live_tables was given it, which is how it is known."""
    model, optimizer, tables = models.sharded(0, 2, "tables", "adagrad")
    tables.close()
    tables = live_tables(model, optimizer, min_rows=1, exclude=["bags.embedding_bags.wares"])
    saver = Saver(model, output_dir=str(root / "small"), tables=tables)
    dense = torch.optim.SGD(next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).parameters())
    saver.register_for_checkpointing("dense", dense)
    models.step(model, optimizer, 3)
    saver.save("c")
    with CheckpointReader(str(root / "small")) as reader:
        assert reader.manifest.training.unsaved.parameters, reader.manifest.training


def a_rate_that_a_schedule_has_set_comes_back(root, *, zeroes_first):
    """The fused kernel takes it at the next step or zero_grad(); a save may lie before or after that."""
    url, ends = str(root / f"rate-{zeroes_first}"), []
    for seed in (0, 1):
        model, optimizer, tables = models.sharded(seed, 2, "tables", "sgd")
        saver = Saver(model, output_dir=url, tables=tables)
        saver.register_for_checkpointing("optimizer", optimizer)
        if seed:
            optimizer.init_state()
            saver.load()
        for number in range(2 * seed, 4):
            if zeroes_first:
                optimizer.zero_grad()
            model(*models.batch(number)).square().mean().backward()
            optimizer.step()
            if not zeroes_first:
                optimizer.zero_grad()
            for group in model.fused_optimizer.param_groups:
                group["lr"] *= 0.5
            if number == 1:
                saver.save("c")
        ends.append(models.whole_state(model, tables))
        rates = {group["lr"] for group in model.fused_optimizer.param_groups}
        assert all(abs(rate - 0.1 * 0.5**4) < 1e-6 for rate in rates), rates
    assert models.differing(*ends) == []


def a_rank_whose_state_cannot_be_taken_is_named_by_all(root):
    """The others do not wait for it: what ranks say to each other before they stage, they say before anything fails."""
    model, optimizer, tables = models.sharded(0, 2, "tables", "adagrad")
    saver = Saver(model, output_dir=str(root / "refused"), tables=tables)
    models.step(model, optimizer, 3)
    if dist.get_rank() == 1:
        next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).register_state_dict_pre_hook(_refuse)
    with pytest.raises(SaveFailedError if dist.get_rank() == 0 else RuntimeError, match="not here"):
        saver.save("c")


def _refuse(*args):
    raise RuntimeError("not here")


def work(rank, size, root):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    no_row_changes_unannounced()
    look_ups_of_this_rank_miss_rows_of_copies()
    columns_of_which_a_rank_has_several_ranges_stay_dense(root.parent)
    nothing_is_saved_twice(root.parent)
    dense_tensors_of_before_become_rows(root.parent, "rowwise", "tables")
    dense_tensors_of_before_become_rows(root.parent, "adagrad", "mixed")
    rows_become_dense_tensors_again(root.parent)
    an_optimizer_that_is_not_registered_is_known_to_be_missing(root.parent)
    sums_of_a_small_table_that_nobody_registered_are_known_to_be_missing(root.parent)
    a_rate_that_a_schedule_has_set_comes_back(root.parent, zeroes_first=True)
    a_rate_that_a_schedule_has_set_comes_back(root.parent, zeroes_first=False)
    a_rank_whose_state_cannot_be_taken_is_named_by_all(root.parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[1]) / "run").mkdir()
    fork_ranks(2, Path(sys.argv[1]) / "run", work)
