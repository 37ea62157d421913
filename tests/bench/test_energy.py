"""Energy of a call, with a counter that moves in steps as a GPU's does."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from sparsellm.bench import energy


class Machine:
    """A GPU on which a call takes some time and a fixed energy, seen in steps of 20 ms."""

    def __init__(self, monkeypatch, step=0.020):
        self.now, self.used, self.step = 0.0, 0.0, step
        self.seen, self.next_step = 0.0, step
        monkeypatch.setattr(energy.time, "perf_counter", lambda: self.now)

    def call(self, milliseconds, millijoules):
        self.now += milliseconds / 1e3
        self.used += millijoules
        if self.now >= self.next_step:
            self.seen, self.next_step = self.used, self.now + self.step

    def read(self):
        self.now += 1e-5
        return int(self.seen)


def test_sides_alternate_and_are_told_apart(monkeypatch):
    machine, order = Machine(monkeypatch), []

    def side(name, milliseconds, millijoules):
        def call():
            order.append(name)
            machine.call(milliseconds, millijoules)

        return call

    sides = {"dense": side("dense", 1.7, 1000), "ours": side("ours", 0.9, 600)}
    found = energy.per_call(sides, {"dense": 1.7, "ours": 0.9}, machine.read, lambda: None)
    assert found["dense"] == pytest.approx(1000, rel=0.02)
    assert found["ours"] == pytest.approx(600, rel=0.02)
    changes = [b for a, b in itertools.pairwise(order) if a != b]
    assert changes == ["ours", "dense", "ours"]


def test_a_counter_that_stands_still_is_said_to(monkeypatch):
    machine = Machine(monkeypatch, step=1e9)
    with pytest.raises(ValueError, match="energy counter does not change"):
        energy.per_call(
            {"ours": lambda: machine.call(1, 1)}, {"ours": 1.0}, machine.read, lambda: None
        )


def test_nvml_that_is_absent_or_lacks_the_counter_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match="pip install nvidia-ml-py"):
        energy.EnergyCounter(torch.device("cuda", 0))

    class NVMLError(Exception):
        pass

    def not_supported(handle):
        assert handle == "GPU-1234"
        raise NVMLError("Not Supported")

    nvml = types.ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit = NVMLError, lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetTotalEnergyConsumption = not_supported
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ValueError, match="no energy counter here \\(Not Supported"):
        energy.EnergyCounter(torch.device("cuda", 0))
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 5
    assert energy.EnergyCounter(torch.device("cuda", 0)).read() == 5
