"""Tensor maps for the bulk copy engine (TMA), encoded by the driver."""

import ctypes
import functools

import numpy as np

from sparsellm.ffn.kernels.launch import driver

# Types of cuda.h. Only an element's size matters to a copy: bf16 serves for fp16 too, bytes for
# e4m3.
_TYPES = {1: 0, 2: 9}
_SWIZZLE_128B, _L2_PROMOTION_256B = 3, 3
_ROW_BYTES = 128  # of a box
_OPAQUE_BYTES = 128
NONE = bytes(_OPAQUE_BYTES)  # for kernels that do not read theirs


@functools.lru_cache(maxsize=4096)
def encode(address: int, rows: int, columns: int, box_rows: int, element_bytes: int = 2) -> bytes:
    """A map of a row-major matrix whose boxes are ``box_rows`` × 128 bytes, swizzled by 128 bytes.

    Returns:
        128 bytes, which the kernel takes by value.

    Raises:
        RuntimeError: the driver refuses (an address off 16 bytes, say).
    """
    # The driver wants 64-byte alignment of what it fills.
    raw = np.zeros(_OPAQUE_BYTES + 64, np.uint8)
    start = -raw.ctypes.data % 64
    aligned = raw[start : start + _OPAQUE_BYTES]
    result = driver().cuTensorMapEncodeTiled(
        aligned.ctypes.data_as(ctypes.c_void_p),
        _TYPES[element_bytes],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * element_bytes),
        (ctypes.c_uint32 * 2)(_ROW_BYTES // element_bytes, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        0,
    )
    if result != 0:
        raise RuntimeError(
            f"the driver refused a tensor map of {rows} × {columns} elements at {address:#x} "
            f"(CUDA error {result}); the matrix must start at a multiple of 16 bytes"
        )
    return aligned.tobytes()
