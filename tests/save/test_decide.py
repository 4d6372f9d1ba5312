"""What all ranks make of what each proposes: one plan, or one refusal, which each raises as its own error says."""

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import table_state
from support.foreign import ForeignTable
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import Saver
from recckpt.dense.sharded import Summary
from recckpt.errors import RecckptError, SaveFailedError, WriterFencedError
from recckpt.policies import Choose
from recckpt.policies.deltas import Chain, Deltas
from recckpt.save.choice import Choice
from recckpt.save.decide import Phase, Proposal, RankFailure, Room, SavePlan, WorkRoom, decide, shortage, why_shared
from recckpt.save.deltas import FULL, DeltaProposal, Kind, TableChanges
from recckpt.save.job import Destination
from recckpt.save.propose import estimated_bytes, measured_room
from recckpt.save.save_info import SaveInfo
from recckpt.sparse import HashTable, gen_slice
from recckpt.sparse.split import state_of
from recckpt.storage import open_storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.transfers import Transport

WIDE, NARROW = Room("here", 10_000, 0, None), Room("here", 1_000, 0, None)
INFO = SaveInfo("c", 7)
N_ROWS = 1000
ROOM = 20_000  # bytes, of which a table takes 40,000


def proposal(**fields):
    return Proposal("c", 7, Choice(), False, **{"room": WIDE, "sharded": Summary(0, 0, 0), **fields})


def failed(phase, reason="OSError: down"):
    return proposal(failure=RankFailure(phase, reason), room=WIDE if phase is Phase.STAGE else None, sharded=None)


def delta(n_changed, n_bytes, room=WIDE, chain=None):
    tables = TableChanges.of({"t": (n_changed, 10, n_bytes // 10, False, False)})
    base = DeltaProposal(Deltas(full_every=3), "b", chain or Chain(1, 10, 100), tables)
    return replace(proposal(n_bytes=n_bytes, room=room, delta=base), writes_deltas=True)


def refusal(*proposals):
    plan = decide(proposals)
    return None if plan.refusal is None else (plan.refusal.rank, plan.refusal.phase)


def test_ranks_that_propose_one_save_have_a_plan_of_what_any_of_them_has():
    plan = decide([proposal(io_state=("x",), own_extra=("a",)), proposal(io_state=("y", "x"))])
    assert plan == SavePlan(FULL, own_extra=("a",), io_state=("x", "y"))


def test_what_has_to_be_compared_in_detail_is_in_the_plan():
    whole, half = Summary(5, 4, 2), Summary(5, 4, 1)
    assert decide([proposal(sharded=whole)] * 2).is_whole
    assert not decide([proposal(sharded=whole), proposal(sharded=half)]).is_whole
    assert decide([proposal(digest=1), proposal(digest=2)]).has_differences


def test_of_several_failures_the_earliest_phase_counts_and_of_one_phase_the_first_rank():
    last = failed(Phase.STAGE)
    assert refusal(proposal(), last) == (1, Phase.STAGE)
    assert refusal(last, failed(Phase.CHECK), failed(Phase.CHECK)) == (1, Phase.CHECK)
    assert refusal(last, failed(Phase.CHECK), failed(Phase.SETTLE)) == (2, Phase.SETTLE)
    assert refusal(failed(Phase.CONFIRM), failed(Phase.ROOM)) == (0, Phase.CONFIRM)


def test_ranks_at_different_saves_are_refused_before_what_comes_later_and_after_what_comes_before():
    other = replace(proposal(), step=8)
    assert refusal(failed(Phase.STAGE), other) == (1, Phase.AGREE)
    assert refusal(failed(Phase.CONFIRM), other) == (1, Phase.AGREE)
    assert refusal(failed(Phase.CHECK), other) == (0, Phase.CHECK)


def test_what_does_not_fit_is_refused_in_full_before_staging_counts_and_as_a_delta_after():
    assert refusal(proposal(n_bytes=600, room=NARROW), proposal(n_bytes=401, room=NARROW)) == (0, Phase.ROOM)
    assert refusal(proposal(n_bytes=600), proposal(n_bytes=400, room=NARROW)) is None
    assert refusal(proposal(n_bytes=2000, room=NARROW), failed(Phase.STAGE)) == (0, Phase.ROOM)
    assert decide([delta(1, 5000, NARROW)]).kind == Kind("b", n_links=3)
    assert refusal(delta(5, 5000, NARROW)) == (0, Phase.ROOM)


def test_a_delta_stands_in_for_a_full_save_that_is_due_where_any_rank_sees_no_room_for_that():
    due = Chain(3, 3, 100)
    assert decide([delta(1, 5000, WIDE, due)]).kind.name == "full"
    plan = decide([delta(1, 1000, WIDE, due), delta(1, 1000, NARROW, due)])
    assert (plan.kind.name, plan.displaced[:8], plan.refusal) == ("delta", "3 deltas", None)


def raised(plan, rank, own=None):
    with pytest.raises((RecckptError, ValueError)) as caught:
        plan.refusal.raise_on(rank, own, INFO)
    return caught.value


def test_a_rank_raises_its_own_error_and_the_others_that_of_the_first_rank():
    plan, own = decide([proposal(), failed(Phase.CHECK, "ValueError: no"), failed(Phase.CHECK)]), ValueError("mine")
    assert raised(plan, 2, own) is own
    other = raised(plan, 0)
    assert (type(other), other.rank, other.step) == (SaveFailedError, 1, 7)
    assert "failed on rank 1: ValueError: no" in str(other)


def test_an_error_of_the_storage_is_a_failure_of_the_save_and_its_cause():
    own = OSError(5, "down")
    error = raised(decide([failed(Phase.STAGE)]), 0, own)
    assert (type(error), error.rank, error.__cause__) == (SaveFailedError, 0, own)
    lacking = raised(decide([proposal(n_bytes=2000, room=NARROW)]), 1)
    assert (type(lacking), lacking.rank, lacking.__cause__.filename) == (SaveFailedError, 0, "here")


@pytest.mark.parametrize("phase", [Phase.SETTLE, Phase.CONFIRM])
def test_an_error_of_recckpt_that_is_of_all_ranks_is_raised_by_all_as_it_is(phase):
    first, own = WriterFencedError("taken over"), WriterFencedError("mine")
    plan = decide([failed(phase, first), failed(phase)])
    assert raised(plan, 1, own) is raised(plan, 2) is first
    assert raised(plan, 0, own) is own


def test_owners_are_compared_over_tables_that_some_ranks_have_beside_others():
    both, one = ("t", "u"), ("t",)
    halves = [{gen_slice(0, 2): both}, {gen_slice(1, 2): one}]
    assert why_shared(halves) is None
    assert why_shared([*halves, {None: ("u",)}]).startswith("table 'u': ranks 0 and 2 own the same ids: each id")
    assert why_shared([*halves, {None: ("t", "x")}]).startswith("table 't': ranks 0 and 2")
    assert "table 't': ranks 0 and 1" in why_shared([{None: both}] * 2)


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: 1000)
    return open_storage(str(tmp_path))


def room(storage, min_free_bytes=0):
    return measured_room(
        Destination(storage, None, Transport(), None, 1, min_free_bytes, on_save=None, changes=None, forgets=None)
    )


@pytest.mark.parametrize(("n_bytes", "min_free_bytes"), [(1000, 0), (0, 1000), (400, 600)])
def test_what_fits_exactly_fits_and_one_byte_more_does_not(storage, memory_url, n_bytes, min_free_bytes):
    assert shortage([room(storage, min_free_bytes)], [n_bytes]) is None
    if n_bytes:
        n_bytes += 1
    else:
        min_free_bytes += 1
    failure = shortage([room(storage, min_free_bytes)], [n_bytes])
    refused = failure.reason
    assert (failure.rank, failure.phase) == (0, Phase.ROOM)
    assert "found 1.0 kB free, expected" in str(refused)
    assert (refused.errno, refused.filename) == (errno.ENOSPC, storage.url)
    assert ("and leave" in str(refused)) == (min_free_bytes > 0)
    assert shortage([room(open_storage(memory_url), 10**30)], [10**30]) is None, "a storage that knows no room"


def test_what_all_ranks_write_has_to_fit_where_any_of_them_looks(storage):
    rooms = [replace(room(storage), free_bytes=2000), room(storage)]
    assert shortage(rooms, [600, 400]) is None
    assert shortage(rooms, [600, 401]).rank == 1
    assert shortage(rooms, [2000, 1]).rank == 0


def test_ranks_of_one_host_take_the_room_of_that_host_alone():
    here, there = Room("near", 1000, 0, None, frozenset([0, 1])), Room("near", 1000, 0, None, frozenset([2]))
    assert shortage([here, here, there], [400, 600, 1000]) is None
    assert shortage([here, here, there], [400, 601, 0]).rank == 0
    assert shortage([here, here, there], [0, 0, 1001]).rank == 2


def test_ranks_of_one_host_share_the_room_of_their_work_dirs():
    here, there = WorkRoom("/tmp/a", ("one", 1), 1000), WorkRoom("/tmp/b", ("other", 1), 1000)
    rooms = [Room("url", None, 0, work) for work in (here, here, there)]
    assert shortage(rooms, [400, 600, 1000]) is None
    failure = shortage(rooms, [400, 601, 0])
    refused = failure.reason
    assert (failure.rank, refused.errno, refused.filename) == (0, errno.ENOSPC, "/tmp/a")
    assert "found 1.0 kB free in the work dir, expected 1.0 kB" in str(refused)
    assert shortage(rooms, [0, 0, 1001]).rank == 2


def test_what_a_save_needs_is_estimated_from_the_rows_of_each_rank_and_the_dense_state_once():
    table = HashTable(2, name="t")
    table(torch.arange(100))
    model = nn.ModuleDict({"t": table, "top": nn.Linear(3, 1, bias=False)})
    assert estimated_bytes(*state_of(model), 0, Choice()) == 100 * (8 + 2 * 4) + 3 * 4
    assert estimated_bytes(*state_of(model), 1, Choice()) == 100 * (8 + 2 * 4)
    ids, of_no_slot = torch.arange(3), torch.ones(3, 2, dtype=torch.complex64)
    refused = {"foreign": ForeignTable("foreign", ids, of_no_slot)}
    assert estimated_bytes(refused, {}, 0, Choice()) == 0, "of what staging refuses"


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
    options = {"choose": Choose(where={"t": {"count": {"min": 2}}}), "deltas": deltas}
    saver = Saver(model, output_dir=str(tmp_path), **options)
    assert [saver.save(name).tables[0].rows for name in "ab"] == [3, 3]


class Run:
    """A table, of which some rows change between saves."""

    def __init__(self, root, **options):
        self.table = HashTable(8, name="t")
        options = {"max_keep": None, "deltas": Deltas(full_every=1), **options}
        self.saver = Saver(nn.ModuleDict({"t": self.table}), output_dir=str(root), **options)

    def save(self, number, n_rows=5):
        self.table.insert(torch.arange(n_rows), torch.full((n_rows, 8), float(number)))
        return self.saver.save(f"c{number}").kind


def test_a_delta_stands_in_for_the_full_save_that_is_due_and_the_next_with_room_is_full(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path)
    assert [run.save(0, N_ROWS), run.save(1)] == ["full", "delta"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "free_bytes", lambda self: ROOM)
        assert [run.save(2), run.save(3, 7)] == ["delta", "delta"]
    assert "no room for c2 in full, which is due (1 deltas since the last full checkpoint" in caplog.text
    restored = Run(tmp_path)
    restored.saver.load()
    assert table_state(restored.table) == table_state(run.table)
    assert run.save(4) == "full"


@pytest.mark.parametrize("room", [100, ROOM])
def test_what_fits_in_no_form_fails_and_the_next_save_has_all_that_changed(tmp_path, monkeypatch, room):
    run = Run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "free_bytes", lambda self: room)
        with pytest.raises(SaveFailedError, match="free, expected"):
            run.save(0, N_ROWS)  # the first one has no delta to stand in for it
    assert [run.save(0, N_ROWS), run.save(1)] == ["full", "delta"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "free_bytes", lambda self: room)
        with pytest.raises(SaveFailedError, match="free, expected"):
            run.save(2, 5 if room == 100 else N_ROWS)
    assert run.save(3) == "full"


def test_all_ranks_write_the_delta_where_one_of_them_finds_no_room(tmp_path):
    def save(rank, connect):
        table = HashTable(8, name="t", slice=gen_slice(rank, 2))
        saver = Saver(nn.ModuleDict({"t": table}), output_dir=str(tmp_path), deltas=Deltas(full_every=1))
        connect(saver)
        ids = torch.arange(N_ROWS)
        own, kinds = ids[table.slice.owns(ids)], []
        for number in range(3):
            changed = own if number == 0 else own[:5]
            table.insert(changed, torch.full((len(changed), 8), float(number)))
            if number == 2:
                saver.storage.free_bytes = lambda: ROOM if rank else 10**9
            kinds.append(saver.save(f"c{number}", rank, 2).kind)
        return kinds

    assert on_ranks(2, save) == [["full", "delta", "delta"]] * 2
