"""Bytes and JSON that are almost what was written."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

NUMBERS = [0, 1, -1, 2, 127, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64]
JSON_VALUES = [
    *(None, True, False, "", "x", "\0", "\ud800", "é" * 300, "x" * 5000, [], {}, [[]], [{}], {"": {}}),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), "NaN", "1", "0123456789abcdef", "../x", "/etc/hostname", "a/../b"),
    *("http://h/x", "file::x", "manifest.json", "sparse", "INTENT", "table", "id", "embedding", "float64", "int8"),
    *NUMBERS,
    *(-number for number in NUMBERS),
    10**30,
    10**4299,
    "@digits",
]


def mutated(data: bytes, rng: random.Random, *, same_size: bool = False) -> bytes:
    """Return ``data`` with a few faults."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        kinds = [_flip, _set, _number, _zeros, _copy] + (
            [] if same_size else [_cut, _insert, _duplicate, _delete, _tail]
        )
        data = rng.choice(kinds)(data, rng)
    return data


def _place(data: bytes, rng: random.Random) -> int:
    """Return an offset; the ends of a file, where it says what it is, come up more often."""
    most = max(0, len(data) - 1)
    return rng.choice([rng.randint(0, most), rng.randint(0, min(most, 1024)), rng.randint(max(0, most - 2048), most)])


def _over(data: bytes, at: int, new: bytes) -> bytes:
    new = new[: len(data) - at]
    return data[:at] + new + data[at + len(new) :]


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return _over(data, at, bytes([data[at] ^ 1 << rng.randrange(8)])) if data else data


def _set(data: bytes, rng: random.Random) -> bytes:
    return _over(data, _place(data, rng), bytes([rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])]))


def _number(data: bytes, rng: random.Random) -> bytes:
    size = rng.choice([2, 4, 4, 8, 8])
    number = rng.choice([*NUMBERS, -2, len(data), len(data) - 8, rng.randrange(len(data) + 1)])
    at = _place(data, rng)
    return _over(data, at - at % rng.choice([1, size]), (number % 2 ** (8 * size)).to_bytes(size, "little"))


def _zeros(data: bytes, rng: random.Random) -> bytes:
    return _over(data, _place(data, rng), bytes([rng.choice([0, 0, 0xFF])]) * rng.choice([4, 64, 512, 4096]))


def _copy(data: bytes, rng: random.Random) -> bytes:
    begin = _place(data, rng)
    return _over(data, _place(data, rng), data[begin : begin + rng.choice([4, 8, 64, 500])])


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, _place(data, rng), len(data) - 1])]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + rng.randbytes(rng.choice([1, 8, 64])) + data[at:]


def _duplicate(data: bytes, rng: random.Random) -> bytes:
    at, size = _place(data, rng), rng.choice([8, 64, 512, len(data)])
    return data[: at + size] + data[at:]


def _delete(data: bytes, rng: random.Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.choice([1, 8, 64, 512]) :]


def _tail(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice([b"\0", b"\n", b"garbage", data[-100:], data])


def mutated_json(value: Any, rng: random.Random) -> bytes:
    """Return the text of a JSON value with a few faults in its structure."""
    value = deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        holder, key = rng.choice(list(places(value)))
        kind = rng.randrange(6)
        if kind == 0:
            del holder[key]
            if not value:
                break
        elif kind == 1:
            other, other_key = rng.choice(list(places(value)))
            holder[key] = deepcopy(other[other_key])
        elif kind == 2 and isinstance(holder, list):
            holder.insert(rng.randint(0, len(holder)), deepcopy(holder[key]))
        elif kind == 3 and isinstance(holder, dict):
            holder[rng.choice(["", "x", f"{key}2", key.upper()])] = holder.pop(key)
        elif kind == 4 and type(holder[key]) is int:
            holder[key] = max(-(2**70), min(2**70, holder[key])) + rng.choice([-1, 1, -holder[key] - 1, 2**31, 2**62])
        else:
            holder[key] = deepcopy(rng.choice(JSON_VALUES))  # a container may be changed by the next fault
    text = json.dumps(value).replace('"@digits"', "9" * 5000)  # more than Python reads
    if rng.randrange(10) == 0:  # a key twice
        text = text.replace("{", '{"rows": 1, "bytes": 0, "file": "x", ', 1)
    return text.encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything in a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)
