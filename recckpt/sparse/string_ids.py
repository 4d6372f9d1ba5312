"""Hashes strings to ids; the hash is the same on all machines and in all versions (numpy only, no torch)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def hash_ids(strings: Any) -> npt.NDArray[np.int64]:
    """Return one int64 id per string: the 64-bit XXH3 hash (seed 0) of its UTF-8 bytes, as a signed number.

    Equal strings have equal ids on all machines and in all versions. Among n different strings, the probability that
    two share an id is about n ** 2 / 2 ** 65: one in 37 for a billion. The function hashes about two million strings
    per second. In an Arrow array, such as a dictionary column, it hashes each different string once. It needs no torch;
    pass the result to tables with ``torch.from_numpy``.

    Args:
        strings: a sequence or array of ``str``, or of ``bytes`` in UTF-8: a list, numpy, pandas or pyarrow.

    Returns:
        Array of int64, of the shape of ``strings``.

    Raises:
        TypeError: an element is not a string, or is null.
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
    # As objects, because numpy would otherwise turn the number 5 into the string "5".
    values = strings if isinstance(strings, np.ndarray) else np.asarray(strings, object)
    flat = values.ravel().tolist() if values.dtype.kind in "OUS" else None
    if flat is None:
        if values.size:
            raise TypeError(f"strings must be str or bytes, found an array of {values.dtype}")
        flat = []
    return _hashed(flat).reshape(values.shape)


def _hashed(strings: list[Any]) -> npt.NDArray[np.int64]:
    for at, text in enumerate(strings):
        if not isinstance(text, str | bytes):  # xxhash would accept arrays and other buffers
            raise TypeError(f"strings must be str or bytes, found {text!r:.80} at {at}")
    try:
        encoded = (text.encode() if isinstance(text, str) else text for text in strings)
        return np.fromiter(map(xxhash.xxh3_64_intdigest, encoded), np.uint64, len(strings)).view(np.int64)
    except UnicodeEncodeError as error:
        raise TypeError(f"strings must be str or bytes, found {error.object!r:.80}, which has no UTF-8") from error
