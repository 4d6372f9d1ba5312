"""Tables of TorchRec are saved and restored where they lie, under any plan, by any ranks, with the same bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.rank_processes import run_script

from recckpt import CheckpointReader
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage

SCRIPT = Path(__file__).with_name("live_torchrec_ranks.py")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What two ranks, one and three have saved, each after restoring what was there before them, and two once more."""
    root = tmp_path_factory.mktemp("ranks")
    run_script(SCRIPT, root, 2, 1, 3, 2, 1, seconds=900)
    return root


def test_any_ranks_restore_any_plan_and_train_on_with_the_same_bits(saved):
    runs = sorted(path.parent for path in saved.glob("*/truth.pt"))
    assert len(runs) == 3 * (5 * 2 + 3)  # ranks, layouts by kinds, and those of row-wise Adagrad
    for path in runs:
        _, _, kinds = torch.load(path / "truth.pt")
        assert kinds == ["full", "delta", "delta"]
        assert verify(str(path)) == []


def test_the_files_have_each_row_once_with_its_slots(saved):
    for path in sorted(path.parent for path in saved.glob("*/truth.pt")):
        truth, _, _ = torch.load(path / "truth.pt")
        with CheckpointReader(str(path)) as reader:
            for name, values in ((name, values) for name, values in truth.items() if not name.startswith("dense ")):
                table, slot = name.split(" ")
                rows, is_there = reader.lookup(table, np.arange(len(values)), slot)
                assert is_there.all()
                assert reader.manifest.named_table(table).rows == len(values)
                np.testing.assert_array_equal(rows, values.numpy())


def test_what_two_ranks_announce_leave_dense_and_save_once(tmp_path):
    run_script(SCRIPT.with_name("live_torchrec_cases.py"), tmp_path)


def test_tables_by_columns_are_saved_beside_training_and_converted_where_that_is_allowed(tmp_path):
    run_script(SCRIPT.with_name("live_columns_cases.py"), tmp_path)


def test_a_rank_that_is_killed_while_columns_are_exchanged_is_an_error_of_the_others_in_time(tmp_path):
    run_script(SCRIPT.with_name("live_columns_killed.py"), tmp_path)
    assert [found.ckpt_id for found in list_checkpoints(open_storage(str(tmp_path / "runs"))).current] == ["ckpt_0"]
    assert verify(str(tmp_path / "runs")) == []


def test_a_table_over_a_grid_is_saved_and_restored(tmp_path):
    run_script(SCRIPT.with_name("live_grid_ranks.py"), tmp_path)
    assert all(verify(str(tmp_path / kind)) == [] for kind in ("sgd", "rowwise"))
