"""What is read: another form of what is damaged, or nothing changes; of a near save what a rank needs."""

import shutil
from dataclasses import replace

import pytest
from near.test_near_saves import begun
from support.builders import flip_bit
from support.spec_writer import Held, write_compacted, write_delta_of, write_full
from support.sweeps import mostly_slow
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.load.open_source import Needs, needed_files
from recckpt.output_dir.listing import list_checkpoints
from recckpt.sparse import HashTable, gen_slice

ROWS = {1: (1.0, 1.0), 2: (2.0, 2.0)}
DAMAGED = pytest.mark.parametrize("damaged", ["form", "delta", "full"])
NOTHING = Needs(0, 1, {}, positions=False, gathers=False, tensors={})


class Chain:
    """ckpt_1, full, on it ckpt_2 with other rows, and a form of that."""

    def __init__(self, root, name="t", changed=9.0):
        self.root, self.rows = root, {**ROWS, 1: (changed, changed)}
        self.full = write_full(root, "ckpt_1", {name: Held(2, [(ROWS, ())])}, step=1)
        self.delta = write_delta_of(self.full, "ckpt_2", {name: Held(2, [({1: self.rows[1]}, ())])}, step=2)
        self.form = write_compacted(self.delta, self.rows)

    def damage(self, which):
        for part in getattr(self, which).directory.glob("sparse/*.arrow"):
            flip_bit(part, 700)


class Model:
    """A model, and a saver of it."""

    def __init__(self, own, *names, slice=None):
        self.tables = {name: HashTable(2, name=name, slice=slice) for name in names or ("t",)}
        self.saver = Saver(nn.ModuleDict(dict(self.tables)), output_dir=str(own), max_keep=None)

    def rows(self, name="t"):
        table = self.tables[name]
        return dict(zip(table.ids().tolist(), map(tuple, table.embeddings().tolist()), strict=True))


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path / "runs")


@DAMAGED
def test_whatever_is_damaged_a_load_takes_the_other_and_says_so(tmp_path, chain, damaged, caplog):
    chain.damage(damaged)
    loads = [
        lambda saver: saver.load(str(chain.root)),
        lambda saver: saver.load(str(chain.root), ckpt_id="ckpt_2"),
        lambda saver: saver.load(str(chain.delta.directory)),
        lambda saver: saver.load(str(chain.form.directory), direct_path=True),
        lambda saver: saver.load_by_config([{"path": str(chain.root)}]),
    ]
    for load in loads:
        model = Model(tmp_path / "own")
        load(model.saver)
        assert model.rows() == chain.rows
    said = {record.message.split(": ckpt_")[0] for record in caplog.records if "is damaged" in record.message}
    form, delta = str(chain.form.directory), str(chain.delta.directory)
    taken, other = (form, delta) if damaged == "form" else (delta, form)  # the delta only by its own path
    assert said == {f"{taken} is damaged, reading {other} instead"}


def test_the_own_output_dir_is_read_so_too_and_it_is_a_whole_restore(chain):
    chain.damage("form")
    model, told = Model(chain.root), []
    model.saver.loader.on_whole_restore = lambda checkpoint, tables: told.append(checkpoint.directory)
    model.saver.load()
    assert told == ["ckpt_2"]
    assert model.rows() == chain.rows


@pytest.mark.parametrize("damaged", ["delta", "full"])
def test_where_both_are_damaged_it_says_which_and_nothing_changes(tmp_path, chain, damaged):
    chain.damage("form")
    chain.damage(damaged)
    model = Model(tmp_path / "own")
    for load in (model.saver.load, lambda path: model.saver.load_by_config([{"path": path}])):
        with pytest.raises(CorruptCheckpointError, match=f"{getattr(chain, damaged).directory.name}/sparse/"):
            load(str(chain.root))
        assert model.rows() == {}


def test_of_two_output_dirs_with_the_same_names_the_damaged_one_is_found(tmp_path, chain):
    other = Chain(tmp_path / "other", "u", changed=7.0)
    other.form.directory.rename(renamed := other.root / chain.form.directory.name.replace("ckpt_2", "ckpt_3"))
    assert renamed.exists()
    bank = [{"path": str(chain.root)}, {"path": str(other.delta.directory)}]
    chain.damage("form")
    model = Model(tmp_path / "own", "t", "u")
    model.saver.load_by_config(bank)
    assert (model.rows("t"), model.rows("u")) == (chain.rows, other.rows)


@pytest.mark.parametrize("damaged", ["form", "delta"])
def test_damage_of_a_bank_takes_nothing_of_the_own_checkpoint(tmp_path, chain, damaged):
    own = Chain(tmp_path / "own", "u", changed=5.0)
    chain.damage(damaged)
    manager = CheckpointManager((model := Model(own.root, "t", "u")).saver, 10)
    path = chain.root if damaged == "form" else chain.delta.directory  # the own one has a directory of that name
    manager.load_model_bank([{"path": str(path), "load": ["t"]}])
    assert (manager.global_step, model.rows("t"), model.rows("u")) == (2, chain.rows, own.rows)


def test_a_damaged_form_in_a_bank_does_not_keep_a_run_from_an_older_own_checkpoint(tmp_path, chain):
    own = Chain(tmp_path / "own", "u", changed=5.0)
    shutil.rmtree(own.form.directory)
    own.damage("delta")
    chain.damage("form")
    manager = CheckpointManager((model := Model(own.root, "t", "u")).saver, 10)
    manager.load_model_bank([{"path": str(chain.delta.directory), "load": ["t"]}])
    assert (manager.global_step, model.rows("t"), model.rows("u")) == (1, chain.rows, ROWS)


@mostly_slow()
@DAMAGED
def test_a_bank_that_is_followed_is_read_in_another_form(tmp_path, chain, damaged):
    chain.damage(damaged)

    def follow(rank, connect):
        model = Model(tmp_path / f"own_{rank}", slice=gen_slice(rank, 2))
        connect(model.saver)
        manager = CheckpointManager(model.saver, 10, shard_id=rank, shard_num=2)
        manager.load_model_bank([{"path": str(chain.root), "is_dynamic": True}])
        return model, manager

    def rows(found):
        return {id_: row for model, _ in found for id_, row in model.rows().items()}

    def reload(rank, connect):
        model, manager = found[rank]
        connect(model.saver)
        return [report.rows_taken["t"] for report in manager.reload_dynamic()]

    found = on_ranks(2, follow)
    assert rows(found) == chain.rows
    delta = write_delta_of(chain.delta, "ckpt_3", {"t": Held(2, [({2: (3.0, 3.0)}, ())])}, step=3)
    form = write_compacted(delta, chain.rows | {2: (3.0, 3.0)})
    assert sum(map(sum, on_ranks(2, reload))) == 2, "the form is read"
    later = write_delta_of(delta, "ckpt_4", {"t": Held(2, [({2: (4.0, 4.0)}, ())])}, step=4)
    for part in write_compacted(later, chain.rows | {2: (4.0, 4.0)}).directory.glob("sparse/*.arrow"):
        flip_bit(part, 700)
    assert sum(map(sum, on_ranks(2, reload))) == 2, "the delta is read on the form of the one before"
    assert form.directory.exists()
    assert rows(found) == chain.rows | {2: (4.0, 4.0)}


@pytest.fixture
def manifest(tmp_path):
    """Return that of a checkpoint of a table."""
    run = begun(tmp_path)
    return list_checkpoints(run.saver.storage).current[-1].manifest


def with_rows(names):
    return {name for name in names if layout.has_rows(name)}


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_rank_without_tables_reads_no_rows_whatever_it_is_to_load(manifest, is_whole):
    names = needed_files(manifest, NOTHING, is_whole=is_whole)
    assert names
    assert not with_rows(names)
    assert with_rows(file.name for file in manifest.files)


@pytest.mark.parametrize("needs", [replace(NOTHING, slices={"t": None}), replace(NOTHING, tensors={"top.weight": 3})])
def test_what_may_have_another_name_there_may_be_in_any_file(manifest, needs):
    assert needed_files(manifest, needs, is_whole=False) == {file.name for file in manifest.files}
