"""SIGTERM at any moment of a run that saves in the background: nothing that was announced is lost, nothing is torn."""

import random
from signal import SIGTERM

import pytest
from support.signalled_run import Job, Runs
from support.sweeps import SWEEP_STRIDE

from recckpt.output_dir.listing import list_checkpoints
from recckpt.storage import open_storage

N_STEPS, INTERVAL = 12, 3  # of at_any_moment
GRACE = (None, None, 0.001, 0.05)  # seconds
RUN = {"interval": INTERVAL, "async_save": True, "save_at_start": True}


@pytest.fixture(scope="module")
def runs():
    runs = Runs()
    yield runs
    runs.stop()


def announced(said):
    """Return the step that a run said it saves for a signal, None where it was over before."""
    steps = [int(line.rpartition(" ")[2]) for line in said if line.startswith(f"signal {SIGTERM:d}: saving step ")]
    assert len(steps) <= 1
    return steps[0] if steps else None


def acceptable(step, grace_sec):
    """Return the steps that a restart may find: the announced one, or the newest that was surely committed before."""
    if step is None:
        return {N_STEPS}
    if grace_sec is None:
        return {step}
    due = list(range(0, step, INTERVAL))
    return {step, *due[-2:]}  # of which the last may have been under way


def send_signals(runs, figures, tmp_path, n_moments, seed):
    codes, [said] = runs.run("at_any_moment", tmp_path / "all", job=RUN)
    assert codes == [0]
    in_training, in_all = (int(line.split()[0]) for line in said)
    draw = random.Random(seed)
    for number in range(n_moments):
        event, grace_sec = draw.randrange(in_all if number % 5 == 4 else in_training), draw.choice(GRACE)
        url = tmp_path / f"run{number}"
        codes, [said] = runs.run("at_any_moment", url, options={"event": event}, job={**RUN, "grace_sec": grace_sec})
        ended = codes == [-SIGTERM]
        assert ended or (codes == [0] and said[-1].endswith(" events")), (event, codes, said)  # the run was shorter
        step = announced(said)
        job = Job(str(url))
        found = job.manager.restore()
        assert found in acceptable(step, grace_sec), (event, grace_sec, said)
        assert job.is_of_step(found), (event, grace_sec, said)
        assert list_checkpoints(open_storage(str(url))).damaged == {}, (event, grace_sec, said)
        figures.add(
            "SIGTERM at any moment",
            **{"moments": 1, "ended by it": ended, "announced": step is not None, "found the announced": found == step},
            **{"found the one before": step is not None and found < step, "torn": 0},
        )


@pytest.mark.slow
def test_a_restart_finds_the_step_that_was_announced_or_the_one_before(runs, figures, tmp_path):
    send_signals(runs, figures, tmp_path, 5, seed=0)


@pytest.mark.slow
def test_at_any_of_200_moments(runs, figures, tmp_path):
    send_signals(runs, figures, tmp_path, 200 // SWEEP_STRIDE, seed=1)
