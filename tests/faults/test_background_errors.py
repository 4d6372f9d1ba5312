"""Errors in every room of a save in the background: each is told once, nothing is lost, and the next save lands."""

import errno

import pytest
from faults.job import Job, State, check_tidy, restored
from faults.storage_faults import Faults
from support.sweeps import SWEEP_STRIDE, mostly_slow

import recckpt.save.stage
from recckpt import CheckpointManager
from recckpt.errors import CommitNotDurableError, SaveFailedError
from recckpt.sparse.table.snapshot import Snapshot

OLD = State(1)

STORAGE_ROOMS = ("begin", "write", "last write", "fsync", "commit", "sync", "rotate", "index")
LATE = {"rotate", "index"}  # the checkpoint is safe by then: a failure there is a warning
MEMORY_ROOMS = {"stage": (recckpt.save.stage, "source_to_save"), "gather": (Snapshot, "read_slots")}
TOLD_BY = {
    "step": lambda manager: manager.step(),
    "save": lambda manager: manager.save(),
    "close": lambda manager: manager.close(),
}


def number_in(log, room):
    """Return the number of the operation that fails for a room, of those of a save that goes well."""
    commit = len(log) - 1 - log[::-1].index("put_if_absent")
    return 1 + {
        "begin": log.index("make_dir"),
        "write": log.index("file.write"),
        "last write": commit - log[commit::-1].index("file.write"),
        "fsync": log.index("file.close"),
        "commit": commit,
        "sync": log.index("sync_dir", commit),
        "rotate": log.index("remove", commit),
        "index": log.index("replace", commit),
    }.get(room, 0)


class Trial:
    """A process that takes over from one that has saved, and saves each of its steps in the background."""

    def __init__(self, url):
        first = Job(url)
        first.advance()
        first.save()
        self.url, self.job = url, Job(url)
        self.manager = CheckpointManager(self.job.saver, 1, async_save=True)
        assert self.manager.restore() == OLD.step
        self.faults = Faults(self.job.saver.storage)

    def step(self):
        """Train a step, begin its save, and change everything at once; return the state that is saved."""
        state = State(self.manager.global_step + 1)
        self.job.set_state(state.step)
        try:
            self.manager.step()
        finally:
            self.job.set_state(state.step + 1000)
        return state

    def fail(self, told_by):
        """Save while something fails; return the state and all that is told of it."""
        told, ways = [], [told_by, "close", "close"]
        try:
            self.step()
            self.job.saver._runner._worker.wait()
        except (MemoryError, SaveFailedError) as error:  # of the staging, or of the look at the room there is
            told, ways = [error], ["close"]
        state = State(self.manager.global_step)
        for way in ways:
            try:
                TOLD_BY[way](self.manager)
            except SaveFailedError as error:
                told.append(error)
        return state, told

    def check(self, *newest):
        """Check that one of these is the newest, that the next save lands, and the next process tidies up."""
        restored(self.url, newest)
        state = self.step()
        self.manager.close()
        following, _ = restored(self.url, [state])
        following.advance()
        following.save()
        check_tidy(following.saver.storage, 1, State(state.step + 1))


@pytest.fixture(params=["local", "memory"])
def make_url(request, ram):
    """Return empty output dirs, one after another."""
    count = iter(range(10_000))
    if request.param == "local":
        return lambda: str(ram / str(next(count)))
    memory_url = request.getfixturevalue("memory_url")
    return lambda: f"{memory_url}/{next(count)}"


LOGS = {}  # by kind of storage: each save of a trial does the same


def log_of_a_good_save(make_url):
    url = make_url()
    kind = url.partition("://")[0] if "://" in url else "local"
    if kind not in LOGS:
        trial = Trial(url)
        trial.step()
        trial.manager.close()
        LOGS[kind] = trial.faults.log
    return LOGS[kind]


def fail_in_storage(url, figures, number, told_by, *, for_ever):
    """Fail an operation, or this and all that follow; return whether that was told."""
    trial = Trial(url)
    trial.faults.plant(number, errno.EIO, for_ever=for_ever)
    state, first = trial.fail(told_by)
    _, second = trial.fail(told_by) if for_ever else (None, [])
    trial.faults.plant(0, 0)
    told = first + second
    assert (len(first) <= 1, len(second)) == (True, for_ever), told
    assert all(error.__cause__.errno == errno.EIO for error in told)
    if any(isinstance(error, CommitNotDurableError) for error in first):
        trial.check(state, OLD)
    else:
        trial.check(OLD if first else state)
    figures.add("errors in the background", faults=1 + for_ever, told=len(told), lost=0)
    return len(first) == 1


@mostly_slow("room")
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("room", STORAGE_ROOMS)
def test_an_error_of_the_storage_is_told_once_and_loses_nothing(make_url, figures, room, for_ever):
    number = number_in(log_of_a_good_save(make_url), room)
    told_by = "close" if room in LATE else list(TOLD_BY)[(STORAGE_ROOMS.index(room) + for_ever) % 3]
    told = fail_in_storage(make_url(), figures, number, told_by, for_ever=for_ever)
    assert told == (room not in LATE)


@mostly_slow("room")
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("told_by", TOLD_BY)
@pytest.mark.parametrize("room", MEMORY_ROOMS)
def test_an_error_before_anything_is_written_is_told_once_and_loses_nothing(
    ram, figures, monkeypatch, room, told_by, for_ever
):
    trial = Trial(str(ram / "runs"))
    with monkeypatch.context() as patch:
        patch.setattr(*MEMORY_ROOMS[room], lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError(room)))
        for _ in range(1 + for_ever):
            _, [error] = trial.fail(told_by)
            cause = error if room == "stage" else error.__cause__
            assert isinstance(cause, MemoryError)
    trial.check(OLD)
    figures.add("errors in the background", faults=1 + for_ever, told=1 + for_ever, lost=0)


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
def test_any_operation_of_the_storage_may_fail(make_url, figures, for_ever):
    log = log_of_a_good_save(make_url)
    committed = number_in(log, "sync")
    told = []
    first = 1 + SWEEP_STRIDE // 2 * for_ever
    for number in sorted({*range(first, len(log) + 1, SWEEP_STRIDE), len(log)}):
        told_by = list(TOLD_BY)[number % 3] if number <= committed else "close"
        told.append(fail_in_storage(make_url(), figures, number, told_by, for_ever=for_ever))
    assert told == sorted(told, reverse=True), "what comes after the commit fails nothing"
    assert told.count(True) >= (committed - first) // SWEEP_STRIDE > 0
    assert told.count(False) > 0
