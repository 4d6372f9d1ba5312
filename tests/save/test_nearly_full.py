"""A disk that is nearly full: the delta that fits is written, though a full checkpoint is due."""

import pytest
import torch
from support.builders import table_state
from support.thread_ranks import on_ranks
from torch import nn

from recckpt import Deltas, Saver
from recckpt.errors import SaveFailedError
from recckpt.sparse import HashTable, gen_slice
from recckpt.storage.local import LocalStorage

N_ROWS = 1000
ROOM = 20_000  # bytes, of which a table takes 40,000


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
    assert "no room for c2 in full, which is due (1 deltas since the last full one" in caplog.text
    restored = Run(tmp_path)
    restored.saver.load()
    assert table_state(restored.table) == table_state(run.table)
    assert run.save(4) == "full"


@pytest.mark.parametrize("room", [100, ROOM])
def test_what_fits_in_no_form_fails_and_the_next_save_has_all_that_changed(tmp_path, monkeypatch, room):
    run = Run(tmp_path)
    assert [run.save(0, N_ROWS), run.save(1)] == ["full", "delta"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "free_bytes", lambda self: room)
        with pytest.raises(SaveFailedError, match="free, expected"):
            run.save(2, 5 if room == 100 else N_ROWS)
    assert run.save(3) == "full"


def test_the_first_save_of_a_run_has_no_delta_to_stand_in_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self: ROOM)
    with pytest.raises(SaveFailedError, match="free, expected"):
        Run(tmp_path).save(0, N_ROWS)


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
