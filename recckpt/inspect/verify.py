"""Checks whether checkpoints are whole, and reports all that is wrong (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.manifest import Manifest
from recckpt.inspect.verify_chains import Standing, check_counts, check_links, standing_of, standing_of_all
from recckpt.inspect.verify_checkpoint import Checkup, Job, newer, unreadable
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.checkpoint_dir import has_manifest, read_intent
from recckpt.output_dir.claims import claimed_epochs, last_takeover, read_claim
from recckpt.output_dir.forget_requests import audit, pending
from recckpt.output_dir.listing import attempt_dirs
from recckpt.parallel.executor import run_on
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.verifier import check_part_anywhere
from recckpt.storage import Storage, open_parent, open_storage
from recckpt.text import Progress

_THREADS = 8


@dataclass(frozen=True)
class Problem:
    """One fault of a checkpoint."""

    directory: str  # of the checkpoint, in its output dir
    file: str  # the file, as named under the output dir
    where: str  # the place in it, or ""
    found: str  # what is there
    expected: str  # what should be there

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.file}{place}: found {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Report:
    """What was found in one checkpoint, in the files that say who owns the output dir, or in what a dead save left."""

    directory: str  # in the output dir
    manifest: Manifest | None  # None where it cannot be read
    problems: tuple[Problem, ...]  # all that is wrong, in the order of the files
    absent_deletes: int = 0  # ids that a delta deletes and that are not there: allowed, and known from a deep check
    is_checkpoint: bool = True  # False for what no checkpoint is read from


def verify(
    path: str, *, deep: bool = True, threads: int | None = None, executor: Executor | None = None
) -> list[Problem]:
    """Look for damage in a checkpoint and what it stands on, or in all checkpoints of an output dir.

    A deep check reads every byte: the checksums of all files, columns and Arrow frames, ``INTENT`` against the
    manifest, and for each table that its ids are where the catalogs say, that none occurs twice, and that its rows add
    up, of a delta those of its chain. Each link is read once, however many checkpoints stand on it. Files that the
    manifest does not list are not read.

    Args:
        path: a checkpoint or an output dir; any fsspec URL.
        deep: False checks only the manifests and the sizes of the files.
        threads: number of files to read at once; None for 8. Locally at most one a core.
        executor: checks the parts, which hold the rows, one a task: processes, or those of a cluster, which reach
            ``path`` by the same name. All else is read here.

    Returns:
        All problems, not only the first, in the order of checkpoints and files; [] if there are none.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, not even a damaged one.
        ValueError: ``threads`` is not an int of at least 1.
    """
    reports = verify_found(find_checkpoints(path), deep=deep, threads=threads, executor=executor)
    return [problem for report in reports for problem in report.problems]


@dataclass(frozen=True)
class CheckpointsToVerify:
    """The checkpoints to look at."""

    storage: Storage  # the output dir
    directories: Sequence[str]  # those with a manifest
    standing: Standing  # what they stand on
    is_output_dir: bool = False  # whether it was the output dir that was asked for, and not one checkpoint


def find_checkpoints(path: str) -> CheckpointsToVerify:
    """Return the directories with a manifest: ``path`` itself, or those in it; CheckpointNotFoundError for none."""
    storage, directory = open_parent(path)
    if has_manifest(storage, directory):
        standing = standing_of(storage, directory)
        return CheckpointsToVerify(storage, standing.links.get(directory, [directory]), standing)
    inside = open_storage(path)
    directories = sorted(name for name in attempt_dirs(inside) if _may_have_manifest(inside, name))
    if directories:
        return CheckpointsToVerify(inside, directories, standing_of_all(inside), is_output_dir=True)
    storage, checkpoint = locate_path(path)  # an id that lives in a later attempt's directory
    standing = standing_of(storage, checkpoint.directory)
    return CheckpointsToVerify(storage, standing.links.get(checkpoint.directory, [checkpoint.directory]), standing)


def verify_found(
    checkpoints: CheckpointsToVerify, *, deep: bool = True, threads: int | None = None, executor: Executor | None = None
) -> list[Report]:
    """Look for damage; arguments as of :func:`verify`.

    A checkpoint that is removed meanwhile, as by rotation, has no report; CheckpointNotFoundError if none is left. Of
    an output dir the last reports are of the files that say who owns it, if one is damaged, and of attempts whose
    ``INTENT`` cannot be read.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is an int of at least 1, found {threads!r}")
    storage, n_threads = checkpoints.storage, checkpoints.storage.threads(threads or _THREADS)
    looks = run_all(lambda name: Checkup(storage, name), checkpoints.directories, n_threads)
    if deep:
        _look_deep([look for look in looks if look.manifest], n_threads, executor)
        check_counts(looks, checkpoints.standing, n_threads)
    looks = [look for look in looks if not look.errors or _may_have_manifest(storage, look.directory)]
    check_links(looks, checkpoints.standing)
    reports = [_report(look) for look in looks]
    if not reports:
        where = ", ".join(checkpoints.directories)
        raise CheckpointNotFoundError(f"{storage.url}: found no {layout.MANIFEST} in {where}")
    return [*reports, *_other_reports(storage)] if checkpoints.is_output_dir else reports


def _other_reports(storage: Storage) -> Iterator[Report]:
    owner = tuple(_problem(layout.OWNER_DIR, error) for error in _owner_errors(storage))
    if owner:
        yield Report(layout.OWNER_DIR, None, owner, is_checkpoint=False)
    for directory in attempt_dirs(storage):
        error = None if _may_have_manifest(storage, directory) else _intent_error(storage, directory)
        if error is not None:
            yield Report(directory, None, (_problem(directory, error),), is_checkpoint=False)


def _intent_error(storage: Storage, directory: str) -> CorruptCheckpointError | None:
    """Return what is wrong with the file that says whose attempt a directory is, None where it can be read."""
    try:
        read_intent(storage, directory)
    except OSError as error:
        expected = "the attempt that was never finished; `recckpt repair --clean` removes it once its writer is dead"
        return unreadable(layout.join(directory, layout.INTENT), error, expected)
    except CorruptCheckpointError as error:
        return error
    return None


def _owner_errors(storage: Storage) -> Iterator[CorruptCheckpointError]:
    """Check the claims on an output dir, the list that tells late commits from others, and what was forgotten."""
    checks: list[Callable[[], object]] = [partial(read_claim, storage, epoch) for epoch in claimed_epochs(storage)]
    checks += [partial(last_takeover, storage), partial(pending, storage), partial(audit, storage)]
    for check in checks:
        try:
            check()
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError as error:
            yield unreadable(layout.OWNER_DIR, error, "a file of one that writes here")
        except CorruptCheckpointError as error:
            yield error
        except FormatVersionError as error:
            yield newer(error)


def _look_deep(looks: Sequence[Checkup], threads: int, executor: Executor | None) -> None:
    """Read everything, with a thread, or a task of the executor, for each file."""
    manifests = [look.manifest for look in looks if look.manifest]
    what = manifests[0].ckpt_id if len(manifests) == 1 else f"{len(manifests)} checkpoints"
    with Progress(f"verifying {what}", sum(manifest.n_bytes for manifest in manifests)) as progress:
        progress.add_rows(sum(manifest.rows for manifest in manifests))
        _run_step(Checkup.check_files, looks, threads, progress)
        _read_parts(looks, threads, executor, progress)
        _run_step(Checkup.check_ids, looks, threads, progress)


def _run_step(
    step: Callable[[Checkup, Callable[[int], object]], Iterable[Job]],
    looks: Sequence[Checkup],
    threads: int,
    progress: Progress,
) -> None:
    jobs = [(look, job) for look in looks for job in step(look, progress.advance)]
    for (look, _), errors in zip(jobs, run_all(lambda pair: list(pair[1]()), jobs, threads), strict=True):
        look.add(errors)


def _read_parts(looks: Sequence[Checkup], threads: int, executor: Executor | None, progress: Progress) -> None:
    pairs = [(look, task) for look in looks for task in look.part_tasks()]
    if executor is None:
        checks = run_all(lambda pair: pair[0].check_part(pair[1], progress.advance), pairs, threads)
    else:
        checks = run_on(
            executor,
            check_part_anywhere,
            [task for _, task in pairs],
            on_done=lambda task: progress.advance(task.n_bytes),
            is_stopped=lambda: False,
        )
    for (look, task), checked in zip(pairs, checks, strict=True):
        look.take_part(task, checked)


def _report(look: Checkup) -> Report:
    problems = tuple(_problem(look.directory, error) for error in look.errors)
    return Report(look.directory, look.manifest, problems, look.absent_deletes)


def _problem(directory: str, error: CorruptCheckpointError) -> Problem:
    return Problem(directory, error.path, error.where, error.found, error.expected)


def _may_have_manifest(storage: Storage, directory: str) -> bool:
    """Say whether a directory has a manifest, or cannot be looked into: then it has to be reported."""
    try:
        return has_manifest(storage, directory)
    except OSError:
        return True
