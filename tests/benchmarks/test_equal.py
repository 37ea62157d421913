"""Equal tokens and equal time: which runs are compared, and by how much they differ."""

import pytest

import equal

STEPS = {"longer": 510}  # of fair-0.5b; all other runs have 400


def ended(run, loss, seconds, *, gates=None, steps=None, gpu="H200", sweep="fair-0.5b", **case):
    """The records of a run's end."""
    steps = steps or next((n for name, n in STEPS.items() if name in run), 400)
    case = {
        "run": run,
        "step": steps,
        "tokens": steps * 65_536,
        "seed": int(run[-1]),
        "learning_rate": 2e-3,
        "optimizer": "muon",
        "precision": "fp8",
        "intermediate_size": 2816 if "narrow" in run else 8448 if "non-gated" in run else 5632,
        **({"gate_learning_rate": gates} if gates else {}),
    } | case
    return [
        {"bench": f"sweep_{sweep}", "case": case, "metric": metric, "value": value}
        | {"hardware": f"1× NVIDIA {gpu}, 9 cores", "commit": "abc"}
        for metric, value in (("validation_loss", loss), ("gpu_seconds", seconds))
    ]


SIXTEENTH, EIGHTH = {"gates": 1.25e-4}, {"gates": 2.5e-4}
DENSE = [
    *ended("dense-silu-muon-gates-seed0", 4.10, 150.0),
    *ended("dense-silu-muon-gates-seed1", 4.12, 151.0),
    *ended("dense-silu-0.000125-seed0", 4.00, 149.0, **SIXTEENTH),
    *ended("dense-silu-0.000125-seed1", 4.02, 150.0, **SIXTEENTH),
]
NARROW = ended("dense-silu-narrow-2816-seed0", 4.07, 100.0, **SIXTEENTH)
SPARSE = [
    *ended("target60-0.00025-seed0", 4.04, 100.0, **EIGHTH),
    *ended("target60-0.00025-seed1", 4.10, 101.0, **EIGHTH),
]


def test_each_kind_is_at_its_best_and_compared_with_dense_silu_at_the_same_seeds():
    narrow = ended("dense-silu-narrow-2816-seed1", 4.07, 110.0, **SIXTEENTH)
    rows = equal.equal_tokens([*SPARSE, *narrow, *DENSE])
    budget = "0.5B, 26.2M"
    assert rows == [
        [budget, "dense SiLU", "0.002, gates 1/16; 2", "4.010 (4.000, 4.020)", "",
         "149, 150 (H200)"],
        [budget, "dense SiLU, 2,816 neurons", "0.002, gates 1/16; 1", "4.070",
         "+0.050 (+1.2%)", "110 (H200)"],  # over 4.02, which is that of seed 1
        [budget, "sparse, target 60", "0.002, gates 1/8; 1", "4.070 (4.040, 4.100)",
         "+0.060 (+1.5%)", "100, 101 (H200)"],
    ]  # fmt: skip


def test_runs_that_did_not_reach_their_end_and_other_precisions_do_not_count():
    cut_off = ended("target60-0.000125-seed0", 3.0, 90.0, steps=350, tokens=26_214_400)
    in_bf16 = ended("target60-0.0005-seed0", 3.0, 90.0, precision="bf16")
    unknown = ended("of-another-day-seed0", 3.0, 90.0)
    rows = equal.equal_tokens([*DENSE, *SPARSE, *cut_off, *in_bf16, *unknown])
    assert [row[1:3] for row in rows][1:] == [["sparse, target 60", "0.002, gates 1/8; 1"]]


def test_one_seed_is_better_than_two_only_by_more_than_noise():
    for loss, rates in ((3.995, "0.002, gates 1/16; 3"), (3.95, "0.002, gates 1/8; 3")):
        one = ended("dense-silu-0.00025-seed0", loss, 150.0, **EIGHTH)
        assert equal.equal_tokens([*DENSE, *SPARSE, *one])[0][2] == rates


def test_normalized_neurons_are_a_setting_of_the_optimizer():
    def normalized(run, loss, **case):
        return [
            line
            for seed in (0, 1)
            for line in ended(f"{run}-seed{seed}", loss, 150.0, normalize_neurons=True, **case)
        ]

    dense = normalized("dense-silu-normalized-0.000125", 3.95, **SIXTEENTH)
    assert equal.equal_tokens([*DENSE, *SPARSE, *dense])[0][2:4] == [
        "0.002, gates 1/16, normalized; 3", "3.950 (3.950, 3.950)"
    ]  # fmt: skip
    higher = normalized("dense-silu-muon-gates-normalized", 4.2)
    assert equal.equal_tokens([*DENSE, *SPARSE, *higher])[0][2] == "0.002, gates 1/16; 3"
    sparse = normalized("target60-normalized-0.00025", 3.9, **EIGHTH)
    row = equal.equal_tokens([*DENSE, *SPARSE, *sparse, *dense])[-1]
    assert row[2:5] == ["0.002, gates 1/8, normalized; 2", "3.900 (3.900, 3.900)", "−0.050 (−1.3%)"]


def test_wide_ffns_are_rows_of_their_own_where_neurons_were_normalized():
    twice = {"intermediate_size": 11_264, **EIGHTH}
    plain = ended("target60-normalized-wide-11264-seed0", 3.8, 150.0, **twice)
    assert [row[1] for row in equal.equal_tokens([*DENSE, *SPARSE, *plain])] == [
        "dense SiLU", "sparse, target 60"
    ]  # fmt: skip
    twice["normalize_neurons"] = True
    wide = ended("target60-normalized-wide-11264-seed0", 3.8, 150.0, **twice)
    wide += ended("dense-silu-normalized-0.00025-seed0", 3.9, 190.0, **twice)
    rows = equal.equal_tokens([*DENSE, *SPARSE, *wide])
    assert {row[1]: row[2:5] for row in rows} == {
        "dense SiLU": ["0.002, gates 1/16; 2", "4.010 (4.000, 4.020)", ""],
        "dense SiLU, 11,264 neurons":
            ["0.002, gates 1/8, normalized; 1", "3.900", "−0.100 (−2.5%)"],
        "sparse, target 60": ["0.002, gates 1/8; 1", "4.070 (4.040, 4.100)", "+0.060 (+1.5%)"],
        "sparse, target 60, 11,264 neurons":
            ["0.002, gates 1/8, normalized; 1", "3.800", "−0.200 (−5.0%)"],
    }  # fmt: skip
    [row] = equal.equal_time([*DENSE, *SPARSE, *wide])
    assert row[1] == "sparse, target 60, 11,264 neurons (0.002, gates 1/8, normalized)"


def test_rates_of_the_gates_are_compared_within_one_sweep():
    dead = [
        record | {"metric": "dead_fraction", "value": 0.26}
        for record in ended("target60-0.000125-seed1", 0.0, 0.0, **SIXTEENTH)[:1]
    ]
    sparse = [*ended("target60-0.000125-seed1", 4.2, 99.0, **SIXTEENTH), *dead]
    sweep = {"sweep": "frontier-0.5b"}
    older = ended("wide1-target60-muon-gates-fp8-0.002-seed0", 3.9, 160.0, gates=5e-4, **sweep)
    alone = ended("dense-silu-narrow-2816-seed0", 4.0, 110.0, **SIXTEENTH)
    head, rows = equal.gate_rates([*DENSE, *SPARSE, *sparse, *older, *alone])
    assert head[2:] == ["by Muon", "1/8", "1/16"]
    assert rows == [
        ["0.5B, 26.2M", "dense SiLU (0.002)", "4.100, 4.120", "", "4.000, 4.020"],
        ["0.5B, 26.2M", "sparse, target 60 (0.002)", "", "4.040, 4.100", "4.200 (26%)"],
    ]
    with pytest.raises(ValueError, match="no runs"):
        equal.gate_rates(alone)


def test_a_run_of_a_fair_sweep_replaces_the_same_one_of_an_older_sweep():
    older = [
        record
        for seed in (0, 1)
        for record in ended(
            f"dense-silu-muon-fp8-0.002-seed{seed}", 3.9, 160.0, sweep="frontier-0.5b"
        )
    ]
    assert equal.equal_tokens([*older, *SPARSE])[0][3] == "3.900 (3.900, 3.900)"
    assert equal.equal_tokens([*older, *DENSE[:4], *SPARSE])[0][3] == "4.110 (4.100, 4.120)"


def test_equal_time_is_against_the_lowest_dense_run_that_took_about_as_long():
    longer = [
        *ended("target60-longer-0.00025-seed0", 3.92, 145.0, **EIGHTH),
        *ended("target60-longer-0.00025-seed1", 3.94, 147.0, **EIGHTH),
    ]
    [row] = equal.equal_time([*DENSE, *SPARSE, *longer])  # SPARSE took less time than any
    assert row == [
        "0.5B, Muon, H200", "sparse, target 60 (0.002, gates 1/8)", "33.4M; 145, 147",
        "3.930 (3.920, 3.940)", "dense SiLU (0.002, gates 1/16)", "26.2M; 149, 150",
        "4.010 (4.000, 4.020)", "−0.080 (−2.0%)",
    ]  # fmt: skip
    narrow = ended("dense-silu-narrow-2816-seed0", 4.01, 103.0, **SIXTEENTH)
    narrow += ended("dense-silu-narrow-longer-0.000125-seed0", 3.9, 144.0, **SIXTEENTH)
    first, *of_longer = equal.equal_time([*DENSE, *SPARSE, *longer, *narrow])
    assert of_longer[0] == row
    assert of_longer[1][4:] == ["dense SiLU, 2,816 neurons (0.002, gates 1/16)", "33.4M; 144",
                                "3.900", "+0.020 (+0.5%)"]  # fmt: skip
    assert len(of_longer) == 2
    assert first[4:] == ["dense SiLU, 2,816 neurons (0.002, gates 1/16)", "26.2M; 103", "4.010",
                         "+0.030 (+0.7%)"]  # fmt: skip


def test_a_dense_run_may_take_longer_if_it_still_ends_higher():
    """Its advantage of time then only makes the comparison harder for the sparse FFN."""
    sparse = ended("target60-0.00025-seed0", 4.04, 100.0, **EIGHTH)
    for loss, seconds, counts in ((4.10, 109.5, True), (4.00, 109.5, False), (4.10, 111.0, False)):
        dense = ended("dense-silu-muon-gates-seed0", loss, seconds)
        assert len(equal.equal_time([*sparse, *NARROW, *dense])) == 1 + counts


def test_the_headline_is_of_the_longest_sparse_runs():
    [shape] = [shape for shape in equal.SHAPES if "fair-0.5b" in shape.sweeps]
    longer = [
        *ended("target60-longer-0.00025-seed0", 3.92, 145.0, **EIGHTH),
        *ended("target60-longer-0.00025-seed1", 3.94, 147.0, **EIGHTH),
    ]
    assert equal.headline([*DENSE, *SPARSE, *longer], shape, 60) == [
        "33M", "1.31×", "−0.080 (−2.0%) in 146 s (dense: 150 s)", "not measured", "not measured"
    ]  # fmt: skip
    as_long = ended("dense-silu-muon-gates-seed0", 4.10, 105.0)
    assert equal.headline([*as_long, *SPARSE], shape, 60) == [
        "26M", "1.04×", "−0.060 (−1.5%) in 100 s (dense: 105 s)", "not measured", "−0.060 (−1.5%)"
    ]  # fmt: skip
    narrow = ended("dense-silu-narrow-2816-seed1", 4.09, 99.0, **SIXTEENTH)
    _, _, _, of_narrow, _ = equal.headline([*as_long, *SPARSE, *narrow], shape, 60)
    assert of_narrow == "+0.010 (+0.2%) in 100 s (dense: 99 s)"
    run = "wide1-target60-longer-muon-gates-fp8-0.002-seed0"
    older = ended(run, 3.5, 140.0, sweep="frontier-0.5b", **EIGHTH)
    assert equal.headline([*as_long, *SPARSE, *older], shape, 60)[0] == "26M"
    before = ended("dense-silu-muon-fp8-0.002-seed0", 4.0, 145.0, sweep="frontier-0.5b")
    assert equal.headline([*DENSE, *older, *before], shape, 60)[0] == "33M"
    with pytest.raises(ValueError, match="no dense run is recorded that took about as long"):
        equal.headline([*DENSE, *older], shape, 60)  # times of two sweeps are of two codes
    slower = ended("dense-silu-muon-fp8-0.002-seed1", 4.04, 130.0, sweep="frontier-0.5b")
    assert equal.headline([*as_long, *SPARSE, *slower], shape, 60)[1:3] == [
        "1.04×", "−0.060 (−1.5%) in 100 s (dense: 105 s)"
    ]  # fmt: skip


def test_times_are_not_compared_across_gpus_and_tables_without_rows_are_errors():
    longer = ended("target60-longer-0.00025-seed0", 3.92, 145.0, gpu="H100", **EIGHTH)
    with pytest.raises(ValueError, match="no runs are recorded that can be compared"):
        equal.equal_time([*DENSE, *longer])
    for lines in ([], DENSE):
        with pytest.raises(ValueError, match="no runs are recorded that can be compared"):
            equal.equal_tokens(lines)


def test_experts_are_a_kind_and_no_dense_rival():
    mixture = {"intermediate_size": 22_528, "experts": 32, "active_experts": 8}
    lines = [
        *ended("moe-8-of-32-muon-seed0", 3.9, 150.0, **SIXTEENTH, **mixture),
        *ended("moe-8-of-32-muon-seed1", 3.9, 150.0, router_learning_rate=5e-4, **mixture),
        *ended("moe-4-of-32-muon-seed0", 3.8, 150.0, **mixture | {"active_experts": 4}),
    ]
    rows = equal.equal_tokens([*DENSE, *SPARSE, *lines])
    four, eight = rows[-2:]
    assert four[1] == "32 experts in bf16, 4 active, 22,528 neurons"
    assert eight[1:4] == [
        "32 experts in bf16, 8 active, 22,528 neurons", "0.002, gates 1/16; 2", "3.900"
    ]  # fmt: skip
    first, second = equal.equal_time([*DENSE, *SPARSE, *lines])
    assert (first[1], second[1]) == (
        f"{four[1]} (0.002, gates by Muon)",
        f"{eight[1]} (0.002, gates 1/16)",
    )
    assert first[4].startswith("dense SiLU (")


@pytest.mark.parametrize(
    ("run", "title"),
    [
        ("dense-relu2-0.00025-seed0", "dense ReLU²"),
        ("dense-relu2-non-gated-seed0", "dense ReLU², no gate"),
        ("target60-per-layer-0.00025-seed0", "sparse, target 60 per layer"),
        ("target150-0.00025-seed0", "sparse, target 150"),
        ("target150-60-between-0.00025-seed0", "sparse, target 150, 150 until 20%, 60 until 50%"),
        ("target60-relu2-non-gated-0.00025-seed0", "sparse, target 60, ReLU², no gate"),
    ],
)
def test_kinds_have_names(run, title):
    assert equal.equal_tokens([*DENSE, *ended(run, 4.0, 120.0)])[-1][1] == title
