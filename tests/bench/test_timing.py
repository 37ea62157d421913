"""Configurations that keep the device busy: their order, their times, and the power meanwhile."""

import itertools
import sys
import types

import pytest
import torch

from sparsellm.bench import timing
from sparsellm.bench.timing import Configuration, Reading, counters, power, spread, sustained

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
    configurations = {
        "a": Configuration({"forward": takes(1, order, "a"), "backward": takes(3, order, "A")}),
        "b": Configuration({"forward": takes(2, order, "b")}, calls=2),
    }
    timings = sustained(configurations, CPU, 0.3)
    assert timings["a"].stages["forward"] == pytest.approx(1)
    assert timings["a"].stages["backward"] == pytest.approx(3)
    assert timings["a"].ms == pytest.approx(4)
    assert timings["b"].ms == pytest.approx(1)  # two calls in 2 ms
    assert (timings["a"].watts, timings["a"].sm_mhz) == (None, None)
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

    configurations = {"ours": Configuration({"forward": takes(cold_then_warm)}, most_at_once=1)}
    configurations["other"] = Configuration({"forward": takes(60)})
    ours = sustained(configurations, CPU, 0.9)["ours"]  # 0.15 s of warming up in each stretch
    _, under = spread(ours.ms)
    assert under == pytest.approx({"p10": 2, "p90": 3})


def test_a_stage_is_run_several_times_before_the_next_one(takes):
    order = []
    stages = {"forward": takes(1, order, "f"), "backward": takes(1, order, "b")}
    sustained({"ours": Configuration(stages, most_at_once=4)}, CPU, 0.01)
    runs = [len(list(run)) for _, run in itertools.groupby(order)]
    assert runs[:4] == [1, 1, 1, 1]  # to see how long they take
    assert set(runs[4:]) == {4}


def test_what_was_measured_apart_is_charged_to_the_first_stage(takes):
    stages = {"forward": takes(1), "backward": takes(3)}
    ours = sustained({"ours": Configuration(stages, charged_ms=0.5)}, CPU, 0.1)["ours"]
    assert ours.ms == pytest.approx(4.5)
    assert [float(stage[0]) for stage in ours.stages.values()] == pytest.approx([1.5, 3])


def test_power_is_that_of_the_stretches(takes, monkeypatch):
    """On a GPU of 500 W whose energy counter moves every 20 ms."""

    def read(now):
        return Reading(now, int(int(now / 0.020) * 0.020 * 500e3), 1400)

    monkeypatch.setattr(timing, "counters", lambda device: read)
    configurations = {
        "ours": Configuration({"forward": takes(3)}),
        "other": Configuration({"forward": takes(5)}),
    }
    ours = sustained(configurations, CPU, 0.6)["ours"]
    assert ours.watts == pytest.approx(500, rel=0.03)
    assert ours.sm_mhz == 1400
    # Nor does the energy between two stretches count.
    first = [Reading(0.001 * ms, 500 * (ms // 20) * 20, 1400) for ms in range(70)]
    second = [Reading(reading.at + 5, reading.millijoules + 9_000_000, 1400) for reading in first]
    assert power([first, second]) == pytest.approx(500)
    assert power([first[:25], []]) is None  # it moved once


def test_nvml_that_is_absent_or_lacks_the_counter_is_named(monkeypatch, capsys):
    device = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counters.cache_clear()
    assert counters(device) is counters(device) is None
    stderr = capsys.readouterr().err
    assert stderr.count("power and clocks are not recorded: NVML is missing: pip install nvid") == 1

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
    counters.cache_clear()
    assert counters(device) is None
    assert "does not count energy here (Not Supported" in capsys.readouterr().err
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: 5
    counters.cache_clear()
    assert counters(device)(2.0) == (2.0, 5, 1411)
    counters.cache_clear()
