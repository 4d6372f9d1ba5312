"""Ids of strings by a hash that is the same on all machines and in all versions (numpy only, no torch)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def hash_ids(strings: Any) -> npt.NDArray[np.int64]:
    """Return an int64 id for each string: XXH3, 64 bits, seed 0, of its UTF-8, read as a signed number.

    Equal strings have equal ids on all machines and in all versions. Of n different strings, two share an id with a
    probability of about n ** 2 / 2 ** 65: one in 37 for a billion. About two million a second; an Arrow array with
    repeats, such as a dictionary column, is hashed once for each different string. Needs no torch; pass the result to
    tables with ``torch.from_numpy``.

    Args:
        strings: a sequence or array of ``str``, or of ``bytes`` in UTF-8: a list, numpy, pandas or pyarrow.

    Returns:
        Array of int64, of the shape of ``strings``.

    Raises:
        TypeError: something is not a string, a null included; says where.
    """
    if isinstance(strings, str | bytes):
        raise TypeError(f"strings must be a sequence of str, found the single {strings!r:.80}: pass [{strings!r:.80}]")
    if hasattr(strings, "dictionary_encode"):
        encoded = strings.dictionary_encode()
        chunks = encoded.chunks if hasattr(encoded, "chunks") else [encoded]
        hashes = [np.empty(0, np.int64)]
        for chunk in chunks:
            if chunk.null_count:
                raise TypeError(f"strings must be str or bytes, found {chunk.null_count} nulls: fill or drop them")
            hashes.append(_hashed(chunk.dictionary.to_pylist())[chunk.indices.to_numpy()])
        return np.concatenate(hashes)
    values = strings if isinstance(strings, np.ndarray) else np.asarray(strings, object)  # or numpy makes a "5" of 5
    flat = values.ravel().tolist() if values.dtype.kind in "OUS" else None
    if flat is None:
        if values.size:
            raise TypeError(f"strings must be str or bytes, found an array of {values.dtype}")
        flat = []
    return _hashed(flat).reshape(values.shape)


def _hashed(strings: list[Any]) -> npt.NDArray[np.int64]:
    for at, text in enumerate(strings):
        if not isinstance(text, str | bytes):  # arrays and other buffers would be hashed too
            raise TypeError(f"strings must be str or bytes, found {text!r:.80} at {at}")
    try:
        encoded = (text.encode() if isinstance(text, str) else text for text in strings)
        return np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(strings)).view(np.int64)
    except UnicodeEncodeError as error:
        raise TypeError(f"strings must be str or bytes, found {error.object!r:.80}, which has no UTF-8") from error
