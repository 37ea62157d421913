"""What the driver is handed: each argument's own bytes."""

from __future__ import annotations

import ctypes
import struct
import threading

import numpy as np
import pytest

from sparsellm.ffn.kernels import launch as module


@pytest.fixture
def driver(monkeypatch):
    """Records launches in place of the driver."""
    seen, codes = [], "128s Q i f Q"

    def record(config, function, pointers, extra):
        config = ctypes.cast(config, ctypes.POINTER(module._Config)).contents
        places = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))
        values = []
        for i, code in enumerate(codes.split()):
            raw = ctypes.string_at(places[i], struct.calcsize(code))
            values += struct.unpack(code, raw)
        assert extra is None
        shape = [*config.grid, *config.block, config.shared_bytes, config.stream or 0]
        attribute = [config.num_attributes, config.attributes.contents.id]
        seen.append((function, *shape, *attribute, values))
        return 1 if function == 13 else 0

    monkeypatch.setattr(module, "_launcher", lambda: record)
    monkeypatch.setattr(module, "_enter_context", lambda: seen.append("entered"))
    monkeypatch.setattr(module, "_local", module._Local())
    return seen


MAP = bytes(range(128))
ARGUMENTS = (MAP, 0x7F00_1234_5678, np.int32(-5), np.float32(0.5), np.uint64(9))


def test_arguments_and_configuration(driver):
    module.launch(7, 132, 384, 1000, ARGUMENTS, 99, overlap=True)
    module.launch(7, 1, 32, 0, (MAP, 0, np.int32(1), np.float32(2), np.uint64(3)), 0, overlap=False)
    _, first, second = driver
    assert first[:10] == (7, 132, 1, 1, 384, 1, 1, 1000, 99, 1)
    assert first[10] == 6
    assert first[11] == [MAP, 0x7F00_1234_5678, -5, 0.5, 9]
    assert second[:10] == (7, 1, 1, 1, 32, 1, 1, 0, 0, 0)
    assert second[11] == [MAP, 0, 1, 2.0, 3]


def test_every_thread_enters_a_context_once(driver):
    """The driver, unlike CUDA's runtime, refuses who has none: a kernel may come first there."""

    def twice():
        for _ in range(2):
            module.launch(7, 132, 384, 1000, ARGUMENTS, 99, overlap=True)

    twice()
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert [event for event in driver if event == "entered"] == ["entered"] * 2
    assert driver[0] == "entered"
    assert len(driver) == 6


def test_refusals(driver):
    with pytest.raises(RuntimeError, match=r"132 blocks of 384 threads .* \(CUDA error 1\)"):
        module.launch(13, 132, 384, 0, ARGUMENTS, 0, overlap=True)
    with pytest.raises(KeyError):
        module.launch(7, 1, 1, 0, (1.0,), 0, overlap=True)
