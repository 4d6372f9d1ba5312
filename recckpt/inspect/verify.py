"""Checks checkpoints and their chains completely, and reports all damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.catalog import Batch
from recckpt.format.manifest import Manifest
from recckpt.inspect.verify_checkpoint import Checkup, as_damage, run_step
from recckpt.output_dir.at_path import locate_path, read_checkpoint
from recckpt.output_dir.checkpoint_dir import attempt_dirs, has_manifest, read_intent, read_manifest
from recckpt.output_dir.claims import claimed_epochs, read_claim, read_takeover
from recckpt.output_dir.forget_requests import audit, pending
from recckpt.output_dir.listing import look_around
from recckpt.parallel.threads import run_all, run_on
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.pieces import RowPiece
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.files.verifier import check_part, check_part_anywhere, count_rows
from recckpt.storage import Storage, open_parent, open_storage
from recckpt.text import Progress

_THREADS = 8
_COUNT_BYTES = 64 << 20


@dataclass(frozen=True)
class Problem:
    directory: str  # directory of the checkpoint, in its output dir
    file: str  # path of the file in the output dir
    where: str  # place in the file, or ""
    found: str  # what is there
    expected: str  # what should be there

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.file}{place}: found {self.found}, expected {self.expected}"


@dataclass(frozen=True)
class Report:
    """Problems of one checkpoint, of the ownership files of the output dir, or of a dead save's leftovers."""

    directory: str  # directory in the output dir
    manifest: Manifest | None  # None if it cannot be read
    problems: tuple[Problem, ...]  # all problems, in the order of the files
    absent_deletes: int = 0  # ids that a delta deletes but its base lacks: allowed; counted by deep checks
    is_checkpoint: bool = True  # False for files that belong to no checkpoint


def verify(
    path: str, *, deep: bool = True, threads: int | None = None, executor: Executor | None = None
) -> list[Problem]:
    """Look for damage in a checkpoint and its chain, or in all checkpoints of an output dir.

    A deep check reads every byte: the checksums of all files, columns and Arrow frames, and ``INTENT`` against the
    manifest. For each table it checks that the catalogs describe where the ids are, that no id occurs twice, and that
    the number of rows, for a delta over its chain, is that of the manifest. Each link is read once, however many
    checkpoints need it. Files that the manifest does not list are not read.

    Args:
        path: a checkpoint or an output dir; any fsspec URL.
        deep: False checks only the manifests and the sizes of the files.
        threads: number of files to read concurrently; None for 8. Locally at most one per core.
        executor: checks the parts, which contain the rows, one part per task. Its processes, here or in a cluster, must
            reach ``path`` by the same name. All other files are read in this process.

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
    storage: Storage  # the output dir
    directories: Sequence[str]  # directories with a manifest
    is_output_dir: bool = False  # whether the path is the output dir, not one checkpoint
    chains: Mapping[str, Sequence[str]] = field(default_factory=dict)  # directory -> its links, itself first
    broken: Mapping[str, CorruptCheckpointError] = field(default_factory=dict)  # directory -> why it has no valid chain


def find_checkpoints(path: str) -> CheckpointsToVerify:
    """Return ``path`` itself or the directories in it that have a manifest; CheckpointNotFoundError if none."""
    storage, directory = open_parent(path)
    if not has_manifest(storage, directory):
        inside = open_storage(path)
        directories = sorted(name for name in attempt_dirs(inside) if _may_have_manifest(inside, name))
        if directories:
            listing = look_around(inside)
            chains = {each.directory: [link.directory for link in each.links] for each in listing.committed}
            errors = {**listing.damaged, **listing.unreadable}
            broken = {
                name: as_damage(error, layout.join(name, layout.MANIFEST), "a manifest")
                for name, error in errors.items()
            }
            return CheckpointsToVerify(inside, directories, is_output_dir=True, chains=chains, broken=broken)
        storage, checkpoint = locate_path(path)  # an id whose checkpoint is in the directory of a later attempt
        directory = checkpoint.directory
    try:
        record = read_manifest(storage, directory)
        found = read_checkpoint(storage, directory) if record is not None and record.parent is not None else None
    except CheckpointNotFoundError:  # a late commit: no run reads it, but it can be checked
        found = None
    except (CorruptCheckpointError, FormatVersionError, OSError) as error:
        broken = {directory: as_damage(error, layout.join(directory, layout.MANIFEST), "a manifest")}
        return CheckpointsToVerify(storage, [directory], broken=broken)
    if found is None or found.directory != directory:  # readers of this name get another directory
        return CheckpointsToVerify(storage, [directory])
    links = [link.directory for link in found.links]
    return CheckpointsToVerify(storage, links, chains={directory: links})


def verify_found(
    checkpoints: CheckpointsToVerify, *, deep: bool = True, threads: int | None = None, executor: Executor | None = None
) -> list[Report]:
    """Look for damage; arguments as in :func:`verify`.

    A checkpoint that is removed during the check has no report; CheckpointNotFoundError if none is left. The last
    reports of an output dir are about damaged ownership files, and attempts with an unreadable ``INTENT``.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads is an int of at least 1, found {threads!r}")
    storage, n_threads = checkpoints.storage, checkpoints.storage.threads(threads or _THREADS)
    looks = run_all(lambda name: Checkup(storage, name), checkpoints.directories, n_threads)
    absent = Counter[str]()
    if deep:
        _look_deep(storage, [look for look in looks if look.manifest], n_threads, executor)
        absent = _check_counts(looks, checkpoints.chains, n_threads)
    looks = [look for look in looks if not look.errors or _may_have_manifest(storage, look.directory)]
    if not looks:
        where = ", ".join(checkpoints.directories)
        raise CheckpointNotFoundError(f"{storage.url}: found no {layout.MANIFEST} in {where}")
    _check_links(looks, checkpoints)
    reports = []
    for look in looks:
        problems = tuple(_problem(look.directory, error) for error in look.errors)
        reports.append(Report(look.directory, look.manifest, problems, absent[look.directory]))
    return [*reports, *_other_reports(storage)] if checkpoints.is_output_dir else reports


def _look_deep(storage: Storage, looks: Sequence[Checkup], threads: int, executor: Executor | None) -> None:
    manifests = [look.manifest for look in looks if look.manifest]
    what = manifests[0].ckpt_id if len(manifests) == 1 else f"{len(manifests)} checkpoints"
    with Progress(f"verifying {what}", sum(manifest.n_bytes for manifest in manifests)) as progress:
        progress.add_rows(sum(manifest.rows for manifest in manifests))

        def visit(_: Batch, piece: RowPiece) -> Callable[[], object]:
            return lambda: progress.advance(piece.n_bytes)

        run_step(Checkup.check_files, looks, threads, progress.advance)
        tasks = [list(look.part_tasks()) for look in looks]
        every = [task for of_look in tasks for task in of_look]
        if executor is None:
            checks = run_all(
                lambda task: check_part(storage, task.directory, task.tables, task.part, visit), every, threads
            )
        else:
            checks = run_on(
                executor,
                check_part_anywhere,
                every,
                on_done=lambda task: progress.advance(task.part.n_bytes),
                is_stopped=lambda: False,
            )
        in_order = iter(checks)
        for look, of_look in zip(looks, tasks, strict=True):
            look.take_parts(islice(in_order, len(of_look)))
        run_step(Checkup.check_ids, looks, threads, progress.advance)


def _check_counts(looks: Sequence[Checkup], chains: Mapping[str, Sequence[str]], threads: int) -> Counter[str]:
    """Check the number of rows after each link of the undamaged chains; reads ids once for all chains.

    Returns, for each directory, the number of its deletes whose id no older link has.
    """
    absent = Counter[str]()
    whole = {look.directory: look for look in looks if look.manifest and not _has_bad_rows(look)}
    countable = [links for links in chains.values() if len(links) > 1 and whole.keys() >= set(links)]
    names = {table.name for links in countable for table in whole[links[0]].record.tables if not table.is_whole}
    counted = [_links_of(name, whole, countable) for name in sorted(names)]
    counts = run_all(lambda pairs: count_rows([link for _, link in pairs], _COUNT_BYTES), counted, threads)
    for pairs, of_pairs in zip(counted, counts, strict=True):
        for (look, (link, _)), count in zip(pairs, of_pairs, strict=True):
            entry = link.entry
            if count.error is not None:
                look.errors.append(as_damage(count.error, layout.join(look.directory, layout.MANIFEST), "a manifest"))
            elif count.is_known:
                absent[look.directory] += count.absent
                if count.rows != entry.rows:
                    look.errors.append(count_error(look.directory, entry.name, entry.rows, count.rows))
    return absent


def _links_of(
    name: str, whole: Mapping[str, Checkup], chains: Sequence[Sequence[str]]
) -> list[tuple[Checkup, tuple[TableReader, int | None]]]:
    """Return the links that hold rows or deletes of a table, oldest first, each with its base."""
    below: dict[str, str | None] = {}
    for links in chains:
        for link, after in zip(links, [*links[1:], None], strict=True):
            entry = whole[link].record.table(name)
            if entry is None:  # only older links have the table
                break
            below[link] = None if entry.is_whole else after
            if entry.is_whole:  # older links do not matter
                break
    looks = sorted((whole[link] for link in below), key=lambda look: look.record.place)
    numbers: dict[str | None, int] = {look.directory: number for number, look in enumerate(looks)}
    return [(look, (look.link().reader(name, ()), numbers.get(below[look.directory]))) for look in looks]


def _check_links(looks: Sequence[Checkup], checkpoints: CheckpointsToVerify) -> None:
    """Report each checkpoint whose chain has a damaged link; call this after all other checks.

    A link counts as damaged only if its rows are damaged or one of its files is missing.
    """
    damaged = {look.directory for look in looks if _has_bad_rows(look)}
    for look in looks:
        known = [(error.path, error.found) for error in look.errors]
        broken = checkpoints.broken.get(look.directory)
        if broken is not None and (broken.path, broken.found) not in known:
            look.errors.append(broken)
        for link in checkpoints.chains.get(look.directory, ())[1:]:
            if link in damaged:
                found, path = f"damage in {link}/", layout.join(look.directory, layout.MANIFEST)
                look.errors.append(CorruptCheckpointError(path, "its chain", found=found, expected="none"))


def _has_bad_rows(look: Checkup) -> bool:
    """Return whether damage to a checkpoint affects the deltas based on it."""
    names = {error.path.removeprefix(f"{look.directory}/") for error in look.errors}
    return any(name in (layout.MANIFEST, layout.SPARSE_DIR) or layout.has_rows(name) for name in names)


def _other_reports(storage: Storage) -> Iterator[Report]:
    epochs = claimed_epochs(storage)
    checks: list[Callable[[], object]] = [partial(pending, storage), partial(audit, storage)]
    checks += [partial(read, storage, epoch) for epoch in epochs for read in (read_claim, read_takeover)]
    errors = [_error_of(check, layout.OWNER_DIR, "a file of a writer of this output dir") for check in checks]
    if owner := tuple(_problem(layout.OWNER_DIR, error) for error in errors if error is not None):
        yield Report(layout.OWNER_DIR, None, owner, is_checkpoint=False)
    expected = "the attempt that was never finished; `recckpt repair --clean` removes it once its writer is dead"
    for directory in attempt_dirs(storage):
        if not _may_have_manifest(storage, directory):
            path = layout.join(directory, layout.INTENT)
            error = _error_of(partial(read_intent, storage, directory), path, expected)
            if error is not None:
                yield Report(directory, None, (_problem(directory, error),), is_checkpoint=False)


def _error_of(check: Callable[[], object], path: str, expected: str) -> CorruptCheckpointError | None:
    try:
        check()
    except FileNotFoundError:  # removed meanwhile
        return None
    except (OSError, CorruptCheckpointError, FormatVersionError) as error:
        return as_damage(error, path, expected)
    return None


def _problem(directory: str, error: CorruptCheckpointError) -> Problem:
    return Problem(directory, error.path, error.where, error.found, error.expected)


def _may_have_manifest(storage: Storage, directory: str) -> bool:
    """Return whether a directory has a manifest, or cannot be read and therefore must be reported."""
    try:
        return has_manifest(storage, directory)
    except OSError:
        return True
