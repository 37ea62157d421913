"""Options, shapes, traces and a clock that the benchmarks' tests share."""

import numpy as np
import pytest
import torch

from sparsellm.analyze.trace import Trace, load_traces, save_traces
from sparsellm.bench import compare, ffn_cases
from sparsellm.bench.ffn_cases import Shape
from sparsellm.bench.timing import Timing
from sparsellm.cli import make_parser

CHUNKS = np.array([0.9, 0.9, 1.0, 1.1, 1.1])  # of what a chunk takes on the fake clock
CPU = torch.device("cpu")
GATED = Shape(64, 256, True)
SHAPES = ["64/256", "64/256/non-gated"]


def options(*words: str):
    """What `sparsellm bench` reads from its arguments."""
    return make_parser().parse_args(["bench", *words])


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """A trace of two layers, 200 tokens, 256 neurons, and its shape as the traced one."""
    generator, layers = np.random.default_rng(0), []
    for rate in (0.02, 0.06):
        active = generator.random((200, 256)) < rate
        layers.append(Trace(active.sum(1).astype(np.uint16), active.nonzero()[1].astype("u2"), 256))
    save_traces(tmp_path / "traces.npz", layers)
    monkeypatch.setattr(ffn_cases, "TRACED", GATED)
    return tmp_path / "traces.npz"


@pytest.fixture
def traces_with_ids(traces):
    """That trace with token ids, four sequences, with the same active neurons for equal ids."""
    layers, _ = load_traces(traces, 256)
    active = np.zeros((200, 257), bool)
    active[:, :256], active[:, 256] = layers[0].pattern().numpy(), True
    save_traces(traces, layers, active.argmax(1).reshape(4, 50))
    return traces


@pytest.fixture(autouse=True)
def _warm_after_few_runs(monkeypatch):
    """Nothing here is timed for its own sake."""
    monkeypatch.setattr(compare, "WARM_UP_RUNS", 3)


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A stage of ours takes 1 ms at 600 W, one of dense 2 ms at 700 W; nothing is compiled.

    Yields the configurations that were timed; each is run once.
    """
    monkeypatch.chdir(tmp_path)  # away from the checkout's own traces, which are wider
    timed = []

    def sustained(configurations, device, seconds):
        timed.append(configurations)
        assert seconds == 0.5
        timings = {}
        for name, configuration in configurations.items():
            for stage in configuration.stages.values():
                stage()
            ms, watts = (1.0, 600.0) if name == "ours" else (2.0, 700.0)
            stages = {stage: ms * CHUNKS for stage in configuration.stages}
            stages["forward"] = stages["forward"] + configuration.charged_ms
            timings[name] = Timing(stages, watts, 1500.0)
        return timings

    monkeypatch.setattr(compare, "sustained", sustained)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return timed
