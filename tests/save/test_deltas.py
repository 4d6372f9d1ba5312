"""Deltas that a saver writes, each held against a full save of the same moment by a reader that knows only the page."""

import json
import logging
import shutil
from contextlib import suppress

import pytest
import torch
from support import spec_reader
from support.builders import OPTIMIZERS, ClickModel
from support.foreign import ForeignTable
from support.forge import Tables
from support.spec_reader import DamagedError
from support.sweeps import mostly_slow
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import Saver
from recckpt.errors import SaveFailedError
from recckpt.inspect.verify import verify
from recckpt.output_dir.listing import list_checkpoints, newest
from recckpt.policies.deltas import Chain, Deltas
from recckpt.save.deltas import FULL, DeltaProposal, Kind, TableChanges, agreed_kind, spared_bytes
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage

POLICY = Deltas(full_every=3)


class Training:
    """A model that trains in one process, and its saver with deltas."""

    def __init__(self, root, **options):
        torch.manual_seed(0)
        self.root, self.n_full, self.infos = root, 0, []
        self.model = ClickModel()
        self.optimizer = OPTIMIZERS["adam"](self.model.tables)
        options = {"max_keep": None, "deltas": True, **options}
        self.saver = Saver(self.model, self.optimizer, str(root / "deltas"), on_save=self.infos.append, **options)
        self.train(range(400))

    def train(self, ids):
        ids = torch.as_tensor(list(ids))
        (self.model.users(ids) + self.model.items(ids)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def save(self, ckpt_id, **options):
        """Save, and check that a reader finds the rows that a full save would have."""
        record = self.saver.save(ckpt_id, **options)
        self.check(ckpt_id, self.full())
        return record

    def full(self):
        """Return the rows of now, by a full save."""
        self.n_full += 1
        other = self.root / f"full {self.n_full}"
        Saver(self.model, self.optimizer, str(other)).save("full")
        return {table.name: spec_reader.read(other, "full", table.name) for table in self.model.tables}

    def check(self, ckpt_id, rows):
        for table, expected in rows.items():
            assert spec_reader.read(self.root / "deltas", ckpt_id, table) == expected


@pytest.fixture
def training(tmp_path):
    return Training(tmp_path)


def held(record, table="item"):
    """Return what a delta holds of a table: rows, deleted ids, and whether these are all."""
    delta = record.table(table).delta
    return delta.upserts, delta.deletes, delta.replaced


def test_the_first_save_is_full_and_the_next_holds_what_has_changed_and_names_what_it_stands_on(training, caplog):
    caplog.set_level(logging.INFO, "recckpt")
    first = training.save("a")
    second = training.train(range(390, 410)).save("b")
    assert (first.kind, second.kind, second.table("item").rows, held(second)) == ("full", "delta", 410, (20, 0, False))
    training.model.items.erase(torch.arange(50, 55))
    third = training.save("c")
    assert held(third) == (0, 5, False)
    assert (third.parent.ckpt_id, third.parent.save_id, third.parent.directory) == ("b", second.save_id, "b")
    assert third.parent.manifest == second.xxh3
    assert [(link.ckpt_id, link.save_id) for link in third.chain] == [("b", second.save_id), ("a", first.save_id)]
    one, two, three = training.infos
    assert (one.kind, one.why_full, one.n_links) == ("full", "there is no checkpoint to count changes from", 1)
    assert (one.n_rows, one.n_upserts, one.n_deletes) == (800, 800, 0)
    assert (two.kind, two.why_full, two.n_links, two.n_bytes) == ("delta", None, 2, second.n_bytes)
    assert (two.n_rows, two.n_upserts, three.n_rows, three.n_upserts, three.n_deletes) == (820, 40, 815, 0, 5)
    assert "a is saved in full: there is no checkpoint to count changes from" in caplog.messages
    said = [text.partition(":")[0] for text in caplog.messages if text.startswith(("saving a", "saving b"))]
    assert said == ["saving a", "saving b as a delta"]


def test_erased_ids_are_deleted_and_those_that_are_back_are_rows(training):
    training.save("a")
    training.model.items.erase(torch.arange(10, 20))
    training.model.items(torch.arange(15, 18))
    record = training.save("b")
    assert (record.table("item").rows, held(record)) == (393, (3, 7, False))
    files = [file.name for file in record.files if "deletes" in file.name]
    assert files == ["sparse/00000-of-00001.deletes.00.arrow"]


def test_a_table_that_was_cleared_moved_or_got_a_slot_is_replaced(training):
    training.train(range(1000, 4000)).save("a")
    training.model.items.clear()
    training.train(range(10))
    record = training.save("b")
    assert held(record) == (10, 0, True)
    assert held(record, "user/1") == (10, 0, False)
    training.model.items.add_slot("late", ())
    assert held(training.save("c")) == (10, 0, True)
    training.model.items.store = training.model.items.store.to(torch.device("cpu"))
    assert held(training.save("d")) == (10, 0, True)
    assert held(training.save("e")) == (0, 0, False)


def test_a_new_table_is_replaced_and_one_that_is_gone_is_not_in_the_delta(training):
    training.save("a")
    training.model.more = HashTable(2, name="more")
    training.model.more(torch.arange(5))
    assert held(training.saver.save("b"), "more") == (5, 0, True)
    assert len(spec_reader.read(training.root / "deltas", "b", "more")) == 5
    del training.model.more
    assert training.save("c").table("more") is None


def test_a_foreign_table_is_always_replaced(tmp_path):
    table = HashTable(2, name="ours")
    table(torch.arange(100))
    model = Tables([table, ForeignTable("foreign", torch.arange(5), torch.ones(5, 2))])
    saver = Saver(model, output_dir=str(tmp_path), max_keep=None, deltas=True)
    saver.save("a")
    record = saver.save("b")
    assert (held(record, "ours"), held(record, "foreign")) == ((0, 0, False), (5, 0, True))
    assert len(spec_reader.read(tmp_path, "b", "foreign")) == 5


def test_a_failed_save_keeps_what_has_changed_for_the_next(training, monkeypatch):
    training.save("a")
    training.train(range(10))
    training.model.items.erase(torch.arange(20, 25))
    with monkeypatch.context() as patch:
        patch.setattr(training.saver.storage, "put_if_absent", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(SaveFailedError):
            training.saver.save("b")
    training.train(range(5, 15))
    record = training.save("c")
    assert (record.parent.ckpt_id, held(record)) == ("a", (15, 5, False))


def test_nothing_stands_on_an_ephemeral_delta(training):
    training.save("a")
    assert held(training.train(range(10)).save("b", ephemeral=True)) == (10, 0, False)
    record = training.train(range(10, 20)).save("c")
    assert (record.parent.ckpt_id, held(record)) == ("a", (20, 0, False))


def test_training_goes_on_while_a_delta_is_written(training):
    training.save("a")
    training.train(range(30))
    expected = training.full()
    handle = training.saver.save_async("b")
    training.train(range(20, 50))
    assert held(handle.wait()) == (30, 0, False)
    training.check("b", expected)
    assert held(training.save("c")) == (30, 0, False)


def test_a_checkpoint_that_is_superseded_may_be_a_link(training):
    training.save("a")
    record = training.train(range(10)).save("a", overwrite=True)
    assert (record.kind, record.parent.directory, record.parent.ckpt_id) == ("delta", "a", "a")
    assert training.train(range(10)).save("b").parent.directory == "a.1"


@mostly_slow()
@pytest.mark.parametrize("max_keep", [1, 2])
def test_rotation_leaves_what_a_delta_stands_on(tmp_path, max_keep):
    training = Training(tmp_path, max_keep=max_keep, deltas=Deltas(full_every=3, max_chain_bytes=100))
    for number in range(7):
        training.train(range(number, number + 20)).save(str(number))
        assert verify(str(tmp_path / "deltas")) == []


def test_a_second_saver_counts_by_itself(training):
    training.save("a")
    other = Saver(training.model, training.optimizer, str(training.root / "other"), max_keep=None, deltas=True)
    assert other.save("a").kind == "full"
    training.train(range(10))
    assert held(training.save("b")) == (10, 0, False)
    training.train(range(10, 20))
    assert held(other.save("b")) == (20, 0, False)
    assert held(training.save("c")) == (10, 0, False)


@mostly_slow()
@pytest.mark.parametrize("is_emptied", [False, True])
def test_where_the_base_is_gone_the_save_is_full_at_once(training, caplog, is_emptied):
    training.save("a")
    training.train(range(5))
    training.save("b")
    gone = training.root / "deltas" / "a" / "manifest.json"
    shutil.rmtree(training.root / "deltas") if is_emptied else gone.unlink()
    (training.root / "deltas").mkdir(exist_ok=True)
    training.train(range(10))
    assert training.save("c").kind == "full"
    assert "this save is full: its base was removed by another process" in caplog.text
    assert training.save("d").kind == "delta"


def test_where_asking_costs_a_request_the_save_fails_and_the_next_is_full(training, monkeypatch):
    training.save("a")
    monkeypatch.setattr(training.saver.storage, "asking_is_free", False, raising=False)
    (training.root / "deltas" / "a" / "manifest.json").unlink()
    training.train(range(10))
    with pytest.raises(SaveFailedError, match="found no such checkpoint; the next save is full"):
        training.saver.save("b")
    assert training.save("c").kind == "full"


def test_what_goes_while_a_delta_is_written_is_seen_before_it_is_committed(training, monkeypatch):
    training.save("a")
    training.train(range(10))
    put = training.saver.storage.sync_dir

    def remove_the_base(name):
        (training.root / "deltas" / "a" / "manifest.json").unlink(missing_ok=True)
        return put(name)

    with monkeypatch.context() as patch:
        patch.setattr(training.saver.storage, "sync_dir", remove_the_base)
        with pytest.raises(SaveFailedError, match="found no such checkpoint; the next save is full"):
            training.saver.save("b")
    with pytest.raises((DamagedError, ValueError)):
        spec_reader.read(training.root / "deltas", "b", "item")
    assert training.save("c").kind == "full"


def test_where_no_deltas_are_asked_for_nothing_is_marked_and_what_is_no_policy_is_refused(tmp_path):
    training = Training(tmp_path, deltas=False)
    assert [training.save(str(number)).kind for number in range(2)] == ["full", "full"]
    assert training.model.items.store._observers.mark_sets() == []
    assert training.infos[1].why_full is None
    for deltas in (None, 1, "yes", 0):
        with pytest.raises(ValueError, match="deltas must be True, False or Deltas"):
            Saver(nn.Linear(1, 1), output_dir=str(tmp_path / "new"), deltas=deltas)
    assert not (tmp_path / "new").exists()


def test_batches_of_a_delta_are_as_wide_as_those_of_a_full_checkpoint(tmp_path):
    table = HashTable(64, name="t")
    table(torch.arange(100_000))
    saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), max_keep=None, deltas=True, concurrency=1)
    saver.save("a")
    table.insert(torch.arange(20_000), torch.ones(20_000, 64))
    saver.save("b")
    batches = [batch for batch in _batches(tmp_path / "b") if batch["rows"]]
    assert len(batches) == pytest.approx(len(_batches(tmp_path / "a")), abs=1)


def _batches(directory):
    [catalog] = directory.glob("sparse/*.json")
    return [batch for part in json.loads(catalog.read_bytes())["parts"] for batch in part["batches"]]


def test_each_delta_on_a_damaged_link_is_told_of_once(training, caplog):
    for ckpt_id in "abc":
        training.saver.save(ckpt_id)
    (training.root / "deltas" / "b" / "manifest.json").write_bytes(b"{}")
    for ckpt_id in "def":
        with suppress(SaveFailedError):
            training.saver.save(ckpt_id)
    told = [text.partition(" is damaged")[0] for text in caplog.messages if "is damaged and left alone" in text]
    assert len(told) == len(set(told)) > 0


def test_a_link_whose_id_an_ephemeral_checkpoint_had_for_a_while_has_it_again_and_is_older_than_the_newest(training):
    training.saver.save("a")
    training.train(range(9)).saver.save("b")
    training.train(range(9)).saver.save("a", overwrite=True, ephemeral=True)
    storage = training.saver.storage
    assert newest(storage).ckpt_id == "a"
    assert newest(storage).manifest.ephemeral
    training.train(range(9)).saver.save("c")  # on b, and that on the first a
    assert list_checkpoints(storage).ckpt_ids == ["a", "b", "c"]
    assert newest(storage).ckpt_id == "c"
    assert not list_checkpoints(storage).find("a").manifest.ephemeral


def test_a_delta_needs_room_for_what_has_changed_and_not_for_all(tmp_path, monkeypatch):
    training = Training(tmp_path)
    full = training.saver.save("a")
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: full.n_bytes // 2)
    training.train(range(10))
    assert training.saver.save("b").kind == "delta"
    training.train(range(300))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: full.n_bytes // 4)
    with pytest.raises(SaveFailedError, match="make room"):
        training.saver.save("c")  # neither the full save that is due nor a delta in its place
    assert not (tmp_path / "deltas" / "c").exists()
    monkeypatch.undo()
    assert training.save("c").kind == "full"


def test_where_the_base_is_damaged_the_error_says_what_is_wrong_with_it(training):
    training.save("a")
    training.save("b")
    (training.root / "deltas" / "a" / "model.pt").unlink()
    training.train(range(10))
    with pytest.raises(SaveFailedError, match=r"found a damaged one: a/model\.pt.*the next save is full"):
        training.saver.save("c")
    assert training.save("d").kind == "full"


@pytest.mark.parametrize("writes", [(True, False), (False, True)])
def test_ranks_that_do_not_all_write_deltas_write_full_checkpoints(tmp_path, writes):
    def save(rank, connect):
        table = HashTable(2, name="t", slice=gen_slice(rank, 2))
        ids = torch.arange(100)
        table(ids[table.slice.owns(ids)])
        saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), max_keep=None, deltas=writes[rank])
        connect(saver)
        return [saver.save(ckpt_id, rank, 2).kind for ckpt_id in "ab"]

    assert on_ranks(2, save) == [["full", "full"]] * 2
    assert len(spec_reader.read(tmp_path, "b", "t")) == 100


def proposal(base="b", chain=None, **tables):
    """Return what a rank proposes, of tables as (changed, rows), or (changed, rows, True) where it has to hold all."""
    rows = {name: (changed, rows, 10, bool(rest), False) for name, (changed, rows, *rest) in tables.items()}
    return DeltaProposal(POLICY, base, chain, TableChanges.of(rows))


CHAIN = Chain(1, 10, 100)


def test_where_all_ranks_count_from_one_checkpoint_it_is_a_delta():
    ranks = [proposal(chain=CHAIN, t=(3, 10)), proposal(t=(0, 5))]
    assert agreed_kind(ranks) == Kind("b", n_links=3)
    assert [spared_bytes(agreed_kind(ranks), rank) for rank in ranks] == [70, 50]


def test_a_table_that_is_replaced_on_one_rank_is_on_all():
    ranks = [proposal(chain=CHAIN, t=(0, 10), u=(0, 100)), proposal(t=(5, 5, True), u=(0, 100))]
    assert agreed_kind(ranks) == Kind("b", frozenset({"t"}), n_links=3)
    assert [spared_bytes(agreed_kind(ranks), rank) for rank in ranks] == [1000, 1000]


def test_rows_are_counted_over_all_ranks_those_of_replaced_tables_as_changed():
    assert agreed_kind([proposal(chain=CHAIN, t=(0, 10)), proposal(u=(0, 5))]).name == "delta"
    assert agreed_kind([proposal(chain=CHAIN, t=(5, 10)), proposal(t=(5, 10))]).name == "delta"
    assert "11 of 20 rows have changed" in agreed_kind([proposal(chain=CHAIN, t=(5, 10)), proposal(t=(6, 10))]).why_full
    ranks = [proposal(chain=CHAIN, t=(0, 8)), proposal(t=(1, 7, True))]
    assert "15 of 15 rows have changed" in agreed_kind(ranks).why_full
    assert [spared_bytes(agreed_kind(ranks), rank) for rank in ranks] == [0, 0]
    long_enough = agreed_kind([proposal(chain=Chain(3, 3, 100), t=(0, 5))])
    assert long_enough.why_full.startswith("3 deltas since the last full checkpoint")


def test_where_a_rank_has_another_base_or_none_the_save_is_full():
    for other in (proposal("another", t=(0, 5)), proposal(None, t=(0, 5)), None):
        kind = agreed_kind([proposal(chain=CHAIN, t=(0, 5)), other])
        assert (kind.name, kind.n_links) == ("full", 1)
        assert kind.why_full == "rank 1 counts changes since another checkpoint, or does not count them"
    assert agreed_kind([proposal(None, t=(0, 5))] * 2).why_full == "there is no checkpoint to count changes from"
    assert agreed_kind([None, proposal(t=(0, 5))]) == FULL, "rank 0 writes no deltas"
    assert FULL.why_full is None


def test_a_full_save_that_the_policy_asks_for_has_a_delta_to_stand_in_for_it_and_one_that_must_be_has_none():
    due = agreed_kind([proposal(chain=Chain(3, 3, 100), t=(1, 5), u=(2, 2, True))])
    assert (due.name, due.stand_in) == ("full", Kind("b", frozenset({"u"}), n_links=5))
    assert agreed_kind([proposal(chain=CHAIN, t=(5, 5))]).stand_in == Kind("b", n_links=3)
    must = [
        [proposal(None, t=(0, 5))],
        [proposal(chain=Chain(999, 3, 100), t=(0, 5))],
        [proposal(chain=CHAIN, t=(0, 5)), None],
    ]
    assert [agreed_kind(ranks).stand_in for ranks in must] == [None] * 3
