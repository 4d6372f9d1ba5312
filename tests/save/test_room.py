"""Whether a save fits: refused before anything is written, where the storage knows its room."""

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.foreign import ForeignTable
from torch import nn

from recckpt import Saver
from recckpt.errors import SaveFailedError
from recckpt.save.choice import Choice
from recckpt.save.job import Destination
from recckpt.save.room import Room, WorkRoom, estimated_bytes, measured_room, shortage
from recckpt.sparse import HashTable
from recckpt.sparse.split import state_of
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.transfers import Transfers


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
    return open_storage(str(tmp_path))


def room(storage, min_free_bytes=0):
    return measured_room(
        Destination(storage, None, Transfers(), None, 1, min_free_bytes=min_free_bytes, on_save=None, changes=None)
    )


@pytest.mark.parametrize(("n_bytes", "min_free_bytes"), [(1000, 0), (0, 1000), (400, 600)])
def test_what_fits_exactly_fits(storage, n_bytes, min_free_bytes):
    assert shortage([room(storage, min_free_bytes)], [n_bytes]) is None


@pytest.mark.parametrize(("n_bytes", "min_free_bytes"), [(1001, 0), (0, 1001), (401, 600)])
def test_one_byte_more_does_not(storage, n_bytes, min_free_bytes):
    rank, refused = shortage([room(storage, min_free_bytes)], [n_bytes])
    assert rank == 0
    assert "found 1.0 kB free, expected" in str(refused)
    assert (refused.errno, refused.filename) == (errno.ENOSPC, storage.url)
    assert ("and leave" in str(refused)) == (min_free_bytes > 0)


def test_what_all_ranks_write_has_to_fit_where_any_of_them_looks(storage):
    rooms = [replace(room(storage), free_bytes=2000), room(storage)]
    assert shortage(rooms, [600, 400]) is None
    assert shortage(rooms, [600, 401])[0] == 1
    assert shortage(rooms, [2000, 1])[0] == 0


def test_ranks_of_one_host_take_the_room_of_that_host_alone():
    here, there = Room("near", 1000, 0, None, frozenset([0, 1])), Room("near", 1000, 0, None, frozenset([2]))
    assert shortage([here, here, there], [400, 600, 1000]) is None
    assert shortage([here, here, there], [400, 601, 0])[0] == 0
    assert shortage([here, here, there], [0, 0, 1001])[0] == 2


def test_ranks_of_one_host_share_the_room_of_their_work_dirs():
    here, there = WorkRoom("/tmp/a", ("one", 1), 1000), WorkRoom("/tmp/b", ("other", 1), 1000)
    rooms = [Room("url", None, 0, work) for work in (here, here, there)]
    assert shortage(rooms, [400, 600, 1000]) is None
    rank, refused = shortage(rooms, [400, 601, 0])
    assert (rank, refused.errno, refused.filename) == (0, errno.ENOSPC, "/tmp/a")
    assert "found 1.0 kB free in the work dir, expected 1.0 kB" in str(refused)
    assert shortage(rooms, [0, 0, 1001])[0] == 2


def test_a_storage_that_does_not_know_its_room_refuses_nothing(memory_url):
    assert shortage([room(open_storage(memory_url), 10**30)], [10**30]) is None


def test_what_a_save_needs_is_estimated_from_rows_and_dense_state():
    table = HashTable(2, name="t")
    table(torch.arange(100))
    model = nn.ModuleDict({"t": table, "top": nn.Linear(3, 1, bias=False)})
    assert estimated_bytes(*state_of(model), 0, Choice()) == 100 * (8 + 2 * 4) + 3 * 4


def test_ranks_write_their_own_rows_each_but_the_dense_state_once():
    table = HashTable(2, name="t")
    table(torch.arange(100))
    model = nn.ModuleDict({"t": table, "top": nn.Linear(3, 1)})
    assert estimated_bytes(*state_of(model), 1, Choice()) == 100 * (8 + 2 * 4)


def test_of_a_state_that_staging_refuses_nothing_is_estimated():
    ids, of_no_slot = torch.arange(3), torch.ones(3, 2, dtype=torch.complex64)
    assert estimated_bytes({"foreign": ForeignTable("foreign", ids, of_no_slot)}, {}, 0, Choice()) == 0


def test_a_save_that_does_not_fit_writes_nothing_and_the_next_that_does_lands(storage, monkeypatch, tmp_path):
    saver = Saver(nn.Linear(300, 1), output_dir=str(tmp_path))
    with pytest.raises(SaveFailedError, match=r"rank 0: OSError: .*found 1.0 kB free, expected 1.2 kB for the save"):
        saver.save_async("c")
    assert list(tmp_path.iterdir()) == []
    saver.close()  # that was told
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 10**6)
    assert saver.save("c").ckpt_id == "c"


@pytest.mark.parametrize("step", [10**30, 10**18, -1, 2.0, True, "1", np.int64(3)])
def test_a_step_that_no_manifest_can_hold_is_refused_before_anything_is_written(tmp_path, step):
    saver = Saver(nn.Linear(1, 1), output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="step must be an int of at least 0, below 10\\^18"):
        saver.save("a", step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("deltas", [False, True])
def test_rows_that_conditions_leave_out_need_no_room(tmp_path, monkeypatch, deltas):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 500)
    table = HashTable(64, name="t", track=("count",))
    model = nn.ModuleDict({"t": table})
    table(torch.arange(1000))
    table(torch.arange(3))
    options = {"save_where": {"t": {"count": {"min": 2}}}, "deltas": deltas}
    saver = Saver(model, output_dir=str(tmp_path), **options)
    assert [saver.save(name).tables[0].rows for name in "ab"] == [3, 3]
