"""Tables in the memory of somebody else, by the public protocol: given to live_tables, saved, audited and refused."""

import pytest
import torch
from support.live_rows import assert_saved
from torch import nn

from recckpt import Saver
from recckpt.errors import LiveTableError, MissedRowsError
from recckpt.live import live_tables
from recckpt.types import Box


class Memory:
    """A table of its own rows, of which ``door`` is told."""

    def __init__(self, name="own", n_rows=50):
        self.name, self.n_rows, self.door = name, n_rows, None
        self.values, self.settings_taken = torch.rand(n_rows, 2), []

    def box(self):
        return Box((0, self.n_rows))

    def prepare(self):
        pass

    def tensors(self):
        return {"embedding": self.values}

    def attach(self, door):
        self.door = door
        return lambda: setattr(self, "door", None)

    def scalars(self):
        return {}

    def settings(self):
        return {"lr": 0.5}

    def finish(self, scalars, settings):
        self.settings_taken.append(settings)


def saver_of(tmp_path, memory, **options):
    model = nn.ModuleDict({"top": nn.Linear(2, 1)})
    tables = live_tables(model, adapters=[memory], **options)
    return Saver(model, output_dir=str(tmp_path), tables=tables, deltas=True, max_keep=9), tables


def upserts(record):
    [entry] = record.tables
    return entry.delta and entry.delta.upserts


def test_rows_that_an_adapter_announces_are_a_delta_and_come_back(tmp_path):
    memory = Memory()
    saver, tables = saver_of(tmp_path, memory)
    assert "own    50 x 2      Memory  -      own" in str(tables)
    saver.save("c0")
    memory.door.announce(torch.tensor([3, 3, 9]))
    memory.values[[3, 9]] = 0
    assert upserts(saver.save("c1")) == 2
    assert_saved(tables, tmp_path)
    kept = memory.values.clone()
    memory.door.announce_all()
    memory.values.zero_()
    saver.load()
    assert torch.equal(memory.values, kept)
    assert {} in memory.settings_taken
    assert {"lr": 0.5} in memory.settings_taken


def test_an_adapter_that_announces_all_rows_has_deltas_by_fingerprints(tmp_path):
    memory = Memory()
    saver, tables = saver_of(tmp_path, memory, marks="fingerprints")
    saver.save("c0")
    memory.door.announce_all()
    memory.values[7] += 1
    assert upserts(saver.save("c1")) == 1
    assert_saved(tables, tmp_path)


def test_an_audit_finds_what_an_adapter_does_not_announce(tmp_path):
    memory = Memory()
    saver, _ = saver_of(tmp_path, memory, audit=1)
    saver.save("c0")
    memory.values[7] += 1
    with pytest.raises(MissedRowsError, match="7"):
        saver.save("c1")


def test_what_is_no_table_is_refused_and_so_are_two_of_one_name():
    model = nn.Module()
    with pytest.raises(TypeError, match=r"adapters must be tables as .*LiveTable or .*LibraryTable, found a dict"):
        live_tables(model, adapters=[{}])
    with pytest.raises(LiveTableError, match=r"'adapters\[0\]' and 'adapters\[1\]' are both named 'own'"):
        live_tables(model, adapters=[Memory(), Memory()])


def test_a_second_call_with_another_adapter_of_the_name_is_refused():
    model, memory = nn.Module(), Memory()
    tables = live_tables(model, adapters=[memory])
    assert live_tables(model, adapters=[memory]) is tables
    with pytest.raises(LiveTableError, match="the model has live tables already, and others are asked for"):
        live_tables(model, adapters=[Memory()])
