"""T8: a run saves and rotates with max_keep=1 without a pause; whoever reads it gets one whole step, or is told."""

import json
import signal
import threading
from contextlib import contextmanager

import pytest
from support import rotating_run
from support.rotating_run import READERS, Run, WrongReadError, read_often, write_until
from support.sweeps import SWEEP_STRIDE, mostly_slow
from support.warm_python import Piped

from recckpt.errors import CheckpointRemovedError
from recckpt.output_dir import open_files

ALL_READS = 10_000
STEPS = 11  # that each reader has seen at least, or it has not read beside saves


@contextmanager
def writing(url, saves_of):
    """A thread that saves as long as the block runs, after its first checkpoint is there."""
    stop, begun, saves = threading.Event(), threading.Event(), []

    def write():
        try:
            saves.append(write_until(stop, url, begun.set, saves_of))
        finally:
            begun.set()

    thread = threading.Thread(target=write)
    thread.start()
    begun.wait()
    try:
        yield saves
    finally:
        stop.set()
        thread.join()
    assert saves, "the writer failed"


def count(figures, outcome):
    told = outcome.pop("told")
    steps = outcome.pop("steps")
    figures.add("T8", **outcome)
    assert (outcome["wrong"], outcome["errors"]) == (0, 0), told
    return steps


@mostly_slow("saves_of")
@pytest.mark.parametrize("saves_of", ["full", "delta"])
@pytest.mark.parametrize("kind", READERS)
def test_whoever_reads_a_run_that_rotates_gets_one_whole_step(url, kind, saves_of, figures):
    with writing(url, saves_of):
        outcome = read_often(kind, url, 3)
    removed = outcome["removed"]
    steps = count(figures, outcome)
    assert steps or removed
    if not url.startswith("memory://"):
        assert removed == 0, "what is mapped stays"


@pytest.mark.parametrize("is_held", [True, False])
def test_what_is_open_is_read_whole_though_the_run_goes_on_and_without_that_the_harness_sees_it(
    tmp_path, monkeypatch, finding, is_held
):
    run = Run(str(tmp_path))
    run.save()
    opened, read = rotating_run.CheckpointReader, rotating_run.by_reader(str(tmp_path))

    def open_and_save(url):
        reader = opened(url)
        run.save()
        return reader

    monkeypatch.setattr(rotating_run, "CheckpointReader", open_and_save)
    monkeypatch.setattr(open_files, "_MOST_MAPS", open_files._MOST_MAPS if is_held else 0)
    if is_held:
        assert [read() for _ in range(3)] == [1, 2, 3]
    else:
        with finding("its writer removed this checkpoint", CheckpointRemovedError):
            read()


def test_the_harness_finds_readers_that_mix_two_steps(tmp_path):
    run = Run(str(tmp_path))
    run.save()
    run.tables["t"].insert(run.torch.tensor([7]), run.torch.full((1, 4), 2.0))
    with pytest.raises(WrongReadError, match="values of t"):
        run.checked()


@pytest.mark.slow
@pytest.mark.parametrize("saves_of", ["full", "delta"])
def test_ten_thousand_reads_by_other_processes_are_all_whole(tmp_path, saves_of, figures):
    url = str(tmp_path / "runs")
    n_reads = ALL_READS // len(READERS) // SWEEP_STRIDE
    processes = [Piped(rotating_run.__file__, "write", url, saves_of)]
    try:
        assert processes[0].stdout.readline() == "ready\n"
        readers = [Piped(rotating_run.__file__, "read", kind, url, n_reads, STEPS) for kind in READERS]
        processes += readers
        outcomes = [json.loads(reader.stdout.read()) for reader in readers]
        processes[0].stdin.close()
        said = processes[0].stdout.read()
        assert said, "the writer died before the readers were through"
        n_saves = int(said)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    n_removed = sum(outcome["removed"] for outcome in outcomes)
    n_steps = [count(figures, outcome) for outcome in outcomes]
    figures.add("T8", saves=n_saves)
    assert n_removed == 0, "what is mapped stays"
    assert min(n_steps) >= STEPS, f"{n_saves} saves, and the readers saw {n_steps} of them"
