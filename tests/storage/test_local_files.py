import gc
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recckpt.storage.local_files import map_file


def mapped(path, data=b"0123456789"):
    path.write_bytes(data)
    with path.open("rb") as file:
        return map_file(file.fileno(), str(path))


def n_maps(path):
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_map_holds_the_bytes_after_file_and_name_are_gone(tmp_path):
    maps = [mapped(tmp_path / str(number)) for number in range(50)]
    for number in range(50):
        (tmp_path / str(number)).unlink()
    assert [bytes(one) for one in maps] == [b"0123456789"] * 50
    descriptors = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [target for target in descriptors if target.startswith(str(tmp_path))]


def test_nobody_writes_to_a_map_an_empty_file_is_no_bytes_and_what_is_none_is_named(tmp_path):
    with pytest.raises(TypeError, match="read-only"):
        mapped(tmp_path / "x")[0] = 1
    assert mapped(tmp_path / "x", b"") == b""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="/that/place"):
            map_file(descriptor, "/that/place")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "view", [lambda m: m[3:5], lambda m: pa.py_buffer(m).slice(3, 2), lambda m: np.frombuffer(m, np.uint8)[3:5]]
)
def test_a_map_lives_as_long_as_the_last_view_of_it_and_no_longer(tmp_path, view):
    some = view(mapped(tmp_path / "x"))
    gc.collect()
    assert n_maps(tmp_path / "x") == 1
    assert bytes(some) == b"34"
    del some
    gc.collect()
    assert n_maps(tmp_path / "x") == 0
