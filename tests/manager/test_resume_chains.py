"""A run that resumes from chains; the checkpoints are made by docs/format.md, not by recckpt."""

import pytest
import torch
from support.builders import flip_bit
from support.spec_writer import Held, write_delta_of, write_form, write_full
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import CorruptCheckpointError
from recckpt.sparse import HashTable, gen_slice

FULL = {1: (1.0, 1.0), 2: (2.0, 2.0), 3: (3.0, 3.0)}


def held(rows, vectors, deletes=()):
    return {"t": Held(rows, [(vectors, deletes)])}


@pytest.fixture
def chain(tmp_path):
    """ckpt_1 and ckpt_2, each full, and on the second ckpt_3, ckpt_4 and ckpt_5."""
    ckpt_1 = write_full(tmp_path, "ckpt_1", held(3, FULL), step=1)
    ckpt_2 = write_full(tmp_path, "ckpt_2", held(3, {**FULL, 1: (9.0, 9.0)}), step=2, seq=2)
    ckpt_3 = write_delta_of(ckpt_2, "ckpt_3", held(2, {}, [3]), step=3)
    ckpt_4 = write_delta_of(ckpt_3, "ckpt_4", held(3, {4: (4.0, 4.0)}), step=4)
    ckpt_5 = write_delta_of(ckpt_4, "ckpt_5", held(2, {}, [1]), step=5)
    return {each.directory.name: each for each in (ckpt_1, ckpt_2, ckpt_3, ckpt_4, ckpt_5)}


def part_of(checkpoint):
    [part] = checkpoint.directory.glob("sparse/*.arrow")
    return part


class Resumed:
    """A run that starts, and the base that it is told of."""

    def __init__(self, root, slice=None):
        self.table, self.bases = HashTable(2, name="t", slice=slice), []
        saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(root), max_keep=None)
        saver.loader.on_whole_restore = lambda checkpoint, tables: self.bases.append((checkpoint.ckpt_id, *tables))
        self.saver, self.manager = saver, CheckpointManager(saver, 10)

    @property
    def rows(self):
        return dict(zip(self.table.ids().tolist(), map(tuple, self.table.embeddings().tolist()), strict=True))


def test_the_newest_delta_is_restored(tmp_path, chain):
    run = Resumed(tmp_path)
    assert run.manager.restore() == 5
    assert run.rows == {2: (2.0, 2.0), 4: (4.0, 4.0)}
    assert run.bases == [("ckpt_5", run.table)]


def test_a_step_in_the_middle_of_a_chain_is_restored(tmp_path, chain):
    run = Resumed(tmp_path)
    assert run.manager.restore(3) == 3
    assert run.rows == {1: (9.0, 9.0), 2: (2.0, 2.0)}


@pytest.mark.parametrize(("damaged", "restored"), [("ckpt_5", 4), ("ckpt_4", 3), ("ckpt_3", 2), ("ckpt_2", 1)])
def test_damage_of_a_link_passes_over_all_that_stand_on_it_and_says_which(tmp_path, chain, caplog, damaged, restored):
    flip_bit(part_of(chain[damaged]), 700)
    run = Resumed(tmp_path)
    assert run.manager.restore() == restored
    assert run.bases == [(f"ckpt_{restored}", run.table)]
    what = "ckpt_5 is damaged" if damaged == "ckpt_5" else f"ckpt_5 stands on {damaged}, which is damaged"
    said = [record.message for record in caplog.records if "is damaged" in record.message]
    assert len(said) == 1, "links are read once"
    assert f"{what}, restoring ckpt_{restored} instead: {damaged}/sparse/" in said[0]


def test_where_all_stand_on_what_is_damaged_the_link_is_named(tmp_path, chain):
    for name in ("ckpt_1", "ckpt_2"):
        flip_bit(part_of(chain[name]), 700)
    with pytest.raises(CorruptCheckpointError, match="ckpt_1/sparse/"):
        Resumed(tmp_path).manager.restore()
    with pytest.raises(CorruptCheckpointError, match="ckpt_2/sparse/"):
        Resumed(tmp_path).manager.restore(4)


@pytest.mark.parametrize("damaged", ["the form", "the chain"])
def test_where_a_form_or_the_chain_is_damaged_the_other_is_restored(tmp_path, chain, damaged):
    form = write_form(chain["ckpt_4"], {1: (9.0, 9.0), 2: (2.0, 2.0), 4: (4.0, 4.0)})
    flip_bit(part_of(form if damaged == "the form" else chain["ckpt_3"]), 700)
    for step, rows in ((5, {2, 4}), (4, {1, 2, 4})):
        run = Resumed(tmp_path)
        assert run.manager.restore(step if step == 4 else None) == step
        assert run.rows.keys() == rows


@pytest.mark.parametrize("n_rows", [3, 5])
def test_rows_that_no_rank_alone_can_count_are_counted_by_all(tmp_path, chain, n_rows):
    write_delta_of(chain["ckpt_5"], "ckpt_6", held(n_rows, {7: (7.0, 7.0), 8: (8.0, 8.0)}), step=6)

    def restore(rank, connect):
        run = Resumed(tmp_path, slice=gen_slice(rank, 3))
        connect(run.saver)
        manager = CheckpointManager(run.saver, 10, shard_id=rank, shard_num=3)
        with pytest.raises(CorruptCheckpointError, match=f"ckpt_6/manifest.json.*{n_rows} rows, expected 4, as in its"):
            manager.restore(6)
        assert run.bases == []
        return manager.restore(), run.rows, run.bases[0][0]

    found = on_ranks(3, restore)
    assert [(step, base) for step, _, base in found] == [(5, "ckpt_5")] * 3
    assert {id_: row for _, rows, _ in found for id_, row in rows.items()} == {2: (2.0, 2.0), 4: (4.0, 4.0)}


def test_a_load_by_path_of_the_own_output_dir_is_a_whole_restore_too(tmp_path, chain):
    run = Resumed(tmp_path)
    run.saver.load(ckpt_id="ckpt_4")
    run.saver.load(str(tmp_path / "ckpt_3"))
    assert [name for name, _ in run.bases] == ["ckpt_4", "ckpt_3"]


@pytest.mark.parametrize(
    "conf",
    [
        {"load": ["sparse"]},
        {"exclude": ["dense"]},
        {"hashtable_clear": False},
        {"where": {"ids": [1, 2, 4]}},
        {"on_mismatch": "cast"},
    ],
)
def test_a_load_of_some_or_of_what_is_converted_is_none(tmp_path, chain, conf):
    run = Resumed(tmp_path)
    if "on_mismatch" in conf:
        run.table = HashTable(2, name="t", dtype=torch.float64)
        run.saver.model["t"] = run.table
    run.saver.load(ckpt_id="ckpt_5", load_conf=conf)
    assert run.rows.keys() == {2, 4}
    assert run.bases == []


def test_a_warm_start_is_none_and_a_resume_with_a_bank_that_is_not_needed_is_one(tmp_path, chain):
    cold, own = tmp_path / "cold", tmp_path / "own"
    run = Resumed(cold)
    run.manager.load_model_bank([{"path": str(tmp_path), "load": ["*"]}])
    assert run.rows.keys() == {2, 4}
    assert run.bases == []
    write_full(own, "ckpt_7", held(3, FULL), step=7)
    run = Resumed(own)
    run.manager.load_model_bank([{"path": str(tmp_path), "load": ["*"]}])
    assert run.manager.restore() == 7
    assert run.bases == [("ckpt_7", run.table)]


def test_a_load_that_breaks_off_is_none(tmp_path, chain, monkeypatch):
    run = Resumed(tmp_path)
    flip_bit(part_of(chain["ckpt_5"]), 700)
    with pytest.raises(CorruptCheckpointError):
        run.saver.load(ckpt_id="ckpt_5")
    assert run.bases == []
