"""What Arrow's flatbuffers say of a part, read before Arrow acts on it; no more of them than that takes.

Arrow expands a compressed batch before anybody can look at it: a file of 100 kB may ask for any number of gigabytes.
Parts are not compressed, so one that says it is is refused.
"""

from __future__ import annotations

import struct

_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of the metadata, bytes of the body
_END_BYTES = 10  # of a file: the size of the footer, and a magic
_DICTIONARIES, _BATCHES = 2, 3  # fields of a Footer
_VERSION, _KIND, _HEADER, _CUSTOM = 0, 1, 2, 4  # fields of a Message
_V5 = 4  # of the metadata
_DICTIONARY, _BATCH = 2, 3  # kinds of a header
_DATA = 1  # field of a DictionaryBatch
_COMPRESSION = 3  # field of a RecordBatch

Data = bytes | memoryview


class Messages:
    """The places of the messages in an Arrow file that lies in memory and has a footer that Arrow takes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._footer = len(data) - _END_BYTES - _int32(data, len(data) - _END_BYTES)

    def check_dictionaries(self) -> None:
        """Raise ValueError if a dictionary is compressed."""
        first, count = self._vector(_DICTIONARIES)
        for number in range(count):
            self._check(first, number)

    def check_all(self) -> None:
        """Raise ValueError if anything is compressed."""
        self.check_dictionaries()
        for number in range(self._vector(_BATCHES)[1]):
            self.check_batch(number)

    def check_batch(self, number: int) -> None:
        """Raise ValueError if a record batch is compressed."""
        self._check(self._vector(_BATCHES)[0], number)

    def _vector(self, field: int) -> tuple[int, int]:
        """Return where the first block is and how many there are."""
        place = _field(self._data, _follow(self._data, self._footer), field)
        vector = _follow(self._data, place) if place else 0
        return vector + 4, _int32(self._data, vector) if place else 0

    def _check(self, first: int, number: int) -> None:
        try:
            begin, n_bytes, _ = _BLOCK.unpack_from(self._data, first + number * _BLOCK.size)
        except struct.error as error:
            raise ValueError(f"a broken footer ({error})") from error
        check_message(self._data[begin : begin + n_bytes])


def check_message(data: Data) -> None:
    """Look at what Arrow has read in one go, a message or anything else.

    Raises:
        ValueError: it is a message with compressed values.
    """
    if len(data) > 8 and _int32(data, 0) == -1:
        begin = 8
    elif len(data) > 4 and _int32(data, 0) == len(data) - 4:  # as Arrow before 0.15 wrote them
        begin = 4
    else:
        return
    try:
        compressed = _is_compressed(data, begin)
    except (struct.error, IndexError):
        return  # no message that Arrow would take
    if compressed:
        raise ValueError("compressed values, which a part does not have")


def _is_compressed(data: Data, begin: int) -> bool:
    message = _follow(data, begin)
    kind, header, version = (_field(data, message, field) for field in (_KIND, _HEADER, _VERSION))
    if not kind or not header or data[kind] not in (_DICTIONARY, _BATCH):
        return False
    batch = _follow(data, header)
    if data[kind] == _DICTIONARY:
        inner = _field(data, batch, _DATA)
        if not inner:
            return False
        batch = _follow(data, inner)
    # Before version 5 the compression stood in the metadata that anybody may add to.
    is_old = not version or struct.unpack_from("<h", data, version)[0] < _V5
    return _field(data, batch, _COMPRESSION) > 0 or (is_old and _field(data, message, _CUSTOM) > 0)


def _field(data: Data, table: int, field: int) -> int:
    """Return where a field of a table is, 0 where the table has none."""
    fields = table - _int32(data, table)
    at = 4 + 2 * field
    if at + 2 > struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + at)[0]
    return table + int(offset) if offset else 0


def _follow(data: Data, at: int) -> int:
    """Return where an offset leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _int32(data: Data, at: int) -> int:
    return int(struct.unpack_from("<i", data, at)[0])
