"""A rank dies or falls silent in any phase of a save: nothing torn is committed, and the others all know who it was."""

import json
import signal

import pytest
from support.dying_ranks import HANG, PHASES, Job
from support.paths import SUPPORT
from support.rank_processes import run_script
from support.sweeps import SWEEP_STRIDE
from support.thread_ranks import on_ranks

from recckpt import CheckpointManager
from recckpt.inspect.verify import verify

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
MARGIN_SEC = 5.0  # of survivors beyond the timeout


def case(n_ranks, victim, number, phase, *, background=False):
    timeout_sec = 60.0 if number == KILL else 6.0  # of what is killed nobody has to wait for the end
    return {
        "n_ranks": n_ranks,
        "victim": victim,
        "signal": int(number),
        "phase": phase,
        "background": background,
        "timeout_sec": timeout_sec,
    }


def run(root, cases):
    run_script(SUPPORT / "dying_ranks.py", root, json.dumps(cases), seconds=40.0 * len(cases) + 120)
    for number, one in enumerate(cases):
        try:
            check_survivors(one, json.loads((root / str(number) / "survivors.json").read_text()))
            check_restart(
                one, root / str(number) / "runs", json.loads((root / str(number) / "survivors.json").read_text())
            )
        except AssertionError as error:
            error.add_note(f"of {one}")
            raise


def check_survivors(one, found):
    assert found["hung"] == []
    assert sorted(met["rank"] for met in found["met"]) == [r for r in range(one["n_ranks"]) if r != one["victim"]]
    for met in found["met"]:
        for error in (met["first"], met["again"]):
            assert error["kind"] == "SaveFailedError", error
            assert one["victim"] in error["lost"] or not error["lost"], error
            assert "restart" in error["text"]
            if one["n_ranks"] == 2 or one["signal"] == KILL:
                assert error["rank"] == one["victim"], error
        assert met["first"]["step"] in ((2,) if one["signal"] == HANG else (2, 3))
        assert met["first"]["time"] - found["died"] <= one["timeout_sec"] + MARGIN_SEC
        assert met["again"]["time"] < one["timeout_sec"] / 2, "it is known by now"


def check_restart(one, url, found):
    """Check that what is committed is whole, and that as many ranks and fewer go on from it."""
    assert verify(str(url)) == []
    acknowledged = max(1, *(met["acknowledged"] for met in found["met"]))
    may_be_committed = one["phase"] in ("committed", "rotation") or (one["phase"] == "commit" and one["victim"])
    for n_ranks in (one["n_ranks"], 1):

        def restart(rank, connect, n_ranks=n_ranks):
            job = Job(url, rank, n_ranks)
            connect(job.saver)
            step = CheckpointManager(job.saver, 1, shard_id=rank, shard_num=n_ranks).restore(required=True)
            return step, job.is_of_step(step)

        [(step, is_whole)] = set(on_ranks(n_ranks, restart))
        assert is_whole
        assert step == 1 or may_be_committed
        assert step >= acknowledged


@pytest.mark.slow
def test_a_rank_that_is_killed_or_falls_silent_is_named_and_nothing_is_committed_that_lacks_its_shard(tmp_path):
    run(
        tmp_path,
        [
            case(2, 1, KILL, "writing"),
            case(2, 0, KILL, "commit", background=True),
            case(2, 1, STOP, "written", background=True),
            case(2, 0, STOP, "staging"),
        ],
    )


@pytest.mark.slow
def test_a_rank_whose_storage_hangs_is_named_with_the_save_that_hung_and_the_others_end_at_once(tmp_path):
    run(
        tmp_path,
        [
            case(2, 1, HANG, "writing", background=True),
            case(2, 0, HANG, "commit", background=True),
            case(3, 1, HANG, "writing"),
            case(3, 2, HANG, "written", background=True),
        ],
    )


def every_case(n_ranks):
    return [
        case(n_ranks, victim, number, phase, background=background)
        for phase in PHASES
        for victim in range(n_ranks)
        for number in (KILL, STOP)
        for background in (False, True)
        if victim == 0 or phase != "committed"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_each_rank_may_die_in_each_phase(tmp_path, n_ranks):
    run(tmp_path, every_case(n_ranks)[:: min(SWEEP_STRIDE, 11)])
