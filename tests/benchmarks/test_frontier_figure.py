"""Figure and table of loss against GPU time: which runs make a line, and which is shown."""

from __future__ import annotations

import pytest

import frontier_figure
import model_tables
from sparsellm.report import drawing


def run(
    name, end, *, seed=0, seconds=50.0, learning_rate=1e-3, activation="silu", width=2816, **more
):
    """Records of a run of two validations."""
    found = []
    for step, loss in ((225, end + 0.4), (450, end)):
        case = {"run": f"{name}-seed{seed}", "layers": 12, "hidden_size": 1024, "seed": seed}
        case |= {"activation": activation, "intermediate_size": width, "gated": True, "step": step}
        case |= {"learning_rate": learning_rate, "precision": "bf16", "tokens": 65_536 * step}
        case |= {"l1_coefficient": 0.0, "target_nnz": None} | more
        for metric, value in (("validation_loss", loss), ("gpu_seconds", seconds * step / 450)):
            line = {"bench": "sweep_frontier", "case": case, "metric": metric, "value": value}
            line |= {"hardware": "1× NVIDIA H200, 9 cores", "commit": "abc", "date": "2026-01-01"}
            found.append(line)
    return found


SPARSE = {"activation": "relu", "width": 11264, "target_nnz": 60.0}


def test_seeds_of_the_best_learning_rate_are_one_line_however_the_run_is_called():
    lines = [
        *run("dense-silu-0.001", 4.5, seconds=40.0),
        *run("dense-silu", 4.6, seed=1, seconds=60.0),
        *run("dense-silu-0.002", 4.7, learning_rate=2e-3),
        *run("wide4-target60", 4.4, **SPARSE),
    ]
    curves = frontier_figure._frontier_curves(lines)
    silu = curves["dense SiLU", "bf16"]
    assert silu.ends == [4.5, 4.6]
    assert silu.losses == pytest.approx([4.95, 4.55])
    assert silu.seconds == [25.0, 50.0]


@pytest.mark.parametrize(("single", "shown"), [(4.49, [4.5, 4.6]), (4.46, [4.46])])
def test_one_seed_that_ends_within_the_noise_of_two_is_not_taken_for_a_better_rate(single, shown):
    lines = [*run("dense-silu", 4.5), *run("dense-silu", 4.6, seed=1)]
    lines += run("dense-silu-0.002", single, learning_rate=2e-3)
    lines += run("wide4-target60", 4.4, **SPARSE)
    curves = frontier_figure._frontier_curves(lines)
    assert curves["dense SiLU", "bf16"].ends == shown


def test_experts_are_not_taken_for_a_dense_layer_and_other_runs_are_left_out():
    lines = [
        *run("moe", 4.5, width=11264, experts=32),
        *run("wide4-target60", 4.4, **SPARSE),
        *run("wide4-target60-reinit", 4.3, **SPARSE),
        *run("wide4-target60-first-0.001", 4.35, **SPARSE),
        *run("wide4-target30", 4.2, **SPARSE | {"target_nnz": 30.0}),
    ]
    curves = frontier_figure._frontier_curves(lines)
    assert {kind: curve.losses[-1] for (kind, _), curve in curves.items()} == {
        "mixture of experts": 4.5,
        frontier_figure._OURS: 4.4,
    }


def test_lines_are_named_inside_the_figure_and_one_line_is_no_figure():
    dense, sparse = run("dense-silu", 4.5), run("wide4-target60", 4.4, **SPARSE)
    assert frontier_figure.frontier(dense) is None
    with drawing.style():
        figure, shown = frontier_figure.frontier([*dense, *sparse])
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["dense SiLU", frontier_figure._OURS]
    boxes = [text.get_window_extent() for text in axes.texts]
    frame = axes.get_window_extent()
    assert all(frame.x0 < box.x0 and box.x1 < frame.x1 for box in boxes)
    assert not boxes[0].overlaps(boxes[1])
    assert len(shown) == 8


def test_one_kind_of_gpu_is_shown_that_with_the_most_kinds_of_ffn():
    h200 = [*run("dense-silu", 4.5), *run("wide4-target60", 4.4, **SPARSE)]
    h100 = [
        *run("dense-silu", 4.51),
        *run("dense-relu2", 4.52, activation="relu2"),
        *run("wide4-target60", 4.41, **SPARSE),
    ]
    for line in h100:
        line["hardware"] = "1× NVIDIA H100 80GB HBM3, 9 cores"
    curves = frontier_figure._frontier_curves([*h100, *h200])
    assert sorted(curve.losses[-1] for curve in curves.values()) == [4.41, 4.51, 4.52]


def test_a_rate_that_is_not_the_best_on_another_gpu_is_left_out():
    h200 = [*run("dense-silu", 4.5), *run("wide4-target60", 4.4, **SPARSE)]
    h200 += run("dense-relu2-0.002", 4.6, activation="relu2", learning_rate=2e-3)
    h100 = [*run("dense-relu2", 4.52, activation="relu2")]
    for line in h100:
        line["hardware"] = "1× NVIDIA H100 80GB HBM3, 9 cores"
    curves = frontier_figure._frontier_curves([*h200, *h100])
    assert sorted(curve.losses[-1] for curve in curves.values()) == [4.4, 4.5]


def test_runs_of_one_gpu_time_end_at_steps_of_their_own():
    dense = run("dense-silu", 5.3, width=5632)
    worse = run("dense-silu-0.002", 5.4, width=5632, learning_rate=2e-3)
    sparse = [
        line | {"case": line["case"] | {"step": line["case"]["step"] + 100}}
        for line in run("wide1-target60", 4.8, **SPARSE | {"width": 5632})
    ]
    others = [*run("wide4-target60", 4.7, **SPARSE), *run("dense-silu-muon", 5.5, width=5632)]
    lines = [line | {"bench": "sweep_frontier-2b"} for line in [*dense, *worse, *sparse, *others]]
    with drawing.style():
        figure, shown = frontier_figure.same_time(lines)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["2B, dense SiLU", "2B, sparse"]
    assert {line["case"]["run"] for line in shown} == {"dense-silu-seed0", "wide1-target60-seed0"}
    assert len(shown) == 8
    assert frontier_figure.same_time(dense) is None


def test_a_row_of_the_table_is_a_variant_at_its_best_learning_rate():
    lines = [
        *run("dense-silu", 4.6),
        *run("dense-silu", 4.5, seed=1),
        *run("dense-silu-0.002", 4.7, learning_rate=2e-3),
        *run("wide4-target60-0.002", 4.3, learning_rate=2e-3, **SPARSE),
        *run("wide4-target60-first-0.001", 4.45, **SPARSE | {"l1_coefficient": 1e-3}),
        *run("wide4-target60-muon", 4.2, optimizer="muon", gate_learning_rate=1e-3, **SPARSE),
    ]
    repeat = run("wide4-target60", 4.4, **SPARSE)
    for line in repeat:
        line["hardware"] = "1× NVIDIA H100 80GB HBM3, 9 cores"
    made = model_tables.frontier_table([*lines, *repeat])
    assert made is not None
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in made[0].splitlines()[2:]]
    assert [[row[1], row[3], row[4], row[-1]] for row in rows] == [
        ["sparse ReLU, Muon", "bf16, 0.001 (gates 0.001)", "4.200", ""],
        ["sparse ReLU", "bf16, 0.002", "4.300", "4.400 (0.001)"],
        ["sparse ReLU, first λ 0.001", "bf16, 0.001", "4.450", ""],
        ["dense SiLU", "bf16, 0.001", "4.600, 4.500", "4.700 (0.002)"],
    ]
