"""Ids are forgotten: no file holds them afterwards, and everything else is what it was."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support.builders import tree
from support.delta_runs import rows_of, run_with_chain
from support.forgetting import ForgettingRun, files_with, fill, ids_at
from support.spec_reader import read
from support.sweeps import mostly_slow

import recckpt
from recckpt import Saver
from recckpt.averages import RowAverage
from recckpt.errors import (
    CheckpointNotFoundError,
    CommitNotDurableError,
    CorruptCheckpointError,
    RecckptError,
    WriterFencedError,
)
from recckpt.format import layout
from recckpt.inspect.absent import look_for
from recckpt.inspect.verify import verify
from recckpt.output_dir import forget_requests
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import pending
from recckpt.output_dir.listing import list_checkpoints, locate
from recckpt.output_dir.rotation import pin
from recckpt.policies import Choose
from recckpt.policies.admit import MinCount
from recckpt.rewrite.forgetting import finish, forget
from recckpt.rewrite.requests import forget_as_owner, settle
from recckpt.sparse import HashTable
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage

GONE = ids_at(5, 7, 50, 200, 99, 4000)  # changed; deleted; changed last; new in a delta; untouched; never there
CHAIN = ("ckpt_1", "ckpt_2", "ckpt_3", "ckpt_4")


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A run that is made once: the tests change copies of it."""
    path = tmp_path_factory.mktemp("chain") / "runs"
    ForgettingRun(path).save_chain()
    return path


@pytest.fixture
def root(tmp_path, chain):
    return shutil.copytree(chain, tmp_path / "runs", symlinks=True)


def rows_in(root: Path) -> dict:
    """Return all rows of all checkpoints, by the specification."""
    return {(ckpt, table): read(root, ckpt, table) for ckpt in ids_of(root) for table in ("user", "item")}


def ids_of(root) -> list[str]:
    return list_checkpoints(open_storage(str(root))).ckpt_ids


def without(rows: dict, gone, table: str = "user") -> dict:
    return {
        key: {id_: row for id_, row in found.items() if key[1] != table or id_ not in gone}
        for key, found in rows.items()
    }


def check_forgotten(root: Path, before: dict, gone) -> None:
    """Check that the ids are gone from the table ``user``, and nothing else is."""
    assert rows_in(root) == without(before, gone)
    assert verify(str(root)) == []
    found = look_for(str(root), np.array(gone), "user")
    assert (found.holding, found.unread, found.pending) == ((), {}, {})


def test_every_link_of_a_chain_is_written_again_without_the_ids_and_no_byte_of_them_is_left(root):
    before = rows_in(root)
    assert set(files_with(root, GONE))
    [done] = forget(str(root), "user", GONE)
    check_forgotten(root, before, GONE)
    assert list(done.rewritten) == list(CHAIN)
    assert done.n_rows == {"ckpt_1": 4, "ckpt_2": 5, "ckpt_3": 4, "ckpt_4": 4}
    listing = list_checkpoints(open_storage(str(root)))
    assert [c.manifest.kind for c in listing.committed] == ["full", "delta", "delta", "delta"]
    assert set(listing.directories) == set(done.rewritten.values())
    forget(str(root), "item", GONE)
    assert files_with(root, GONE) == {}
    assert files_with(root, ids_at(8, 9))  # those that stay are found, as deletes too


def test_dense_state_registered_objects_and_parts_without_the_ids_keep_their_bytes(root):
    def files(directory):
        return {n: d for n, d in tree(root / directory).items() if n.endswith(".pt") or n.endswith(".arrow")}

    before = {name: files(name) for name in CHAIN}
    [done] = forget(str(root), "user", ids_at(50))
    for old, new in done.rewritten.items():
        after = files(new)
        assert {n: d for n, d in after.items() if n.endswith(".pt")} == {
            n: d for n, d in before[old].items() if n.endswith(".pt")
        }
    assert files(done.rewritten["ckpt_2"]) == before["ckpt_2"]
    assert files(done.rewritten["ckpt_3"]) == before["ckpt_3"]
    assert files(done.rewritten["ckpt_4"]) != before["ckpt_4"]


def test_an_old_checkpoint_that_is_written_again_stays_older_than_those_after_it(tmp_path):
    run = ForgettingRun(tmp_path / "runs", deltas=False)
    fill(run.user, ids_at(1), 1.0)
    run.saver.save("ckpt_1", step=1)
    run.user.erase(torch.tensor(ids_at(1)))
    fill(run.user, ids_at(2), 1.0)
    run.saver.save("ckpt_2", step=2)
    for gone, written, other in ((1, "ckpt_1", "ckpt_2"), (2, "ckpt_2", None)):
        before = tree(tmp_path / "runs" / other) if other else {}
        [done] = forget(tmp_path / "runs", "user", ids_at(gone))
        assert list(done.rewritten) == [written]
        assert not other or tree(tmp_path / "runs" / other) == before, "it neither holds them nor stands on one"
        assert ids_of(tmp_path / "runs") == ["ckpt_1", "ckpt_2"]


def test_a_restore_gives_the_same_step_and_state_without_the_ids(root):
    whole = ForgettingRun(root)
    whole.saver.load()
    forget(str(root), "user", GONE)
    run = ForgettingRun(root)
    report = run.saver.load()
    assert report.global_step == 4
    there = [id_ for id_ in sorted(whole.user.ids().tolist()) if id_ not in GONE]
    assert sorted(run.user.ids().tolist()) == there
    kept = torch.tensor(there)
    assert torch.equal(run.user(kept), whole.user(kept))
    assert sorted(run.item.ids().tolist()) == sorted(whole.item.ids().tolist())
    fill(run.user, ids_at(300), 9.0)
    run.saver.save("ckpt_5", step=5)  # goes on from the revision
    assert locate(open_storage(str(root)), "ckpt_5").manifest.kind == "delta"
    assert verify(str(root)) == []
    assert not set(GONE) & set(read(root, "ckpt_5", "user"))


def test_a_table_may_lose_all_its_rows(root):
    before = rows_in(root)
    everything = ids_at(*range(300))
    forget(str(root), "user", everything)
    check_forgotten(root, before, everything)
    assert read(root, "ckpt_4", "user") == {}


def test_compacted_ones_and_waiting_offers_are_free_of_them_too(tmp_path):
    run = run_with_chain(tmp_path / "runs")
    recckpt.rewrite.compact(run.url, adopt=True)  # the delta is gone, what supersedes it is there, and its links
    recckpt.rewrite.compact(run.url, "ckpt_2")  # an offer that nobody adopts
    before = {name: rows_of(run, name) for name in ("ckpt_1", "ckpt_2", "ckpt_3")}
    [done] = forget(run.url, "item", [5, 9, 149])
    assert any(layout.is_offer_dir(name) for name in done.removed)
    assert all(len(link.manifest.shards) == 2 for link in locate(run, "ckpt_2").links), "as of the ranks that saved"
    for name, rows in before.items():
        assert rows_of(run, name) == {id_: row for id_, row in rows.items() if id_ not in (5, 9, 149)}
    assert not any(map(layout.is_offer_dir, list_checkpoints(run).directories))
    assert look_for(run.url, np.array([5, 9, 149])).holding == ()
    recckpt.rewrite.compact(run.url, "ckpt_2", adopt=True)  # what supersedes has fewer rows, and is superseded
    assert locate(run, "ckpt_2").manifest.supersedes
    assert rows_of(run, "ckpt_2") == {id_: row for id_, row in before["ckpt_2"].items() if id_ not in (5, 9, 149)}
    assert list_checkpoints(run).ckpt_ids == ["ckpt_1", "ckpt_2", "ckpt_3"]
    forget(run.url, "item", [6])  # and that is written again once more
    assert 6 not in rows_of(run, "ckpt_2")
    assert verify(run.url) == []


def test_what_crashed_saves_and_fenced_writers_left_goes(root):
    storage = open_storage(str(root))
    late, before = Fence(storage), rows_in(root)
    late.hold()
    shutil.copytree(root / "ckpt_2", root / "ckpt_9")  # a save that died before its commit
    (root / "ckpt_9" / "manifest.json").unlink()
    shutil.copytree(root / "ckpt_2" / "sparse", root / "ckpt_10" / "sparse")  # one of which even INTENT is gone
    draft = root / ".recckpt" / "forget" / f"{'ab' * 16}.json.{'cd' * 8}.tmp"
    draft.parent.mkdir()
    draft.write_bytes(b"ids")
    [done] = forget(str(root), "user", GONE)
    assert not (root / "ckpt_9").exists()
    assert not (root / "ckpt_10").exists()
    assert not draft.exists()
    assert "ckpt_10" in done.removed
    check_forgotten(root, before, GONE)


def test_pins_the_order_of_checkpoints_and_files_of_others_stay_though_they_are_called_like_ours(root):
    for name in ("export/model.pt", "recis/model.pt", "recis/extra.pt", "recis/io_state_0.pt", "recis/sparse/x.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"mine")
    before = [tree(root / name) for name in ("export", "recis")]
    pin(open_storage(str(root)), "ckpt_2")
    [done] = forget(str(root), "user", GONE)
    assert [tree(root / name) for name in ("export", "recis")] == before
    assert set(done.removed) == set(CHAIN)
    assert ids_of(root) == list(CHAIN)
    assert (root / "checkpoint").read_text().split() == list(CHAIN)
    run = ForgettingRun(root, max_keep=1)
    run.saver.load()
    run.saver.save("ckpt_5", step=5)
    assert {"ckpt_2", "ckpt_5"} <= set(ids_of(root))


def test_superseded_checkpoints_and_copies_by_hand_go(root):
    run = ForgettingRun(root, deltas=False)
    run.saver.load()
    run.saver.save("ckpt_4", step=4, overwrite=True)
    shutil.copytree(root / "ckpt_1", root / "mine")
    before = rows_in(root)
    forget(str(root), "user", GONE)
    assert not (root / "mine").exists()
    check_forgotten(root, before, GONE)
    assert ids_of(root) == list(CHAIN)


def test_counts_of_ids_that_wait_for_a_row_go_too(tmp_path):
    user = HashTable(2, name="user", admit=MinCount(3))
    saver = Saver(torch.nn.ModuleDict({"user": user}), output_dir=str(tmp_path / "runs"))
    user(torch.tensor([*ids_at(1, 1, 1), *ids_at(2, 3)]))
    saver.save("ckpt_1", step=1)
    assert set(read(tmp_path / "runs", "ckpt_1", "user.candidates")) == set(ids_at(2, 3))
    assert len(look_for(str(tmp_path / "runs"), np.array(ids_at(2)), "user").holding) == 1
    [done] = forget(tmp_path / "runs", "user", ids_at(1, 2))
    assert done.n_rows == {"ckpt_1": 1}
    assert set(read(tmp_path / "runs", "ckpt_1", "user.candidates")) == set(ids_at(3))
    assert files_with(tmp_path / "runs", ids_at(1, 2)) == {}
    assert verify(str(tmp_path / "runs")) == []


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("slots", [None, []])
def test_averages_of_the_rows_go_too_and_those_of_other_tables_stay(tmp_path, slots, is_shown):
    root = tmp_path / "runs"
    model = torch.nn.ModuleDict({"0": HashTable(2, name="user"), "1": HashTable(2, name="user.x")})
    averages = [RowAverage(model, decay=0.5, name=name) for name in ("average", "slow.ema")]
    choose = None if slots is None else Choose(slots=slots)
    saver = Saver(model, output_dir=str(root), deltas=True, max_keep=2, choose=choose)
    for number in (1, 2):
        for table in model.values():
            fill(table, ids_at(*range(3)), float(number))
        for average in averages:
            average.update()
        with averages[0].swap() if is_shown else nullcontext():
            saver.save(f"ckpt_{number}", step=number)
    assert len(look_for(str(root), np.array(ids_at(1)), "user").holding) == 6  # two checkpoints with three tables
    forget(root, "user", ids_at(1))
    for ckpt_id in ("ckpt_1", "ckpt_2"):
        for name, left in (("user", (0, 2)), ("user.x", (0, 1, 2))):
            for table in (name, f"{name}.average", f"{name}.slow.ema"):
                assert set(read(root, ckpt_id, table)) == set(ids_at(*left)), table
    assert look_for(str(root), np.array(ids_at(1)), "user").holding == ()
    assert verify(str(root)) == []


def test_a_table_of_rows_that_is_called_like_counts_is_left_alone(tmp_path):
    user, other = HashTable(2, name="user"), HashTable(2, name="user.candidates")
    saver = Saver(torch.nn.ModuleDict({"user": user, "other": other}), output_dir=str(tmp_path / "runs"), deltas=True)
    for number in (1, 2):
        for table in (user, other):
            fill(table, ids_at(*range(3)), float(number))
        saver.save(f"ckpt_{number}", step=number)
    before = read(tmp_path / "runs", "ckpt_2", "user.candidates")
    forget(tmp_path / "runs", "user", ids_at(1))
    assert set(read(tmp_path / "runs", "ckpt_2", "user")) == set(ids_at(0, 2))
    assert read(tmp_path / "runs", "ckpt_2", "user.candidates") == before
    assert look_for(str(tmp_path / "runs"), np.array(ids_at(1)), "user").holding == ()
    assert verify(str(tmp_path / "runs")) == []


def test_an_object_store_will_do(memory_url):
    ForgettingRun(memory_url).save_chain()
    [done] = forget(memory_url, "user", GONE)
    assert list(done.rewritten) == list(CHAIN)
    found = look_for(memory_url, np.array(GONE), "user")
    assert (found.holding, found.unread, found.n_asked) == ((), {}, len(GONE))
    assert verify(memory_url) == []


def test_the_audit_says_what_was_done_and_names_no_id(root):
    forget(str(root), "user", GONE)
    forget(str(root), "user", ids_at(1))
    data = (root / "forgotten.jsonl").read_text()
    first, second = map(json.loads, data.splitlines())
    assert (first["table"], first["n_ids"], first["by"]) == ("user", len(GONE), "recckpt.rewrite.forget")
    assert first["asked"] <= first["finished"]
    assert list(first["rewritten"]) == list(CHAIN)
    assert len(first["digests"]) == len(GONE)
    assert len(second["digests"]) == 1
    assert not any(str(id_) in data for id_ in GONE)
    storage = open_storage(str(root))
    assert forget_requests.digests(forget_requests.key(storage), ids_at(1)) == second["digests"]
    (root / ".recckpt" / "forget" / "key").unlink()  # after which nobody can test an id
    assert look_for(str(root), np.array(GONE)).n_asked == 0


@mostly_slow()
@pytest.mark.parametrize("damage", [b"", b"ab", b"no hex", b"ab" * 40])
def test_no_digest_is_written_without_a_whole_key(root, damage):
    forget(str(root), "user", ids_at(1))
    (root / ".recckpt" / "forget" / "key").write_bytes(damage)
    forget(str(root), "user", ids_at(2))
    line = json.loads((root / "forgotten.jsonl").read_text().splitlines()[-1])
    key = forget_requests.key(open_storage(str(root)))
    assert len(key) == 32
    assert line["digests"] == forget_requests.digests(key, ids_at(2))


def test_ids_that_are_nowhere_change_no_checkpoint_and_a_trainer_is_told_by_whom_it_was_taken_over(root):
    before = {name: tree(root / name) for name in CHAIN}
    [done] = forget(str(root), "user", ids_at(4000))
    assert (done.rewritten, done.n_rows) == ({}, {})
    assert {name: tree(root / name) for name in CHAIN} == before
    run = ForgettingRun(root)
    run.saver.load()
    run.saver.save("ckpt_5", step=5)
    forget(str(root), "user", GONE)
    fill(run.user, ids_at(301), 1.0)
    with pytest.raises(WriterFencedError, match=r"taken over by `recckpt forget`.*restart it from the newest"):
        run.saver.save("ckpt_6", step=6)
    assert look_for(str(root), np.array(GONE), "user").holding == ()


def test_what_was_begun_is_ended_by_the_next_call(root, monkeypatch):
    before = rows_in(root)

    def die(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Fence, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            forget(str(root), "user", GONE)
    assert look_for(str(root), np.array(GONE), "user").pending == {"user": len(GONE)}
    assert rows_in(root) == without(before, GONE)  # readers prefer what is written again
    [ended, own] = forget(str(root), "user", ids_at(1))
    assert (ended.is_resumed, own.is_resumed) == (True, False)
    assert ended.n_rows == {"ckpt_1": 4, "ckpt_2": 5, "ckpt_3": 4, "ckpt_4": 4}
    check_forgotten(root, before, [*GONE, *ids_at(1)])
    assert finish(str(root)) == []
    lines = (root / "forgotten.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert all(len(each.chains.broken) == 0 for each in [list_checkpoints(open_storage(str(root)))])


WRONG = [
    (lambda root: forget(str(root), "users", [1]), ValueError, "no table 'users'.*did you mean 'user'"),
    (lambda root: forget(str(root), "user", []), ValueError, "at least one id to forget, found none"),
    (lambda root: forget(str(root), "user", [1.5]), TypeError, "int64, found float64"),
    (lambda root: forget(str(root), "user", ["1"]), TypeError, "int64, found"),
    (lambda root: forget(str(root), "user", [True]), TypeError, "int64, found bool"),
    (lambda root: forget(str(root), "user", [True, 7]), TypeError, "int64, found bool"),
    (lambda root: forget(str(root), "user", [2**64]), ValueError, "int64"),
    (lambda root: forget(str(root), "user", [2**63]), ValueError, "int64"),
    (lambda root: forget(str(root), "user", np.ones((2, 2), np.int64)), ValueError, r"found \(2, 2\)"),
    (
        lambda root: forget(str(root / "ckpt_1"), "user", [1]),
        CheckpointNotFoundError,
        "itself the directory of a checkpoint",
    ),
    (lambda root: forget(str(root / "nowhere"), "user", [1]), CheckpointNotFoundError, "does not exist"),
    (lambda root: finish(str(root / "nowhere")), CheckpointNotFoundError, "does not exist"),
]


@pytest.mark.parametrize(("call", "kind", "said"), WRONG)
def test_wrong_input_is_refused_before_anything_changes(root, call, kind, said):
    before = tree(root)
    with pytest.raises(kind, match=said):
        call(root)
    assert tree(root) == before


def test_damage_is_refused_before_anything_changes(root):
    part = next((root / "ckpt_1" / "sparse").glob("*.arrow"))
    data = bytearray(part.read_bytes())
    at = data.index(ids_at(5)[0].to_bytes(8, "little"))
    data[at] ^= 0x40
    part.write_bytes(data)
    before = tree(root)
    with pytest.raises(CorruptCheckpointError):
        forget(str(root), "user", GONE)
    assert tree(root) == before
    os.truncate(part, 10)
    before = tree(root)
    with pytest.raises(CorruptCheckpointError, match="it is unknown whether it holds the ids"):
        forget(str(root), "user", GONE)
    assert tree(root) == before


def test_what_somebody_puts_back_after_ids_were_forgotten_never_counts_again(root, tmp_path):
    shutil.copytree(root, tmp_path / "copy")
    forget(str(root), "user", GONE)
    shutil.copytree(tmp_path / "copy" / "ckpt_2", root / "ckpt_2")
    storage = open_storage(str(root))
    assert list(list_checkpoints(storage).fenced) == ["ckpt_2"]
    Fence(storage).hold()  # whose list does not name it
    assert list(list_checkpoints(storage).fenced) == ["ckpt_2"]


def test_what_somebody_puts_back_meanwhile_does_not_get_into_the_list(root, tmp_path, monkeypatch):
    shutil.copytree(root, tmp_path / "copy")
    close_list = Fence.close_list

    def put_back_first(fence, clean):
        shutil.copytree(tmp_path / "copy" / "ckpt_1", root / "ckpt_1")
        close_list(fence, clean)

    with monkeypatch.context() as patch:
        patch.setattr(Fence, "close_list", put_back_first)
        with pytest.raises(RecckptError, match=r"ckpt_1: found sparse/.*may hold the ids"):
            forget(str(root), "user", GONE)
    storage = open_storage(str(root))
    assert list(list_checkpoints(storage).fenced) == ["ckpt_1"]
    assert pending(storage)
    finish(str(root))
    assert look_for(str(root), np.array(GONE), "user").holding == ()
    assert not pending(storage)


def test_what_is_taken_as_it_is_was_synced_before_what_it_supersedes_goes(root, monkeypatch):
    storage, done = open_storage(str(root)), []
    sync, remove = LocalStorage.sync_dir, LocalStorage.remove
    fence = Fence(storage)
    fence.hold()

    def failing(self, name):
        if any(c.manifest.supersedes for c in list_checkpoints(storage).committed):
            raise OSError(5, "Input/output error", name)
        sync(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "sync_dir", failing)
        with pytest.raises(CommitNotDurableError, match="Input/output"):
            forget_as_owner(storage, fence, "user", np.array(GONE), "a test")
    [doubtful] = [c.directory for c in list_checkpoints(storage).committed if c.manifest.supersedes]
    monkeypatch.setattr(LocalStorage, "sync_dir", lambda self, name: (done.append(name), sync(self, name)))
    monkeypatch.setattr(LocalStorage, "remove", lambda self, name: (done.append(name), remove(self, name)))
    assert settle(storage, fence)
    assert done.index(doubtful) < done.index("ckpt_1/manifest.json")
