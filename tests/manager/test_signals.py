"""Signals that ask for a save: noted, answered between two steps, and followed then."""

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR1, SIGUSR2

import pytest
from support.builders import checkpoints
from support.paths import PYTHONPATH
from support.signalled_run import Job, Runs
from support.sweeps import mostly_slow
from torch import nn

from recckpt import CheckpointManager, Saver
from recckpt.manager.signals import SignalWatch, goes_on, most_urgent
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies import OnSignal
from recckpt.storage import open_storage


@pytest.fixture
def handled():
    """Signals that a handler of ours has got, in this process; afterwards all are as they were."""
    got = []
    before = {number: signal.getsignal(number) for number in (SIGTERM, SIGUSR1, SIGUSR2)}
    for number in before:
        signal.signal(number, lambda number, frame: got.append(number))
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def watch(handled):
    watch = SignalWatch(OnSignal((SIGTERM, SIGUSR1, SIGUSR2)))
    yield watch
    watch.release()


# the watch


def test_only_sigusr1_and_sigusr2_let_a_process_go_on_and_one_that_ends_it_goes_before_others():
    assert [goes_on(number) for number in (SIGUSR1, SIGUSR2, SIGTERM, SIGINT)] == [True, True, False, False]
    assert most_urgent([None, SIGUSR1, SIGTERM, SIGINT, None]) == SIGTERM
    assert most_urgent([SIGUSR2, SIGUSR1]) == SIGUSR2
    assert most_urgent([None]) is None


def test_a_signal_is_noted_and_taken_once_and_to_follow_is_to_do_what_it_did_before(watch, handled):
    assert watch.take() is None
    for number in (SIGUSR1, SIGTERM, SIGUSR2):
        signal.raise_signal(number)
    assert (watch.take(), watch.take(), handled) == (SIGTERM, None, []), "of several the one that ends the process"
    watch.follow(SIGUSR1)
    assert (handled, watch.is_watching) == ([], True)
    watch.follow(SIGTERM)
    assert (handled, watch.is_watching) == ([SIGTERM], False)


def closed(tmp_path):
    with manager_of(tmp_path, save_on_signal=(SIGTERM, SIGUSR1)) as manager:
        manager.step()


def refused(tmp_path):
    with pytest.raises(ValueError, match="OnSignal: grace_sec must be a finite number above 0"):
        manager_of(tmp_path, save_on_signal=OnSignal((SIGTERM,), grace_sec=0))


@pytest.mark.parametrize(
    "end",
    [
        lambda path: SignalWatch(OnSignal((SIGTERM, int(SIGTERM)))).release(),  # one named twice is watched once
        lambda path: SignalWatch(OnSignal(())),
        lambda path: SignalWatch(OnSignal((SIGTERM,))) and None,  # forgotten
        closed,
        refused,
    ],
)
def test_a_watch_that_has_ended_or_has_none_to_wait_for_holds_no_signal_back(tmp_path, handled, end):
    end(tmp_path)
    gc.collect()
    signal.raise_signal(SIGTERM)
    assert handled == [SIGTERM]


@pytest.mark.parametrize("came", [[], [SIGUSR1, SIGTERM]])
def test_a_released_watch_gives_all_back_and_follows_what_nobody_has_answered(watch, handled, came):
    for number in came:
        signal.raise_signal(number)
    watch.release()
    assert handled == came[1:]
    signal.raise_signal(SIGUSR1)
    assert (handled, watch.take()) == ([*came[1:], SIGUSR1], None)
    watch.release()


@pytest.mark.parametrize(
    "signals",
    [
        (SIGTERM, SIGKILL),
        (SIGTERM, 0),
        (SIGTERM, "SIGKILL"),
        (SIGTERM, None),
        2.5,
        True,
        (True,),
        "SIGTREM",
        ["SIG_IGN"],
    ],
)
def test_what_cannot_be_caught_is_refused_and_nothing_is_held_back(tmp_path, signals, handled):
    text = "did you mean 'SIGTERM'" if signals == "SIGTREM" else "name signals that can be caught, in the main thread"
    with pytest.raises(ValueError, match=f"save_on_signal=.*{text}"):
        manager_of(tmp_path, save_on_signal=signals)
    signal.raise_signal(SIGTERM)
    assert handled == [SIGTERM]


def test_a_handler_that_somebody_has_set_since_stays(watch, handled):
    others = []
    signal.signal(SIGTERM, lambda number, frame: others.append(number))
    watch.release()
    signal.raise_signal(SIGTERM)
    assert (others, handled) == ([SIGTERM], [])


def test_watches_over_each_other_end_in_any_order(watch, handled):
    upper = SignalWatch(OnSignal((SIGTERM,)))
    signal.raise_signal(SIGTERM)
    upper.follow(upper.take())
    assert (watch.take(), handled) == (SIGTERM, [])
    upper = SignalWatch(OnSignal((SIGTERM,)))
    watch.release()
    signal.raise_signal(SIGTERM)
    upper.follow(upper.take())
    assert handled == [SIGTERM]


def test_a_manager_in_the_place_of_another_follows_the_signal(tmp_path, handled):
    for _ in range(3):
        manager = manager_of(tmp_path, save_on_signal=(SIGTERM,))
    gc.collect()
    signal.raise_signal(SIGTERM)
    manager.step()
    assert (checkpoints(tmp_path), handled) == (["ckpt_1"], [SIGTERM])


def test_process_1_which_no_signal_ends_by_default_exits_as_a_shell_says_it():
    own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]  # as a container has
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("NO PROCESS 1 IS TRIED: this machine gives nobody pids of their own by `unshare`")
    code = (
        "import os, signal; from recckpt.manager.signals import SignalWatch\n"
        "from recckpt.policies import OnSignal; assert os.getpid() == 1\n"
        "watch = SignalWatch(OnSignal('SIGTERM')); signal.raise_signal(15); watch.follow(watch.take())"
    )
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    assert subprocess.run([*own, sys.executable, "-c", code], env=env).returncode == 128 + SIGTERM


def test_a_signal_ends_a_fork_as_if_nobody_watched():
    watch = SignalWatch(OnSignal((SIGTERM, SIGUSR1)))
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()

    def work():
        runs.set()
        while True:  # not a wait for a lock: CPython follows no signal that comes just before it, until it ends
            pass

    worker = fork.Process(target=work)
    worker.start()
    runs.wait()
    worker.terminate()
    worker.join()
    watch.release()
    assert worker.exitcode == -SIGTERM


def test_only_the_main_thread_can_watch():
    refused = []

    def work():
        try:
            SignalWatch(OnSignal((SIGTERM,)))
        except ValueError as error:
            refused.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in refused[0]


# the manager, in this process


def manager_of(url, **options):
    return CheckpointManager(Saver(nn.Linear(1, 1), output_dir=str(url)), 10**9, **options)


@pytest.mark.parametrize(
    "signals", [(SIGTERM, SIGUSR1), ("SIGTERM", SIGUSR1), ("sigterm", "usr1"), "SIGTERM", SIGTERM], ids=str
)
def test_a_manager_saves_in_the_step_after_which_it_follows_the_signal_however_that_is_named(
    tmp_path, handled, signals
):
    manager = manager_of(tmp_path, save_on_signal=signals)
    manager.step()
    signal.raise_signal(SIGTERM)
    assert (handled, checkpoints(tmp_path)) == ([], [])
    manager.step()
    assert (handled, checkpoints(tmp_path)) == ([SIGTERM], ["ckpt_2"])


@pytest.fixture
def python_handles_interrupts():
    """As where a shell runs the tests in the foreground; what it runs in the background ignores them."""
    before = signal.signal(SIGINT, signal.default_int_handler)
    yield
    signal.signal(SIGINT, before)


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_is_raised_from_the_step_after_its_save(tmp_path):
    manager = manager_of(tmp_path, save_on_signal=(SIGINT,))
    signal.raise_signal(SIGINT)
    with pytest.raises(KeyboardInterrupt):
        manager.step()
    assert checkpoints(tmp_path) == ["ckpt_1"]
    assert signal.getsignal(SIGINT) is signal.default_int_handler


def test_a_step_that_was_due_anyway_is_saved_once(tmp_path, handled):
    manager = manager_of(tmp_path, async_save=True, save_on_signal=(SIGTERM,), ephemeral=1)
    signal.raise_signal(SIGTERM)
    manager.step()
    regular = manager_of(tmp_path, async_save=True, save_on_signal=(SIGTERM,))
    regular.restore()
    assert (handled, regular.global_step) == ([SIGTERM], 1)
    [found] = list_checkpoints(regular.saver.storage).committed
    assert found.manifest.ephemeral is False, "the ephemeral one was begun, and the one for the signal took its place"
    manager.close()
    regular.close()


def test_with_async_save_training_goes_on_while_the_save_for_sigusr1_is_written(tmp_path, handled, gate):
    manager = manager_of(tmp_path, async_save=True, save_on_signal=(SIGUSR1,))
    writing = gate(type(manager.saver.storage), "create")
    signal.raise_signal(SIGUSR1)
    manager.step()
    assert manager.saver.is_saving
    writing.open()
    manager.close()
    assert checkpoints(tmp_path) == ["ckpt_1"]


# real processes


@pytest.fixture(scope="module")
def runs():
    runs = Runs()
    yield runs
    runs.stop()


def restored(url):
    job = Job(str(url))
    step = job.manager.restore()
    assert job.is_of_step(step)
    assert list_checkpoints(open_storage(str(url))).damaged == {}
    return step


SAVING = f"signal {SIGTERM:d}: saving step 3"


@mostly_slow()
@pytest.mark.parametrize(
    ("scene", "job", "code", "said", "step"),
    [
        *(("sigterm", {"async_save": flag}, -SIGTERM, f"^{SAVING}$", 3) for flag in (False, True)),
        ("sigusr1", {}, 0, f"^signal {SIGUSR1:d}: saving step 3\nstep 5$", 3),  # training goes on
        ("both_signals", {}, -SIGTERM, f"^{SAVING}$", 3),  # it wins over a SIGUSR1 that comes after it
        ("more_signals_during_the_commit", {}, -SIGTERM, "signals before manifest.json$", 3),
        *(
            (scene, {"grace_sec": 0.05}, -SIGTERM, "step 3 is not saved after 0.05 s of grace$", 1)
            for scene in ("storage_that_hangs", "save_before_that_hangs")
        ),
        (
            "save_that_fails",
            {},
            -SIGTERM,
            r"signal 15: saving 'ckpt_3' failed on rank 0: OSError: \[Errno 5\] broken",
            1,
        ),
        ("signal_after_the_last_step", {}, -SIGTERM, "^the block ends$", 2),  # it is followed when all is saved
    ],
)
def test_a_process_does_what_a_signal_asks_after_the_save_and_what_it_leaves_is_whole(
    runs, tmp_path, scene, job, code, said, step
):
    codes, [lines] = runs.run(scene, tmp_path / "runs", job=job)
    assert codes == [code]
    assert re.search(said, "\n".join(lines))
    assert restored(tmp_path / "runs") == step
    lines = (tmp_path / "runs/timeline.jsonl").read_text().splitlines()
    assert all(json.loads(line)["kind"] == "full" for line in lines), "a run that a signal ends has not ended well"


# two ranks


@mostly_slow()
@pytest.mark.parametrize(
    ("scene", "job", "said"),
    [
        *(("signal_to_rank_1", {"async_save": flag}, f"^{SAVING}$") for flag in (False, True)),
        ("other_signals_to_each_rank", {}, ""),  # of which one has to end
        ("save_before_that_failed", {"interval": 2, "async_save": True}, "saving 'ckpt_2' failed on rank 0.*$"),
    ],
)
def test_where_one_rank_is_to_end_all_save_the_same_step_and_end(runs, tmp_path, scene, job, said):
    codes, lines = runs.run(scene, tmp_path / "runs", ranks=2, job=job)
    assert codes == [-SIGTERM, -SIGTERM]
    assert all(re.search(said, "\n".join(of_rank)) for of_rank in lines)
    newest = list_checkpoints(open_storage(str(tmp_path / "runs"))).committed[-1]
    assert (newest.ckpt_id, len(newest.manifest.shards)) == ("ckpt_3", 2)
    assert restored(tmp_path / "runs") == 3


def test_ranks_whose_data_passes_an_hour_at_different_steps_save_it_once(runs, tmp_path):
    codes, said = runs.run("event_times_that_differ", tmp_path / "runs", ranks=2)
    assert (codes, said) == ([0, 0], [["2 saves", "7300.0"]] * 2)
