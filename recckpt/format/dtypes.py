"""The dtypes of dense tensors, by the names of torch, and how numpy reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_NATIVE = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128"
_ONE_BYTE = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {  # those that numpy lacks come as bit patterns of their size
    **{name: np.dtype(name).newbyteorder("<") for name in _NATIVE.split()},
    **{name: np.dtype("u1") for name in _ONE_BYTE.split()},
    "bfloat16": np.dtype("<u2"),
    "complex32": np.dtype("<u4"),
}
MAX_DIMS = 64
STORAGES = {  # part of the format: torch's names for them in pickles; the storage of any other dtype is untyped
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


def widened(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return bfloat16 bit patterns as the float32 that they are."""
    wide: npt.NDArray[Any] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide
