"""Arguments lie where a kernel's C++ signature has them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sparsellm.kernels.launch import layout


def test_arguments_are_aligned_as_in_cpp():
    # (TensorMap, const void*, int, float, int, uint64, TensorMap)
    types = (bytes, int, np.int32, np.float32, np.int32, np.uint64, bytes)
    packed = layout(types)
    assert packed.size == 320
    map_, pointer = bytes(range(128)), 0x7F00_1234_5678
    raw = packed.pack(map_, pointer, np.int32(-5), np.float32(0.5), np.int32(7), np.uint64(9), map_)
    assert raw[:128] == map_
    assert struct.unpack_from("<QifixxxxQ", raw, 128) == (pointer, -5, 0.5, 7, 9)
    assert raw[192:] == map_


def test_an_unknown_type_is_no_argument():
    with pytest.raises(KeyError):
        layout((float,))
