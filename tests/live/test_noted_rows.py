"""Rows noted on a device: each once, none lost, those of other ranks left out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICES, here, on

from recckpt.live.noted_rows import NotedRows

N_ROWS = 12  # of the box


@pytest.mark.parametrize("device", DEVICES)
@given(
    begin=st.integers(0, N_ROWS),
    n_rows=st.integers(0, N_ROWS),
    calls=st.lists(st.one_of(st.none(), st.lists(st.integers(-3, N_ROWS + 3)), st.sets(st.integers(0, N_ROWS - 1)))),
)
@settings(deadline=None, max_examples=60)
def test_what_was_noted_is_taken_once(device, begin, n_rows, calls):
    """``None`` takes; a list names rows by number, a set by a mask."""
    n_rows = min(n_rows, N_ROWS - begin)
    noted, expected = NotedRows(begin, n_rows), set()
    with on(device):
        for call in [*calls, None]:
            if call is None:
                taken = noted.take().tolist()
                assert sorted(taken) == sorted(expected)
                expected = set()
                continue
            if isinstance(call, set):
                rows = torch.zeros(N_ROWS, dtype=torch.bool, device=here())
                rows[list(call)] = True
            else:
                rows = torch.tensor(call, dtype=torch.int64, device=here())
            noted.note(rows)
            expected |= {row - begin for row in call if begin <= row < begin + n_rows}


def test_numbers_of_any_shape_and_type_are_noted():
    noted = NotedRows(0, 5)
    noted.note(torch.tensor([[1, 3], [3, 1]], dtype=torch.int32))
    with torch.inference_mode():
        noted.note(torch.tensor([4]))
    noted.note(torch.tensor([0], dtype=torch.int16))
    assert noted.take().tolist() == [0, 1, 3, 4]


def test_without_room_for_a_byte_a_row_nothing_is_noted_and_room_is_not_asked_for_again(monkeypatch):
    asked = []

    def full(*args, **kwargs):
        asked.append(args)
        raise torch.OutOfMemoryError

    noted = NotedRows(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        assert not noted.note(torch.tensor([1]))
    assert not noted.note(torch.tensor([1]))
    assert (len(asked), noted.take().tolist()) == (1, [])


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_what_streams_of_several_devices_and_threads_note_is_taken_whole(device):
    with on(device):
        for _ in range(20):
            noted, streams = NotedRows(0, 100_000), [torch.cuda.Stream() for _ in range(4)]
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(1_000_000)
                    noted.note(torch.arange(number, 100_000, 5, device=here()))
            noted.note(torch.tensor([4]))  # from the host
            rows = noted.take()
            assert set(rows.tolist()) == {row for row in range(100_000) if row % 5 < 4} | {4}
            assert not len(noted.take())
