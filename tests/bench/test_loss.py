"""`bench loss`: which side is relative to which, with a stand-in for Liger's kernel."""

from __future__ import annotations

import pytest
import torch

from sparsellm.bench import loss, memory, timing
from sparsellm.training.objective import logits_cross_entropy


def test_liger_is_measured_against_torch(monkeypatch):
    def build_loss(runtime):
        factor = {"torch": 1.0, "liger": 1.1}[runtime.loss]
        return lambda *inputs: factor * logits_cross_entropy(*inputs)

    def interleaved(sides, seconds):
        return {name: {"torch": 6.0, "liger": 2.0}[name] for name in sides}

    peaks = iter([30.0, 20.0])
    monkeypatch.setattr(loss, "build_loss", build_loss)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(memory, "peak_mib", lambda call: next(peaks))
    found = loss.run(8, 16, 32, torch.device("cpu"))
    by_metric = {m.metric: (m.value, m.baseline, m.ratio) for m in found}
    assert by_metric["fwd_bwd"] == (2.0, 6.0, 3.0)
    assert by_metric["peak_memory"] == (20.0, 30.0, 1.5)
    # All that is compared has the factor; bf16 rounds the gradients.
    for what in ("loss", "grad_x", "grad_w"):
        assert by_metric[f"difference_{what}"][0] == pytest.approx(0.1, abs=0.003)
    assert found[0].case["vocab_size"] == 32
