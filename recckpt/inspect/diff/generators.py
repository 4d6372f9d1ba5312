"""Which random generators differ, by the words of the pickle that holds their states: none is run (no torch here)."""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterator, Mapping

import xxhash

from recckpt.checkpoint.chain import OpenChain
from recckpt.format import layout

_GENERATORS = ("torch", "cuda", "numpy", "python")  # part of the format: in this order
_MAX_BYTES = 64 << 20  # states of all devices take a few kB each
_PLACES = ("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET")  # which differ where nothing else does


def generators_of(side: OpenChain) -> Mapping[str, tuple[int, ...]]:
    """Return a checksum of the state of each generator on each rank; {} where a file is of another form."""
    sums: dict[str, list[int]] = {name: [] for name in _GENERATORS}
    for file in sorted(file.name for file in side.manifest.files if layout.content_of_rank(file.name) == "rng"):
        of_rank = _of_file(side.files.read(layout.join(side.directory, file), _MAX_BYTES))
        if of_rank.keys() != sums.keys():
            return {}
        for name, checksum in of_rank.items():
            sums[name].append(checksum)
    return {name: tuple(each) for name, each in sums.items() if each}


def _of_file(data: bytes) -> dict[str, int]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name.rpartition("/")[2]: archive.read(name) for name in archive.namelist() if "/data/" in name}
            [pickled] = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
        return {name: checksum.intdigest() for name, checksum in _digests(pickled, records)}
    except (zipfile.BadZipFile, ValueError, KeyError, NotImplementedError):
        return {}


def _digests(pickled: bytes, records: Mapping[str, bytes]) -> Iterator[tuple[str, xxhash.xxh3_64]]:
    """Yield a checksum of what stands after each name, with the bytes of the tensors that it refers to."""
    names, current = list(_GENERATORS), xxhash.xxh3_64()
    name = ""
    for opcode, argument, _ in pickletools.genops(pickled):
        if names and argument == names[0]:
            if name:
                yield name, current
            name, current = names.pop(0), xxhash.xxh3_64()
        elif opcode.name not in _PLACES:
            record = records.get(str(argument)) if opcode.name == "BINUNICODE" else None
            current.update(f"{opcode.name} {argument!r}\n".encode() if record is None else record)
    yield name, current
