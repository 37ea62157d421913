"""Draws figures/*.svg from the newest records in results.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import frontier_figure
import quality_figures
import results
import train_results
from published import PAPER_MODELS, PUBLISHED_KERNELS
from results import Drawn, FFNSetting, Line
from sparsellm.report import drawing
from train_results import TrainPair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = results.FOLDER / "figures"
_NNZ = "non-zeros per token"


def draw_all(lines: Sequence[Line]) -> dict[str, str]:
    """The SVG of each figure that has records, by file name; equal records give equal bytes.

    The text must be saved as UTF-8 with line feeds.
    """
    found = {}
    with drawing.style():
        for name, (title, draw) in FIGURES.items():
            drawn = draw(lines)
            if drawn is not None:
                figure, shown = drawn
                caption = results.taken_on(shown, commits=not name.startswith("frontier"))
                found[f"{name}.svg"] = drawing.svg_text(figure, title, caption)
    return found


# --- one FFN --------------------------------------------------------------------------------------

_PATTERNS = {"uniform": "o", "skewed": "s", "trace": "^"}
_SHOWN_NNZ = (15, 30, 60, 120, 300)
_SYSTEMS = {
    "union": 0,
    "token order": 1,
    "token order, FP8": 4,
    "TwELL (ours)": 3,
    "published kernels": 2,
}


def _ffn_speed(lines: Sequence[Line]) -> Drawn | None:
    """Speed over dense against non-zeros: forward, and forward and backward."""
    shown: list[Line] = []
    figure, panels = drawing.new_figure(2)
    titles = ("FFN forward", "FFN forward and backward, training")
    benches = ("ffn_forward", "ffn_train")
    for axes, title, bench in zip(panels, titles, benches, strict=True):
        cases = {s: m for s, m in results.ffn(lines, bench).items() if results.shown_shape(s)}
        for system in _SYSTEMS:
            for pattern, marker in _PATTERNS.items():
                own = [
                    (s.nnz, m["ms"])
                    for s, m in cases.items()
                    if (_system(s), s.pattern) == (system, pattern)
                    and s.layer != "mean"
                    and "ms" in m
                ]
                shown += [line for _, line in own]
                points = [(nnz, line["ratio"]) for nnz, line in own]
                if system == "published kernels":
                    points = _published(bench, pattern)
                _speed_points(axes, sorted(points), system, pattern, marker)
        axes.axhline(1.0, color=drawing.MUTED, linestyle="--", label="dense (cuBLAS, compiled)")
        axes.set(title=title, xlabel=_NNZ, ylabel="speed over dense")
        drawing.log_scale(axes.xaxis)
        axes.set_xlim(10, 400)
        axes.set_xticks(_SHOWN_NNZ, list(map(str, _SHOWN_NNZ)))
        axes.set_ylim(bottom=0)
    if not shown:
        return None
    figure.suptitle(f"One FFN, {results.TOKENS:,} tokens at {results.HIDDEN}/{results.WIDTH}")
    drawing.legend_beside(figure, panels)
    return figure, shown


def _system(setting: FFNSetting) -> str:
    if setting.format == "twell":
        return "TwELL (ours)"
    order = "token order" if setting.in_token_order else "union"
    return f"{order}, FP8" if setting.precision == "fp8" else order


def _published(bench: str, pattern: str) -> list[tuple[float, float]]:
    return [
        (k.nnz, 1 / (k.forward if bench == "ffn_forward" else k.both).ratio)
        for k in PUBLISHED_KERNELS
        if k.pattern == pattern
    ]


def _speed_points(
    axes: Axes, points: list[tuple[float, float]], system: str, pattern: str, marker: str
) -> None:
    if not points:
        return
    names = {"trace": "layers of a trained model", "uniform": "uniform", "skewed": "skewed"}
    axes.plot(
        *zip(*points, strict=True),
        marker=marker,
        color=drawing.color(_SYSTEMS[system]),
        linestyle="none" if pattern == "trace" else "-",
        linewidth=1,
        label=f"{system}, {names[pattern]}",
    )


# --- whole models ---------------------------------------------------------------------------------


def _model_sizes(lines: Sequence[Line]) -> Drawn | None:
    """Training rate and peak memory of each size on one GPU, beside the paper's."""
    pairs: dict[str, TrainPair] = {}
    for pair in train_results.default_pairs(lines):
        if pair.gpus == 1:  # the smallest micro-batch comes first
            pairs.setdefault(train_results.size_name(pair.recipe), pair)
    if not pairs:
        return None
    figure, panels = drawing.new_figure(2, size=(12, 4.5))
    quantities = {
        "Training on one GPU": ("tokens/ms", "tokens_per_ms"),
        "Peak memory while training": ("GB (paper), GiB (ours)", "memory_GiB"),
    }
    sides = ("paper, dense", "paper, sparse", "ours, dense", "ours, sparse")
    colors = (drawing.LINE, drawing.MUTED, drawing.color(1), drawing.color(0))
    for axes, (title, (unit, metric)) in zip(panels, quantities.items(), strict=True):
        for place, model in enumerate(PAPER_MODELS):
            published = model.training if metric == "tokens_per_ms" else model.peak_gb
            own = pairs[model.name].values(metric) if model.name in pairs else (None, None)
            for side, value in enumerate((*published, *own)):
                if value is None:
                    continue
                x = place + 0.2 * (side - 1.5)
                axes.bar(x, value, 0.19, color=colors[side], label=None if place else sides[side])
                axes.annotate(
                    f"{value:.3g}", (x, value), ha="center", va="bottom", fontsize=7,
                    xytext=(0, 1), textcoords="offset points",
                )  # fmt: skip
        axes.set_xticks(range(len(PAPER_MODELS)), [model.name for model in PAPER_MODELS])
        axes.set(title=title, xlabel="model", ylabel=unit)
        axes.grid(visible=False, axis="x")
    drawing.legend_beside(figure, panels)
    return figure, [line for pair in pairs.values() for line in pair.lines]


def _scaling(lines: Sequence[Line]) -> Drawn | None:
    """Rates per GPU, dense beside sparse; the two of a pair are of one run, and no others."""
    pairs = [p for p in train_results.default_pairs(lines) if _usual(p)]
    recipes = list(dict.fromkeys(p.recipe for p in pairs if p.gpus > 1))
    if not recipes:
        return None
    pairs = [p for p in pairs if p.recipe in recipes]
    figure, panels = drawing.new_figure(len(recipes), size=(12, 4.5))
    for axes, recipe in zip(panels, recipes, strict=True):
        own = [p for p in pairs if p.recipe == recipe]
        for place, pair in enumerate(own):
            _side_bars(axes, place, pair)
        axes.set_xticks(range(len(own)), [_launch(pair) for pair in own], fontsize=8)
        axes.set(title=train_results.size_name(recipe), ylabel="tokens/ms of each GPU")
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.1)
    figure.suptitle("Training over the GPUs of one node: rate of each GPU, dense and sparse")
    drawing.legend_beside(figure, panels)
    return figure, [line for pair in pairs for line in pair.lines]


def _usual(pair: TrainPair) -> bool:
    usual = (pair.recipe, pair.micro_batch_size) not in {("2b", 8), ("2b", 16)}
    return usual and pair.precision == "bf16"


def _launch(pair: TrainPair) -> str:
    gpus = "1 GPU" if pair.gpus == 1 else f"{pair.gpus} GPUs\n{pair.config.rstrip('8').upper()}"
    return f"{gpus}\n{pair.values('nnz')[1] or 0:.0f} active"


def _side_bars(axes: Axes, place: int, pair: TrainPair) -> None:
    rates = pair.values("tokens_per_ms")
    for side, rate in enumerate(rates):
        assert rate is not None
        x, height = place + 0.4 * (side - 0.5), rate / pair.gpus
        name = ("dense", "sparse, and over dense of the same run")[side]
        axes.bar(x, height, 0.38, color=drawing.color(1 - side), label=name)
        gain = f"\n{rate / (rates[0] or 1):.2f}×" if side else ""
        axes.annotate(
            f"{height:.3g}{gain}", (x, height),
            ha="center", va="bottom", fontsize=7, xytext=(0, 1), textcoords="offset points",
        )  # fmt: skip


FIGURES: dict[str, tuple[str, Callable[[Sequence[Line]], Drawn | None]]] = {
    "ffn_speed": ("Speed of one FFN over dense, against non-zeros per token", _ffn_speed),
    "model_sizes": ("Training rate and memory at each model size, beside the paper", _model_sizes),
    "scaling": ("Training rate over the GPUs of one node", _scaling),
    "quality_and_speed": (
        "Held-out loss and training speed against non-zeros",
        quality_figures.quality_and_speed,
    ),
    "frontier": (
        "Held-out loss against GPU time in the recipe small with AdamW, dense and sparse FFNs",
        frontier_figure.frontier,
    ),
    "frontier-same-time": (
        "Held-out loss against GPU time at the shapes of 0.5b and 2b, dense and sparse FFNs",
        frontier_figure.same_time,
    ),
    "score_and_forward": (
        "Mean task score, and the forward pass's speed and energy, against non-zeros",
        quality_figures.score_and_forward,
    ),
}


def main() -> None:
    """Writes the figures, and names those that have no records."""
    drawn = draw_all(results.read_records(results.RECORDS))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
        print(FOLDER / name)
    for name in FIGURES:
        if f"{name}.svg" not in drawn:
            print(f"skipped {name}.svg: {results.RECORDS} has no records for it")


if __name__ == "__main__":
    main()
