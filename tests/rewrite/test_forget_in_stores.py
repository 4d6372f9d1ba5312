"""Whoever forgets in an object store dies at any request: nothing else is lost, and the next one ends it."""

import errno
from itertools import count

import fsspec
import numpy as np
import pytest
from faults.storage_faults import Faults
from support.forgetting import ForgettingRun, ids_at
from support.sweeps import SWEEP_STRIDE, some_of

import recckpt
from recckpt import CheckpointReader
from recckpt.errors import RecckptError
from recckpt.inspect.absent import look_for
from recckpt.inspect.verify import verify
from recckpt.output_dir.forget_requests import pending, requests
from recckpt.rewrite import forgetting as forget_module
from recckpt.rewrite.forgetting import finish, forget
from recckpt.storage import open_storage

GONE = ids_at(5, 7, 50, 200)
CHAIN = ("ckpt_1", "ckpt_2", "ckpt_3", "ckpt_4")
MOST_REQUESTS = 2000


class Scene:
    """A chain with an offer in an object store, of which each try gets a copy."""

    def __init__(self, url):
        ForgettingRun(url).save_chain()
        recckpt.rewrite.compact(url, "ckpt_3")
        self.url, self._numbers = url, count()
        self.fs, self.root = fsspec.core.url_to_fs(url)
        self._files = {name: self.fs.cat_file(name) for name in self.fs.find(self.root)}
        self.before = rows_of(url)
        self.after = {name: {i: row for i, row in rows.items() if i not in GONE} for name, rows in self.before.items()}

    def copied(self):
        """Return the URL of a copy."""
        suffix = f"-{next(self._numbers)}"
        for name, data in self._files.items():
            self.fs.pipe_file(name.replace(self.root, self.root + suffix, 1), data)
        return self.url + suffix


def rows_of(url):
    """Return the rows of the table of each checkpoint."""
    found = {}
    for name in CHAIN:
        with CheckpointReader(f"{url}/{name}") as reader:
            batches = list(reader.table("user"))
        pairs = (zip(b["id"].to_pylist(), b["embedding"].to_pylist(), strict=True) for b in batches)
        found[name] = {id_: tuple(row) for each in pairs for id_, row in each}
    return found


def die_at(url, number, when, monkeypatch):
    """Forget with a storage that answers no request from that of a number on; return how many were made."""
    storage = open_storage(url)
    faults = Faults(storage)
    faults.plant(number, errno.EIO, for_ever=True, when=when)
    with monkeypatch.context() as patched:
        patched.setattr(forget_module, "open_storage", lambda url: storage)
        try:
            forget(url, "user", GONE)
        except (OSError, RecckptError):
            assert faults.has_struck
    return len(faults.log)


def check(scene, number, when, monkeypatch):
    """Let one die, and the next one end what it began; say whether it died."""
    url = scene.copied()
    has_died = die_at(url, number, when, monkeypatch) >= number
    found = rows_of(url)
    for name in CHAIN:
        assert found[name] in (scene.before[name], scene.after[name]), (number, when, name)
    if requests(open_storage(url)):
        finish(url)
    else:
        forget(url, "user", GONE)  # it died before it was asked
    assert rows_of(url) == scene.after, (number, when)
    absence = look_for(url, np.array(GONE), "user")
    assert (absence.holding, absence.unread, absence.pending) == ((), {}, {}), (number, when)
    assert absence.n_asked == len(GONE)
    assert not pending(open_storage(url))
    assert verify(url) == []
    scene.fs.rm(url.removeprefix("s3://").removeprefix("memory://"), recursive=True)
    return has_died


def test_a_death_at_some_requests_to_a_store_in_memory_loses_nothing(memory_url, monkeypatch):
    scene = Scene(memory_url)
    assert all(check(scene, number, when, monkeypatch) for number, when in ((40, "after"), (90, "before")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory_url", "s3_url"])
def test_a_death_at_any_request_to_an_object_store_loses_nothing(request, kind, monkeypatch):
    scene = Scene(request.getfixturevalue(kind))
    stride = SWEEP_STRIDE * (1 if kind == "memory_url" else 7)
    n_requests = die_at(scene.copied(), MOST_REQUESTS, "before", monkeypatch)
    assert n_requests < MOST_REQUESTS
    for sweep, when in enumerate(("before", "after")):
        numbers = some_of(n_requests, stride, 4 * sweep)
        assert all(check(scene, number, when, monkeypatch) for number in numbers)
        print(f"{kind}, {when}: {len(numbers)} points")  # for docs/reliability.md, with -s
        assert len(numbers) > 0
