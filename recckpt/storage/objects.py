"""Object stores: no directories, no renames, nothing published on an error; the first writer of a name wins."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from recckpt.format import layout
from recckpt.storage.base import Draft, Listed, Sink, Storage
from recckpt.storage.remote import RangedFile
from recckpt.storage.retry import (
    NobodyAnswersError,
    Retries,
    RetryPolicy,
    TryAgainError,
    is_answer,
    is_conflict,
    is_transient,
    is_unreachable,
    status_of,
)
from recckpt.storage.upload import Put, Upload

log = logging.getLogger("recckpt")
_T = TypeVar("_T")

_STAMPS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "created")  # keys of the backends
_READ_AHEAD_BYTES = 4 << 20
_PREPARE_SEC = 60.0  # short, to report a wrong address soon


class ObjectStorage(Storage):
    """Objects below a URL. Follows "Object stores" of the commit protocol.

    Attributes:
        policy: how often, and for how long, a request is retried.
        may_be_conditional: whether to try puts that fail if the name is taken.
        is_reached: whether its server has ever answered.
    """

    may_be_conditional: ClassVar[bool] = True

    def __init__(self, url: str, fs: Any, root: str) -> None:
        super().__init__(url)
        self.policy = RetryPolicy()
        self._fs, self._root = fs, root
        self._is_conditional = self.may_be_conditional
        self.is_reached = False
        protocols = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self._is_s3 = "s3" in protocols
        if self._is_s3:  # attempts of s3fs and botocore would multiply ours
            self._fs.retries = 1
            self._fs.config_kwargs.setdefault("retries", {"total_max_attempts": 1})

    def give_up_after(self, seconds: float) -> None:
        self.policy = replace(self.policy, deadline_sec=seconds)

    @contextmanager
    def giving_up_after(self, seconds: float) -> Iterator[None]:
        policy = self.policy
        self.give_up_after(min(seconds, policy.deadline_sec))
        try:
            yield
        finally:
            self.policy = policy

    def prepare(self) -> None:
        """Check that objects can be written and removed; warn if a second writer can overwrite a new one."""
        self.is_reached = True  # assume a right address: a server that starts together with a job gets a minute
        probe = layout.probe()
        with self.giving_up_after(_PREPARE_SEC):
            self._is_conditional = self._takes_conditions(probe)
            if not self._is_conditional:
                log.warning(
                    "%s: this store has no conditional put, so that a second writer may go unnoticed: "
                    "let one process at a time save here",
                    self.url,
                )
            self.remove(probe)

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, RangedFile(lambda: self._open(name), self._retries(name)))

    def map(self, name: str) -> memoryview | None:
        return None

    def read(self, name: str, max_bytes: int, begin: int = 0) -> bytes:
        return self._call("reading", name, lambda: self._read(name, begin, begin + max_bytes))

    def size(self, name: str) -> int:
        info = self._call("looking up", name, lambda: self._fs.info(self._path(name)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "looking up failed: found a directory, no file", self.url_of(name))
        return int(info["size"])

    def drop_cached(self, name: str) -> bool:
        drop = getattr(self._fs, "pop_from_cache", None)  # method of fsspec's caches on this host, such as filecache::
        if drop is not None:
            with suppress(Exception):  # the file is not cached
                drop(self._path(name))
        return True

    def make_dir(self, name: str) -> None:
        """Raise FileExistsError if objects have this prefix. Nothing is made, because stores have no directories."""
        if self.list_files(name):
            raise FileExistsError(errno.EEXIST, "making a directory failed: exists already", self.url_of(name))

    def create(self, name: str) -> Sink:
        return self._upload(name, lambda data: self._put(name, data), replaces=False)

    def draft(self, name: str) -> Draft:
        return self._upload(name, lambda data: self._fs.pipe_file(self._path(name), data), replaces=True)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Put one small object. Reading it back shows which writer won a race, so writers must put different bytes."""
        self._call("putting", name, lambda: self._put(name, data))

    def replace(self, name: str, data: bytes) -> None:
        self._call("replacing", name, lambda: self._write(self._path(name), data))

    def sync_dir(self, name: str) -> None:
        """Do nothing: a published object is durable."""

    def modified(self, name: str) -> float | None:
        return self._call("looking up", name, lambda: self._modified(name))

    def list_dirs(self) -> list[str]:
        try:
            entries = self._list("", lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(str(e["name"]).rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")

    def list_files(self, directory: str) -> list[str]:
        return sorted(self._find(directory))

    def listed(self, directory: str) -> dict[str, Listed]:
        files = self._find(directory).items()
        sized = {n: e for n, e in files if e.get("type") == "file" and isinstance(e.get("size"), int)}
        stamps = {name: [str(entry[key]) for key in _STAMPS if entry.get(key)] for name, entry in sized.items()}
        return {name: Listed(entry["size"], " ".join(stamps[name])) for name, entry in sized.items()}

    def listed_by_dir(self) -> Mapping[str, Mapping[str, Listed]] | None:
        by_dir: dict[str, dict[str, Listed]] = {}
        for path, entry in self.listed("").items():
            directory, is_below, name = path.partition("/")
            if is_below:
                by_dir.setdefault(directory, {})[name] = entry
        return by_dir

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("removing", name, lambda: self._fs.rm_file(self._path(name)))

    def remove_empty_dirs(self, name: str) -> None:
        """Raise OSError if objects are left; a prefix vanishes with its last object."""
        left = self.list_files(name)
        if left:
            raise OSError(errno.ENOTEMPTY, f"removing failed: found {left[0]} in it", self.url_of(name))

    def _retries(self, name: str) -> Retries:
        return Retries(self.policy, self.url_of(name), self.count_retry, self._attempt)

    def _attempt(self, work: Callable[[], Any], handled: BaseException | None) -> Any:
        """Do work. If an address that has never answered refuses the connection, raise an error that is not retried."""
        try:
            result = work()
        except Exception as error:
            if not self.is_reached and is_unreachable(error, handled):
                problem = f"nobody answers there ({error}); check the URL"
                raise NobodyAnswersError(errno.ECONNREFUSED, problem) from error
            self.is_reached = self.is_reached or is_answer(error, handled)
            raise
        self.is_reached = True
        return result

    def _call(self, operation: str, name: str, work: Callable[[], _T]) -> _T:
        return self._retries(name).call(operation, work)

    def count_retry(self) -> None:
        """Count a retry, for metrics. With several threads a count may be lost."""
        self.n_retries += 1

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _read(self, name: str, begin: int, end: int) -> bytes:
        try:
            data = bytes(self._fs.cat_file(self._path(name), start=begin, end=end))
        except Exception as error:
            if status_of(error) == 416:  # an empty file has no ranges
                return b""
            raise
        return data if len(data) <= end - begin else data[begin:end]  # the server ignores ranges

    def _modified(self, name: str) -> float | None:
        with suppress(NotImplementedError):  # the backend has no such method
            return float(self._fs.modified(self._path(name)).timestamp())
        return None

    def _find(self, directory: str) -> dict[str, dict[str, Any]]:
        top = self._path(directory)
        prefix = len(self._fs._strip_protocol(top).rstrip("/")) + 1
        entries = self._list(directory, lambda: self._files_below(top))
        return {str(path)[prefix:]: entry for path, entry in entries.items()}

    def _files_below(self, top: str) -> dict[str, dict[str, Any]]:
        return cast(dict[str, dict[str, Any]], self._fs.find(top, detail=True))

    def _list(self, directory: str, ask: Callable[[], _T]) -> _T:
        def look() -> _T:
            try:
                return ask()
            except (RuntimeError, KeyError) as error:
                if isinstance(self._fs, MemoryFileSystem):  # another thread has changed its dict
                    raise TryAgainError(str(error)) from error
                raise

        return self._call("listing", directory, look)

    def _upload(self, name: str, put: Put, *, replaces: bool) -> Upload:
        in_one = isinstance(self._fs, MemoryFileSystem)  # this backend publishes a file when it opens the file
        path, retries = self._path(name), self._retries(name)
        return Upload(self._fs, path, retries, put, in_one=in_one, repeats=self._is_s3, replaces=replaces)

    def _open(self, name: str) -> BinaryIO:
        file: Any = self._fs.open(self._path(name), "rb", block_size=_READ_AHEAD_BYTES)
        if (getattr(file, "details", None) or {}).get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "found a directory, expected a file", self.url_of(name))
        if isinstance(file, MemoryFile):  # one object with one position for all readers
            file = BytesIO(file.getvalue())
        return cast(BinaryIO, file)

    def _takes_conditions(self, probe: str) -> bool:
        self._is_conditional = self.may_be_conditional
        try:
            self.put_if_absent(probe, b"first")
            if not self.may_be_conditional:
                return False
            self.put_if_absent(probe, b"second")
        except FileExistsError:
            return True
        except OSError as error:
            if error.errno != errno.ENOSYS:  # a store without conditional puts may refuse them
                raise
        return False

    def _put(self, name: str, data: bytes) -> None:
        path, doubt = self._path(name), None
        if not self._is_conditional and self._peek(path) is not None:
            raise FileExistsError(errno.EEXIST, "exists already", self.url_of(name))
        try:
            self._write(path, data, mode="create" if self._is_conditional else "overwrite")
        except Exception as error:
            doubt = error
        else:
            if self._is_conditional:
                return
        try:
            content = self._peek(path)
        except Exception as error:
            if doubt is None or is_conflict(doubt) or is_transient(error):
                raise
            raise doubt from error  # the first error says more: a look-up answers without text
        if content == data:
            return
        if content is not None:
            raise FileExistsError(errno.EEXIST, "exists already", self.url_of(name)) from doubt
        if doubt is None or is_conflict(doubt):
            raise TryAgainError(errno.EAGAIN, "the object that was put is missing") from doubt
        raise doubt

    def _write(self, path: str, data: bytes, **mode: str) -> None:
        self._fs.pipe_file(path, data, **mode)

    def _peek(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
