"""A trainer saves deltas, a compactor makes offers of them meanwhile, and what is restored is what was saved."""

import pytest
from support.builders import Run, state_of
from support.sweeps import mostly_slow

import recckpt
from recckpt import Deltas
from recckpt.inspect.verify import verify
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import list_checkpoints, newest
from recckpt.output_dir.offers import adopt_offers
from recckpt.output_dir.timeline import read_timeline
from recckpt.storage import open_storage
from recckpt.storage.transfers import VISIBLE


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request, tmp_path):
    return str(tmp_path / "runs") if request.param == "local" else request.getfixturevalue(f"{request.param}_url")


DELTAS = Deltas(max_chain_bytes=1e9, max_dirty=1.0)  # a small model changes nearly all of its rows


def restored(url) -> dict:
    run = Run(url, seed=9)
    assert run.manager.restore()
    return state_of(run)


def directories(url) -> set[str]:
    return {c.directory for c in list_checkpoints(open_storage(url)).committed}


def test_a_delta_is_restored_from_its_form(url):
    run = Run(url, deltas=DELTAS, max_keep=None).train(30)
    saved = state_of(run)
    done = recckpt.compact(url)
    assert (done.ckpt_id, done.n_links) == ("ckpt_30", 3)
    assert restored(url) == saved
    storage, fence = open_storage(url), Fence(open_storage(url))
    fence.hold()
    adopt_offers(storage, fence, VISIBLE, 1)
    assert newest(storage).directory == done.directory
    assert restored(url) == saved
    assert verify(url) == []


@mostly_slow()
def test_the_save_that_adopts_an_offer_tells_how_long_a_chain_it_leaves(url):
    run = Run(url, deltas=DELTAS, max_keep=None).train(30)
    recckpt.compact(url)
    run.train(10)
    assert [line["n_links"] for line in read_timeline(open_storage(url))] == [1, 2, 3, 2]
    assert len(newest(open_storage(url)).links) == 2


@mostly_slow()
def test_a_trainer_adopts_an_offer_at_its_next_save_and_drops_what_that_replaces_at_the_one_after(url):
    run = Run(url, deltas=DELTAS, max_keep=1).train(30)
    done = recckpt.compact(url)
    run.train(10)
    assert directories(url) == {"ckpt_10", "ckpt_20", "ckpt_30", done.directory, "ckpt_40"}
    assert [link.directory for link in newest(open_storage(url)).links] == ["ckpt_40", done.directory]
    assert restored(url) == state_of(run)
    run.train(10)
    assert directories(url) == {done.directory, "ckpt_40", "ckpt_50"}
    assert restored(url) == state_of(run)
    assert verify(url) == []
