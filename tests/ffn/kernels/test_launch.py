"""What the driver is handed: each argument's own bytes."""

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from sparsellm.ffn.kernels import launch as module
from sparsellm.ffn.kernels.launch import Address, Kernel, kernels_of


@pytest.fixture
def driver(monkeypatch):
    """Records launches in place of the driver."""
    launches, codes = [], "128s Q i f Q Q"

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
        launches.append((function, *shape, *attribute, values))
        return 1 if function == 13 else 0

    monkeypatch.setattr(module, "_launcher", lambda: record)
    monkeypatch.setattr(module, "_enter_context", lambda: launches.append("entered"))
    monkeypatch.setattr(module, "_local", module._Local())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: device, raising=False)
    return launches


SOURCE = """
extern "C" __global__ void __launch_bounds__(threads, 1)
    some(const __grid_constant__ TensorMap map, const bf16* from, uint32 n, float threshold,
         uint64 capacity, void* to) {
}
"""
LAYOUT = module.Layout("some", kernels_of(SOURCE)["some"])
MAP = bytes(range(128))
ARGUMENTS = {
    "map": MAP,
    "from": Address(0x7F00_1234_5678),
    "n": -5,
    "threshold": 0.5,
    "capacity": 9,
    "to": None,
}


def kernel(*, function=7, layout=LAYOUT, threads=384, shared_bytes=1000, stream=99, overlap=True):
    """On a device with that number, which is its stream's too."""
    ptr = SimpleNamespace(ptr=function)
    return Kernel(ptr, layout, threads, shared_bytes, {"blocks": 2}.get, stream, 132, overlap)


def test_arguments_and_configuration(driver):
    kernel().launch(132, **ARGUMENTS)
    tensor = torch.zeros(8)
    plain = kernel(threads=32, shared_bytes=0, stream=0, overlap=False)
    # By name, in any order.
    arguments = {"to": tensor, "capacity": 3, "threshold": 2, "n": True, "from": None, "map": MAP}
    plain.launch(1, **arguments)
    _, first, second = driver
    assert first[:10] == (7, 132, 1, 1, 384, 1, 1, 1000, 99, 1)
    assert first[10] == 6
    assert first[11] == [MAP, 0x7F00_1234_5678, -5, 0.5, 9, 0]
    assert second[:10] == (7, 1, 1, 1, 32, 1, 1, 0, 0, 0)
    assert second[11] == [MAP, 0, 1, 2.0, 3, tensor.data_ptr()]


def test_as_many_blocks_as_there_is_work_for(driver):
    for units in (1000, 200):
        kernel().launch_units(units, **ARGUMENTS)
    assert [event[1] for event in driver if event != "entered"] == [264, 200]


def test_every_thread_enters_a_context_once(driver):
    """The driver, unlike CUDA's runtime, refuses who has none: a kernel may come first there."""

    def twice():
        for _ in range(2):
            kernel().launch(132, **ARGUMENTS)

    twice()
    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert [event for event in driver if event == "entered"] == ["entered"] * 2
    assert driver[0] == "entered"
    assert len(driver) == 6


def test_refusals(driver):
    with pytest.raises(RuntimeError, match=r"132 blocks of 384 threads .* \(CUDA error 1\)"):
        kernel(function=13).launch(132, **ARGUMENTS)


def _refused(arguments):
    with pytest.raises(TypeError) as error:
        kernel().launch(1, **arguments)
    return str(error.value)


def test_arguments_of_other_types_are_refused(driver):
    """The driver would take a number for an address, and not complain."""
    for name, value, error in (
        ("n", 0.5, "argument n is a float; it takes int"),
        ("n", torch.zeros(1), "argument n is a Tensor; it takes int"),
        ("threshold", None, "argument threshold is a NoneType; it takes float or int"),
        ("from", 0, "argument from is a int; it takes Tensor or NoneType or Address"),
    ):
        assert _refused(ARGUMENTS | {name: value}) == f"some: {error}"
    assert driver == []


def test_arguments_of_other_names_are_refused(driver):
    names = "its arguments are map, from, n, threshold, capacity, to"
    fewer = {name: value for name, value in ARGUMENTS.items() if name not in ("n", "to")}
    assert _refused(fewer) == f"some lacks n, to; {names}"
    assert _refused(ARGUMENTS | {"m": 3}) == f"some does not take m; {names}"
    renamed = fewer | {"m": 3, "to": None}
    assert _refused(renamed) == f"some lacks n and does not take m; {names}"
    assert driver == []


def test_types_are_checked_once_per_combination(driver, monkeypatch):
    layout, checks = module.Layout("some", kernels_of(SOURCE)["some"]), []
    check = layout._check
    monkeypatch.setattr(layout, "_check", lambda types: checks.append(types) or check(types))
    for arguments in (ARGUMENTS, ARGUMENTS, ARGUMENTS | {"to": Address(0)}, ARGUMENTS):
        kernel(layout=layout).launch(1, **arguments)
    assert len(checks) == 2


def test_parameters_of_other_types_are_named():
    with pytest.raises(ValueError, match=r"parameter of type double \(threshold\)"):
        kernels_of(SOURCE.replace("float", "double"))
