"""A saver compacts what its deltas stand on, in a thread of its own."""

import threading

import pytest
from support.builders import Run, state_of

from recckpt import Deltas
from recckpt.compaction import whole
from recckpt.format import layout
from recckpt.output_dir.listing import attempt_dirs, list_checkpoints
from recckpt.storage import open_storage


def deltas(**options) -> Deltas:
    return Deltas(full_every=2, max_chain_bytes=1e9, max_dirty=1.0, compact=True, **options)


def compaction() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "recckpt-compact"]


def join() -> None:
    for thread in compaction():
        thread.join()


def offers(root) -> list[str]:
    return [name for name in attempt_dirs(open_storage(str(root))) if layout.is_offer_dir(name)]


def restored(root) -> dict:
    run = Run(root, seed=9)
    assert run.manager.restore()
    return state_of(run)


@pytest.mark.slow
def test_a_chain_that_is_compacted_needs_no_further_full_save(tmp_path):
    run = Run(tmp_path, deltas=deltas(), max_keep=2)
    for _ in range(9):
        run.train(10)
        join()
        assert restored(tmp_path) == state_of(run)
    committed = list_checkpoints(open_storage(str(tmp_path))).committed
    saved = [c.manifest for c in committed if not c.manifest.form_of]
    assert {record.kind for record in saved} == {"delta"}  # the first one, which was full, is gone
    assert any(c.manifest.form_of for c in committed)
    assert len(committed) < 9


def test_where_no_offer_is_adopted_a_save_is_full_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("recckpt.save.commit.adopt_offers", lambda *args: [])
    run = Run(tmp_path, deltas=deltas(), max_keep=None)
    for _ in range(6):
        run.train(10)
        join()
    kinds = [c.manifest.kind for c in list_checkpoints(open_storage(str(tmp_path))).committed]
    assert kinds == ["full", "delta", "delta", "delta", "delta", "full"]
    assert len(offers(tmp_path)) == 1  # one that waits is enough


def test_without_the_option_nothing_is_compacted(tmp_path):
    Run(tmp_path, deltas=Deltas(full_every=2, max_chain_bytes=1e9, max_dirty=1.0), max_keep=None).train(60)
    assert (offers(tmp_path), compaction()) == ([], [])


def test_a_failed_compaction_is_logged_and_fails_no_save(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole, "plan_of_chain", fail)
    run = Run(tmp_path, deltas=deltas(), max_keep=None).train(30)
    join()
    run.train(10)
    join()
    assert "'ckpt_30' could not be compacted: [Errno 28] No space left on device" in caplog.text
    assert offers(tmp_path) == []
    assert restored(tmp_path) == state_of(run)


def test_closing_the_saver_ends_a_compaction_which_leaves_nothing(tmp_path, gate):
    at_work = gate(whole, "plan_of_chain")
    run = Run(tmp_path, deltas=deltas(), max_keep=None).train(30)
    at_work.wait()
    closing = threading.Thread(target=run.saver.close)
    closing.start()
    assert run.saver._to.offers._stop.wait(60)
    at_work.open()
    closing.join()
    assert (compaction(), offers(tmp_path)) == ([], [])
    assert restored(tmp_path) == state_of(run)
    run.train(10)  # it may go on being used
    run.saver.close()
