"""The base of a saver: what it may count changes from, so that no delta stands on what somebody removes."""

import pytest
import torch
from support import spec_reader
from support.builders import Run, state_of
from support.sweeps import mostly_slow

import recckpt
from recckpt import Deltas
from recckpt.errors import SaveFailedError, WriterFencedError
from recckpt.output_dir.listing import list_checkpoints

LONG = Deltas(full_every=50, max_chain_bytes=1000, max_dirty=1.0)


def start(root, **options):
    """Return a run that saves by hand, and writes a delta whenever it has a base."""
    options = {"max_keep": None, "deltas": LONG, **options}
    run = Run(root, 10_000, **options)
    run.root = root
    return run


def resumed(root, step=None, **options):
    run = start(root, seed=1, **options)
    run.manager.restore(step)
    return run


def save(run, **options):
    """Save the step of a run, and check what a reader finds of its tables."""
    ckpt_id = f"ckpt_{run.manager.global_step}"
    record = run.saver.save(ckpt_id, **options)
    for table in run.model.tables:
        rows = spec_reader.read(run.root, ckpt_id, table.name)
        assert rows.keys() == set(table.ids().tolist())
        order = table.ids().tolist()
        embeddings = table.embeddings()
        for row, id_ in enumerate(order):
            assert rows[id_]["embedding"] == embeddings[row].numpy().tobytes()
    return record


def test_a_restored_run_goes_on_with_deltas(tmp_path):
    run = start(tmp_path).train(5)
    save(run)
    last = save(run.train(2))
    later = resumed(tmp_path)
    record = save(later.train(3))
    assert (record.kind, record.parent.save_id) == ("delta", last.save_id)
    assert len(record.chain) == 2
    assert state_of(resumed(tmp_path)) == state_of(later)
    assert save(later.train(1)).parent.ckpt_id == record.ckpt_id


@mostly_slow()
@pytest.mark.parametrize(
    ("resume", "kind"),
    [
        (lambda run, other: run.saver.load(), "delta"),
        (lambda run, other: run.manager.restore(5), "full"),  # which is not the newest
        (lambda run, other: run.manager.restore(load_conf={"exclude": ["item"]}), "full"),
        (lambda run, other: run.manager.load_model_bank([{"path": other}]), "delta"),  # it resumes the own run
        (lambda run, other: run.saver.load(other), "full"),
        (lambda run, other: run.model.users(torch.arange(3)), "full"),
    ],
    ids=["a load of all", "an older one", "a part", "a bank", "another output dir", "nothing"],
)
def test_only_what_was_loaded_whole_of_the_newest_of_the_own_output_dir_is_a_base(tmp_path, resume, kind):
    other = str(tmp_path / "other")
    save(start(tmp_path / "other").train(3))
    run = start(tmp_path / "own").train(5)
    save(run)
    save(run.train(1))
    later = start(tmp_path / "own", seed=1)
    resume(later, other)
    assert later.saver.save("next", step=9).kind == kind
    without = resumed(tmp_path / "own", deltas=False)
    assert save(without.train(1), overwrite=True).kind == "full"
    assert all(table.store._observers.mark_sets() == [] for table in without.model.tables)


def test_a_restored_ephemeral_checkpoint_is_a_base_and_stays_while_it_is(tmp_path):
    run = start(tmp_path, max_keep=1).train(5)
    save(run)
    save(run.train(1), ephemeral=True)
    later = resumed(tmp_path, max_keep=1)
    first = save(later.train(1), ephemeral=True)
    second = save(later.train(1))
    assert [record.parent.ckpt_id for record in (first, second)] == ["ckpt_6", "ckpt_6"]


def test_a_base_stays_though_no_policy_wants_it(tmp_path):
    run = start(tmp_path, max_keep=1).train(5)
    save(run)
    save(run.train(1), ephemeral=True)
    later = resumed(tmp_path, max_keep=1, deltas=Deltas(max_dirty=1e-9))
    assert save(later.train(1), ephemeral=True).kind == "full"
    assert list_checkpoints(later.saver.storage).ckpt_ids == ["ckpt_5", "ckpt_6", "ckpt_7"]


def test_a_delta_on_what_was_compacted_names_the_delta(tmp_path):
    run = start(tmp_path).train(5)
    save(run)
    last = save(run.train(1))
    assert recckpt.rewrite.compact(tmp_path, adopt=True).is_committed
    later = resumed(tmp_path)
    assert save(later.train(1)).parent.save_id == last.save_id


def test_what_another_writer_has_gone_on_from_is_no_base(tmp_path):
    save(start(tmp_path).train(5))
    mine, other = resumed(tmp_path), resumed(tmp_path)
    assert save(other.train(1)).kind == "delta"
    assert save(mine.train(2)).kind == "full"
    with pytest.raises(WriterFencedError):
        other.saver.save("late")


def test_what_is_older_than_a_damaged_checkpoint_is_no_base(tmp_path):
    run = start(tmp_path).train(5)
    save(run)
    save(run.train(2))
    (tmp_path / "ckpt_7" / "model.pt").unlink()
    assert save(resumed(tmp_path).train(1)).kind == "full"


def test_a_run_that_restores_its_own_last_save_goes_on_from_it_and_writes_full_after_one_before(tmp_path):
    run = start(tmp_path).train(5)
    save(run)
    last = save(run.train(2))
    run.train(3)
    run.manager.restore()
    assert save(run.train(1)).parent.save_id == last.save_id
    run.manager.restore(7)
    assert save(run.train(1), overwrite=True).kind == "full"
    assert save(run.train(1)).kind == "delta"


def test_what_a_load_brings_in_after_a_base_is_in_the_delta(tmp_path):
    save(start(tmp_path / "other", seed=7).train(5))
    run = start(tmp_path / "own").train(5)
    save(run)
    run.saver.load(str(tmp_path / "other"), load_conf={"load": ["item"]})
    record = save(run.train(1))
    assert record.table("item").delta.replaced


def test_the_base_of_a_restored_run_is_durable_before_anything_stands_on_it(tmp_path, monkeypatch):
    save(start(tmp_path).train(5))
    run, done = resumed(tmp_path), []
    storage = run.saver.storage
    sync_dir, make_dir = storage.sync_dir, storage.make_dir
    monkeypatch.setattr(storage, "sync_dir", lambda name: (done.append(name), sync_dir(name)))
    monkeypatch.setattr(storage, "make_dir", lambda name: (done.append(f"make {name}"), make_dir(name)))
    save(run.train(1))
    before = done[: done.index("make ckpt_6")]
    assert "ckpt_5" in before
    assert {"ckpt_5", "ckpt_5/sparse", "ckpt_5/dense", ""} <= set(before[before.index("ckpt_5") :])


def test_a_base_that_could_not_be_made_durable_waits_for_the_next_save(tmp_path, monkeypatch):
    save(start(tmp_path).train(5))
    run = resumed(tmp_path)
    run.train(1)

    def fail(name):
        raise OSError(5, "Input/output error", name)

    with monkeypatch.context() as patch:
        run.saver._to.fence.hold()
        patch.setattr(run.saver.storage, "sync_dir", fail)
        with pytest.raises(SaveFailedError, match="Input/output error"):
            run.saver.save("ckpt_6")
    assert save(run).kind == "delta"


def test_a_base_that_is_gone_when_the_run_goes_on_is_none(tmp_path):
    run = start(tmp_path).train(5)
    save(run)
    save(run.train(1))
    later = resumed(tmp_path)
    (tmp_path / "ckpt_5" / "manifest.json").unlink()
    assert save(later.train(1)).kind == "full"
    assert list_checkpoints(later.saver.storage).ckpt_ids == ["ckpt_7"]
