import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from recckpt.sparse import hash_ids

WORDS = ["", "a", "naïve 表", "a", "x" * 300]


def test_an_id_is_the_xxh3_of_the_utf8_as_a_signed_number():
    expected = [xxhash.xxh3_64_intdigest(word.encode()) for word in WORDS]
    assert hash_ids(WORDS).tolist() == [value - (value >> 63 << 64) for value in expected]
    assert hash_ids(["user 1"]).tolist() == [2434219252161785627], "for ever"


@pytest.mark.parametrize(
    "strings",
    [
        tuple(WORDS),
        np.array(WORDS),
        np.array(WORDS, object),
        [word.encode() for word in WORDS],
        pa.array(WORDS),
        pa.chunked_array([WORDS[:2], WORDS[2:]]),
        pa.array(WORDS).dictionary_encode(),
    ],
)
def test_strings_come_in_any_array(strings):
    assert hash_ids(strings).tolist() == hash_ids(WORDS).tolist()


def test_the_shape_stays():
    assert hash_ids(np.array([["a", "b"], ["c", "a"]])).shape == (2, 2)
    assert hash_ids([]).shape == (0,)
    assert hash_ids(pa.array([], pa.utf8())).shape == (0,)


@pytest.mark.parametrize(
    "strings", ["abc", b"abc", ["a", None], ["a", 5], np.arange(3), pa.array(["a", None]), ["\ud800"]]
)
def test_what_is_no_string_is_refused(strings):
    with pytest.raises(TypeError, match="strings must be"):
        hash_ids(strings)


def test_hashing_imports_no_torch():
    code = "import sys; from recckpt.sparse import hash_ids; hash_ids(['a']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
