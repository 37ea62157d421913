"""Shapes and traces that the FFN benchmarks' tests share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsellm.analyze.trace import Trace, load_traces, save_traces
from sparsellm.bench import ffn_sweep, timing
from sparsellm.bench.ffn_cases import Shape

CPU = torch.device("cpu")
GATED, NON_GATED = Shape(64, 256, True), Shape(64, 256, False)


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """A trace of two layers, 200 tokens, 256 neurons, and its shape as the traced one."""
    generator, layers = np.random.default_rng(0), []
    for rate in (0.02, 0.06):
        fired = generator.random((200, 256)) < rate
        layers.append(Trace(fired.sum(1).astype(np.uint16), fired.nonzero()[1].astype("u2"), 256))
    save_traces(tmp_path / "traces.npz", layers)
    monkeypatch.setattr(ffn_sweep, "TRACED", GATED)
    return tmp_path / "traces.npz"


@pytest.fixture
def ids(tmp_path, traces):
    """Token ids of that trace, four sequences, such that equal ids fire alike."""
    (trace, _) = load_traces(traces, 256)
    fired = np.zeros((200, 257), bool)
    fired[trace.rows, trace.index], fired[:, 256] = True, True
    np.save(tmp_path / "ids.npy", fired.argmax(1).reshape(4, 50))
    return tmp_path / "ids.npy"


@pytest.fixture
def train_clock(monkeypatch):
    """Forward and backward take 1 and 3 ms (dense 3 and 3), and all is called once, in turn."""

    def interleaved(stages, seconds, lead):
        assert seconds == 0.5
        assert lead == "lead"
        assert torch.is_grad_enabled()
        for (call,) in stages.values():
            call()
        ms = [3.0, 3.0, 1.0, 3.0]
        names = ["dense_compiled forward", "dense_compiled backward"]
        names += ["ours forward", "ours backward"]
        assert list(stages) == names
        return dict(zip(names, ms, strict=True))

    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing, "other_work", lambda device: "lead")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
