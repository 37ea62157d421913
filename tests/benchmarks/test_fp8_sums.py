"""Errors of FP8 sums are those that products make, by layer, and the loss is that of the model."""

import json

import pytest
import torch
from conftest import set_arguments

import fp8_sums
from sparsellm.ffn.quantised import QuantisedRows, dequantised, fp32_product

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def trained(tiny_overrides, tmp_path, cli_here):
    """A tiny run of two steps."""
    overrides = [*tiny_overrides, "name=sums", "train.steps=2", "checkpoint.every_steps=2"]
    cli_here("train", "--recipe", "debug", *set_arguments(overrides))
    return tmp_path / "runs" / "sums"


def truncated(x: QuantisedRows, w: QuantisedRows, dtype: torch.dtype):
    """Sums that are 3% too small, as one-sided ones are with fast accumulation."""
    return (fp32_product(dequantised(x), w, torch.float32) * 0.97).to(dtype)


def test_a_bias_of_fast_accumulation_is_measured_in_every_product(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(fp8_sums.ACCUMULATIONS, "fast", truncated)
    monkeypatch.setattr(fp8_sums, "scaled_product", truncated)  # of the gate's stand-in
    record = tmp_path / "results.jsonl"
    words = ["--sequences", "2", "--loss-sequences", "4", "--record", str(record)]
    fp8_sums.main([str(trained), *words])
    lines = list(map(json.loads, record.read_text().splitlines()))
    figures = {
        (case["layer"], case["result"], case["accumulation"], line["metric"]): line
        for line in lines
        if "layer" in (case := line["case"])
    }
    results = [*((layer, kind) for layer in LAYERS for kind in ("output", "gradient"))]
    for product in (*results, ("lm_head", "output")):
        fast, plain, rounded = (
            figures[*product, by, "bias"] for by in ("fast", "plain", "rounded")
        )
        assert fast["value"] == pytest.approx(-0.03, abs=1e-3)
        assert fast["baseline"] == plain["value"]
        assert abs(plain["value"]) < 1e-3
        assert rounded["value"] == pytest.approx(plain["value"], abs=1e-5)
        assert 1e-3 < figures[*product, "plain", "rms"]["value"] < 3e-3  # bf16's rounding
    assert figures["gate_kernel", "output", "fast", "bias"]["value"] == pytest.approx(
        -0.03, abs=1e-3
    )
    losses = {line["case"]["accumulation"]: line for line in lines if line["metric"] == "loss"}
    assert losses["plain"]["value"] == pytest.approx(losses["rounded"]["value"], abs=1e-5)
    assert losses["fast"]["value"] != losses["plain"]["value"]
    assert losses["fast"]["baseline"] == losses["plain"]["value"]
