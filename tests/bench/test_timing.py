"""Sides that keep the device busy: their order, their times, and the power meanwhile."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
import torch

from sparsellm.bench import timing
from sparsellm.bench.timing import GPUCounters, PowerMeter, Side, Spread, Timing, sustained

CPU = torch.device("cpu")


@pytest.fixture
def takes(monkeypatch):
    """Makes a call that takes so many ms of the test's own clock, and writes its name down."""
    now = 0.0
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now))

    def make(milliseconds, into=None, name=""):
        def call():
            nonlocal now
            now += (milliseconds(now) if callable(milliseconds) else milliseconds) / 1e3
            if into is not None:
                into.append(name)

        return call

    return make


def test_sides_take_turns_each_alone_and_are_timed_apart(takes):
    order = []
    sides = {
        "a": Side({"forward": takes(1, order, "a"), "backward": takes(3, order, "A")}),
        "b": Side({"forward": takes(2, order, "b")}, calls=2),
    }
    found = sustained(sides, CPU, 0.3)
    assert found["a"].stages == {
        "forward": pytest.approx((1, 1, 1)),
        "backward": pytest.approx((3, 3, 3)),
    }
    assert found["a"].ms == pytest.approx((4, 4, 4))
    assert found["b"].ms == pytest.approx((1, 1, 1))  # two calls in 2 ms
    assert (found["a"].watts, found["a"].sm_mhz) == (None, None)
    turns = [name for name, _ in itertools.groupby(name.lower() for name in order)]
    assert turns == ["a", "b"] * (1 + timing.STRETCHES)  # once to see how long they take
    timed = sum(name == "b" for name in order) * 2
    assert timed == pytest.approx(300 * (1 + timing.WARM_SHARE), rel=0.1)


def test_the_beginning_of_a_stretch_is_not_timed_and_the_rest_has_a_spread(takes):
    began, last = 0.0, -1.0

    def cold_then_warm(now):
        nonlocal began, last
        if now - last > 0.05:
            began = now  # a stretch begins
        ms = 1 if now - began < 0.14 else 2 if round(1e3 * now) % 5 else 3
        last = now + ms / 1e3
        return ms

    sides = {"ours": Side({"forward": takes(cold_then_warm)}, most_at_once=1)}
    sides["other"] = Side({"forward": takes(60)})
    found = sustained(sides, CPU, 0.9)["ours"]  # 0.15 s of warming up in each stretch
    assert (round(found.ms.p10, 3), round(found.ms.p90, 3)) == (2, 3)


def test_a_stage_is_run_several_times_before_the_next_one(takes):
    order = []
    stages = {"forward": takes(1, order, "f"), "backward": takes(1, order, "b")}
    sustained({"ours": Side(stages, most_at_once=4)}, CPU, 0.01)
    runs = [len(list(run)) for _, run in itertools.groupby(order)]
    assert runs[:4] == [1, 1, 1, 1]  # to see how long they take
    assert set(runs[4:]) == {4}


def test_a_time_becomes_a_rate_and_takes_charges():
    assert Spread(2.0, 1.0, 4.0).over(8.0) == Spread(4.0, 2.0, 8.0)
    stage = {"forward": Spread(2.0, 1.0, 4.0), "backward": Spread(1.0, 1.0, 1.0)}
    found = Timing(Spread(3.0, 2.0, 5.0), stage, 700.0, 1500.0).charged({"forward": 0.5})
    assert found.ms == Spread(3.5, 2.5, 5.5)
    assert found.stages == stage | {"forward": Spread(2.5, 1.5, 4.5)}


class Machine:
    """A GPU of 500 W whose energy counter moves every 20 ms, on a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.joules_before = 0.0, 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def millijoules(self):
        return int(self.joules_before * 1e3 + int(self.now / 0.020) * 0.020 * 500e3)

    def sm_mhz(self):
        return 1400


def test_power_is_that_of_the_stretches(monkeypatch):
    machine = Machine(monkeypatch)
    meter = PowerMeter(machine)
    assert (meter.watts, meter.sm_mhz) == (None, None)
    for began in (0.039, 5.039):  # just before the counter moves
        machine.now = began
        for _ in range(70):
            meter.sample()
            machine.now += 0.003
        meter.end_stretch()
        machine.joules_before += 9e3  # of another side
    assert meter.watts == pytest.approx(500, rel=0.03)
    assert meter.sm_mhz == 1400
    still = PowerMeter(machine)
    still.sample()
    still.end_stretch()
    assert still.watts is None


def test_nvml_that_is_absent_or_lacks_the_counter_is_named(monkeypatch, capsys):
    device = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ValueError, match="pip install nvidia-ml-py"):
        GPUCounters(device)
    timing.counters.cache_clear()
    assert timing.counters(device) is timing.counters(device) is None
    assert capsys.readouterr().err.count("power and clocks are not recorded: NVML") == 1

    class NVMLError(Exception):
        pass

    def not_supported(handle):
        assert handle == "GPU-1234"
        raise NVMLError("Not Supported")

    nvml = types.ModuleType("pynvml")
    nvml.NVMLError, nvml.nvmlInit, nvml.NVML_CLOCK_SM = NVMLError, lambda: None, 1
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetTotalEnergyConsumption = not_supported
    nvml.nvmlDeviceGetClockInfo = lambda handle, clock: 1410 + clock
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ValueError, match="does not count energy here \\(Not Supported"):
        GPUCounters(device)
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 5
    assert (GPUCounters(device).millijoules(), GPUCounters(device).sm_mhz()) == (5, 1411)
    timing.counters.cache_clear()
