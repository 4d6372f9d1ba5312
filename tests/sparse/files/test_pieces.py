from pathlib import Path

import numpy as np
import pytest
from support.builders import flip_bit
from support.forge import filled, parts_of, save_tables

from recckpt.errors import CorruptCheckpointError
from recckpt.output_dir.listing import locate
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.pieces import IdCheck, RowPiece

N_ROWS = 40


@pytest.fixture
def reader_of(local):
    """What opens the one batch of a part anew; ``flip`` changes a bit of a row of a slot first."""
    save_tables(local, [filled("item", range(N_ROWS), slots={"sparse_m": (3,)})])
    [part], [entry] = parts_of(local), locate(local, "ckpt_1").manifest.tables

    def open_part(flip: tuple[str, int] | None = None) -> PartReader:
        if flip is not None:
            slot, row = flip
            spec = next(spec for spec in entry.slots if spec.name == slot)
            values = bytes(memoryview(PartReader(local, "ckpt_1", part, entry.slots).unchecked(0)[slot]))
            path = Path(local.url, "ckpt_1", part.file)
            flip_bit(path, path.read_bytes().rindex(values) + row * spec.row_bytes)
        return PartReader(local, "ckpt_1", part, entry.slots)

    return open_part


def test_a_piece_has_the_rows_of_its_batch_checked_in_whatever_steps_they_pass(reader_of):
    reader = reader_of()
    columns, piece = reader.read(0), IdCheck().piece(reader, 0)
    assert piece.ids.tolist() == np.frombuffer(columns["id"], np.int64).tolist()
    for row in (0, 3, 3, 1, 17):
        piece.pass_to(1, row)
    assert list(piece.check().problems()) == []
    for number, name in enumerate(("embedding", "sparse_m"), start=1):
        assert piece.columns[number].tobytes() == bytes(columns[name])


@pytest.mark.parametrize("slot", ["embedding", "sparse_m"])
@pytest.mark.parametrize("row", [0, 20, N_ROWS - 1])
def test_a_flipped_bit_is_found_wherever_it_lies_and_however_far_rows_have_passed(reader_of, slot, row):
    reader = reader_of((slot, row))
    for passed in (0, 20, N_ROWS):
        piece = IdCheck().piece(reader, 0)
        piece.pass_to(1, passed)
        piece.pass_to(2, passed)
        with pytest.raises(CorruptCheckpointError, match=f"column '{slot}': found checksum") as failure:
            piece.check()
        with pytest.raises(CorruptCheckpointError) as of_reader:
            reader.read(0)
        assert str(failure.value) == str(of_reader.value)
        for use in (piece.copy, lambda piece=piece: RowPiece.joined([piece])):
            with pytest.raises(CorruptCheckpointError):
                use()


def test_a_batch_in_two_pieces_is_checked_at_the_end_of_the_second(reader_of):
    whole = IdCheck().piece(reader_of(("embedding", 2)), 0)
    first, last = whole.some(0, 25, goes_on=True), whole.some(25, N_ROWS, goes_on=False)
    assert [*first.ids, *last.ids] == whole.ids.tolist()
    first.pass_to(1, 25)
    first.end()
    last.pass_to(1, 15)
    with pytest.raises(CorruptCheckpointError, match="column 'embedding'"):
        last.end()
    with pytest.raises(CorruptCheckpointError, match="column 'embedding'"):
        first.check()


def test_ids_are_checked_before_a_piece_is_given(reader_of):
    reader = reader_of()
    values = dict(reader.unchecked(0))
    ids = np.frombuffer(values["id"], np.int64).copy()
    piece = RowPiece.of(reader, 0, {**values, "id": memoryview(ids[::-1].copy()).cast("B")}, is_checked=False)
    found = [found for found, _ in IdCheck().check(piece, reader.part.batches[0])]
    assert "rows out of bucket order" in found
