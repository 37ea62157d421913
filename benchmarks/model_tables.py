"""Tables of whole models in benchmarks/RESULTS.md: sizes, several GPUs, quality of sweeps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import sweep_results
import train_results
from listing import cell, markdown_table
from published import PAPER_MODELS, Sides
from results import Line
from sparsellm.ffn.activations import ACTIVATIONS
from sweep_results import SweepGroup
from train_results import TrainPair

Made = tuple[str, list[Line]]  # Markdown, and the records that it shows
_TEXT_ORDER = ", text order"  # the mark of what was measured without a token order


def change(dense: float | None, sparse: float | None, *, less: bool = False) -> str:
    """``dense → sparse``, with the gain if both were measured."""
    if dense is None or sparse is None:
        return ""
    gain = dense / sparse if less else sparse / dense
    return f"{cell(_three(dense))} → {cell(_three(sparse))} ({gain:.2f}×)"


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def size_table(lines: Sequence[Line]) -> Made | None:
    """Training, memory and forward on one GPU; one row per size of the paper."""
    pairs = [p for p in train_results.default_pairs(lines) if p.gpus == 1]
    if not pairs:
        return None
    forwards = train_results.model_forwards(lines)
    rows, shown = [], []
    for model in PAPER_MODELS:
        own: list[TrainPair | None] = [
            p for p in pairs if train_results.size_name(p.recipe) == model.name
        ]
        for pair in own or [None]:
            known = forwards.get((model.name, pair.precision), {}) if pair else {}
            forward = known.get("tokens_per_ms")
            shown += [*(pair.lines if pair else []), *([forward] if forward else [])]
            peak = f"{model.peak_gb.dense:g} → {model.peak_gb.sparse:g}"
            paper = [_arrow(model.training), peak, _arrow(model.forward)]
            rows.append([model.name, *_own_cells(pair, forward), *paper])
    head = ["Model", "Micro-batch; non-zeros", "Training, tokens/ms", "Peak, GiB"]
    head += ["Forward, tokens/ms; non-zeros", "Paper: training", "Paper: peak, GB"]
    head += ["Paper: forward"]
    return markdown_table(head, rows), shown


def _own_cells(pair: TrainPair | None, forward: Line | None) -> list[str]:
    if pair is None:
        return ["", "", "", ""]
    nnz = pair.values("nnz")[1]
    return [
        f"{pair.micro_batch_size}; {nnz:.0f}{_variant(pair)}" if nnz is not None else "",
        change(*pair.values("tokens_per_ms")),
        change(*pair.values("memory_GiB"), less=True),
        _forward(forward) if forward else "",
    ]


def _forward(line: Line) -> str:
    order = "" if "token_order" in line["case"] else _TEXT_ORDER
    nnz = line["case"].get("measured_nnz")
    return change(line["baseline"], line["value"]) + (f"; {nnz:.0f}" if nnz else "") + order


def _variant(pair: TrainPair) -> str:
    order = "" if pair.in_token_order else _TEXT_ORDER
    precision = ", FP8 on both sides" if pair.precision == "fp8" else ""
    return f"{order}, fused gradients{precision}" if pair.fused_gradients else order + precision


def _arrow(sides: Sides) -> str:
    return f"{sides.dense:g} → {sides.sparse:g} ({sides.ratio:.2f}×)"


SIZE_LEGEND = """
Whole models on one GPU, dense → sparse (`ffn.kernels: auto`, in token order unless the table says
otherwise), from weights whose sparsity has settled; medians over the second half of the steps. In
brackets: gain; above 1 is better. Forward: 16,384 tokens of held-out text, and non-zeros there; in
bursts in bf16, and sustained, over dense in bf16, in FP8. Paper: arXiv 2603.23198 at its λ = 2e-5
(39, 29 and 24 non-zeros at 0.5B, 1.5B and 2B), one GPU of a node of eight H100; its sparse 2B has a
larger micro-batch. Commands: `sparsellm bench train`, `sparsellm bench forward`.
"""


def scaling_table(lines: Sequence[Line]) -> Made | None:
    """Rate, efficiency, memory and energy of each recipe that was trained on several GPUs."""
    pairs = train_results.default_pairs(lines)
    several = {p.recipe for p in pairs if p.gpus > 1}
    pairs = [p for p in pairs if p.recipe in several]
    if not pairs:
        return None
    rows = [
        [
            train_results.size_name(p.recipe),
            p.gpus,
            f"{p.config}{_variant(p)}",
            f"{p.micro_batch_size}; {p.global_batch_tokens:,}; {p.values('nnz')[1] or 0:.0f}",
            change(*p.values("tokens_per_ms")),
            change(*p.values("memory_GiB"), less=True),
            change(*p.values("mJ_per_token"), less=True),
        ]
        for p in pairs
    ]
    head = ["Model", "GPUs", "Launch", "Micro-batch; tokens per step; non-zeros"]
    head += ["Training, tokens/ms", "Peak of a GPU, GiB", "mJ per token"]
    return markdown_table(head, rows), [line for p in pairs for line in p.lines]


SCALING_LEGEND = """
Whole training runs through `accelerate launch` on GPUs of one node, dense → sparse (in token order
unless the table says otherwise), from settled weights; both sides of a row are of one run. Rows
differ in their non-zeros and tokens per step, so they cannot be compared with one another. Rates
and energy are of all GPUs. Command: `sparsellm bench train`.
"""

# --- width ---------------------------------------------------------------------------------------


def frontier_table(lines: Sequence[Line]) -> Made | None:
    """Loss, rate and GPU time of FFNs of several widths, each at its best learning rate."""
    groups = [g for g in sweep_results.sweep_groups(lines) if g.is_of_frontier and g.losses]
    if not groups:
        return None
    # Variants of a sweep differ in their steps. One with less than half of the most was stopped.
    steps = {name: [g.case["step"] for g in groups if g.sweep == name] for name in _sweeps(groups)}
    groups = [g for g in groups if 2 * g.case["step"] >= max(steps[g.sweep])]
    groups.sort(key=lambda g: (g.size, statistics.fmean(g.losses), g.name))
    variants: dict[tuple[Any, ...], list[SweepGroup]] = defaultdict(list)
    keys = ("intermediate_size", "target_nnz", "precision", "gate_learning_rate")
    for g in groups:
        variants[g.size, _ffn(g), *(g.case.get(key) for key in keys)].append(g)
    rows = [_frontier_row(best, others) for best, *others in variants.values()]
    head = ["Model; tokens", "FFN", "Neurons; active; dead", "Precision, learning rate"]
    head += ["Held-out loss of each seed", "GPU seconds", "Other runs: loss (learning rate)"]
    return markdown_table(head, rows), [line for g in groups for line in g.lines]


def _frontier_row(best: SweepGroup, others: Sequence[SweepGroup]) -> list[str]:
    case = best.case
    return [
        f"{best.size[0]} × {best.size[1]}; {best.size[2] / 1e6:.1f}M",
        _ffn(best),
        "; ".join(
            [f"{case['intermediate_size']:,}"]
            + ([f"{statistics.fmean(best.nnz):,.0f}"] if best.nnz else [])
            + ([f"{statistics.fmean(best.dead):.0%}"] if best.dead else [])
        ),
        f"{case['precision'].replace('fp8', 'FP8')}, {case['learning_rate']:g}"
        + (f" (gates {gates:g})" if (gates := case.get("gate_learning_rate")) else ""),
        _losses(best),
        ", ".join(f"{seconds:,.1f}" for seconds in best.gpu_seconds)
        + f" ({best.gpu.split()[1]})" * bool(best.gpu_seconds),
        "; ".join(f"{_losses(g)} ({g.case['learning_rate']:g})" for g in others),
    ]


def _ffn(group: SweepGroup) -> str:
    """The FFN and how it is trained, without its sizes."""
    case = group.case
    return (
        ("sparse " if case["target_nnz"] else "dense ")
        + ACTIVATIONS[case["activation"]].title
        + ("" if case["gated"] else ", non-gated")
        + (", re-initialised" if "reinit" in group.name else "")
        + (f", first λ {case['l1_coefficient']:g}" if "-first-" in group.name else "")
        + (", Muon" if case.get("optimizer") == "muon" else "")
        + (f", {case['experts']} experts" if "experts" in case else "")
    )


def _losses(group: SweepGroup) -> str:
    return ", ".join(f"{value:.3f}" for value in group.losses)


def _sweeps(groups: Sequence[SweepGroup]) -> list[str]:
    return list(dict.fromkeys(g.sweep for g in groups))


FRONTIER_LEGEND = """
Runs of `sparsellm sweep frontier` (the recipe `small`), `frontier-0.5b` and `frontier-2b`, and of
`frontier-long` and `frontier-0.5b-long` (111.4M tokens, or as many as fit into the sparse run's
time, and held-out text of two corpora). Best first for each model and number of tokens. A row is
the variant at the best learning rate of its runs; the last column has the losses of its other runs,
some of them on another GPU. Model: layers × width. Active: neurons that fire for a token at the
end, mean over layers. Dead: those that did not fire for a whole window of tokens. GPU seconds: of
training steps alone; compare only those of the same kind of GPU. They are missing where two runs
shared the GPU, or where they were not recorded.
"""

# --- quality --------------------------------------------------------------------------------------


def quality_table(lines: Sequence[Line]) -> Made | None:
    """Loss and rate of each group of runs of a sweep."""
    groups = [g for g in sweep_results.sweep_groups(lines) if g.losses and g.nnz]
    groups = [g for g in groups if not g.is_of_frontier]
    if not groups:
        return None
    dense = sweep_results.dense_relu_losses(groups)
    sweeps = _sweeps(groups)
    groups.sort(key=lambda g: (sweeps.index(g.sweep), -statistics.fmean(g.nnz)))
    rows = []
    for g in groups:
        nnz, loss = statistics.fmean(g.nnz), statistics.fmean(g.losses)
        against = dense.get(g.size)
        width = g.case["intermediate_size"]
        rows.append(
            [
                f"{g.sweep}: {g.name}",
                str(len(g.losses)),
                f"{nnz:,.1f} ({1 - nnz / width:.1%} zeros)",
                f"{statistics.fmean(g.dead):.0%}" if g.dead else "",
                ", ".join(f"{value:.3f}" for value in g.losses),
                f"{loss / against - 1:+.1%}".replace("-", "−") if against else "",
                f"{100 * statistics.fmean(g.scores):.1f}%" if g.scores else "",
                f"{statistics.fmean(g.rates) / 1e3:,.0f}k" if g.rates else "",
            ]
        )
    head = ["Run", "Seeds", "Non-zeros per token", "Dead", "Held-out loss"]
    head += ["Against dense ReLU", "Mean score", "Training, tokens/s"]
    return markdown_table(head, rows), [line for g in groups for line in g.lines]


QUALITY_LEGEND = """
Runs of `sparsellm sweep`, equal tokens of real text, usually on one GPU each. Non-zeros and dead
neurons: at the end, mean over layers and seeds. Held-out loss: nats per token, of each seed;
against the mean of dense ReLU (λ 0) of the same size. Mean score: of the seven tasks, of which
guessing gets 31.4%. The number in a run's name is λ or the target. Second figure: mean scores, and
on held-out text, over the same model dense, in bursts: forward passes of the trained models in
token order, and of the FFN of each of their layers alone in text order. Commands: `sparsellm
sweep`, `sparsellm eval`, `sparsellm bench forward --layers`, `benchmarks/record_sweep.py`.
"""
