"""The model of the lead gives back the parameters of runs that were made by it."""

from math import log

import numpy as np
import pytest

import lead
from benchmarks.test_equal import ended

B, G, H, BETA = 1.4, 0.03, 0.01, 0.28
STARTS = (2.2, 2.4)  # of two texts


def loss(text, tokens, *, sparse):
    gap = G + H * log(tokens / lead.T0) if sparse else 0.0
    return STARTS[text] + B * (tokens / lead.T0) ** -BETA + gap


def made(lengths, noise=0.0):
    """Runs of two seeds each; (text, tokens, sparse)."""
    draws = np.random.default_rng(0).normal(0.0, noise, 2 * len(lengths))
    return [
        lead.Observation(*run, loss(run[0], run[1], sparse=run[2]) + draw)
        for run, draw in zip([*lengths, *lengths], draws, strict=True)
    ]


LENGTHS = [
    (0, 26e6, False), (0, 33e6, True),
    (1, 81e6, False), (1, 111e6, False), (1, 111e6, True), (1, 300e6, True),
]  # fmt: skip


def test_parameters_and_the_lead_are_those_that_made_the_runs():
    fitted = lead.fit(made(LENGTHS), BETA)
    assert fitted.values == pytest.approx([B, G, H], abs=1e-9)
    for tokens, ratio in ((8e7, 1.36), (1e10, 1.5)):
        right = loss(1, tokens, sparse=False) - loss(1, ratio * tokens, sparse=True)
        assert fitted.lead(tokens, ratio, grows=True)[0] == pytest.approx(right, abs=1e-9)
    at_longest = G + H * log(300e6 / lead.T0)
    saved = loss(1, 1e10, sparse=False) - loss(1, 1.5e10, sparse=False)
    stays, _ = fitted.lead(1e10, 1.5, grows=False)
    assert stays == pytest.approx(saved - at_longest, abs=1e-9)


def test_the_error_is_that_of_the_noise():
    right = loss(1, 1e9, sparse=False) - loss(1, 1.36e9, sparse=True)
    value, error = lead.fit(made(LENGTHS, noise=0.01), BETA).lead(1e9, 1.36, grows=True)
    assert 0.005 < error < 0.1
    assert abs(value - right) < 2 * error
    _, larger = lead.fit(made(LENGTHS, noise=0.02), BETA).lead(1e9, 1.36, grows=True)
    assert larger == pytest.approx(2 * error)


def test_a_gap_of_one_length_has_no_trend_and_dense_runs_of_one_length_no_slope():
    one_gap = [run for run in LENGTHS if not run[2]] + [(1, 1e8, True)]
    assert lead.fit(made(one_gap), BETA).values == pytest.approx([B, G, 0.0], abs=1e-9)
    assert lead.fit(made([(0, 26e6, False), (0, 26e6, True)]), BETA) is None


def test_a_table_row_has_the_lead_of_recorded_runs():
    settings = {
        "dense-silu-muon-gates-shorter-1240": ({}, 1240, 0.4),
        "dense-silu-muon-gates": ({}, 1700, 0.4),
        "dense-silu-muon-gates-301M": ({}, 4600, 0.4),
        "target60-per-layer-0.00025": ({"gates": 2.5e-4}, 1700, 0.25),
        "target60-per-layer-301M-0.000125": ({"gates": 1.25e-4}, 4600, 0.25),
    }
    lines = [
        record
        for name, (case, steps, seconds) in settings.items()
        for seed, noise in ((0, -0.001), (1, 0.001))
        for record in ended(
            f"{name}-seed{seed}",
            noise + loss(1, steps * 65_536, sparse="target" in name),
            seconds * steps,
            sweep="fair-long",
            steps=steps,
            **case,
        )
    ]
    rows = lead.expected(lines)
    tokens = 10_000 * 1_048_576
    right = loss(1, tokens, sparse=False) - loss(1, 1.6 * tokens, sparse=True)
    *title, _, grows = rows[-1]
    assert title == ["0.5B", "sparse, target 60 per layer", "10,486M", "1.60"]
    middle, lowest, _, highest = grows.replace("−", "-").replace("(", "").replace(")", "").split()
    assert float(lowest) < right < float(highest)
    assert float(middle) == pytest.approx(right, abs=0.02)
    assert [row[2] for row in rows] == ["188M", "1,000M", "10,486M"]
    # A sparse run without a second seed does not count.
    of_one = "target60-per-layer-301M-0.000125-seed1"
    rows = lead.expected([line for line in lines if line["case"]["run"] != of_one])
    assert [row[2] for row in rows] == ["70M", "1,000M", "10,486M"]
    # A longer sparse run, on several GPUs, does not count beside dense runs of other lengths.
    alone = [line for line in lines if "dense-silu-muon-gates-301M" not in line["case"]["run"]]
    for line in alone:
        if "301M" in line["case"]["run"] and line["metric"] == "gpu_seconds":
            line["value"] *= 2
    shapes = [shape for shape in lead.SHAPES if shape.recipe == "0.5b"]
    per_layer = lead.DENSE_SILU._replace(target_nnz=60.0, per_layer=True, activation=1)
    assert lead.longest_ratio(alone, shapes, per_layer) == pytest.approx(1.6)
    without_seeds = [line for line in lines if line["case"]["seed"] == 0]
    for few in (lines[:12], without_seeds):
        with pytest.raises(ValueError, match="no shape has dense and sparse runs"):
            lead.expected(few)
