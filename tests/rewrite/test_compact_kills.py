"""A compactor, and an owner that adopts, are killed at any point: what is restored stays what it was."""

import pytest
from support.delta_runs import rows_of, run_with_chain
from support.killed import killed_at
from support.sweeps import SWEEP_STRIDE

from recckpt.format import layout
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import attempt_dirs, locate
from recckpt.output_dir.offers import adopt_offers
from recckpt.rewrite.compaction import make_offer
from recckpt.rewrite.whole import Means
from recckpt.storage.transfers import VISIBLE

MOST_CALLS = 1000


def compact(run) -> str | None:
    return make_offer(run, locate(run, "ckpt_3"), Means(None, 1, 1 << 20)).directory


def owned(run) -> Fence:
    fence = Fence(run)
    fence.hold()
    return fence


def adopt(run, fence) -> list[str]:
    fence.look_again()
    return [done.directory for done in adopt_offers(run, fence, VISIBLE)]


def sweep(tmp_path, work, check, stride) -> None:
    """Kill at one point after another until the work is done, each time in an output dir of its own."""
    for count, number in enumerate(range(0, MOST_CALLS, stride)):
        run = run_with_chain(tmp_path / str(number))
        expected = rows_of(run, "ckpt_3")
        begun = work(run)
        was_there = killed_at(number, begun)
        assert rows_of(run, "ckpt_3") == expected, number
        check(run, expected)
        if not was_there:
            assert count > 1
            return
    raise AssertionError(f"more than {MOST_CALLS} calls")


def check_compaction(run, expected) -> None:
    """Check that what a dead compactor left hinders nobody, and goes with the next owner."""
    left = [name for name in attempt_dirs(run) if layout.is_offer_dir(name)]
    fence = owned(run)
    assert [name for name in attempt_dirs(run) if layout.is_offer_dir(name)] == [], left
    offered = compact(run)
    assert adopt(run, fence) == [offered]
    assert rows_of(run, "ckpt_3") == expected


def check_adoption(run, expected) -> None:
    """Check that the next owner ends what a dead one began, or begins anew."""
    fence = owned(run)
    offered = compact(run)
    assert adopt(run, fence) == [offered] * (offered is not None)
    assert locate(run, "ckpt_3").manifest.is_compacted
    assert rows_of(run, "ckpt_3") == expected


def offered_first(run):
    fence = owned(run)
    compact(run)
    return lambda: adopt(run, fence)


@pytest.mark.parametrize("stride", [29, pytest.param(min(SWEEP_STRIDE, 23), marks=pytest.mark.slow)])
def test_a_compactor_that_is_killed_leaves_what_nobody_takes_for_whole(tmp_path, stride):
    sweep(tmp_path, lambda run: lambda: compact(run), check_compaction, stride)


@pytest.mark.parametrize("stride", [9, pytest.param(min(SWEEP_STRIDE, 7), marks=pytest.mark.slow)])
def test_an_owner_that_is_killed_while_it_adopts_loses_nothing(tmp_path, stride):
    sweep(tmp_path, offered_first, check_adoption, stride)
