"""Makes the tables of README.md and docs/, and the figures, from results.jsonl: `make results`.

A page has the place of a table between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Every row
names the records that it shows, so that a new kind of measurement gets a new row here. Only
`equal` and `lead` take all records of their sweeps.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import claims
import equal
import figures
import lead
import results
from published import PAPER_MODELS, PUBLISHED_KERNELS, Comparison
from results import SHAPE, Line, Run, find, matches, measured, runs
from sparsellm.recipe import load_recipe
from sparsellm.words import markdown_table

ROOT = results.FOLDER.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def fill(text: str, lines: Sequence[Line]) -> str:
    """The text of a page with its tables as the records have them now.

    Raises:
        KeyError: a table has no such name.
        ValueError: a row has no records.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]](lines)}{match[3]}", text)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else _digits(value, 3)


def _digits(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):g}"


def _gain(dense: float, sparse: float, *, less: bool = False) -> str:
    """``dense → sparse``, with the gain; ``less``: where less is better."""
    gain = dense / sparse if less else sparse / dense
    return f"{_number(dense)} → {_number(sparse)} ({gain:.2f}×)"


def _each(values: Iterable[float], digits: int = 3) -> str:
    return ", ".join(f"{value:,.{digits}f}" for value in values)


def _percent(values: Iterable[float]) -> str:
    return ", ".join(f"{100 * value:.0f}" for value in values) + "%"


# --- whole trainings ------------------------------------------------------------------------------

_HALF, _SMALL, _NARROW = "frontier-0.5b-long", "frontier-long", "fair-small-long"
# Model, FFN, sweep, run, and the GPU if it is no H200; all in FP8.
_LONG: tuple[tuple[str, ...], ...] = (
    ("0.5B", "dense SiLU, all matrices by Muon", _HALF, "dense-silu-0.002-seed*"),
    ("0.5B", "dense SiLU, gates by AdamW at 1/16", "fair-long", "dense-silu-0.000125-seed*"),
    ("0.5B", "the same at 1/8, newer code", "fair-long", "dense-silu-0.00025-seed*"),
    ("0.5B", "dense SiLU, 2,816 neurons, newer code", "fair-long", "dense-silu-narrow-2816-seed*"),
    ("0.5B", "dense SiLU, all by Muon, 81.3M tokens", _HALF, "dense-silu-shorter-0.002-seed*"),
    ("0.5B", "the same, 90.4M tokens, newer code", "fair-long", "dense-silu-muon-gates-shorter-*"),
    ("0.5B", "dense ReLU, all by Muon", _HALF, "dense-relu-0.002-seed*"),
    ("0.5B", "sparse, target 300", _HALF, "wide1-target300-gates-0.00025-seed*"),
    ("0.5B", "sparse, target 150", _HALF, "wide1-target150-gates-0.00025-seed*"),
    ("0.5B", "sparse, target 60", _HALF, "wide1-target60-gates-0.00025-seed*"),
    ("0.5B", "the same, newer code", "fair-long", "target60-0.00025-seed*"),
    ("0.5B", "sparse, 4 times as wide, target 150", _HALF, "wide4-gates-0.00025-150-seed*"),
    ("`small`", "dense SiLU, all by Muon", _SMALL, "dense-silu-muon-fp8-seed*"),
    ("`small`", "dense SiLU, all by Muon, 91.8M tokens", _SMALL, "dense-silu-shorter-muon-*"),
    ("`small`", "dense SiLU, 1,408 neurons, newer code", _NARROW, "dense-silu-narrow-1408-seed*"),
    ("`small`", "the same, 301M tokens", _NARROW, "dense-silu-narrow-301M-1408-seed*"),
    ("`small`", "sparse, target 60", _SMALL, "wide1-target60-muon-gates-fp8-seed*"),
    ("`small`", "the same, gates at an eighth, newer code", _NARROW, "target60-0.0005-seed*"),
    ("`small`", "the same, 301M tokens", _NARROW, "target60-301M-0.0005-seed*"),
    ("`small`", "AdamW: dense SiLU", _SMALL, "dense-silu-fp8-seed*", "H100"),
    ("`small`", "AdamW: sparse, 4 times as wide, target 60", _SMALL, "wide4-target60-*", "H100"),
    ("`small`", "AdamW: sparse, 4 times as wide, target 150", _SMALL, "wide4-target150-*"),
)
# Of the sweep `frontier`, at the best learning rate of each: FFN, run, GPU.
_WIDTHS = (
    ("dense SiLU", "dense-silu-fp8-seed*", "H100"),
    ("dense SiLU, 4 times as wide", "wide4-dense-silu-fp8-seed*", "H100"),
    ("dense ReLU²", "dense-relu2-fp8-seed*", "H100"),
    ("32 experts, 8 active (SiLU, bf16)", "moe-8-of-32-seed*", "H200"),
    ("sparse", "wide1-fp8-60-seed*", "H100"),
    ("sparse, 4 times as wide", "wide4-target60-fp8-seed*", "H100"),
    ("the same, target 30", "wide4-fp8-30-seed*", "H100"),
    ("the same, target 150", "wide4-fp8-150-seed*", "H100"),
    ("sparse, 8 times as wide", "wide8-target60-fp8-seed*", "H100"),
    ("sparse, non-gated, 6 times as wide", "wide4-non-gated-target60-fp8-seed*", "H100"),
)
# Sweep, GPU, what the run does, its name.
_RELUFY = tuple(
    (sweep, gpu, title, f"{name}-seed*")
    for sweep, gpu in (("relufy", "H200"), ("relufy-0.5b", "H100"))
    for title, name in (
        ("SiLU, at the start", "silu"),
        ("SiLU, continued", "continued"),
        ("ReLU at once", "at-once"),
        ("ramp of 50 steps", "ramp"),
        ("the same, half of the loss from the teacher", "ramp-distilled"),
    )
    if (sweep, name) != ("relufy-0.5b", "ramp")
)
_ZEROS = (
    "dense-silu-*",
    "dense-relu-*",
    *(f"l1-{value}-*" for value in ("1e-05", "0.0001", "0.0003")),
    "target-30-seed*",
    *(f"l1-{value}-*" for value in ("0.001", "0.003")),
)


def _losses(group: Sequence[Run]) -> str:
    return _each(run.last("validation_loss") for run in group)


def _seconds(group: Sequence[Run]) -> str:
    return _each((run.last("gpu_seconds") for run in group), 0)


def _active(group: Sequence[Run]) -> str:
    if not all("nnz" in run.by_metric for run in group):
        return ""
    return _number(fmean(run.last("nnz") for run in group))


def _dead(group: Sequence[Run]) -> str:
    recorded = all("dead_fraction" in run.by_metric for run in group)
    return _percent(run.last("dead_fraction") for run in group) if recorded else ""


def _long(lines: Sequence[Line]) -> str:
    rows = []
    for model, ffn, sweep, name, *on in _LONG:
        group = runs(lines, sweep, name, gpu=on[0] if on else "H200")
        title = f"{ffn} ({on[0]})" if on else ffn
        rows.append([model, title, _losses(group), _seconds(group), _active(group), _dead(group)])
    head = ["Model", "FFN", "Validation loss of each seed", "GPU seconds", "Active", "Dead"]
    return markdown_table(head, rows)


def _widths(lines: Sequence[Line]) -> str:
    rows = []
    for ffn, name, gpu in _WIDTHS:
        group = runs(lines, "frontier", name, gpu=gpu)
        cells = [_losses(group), f"{_seconds(group)} ({gpu})", _active(group), _dead(group)]
        rows.append([ffn, *cells])
    return markdown_table(["FFN", "Validation loss", "GPU seconds", "Active", "Dead"], rows)


def _relufy(lines: Sequence[Line]) -> str:
    rows = []
    for sweep, gpu, title, name in _RELUFY:
        [run] = runs(lines, sweep, name, gpu=gpu)
        of = f"{'0.5B' if sweep.endswith('0.5b') else '`small`'} ({gpu})"
        rate = f"{run.last('throughput') / 1e3:.0f}k"
        rows.append([of, title, _active([run]), _losses([run]), rate])
    return markdown_table(
        ["Model", "Run", "Active", "Validation loss", "Tokens/s at the end"], rows
    )


def _zeros(lines: Sequence[Line]) -> str:
    rows = []
    for name in _ZEROS:
        group = runs(lines, "quality", name)
        rate = fmean(run.last("throughput") for run in group)
        title = re.sub(r"-?(seed)?\*$", "", name).replace("l1-", "λ = ").replace("-", " ")
        title = title.replace("e 05", "e-5").replace("silu", "SiLU").replace("relu", "ReLU")
        rows.append([title, _active(group), _dead(group), _losses(group), f"{rate / 1e3:.0f}k"])
    return markdown_table(["Run", "Active", "Dead", "Validation loss", "Tokens/s at the end"], rows)


# --- throughput of whole models -------------------------------------------------------------------

_USUAL: dict[str, Any] = {"gpus": 1, "config": "single", "micro_batch_size": 16}
_USUAL["token_order"] = "auto"
_TEXT_ORDER: dict[str, Any] = {"token_order": None, "micro_batch_size": 4}
# Model, launch, and the keys of the sparse training's case; "gpu" is that of `find`.
_TRAININGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("0.5B", "1 GPU", {"target_nnz": 30.0}),
    ("0.5B", "1 GPU, FP8", {"precision": "fp8"}),
    ("0.5B", "2 GPUs, DDP, text order", {"gpus": 2, "config": "ddp8", "token_order": None}),
    ("0.5B", "2 GPUs, FSDP2, text order", {"gpus": 2, "config": "fsdp2", "token_order": None}),
    ("0.5B", "4 GPUs, DDP, text order", {"gpus": 4, "config": "ddp8", "token_order": None,
                                         "global_batch_tokens": 1_048_576}),
    ("2B", "1 GPU", {"micro_batch_size": 4, "global_batch_tokens": 131_072}),
    ("2B", "1 GPU", {}),
    ("2B", "1 GPU, FP8", {"precision": "fp8"}),
    ("2B", "1 GPU, H100", {"micro_batch_size": 4, "gpu": "H100"}),
    ("2B", "1 GPU, H100, FP8", {"micro_batch_size": 4, "gpu": "H100", "precision": "fp8"}),
    ("2B", "2 GPUs, DDP, text order", {"gpus": 2, "config": "ddp8"} | _TEXT_ORDER),
    ("2B", "2 GPUs, FSDP2, text order", {"gpus": 2, "config": "fsdp2"} | _TEXT_ORDER),
    ("2B", "4 GPUs, FSDP2, text order", {"gpus": 4, "config": "fsdp2"} | _TEXT_ORDER),
)  # fmt: skip


def training(lines: Sequence[Line], model: str, case: dict[str, Any], metric: str) -> list[Line]:
    """Dense and sparse record of a metric, of one command; empty if it was not recorded.

    Args:
        lines: all records.
        model: such as ``0.5B``.
        case: keys of the sparse training's case that are not `_USUAL`.
        metric: such as ``tokens_per_ms``.
    """
    case = {**_USUAL, **case, "recipe": model.lower()}
    sparse = find(lines, "train", "tokens_per_ms", kernels="auto", **case)
    of_command = [
        line
        for line in lines
        if line["bench"] == "train"
        and line["metric"] == metric
        # Both are of one command.
        and all(line[key] == sparse[key] for key in ("commit", "command", "hardware"))
    ]
    shared = {k: v for k, v in case.items() if k not in ("token_order", "target_nnz")}
    try:
        dense = find(of_command, "train", metric, kernels="dense", **shared)
        return [dense, find(of_command, "train", metric, kernels="auto", **case)]
    except ValueError:
        return []


def _trainings(lines: Sequence[Line]) -> str:
    rows = []
    for model, launch, case in _TRAININGS:
        cells = []
        for metric in ("tokens_per_ms", "memory_GiB", "mJ_per_token"):
            values = [line["value"] for line in training(lines, model, case, metric)]
            cells.append(_gain(*values, less=metric != "tokens_per_ms") if values else "")
        size = (_USUAL | case)["micro_batch_size"]
        active = training(lines, model, case, "nnz")
        mfu = training(lines, model, case, "mfu")[0]["value"]
        nnz = _number(active[1]["value"])
        rows.append([model, launch, f"{size}; {nnz}", *cells, f"{mfu:.0%}"])
    head = ["Model", "Launch", "Micro-batch; active", "Tokens/ms", "Peak memory, GiB"]
    return markdown_table([*head, "mJ per token", "MFU of dense"], rows)


def _headline(lines: Sequence[Line]) -> str:
    rows = []
    for model, sweep in (("0.5B", "fair-long"), ("2B", "fair-2b")):
        [shape] = [shape for shape in equal.SHAPES if sweep in shape.sweeps]
        tokens, first, *losses = equal.headline(lines, shape, 60)
        dense, sparse = training(lines, model, _FP8, "tokens_per_ms")
        steady = f"{sparse['value'] / dense['value']:.2f}×"
        rows.append([f"{model}, {tokens} tokens", first, steady, *losses])
    head = [
        "Sparse vs. dense",
        "Throughput, whole run",
        "Throughput, steady state, about 30 active",
        "Loss in equal GPU time, nats",
        "The same against dense with fewer neurons",
        "Loss after equal tokens, nats",
    ]
    return markdown_table(head, rows)


def _arrow(sides: Comparison) -> str:
    return f"{sides.dense:g} → {sides.sparse:g} ({sides.ratio:.2f}×)"


def _paper(lines: Sequence[Line]) -> str:
    forwards = {"0.5B": "half", "2B": "two"}
    rows = []
    for model in PAPER_MODELS:
        ours = ["", "", ""]
        if run := forwards.get(model.name):
            case = {"micro_batch_size": 4, "global_batch_tokens": 131_072} if run == "two" else {}
            for place, metric in enumerate(("tokens_per_ms", "memory_GiB")):
                values = [line["value"] for line in training(lines, model.name, case, metric)]
                ours[place] = _gain(*values, less=bool(place))
            key: dict[str, Any] = {"run": run, "step": 300, "token_order": "auto"}
            forward = find(lines, "model_forward", "tokens_per_ms", **key)
            ours[2] = _gain(forward["baseline"], forward["value"])
        peak = f"{model.peak_gb.dense:g} → {model.peak_gb.sparse:g}"
        row = [_arrow(model.training), ours[0], peak, ours[1], _arrow(model.forward), ours[2]]
        rows.append([model.name, *row])
    head = ["Model", "Training, tokens/ms: paper", "here", "Peak memory: paper, GB", "here, GiB"]
    return markdown_table([*head, "Forward, tokens/ms: paper", "here"], rows)


def _hours(lines: Sequence[Line]) -> str:
    """Of a recipe's whole training, from the recorded throughput of one GPU."""
    rows = []
    for model, precision in (("0.5B", None), ("0.5B", "fp8"), ("2B", None), ("2B", "fp8")):
        case: dict[str, Any] = {"precision": precision} if precision else {}
        if (model, precision) == ("2B", None):
            case = {"micro_batch_size": 16, "global_batch_tokens": 131_072}
        recipe = load_recipe(model.lower())
        tokens = recipe.train.steps * recipe.train.global_batch_tokens
        speeds = training(lines, model, case, "tokens_per_ms")
        hours = [f"{tokens / line['value'] / 3.6e6:.0f}" for line in speeds]
        name = f"`{model.lower()}`" + (", FP8" if precision else "")
        rows.append([name, f"{tokens / 1e9:.1f} billion", *reversed(hours)])
    return markdown_table(["Recipe", "Tokens", "GPU hours, sparse", "GPU hours, dense"], rows)


def _muon(lines: Sequence[Line]) -> str:
    rows = []
    for gpus, config in ((4, "ddp8"), (4, "fsdp2"), (4, "hsdp"), (8, "fsdp2")):
        case: dict[str, Any] = {"recipe": "2b", "gpus": gpus, "config": config, "precision": "fp8"}
        case["normalize_neurons"] = None
        each = [
            find(lines, "optimizer_step", "step_ms", optimizer=name, **case)["value"]
            for name in ("adamw", "muon")
        ]
        rows.append([str(gpus), config.rstrip("8").upper(), *(f"{value:.0f}" for value in each)])
    return markdown_table(["GPUs", "Layout", "AdamW, ms", "Muon, ms"], rows)


def _micro_batches(lines: Sequence[Line]) -> str:
    rows = []
    for size in (16, 8, 4):
        case: dict[str, Any] = {"recipe": "2b", "precision": "fp8", "optimizer": "muon"}
        case["micro_batch_size"] = size
        one, two = (
            find(lines, "micro_batches", "tokens_per_ms", gpus=gpus, **case)["value"]
            for gpus in (1, 2)
        )
        rows.append([str(size), f"{one:.1f}", f"{two:.1f}", f"{two / one:.0%}"])
    head = ["Sequences per micro-batch", "Tokens per ms, one H200"]
    return markdown_table([*head, "Per GPU, two H200 under FSDP2", "Ratio"], rows)


def _generation(lines: Sequence[Line]) -> str:
    rows = []
    # transformers' static cache was not as short as the prompt of these cases allows: not recorded.
    missing = {("0.5b", "fp8", 128)}
    for recipe, precision, batch, prompt in product(
        ("2b", "0.5b"), ("model", "fp8"), (1, 8), (128, 2048)
    ):
        if (recipe, precision, prompt) in missing:
            continue
        case = {"recipe": recipe, "precision": precision, "batch": batch, "prompt": prompt}
        model = [recipe.upper(), "bf16" if precision == "model" else "FP8"]
        rows.append([*model, *_generated(lines, "H100", case)])
    head = ["Model", "`sparsellm.load` in", "Batch", "Prompt", "Tokens/s"]
    return markdown_table([*head, "Compiled static cache, bf16", "Eager, bf16"], rows)


def _generated(lines: Sequence[Line], gpu: str, case: dict[str, Any]) -> list[str]:
    """Batch, prompt and tokens per second; the latter also of stock transformers' two ways."""
    static, eager = (
        find(lines, "generation", "tokens_per_second", gpu=gpu, baseline=side, **case)
        for side in ("static", "eager")
    )
    return [
        *(str(case["batch"]), f"{case['prompt']:,}", f"{static['value']:,.0f}"),
        *(f"{side['baseline']:,.0f} ({side['ratio']:.1f}×)" for side in (static, eager)),
    ]


def _generation_on_a_quiet_host(lines: Sequence[Line]) -> str:
    rows = []
    for batch, prompt in ((1, 128), (8, 128), (1, 2048)):
        case = {"recipe": "2b", "precision": "fp8", "batch": batch, "prompt": prompt}
        rows.append(_generated(lines, "H200", case))
        for metric, scale in (("first_token_ms", 1), ("peak_MiB", 1024)):
            line = find(lines, "generation", metric, gpu="H200", baseline="static", **case)
            rows[-1] += [f"{line[side] / scale:.3g}" for side in ("value", "baseline")]
    head = ["Batch", "Prompt", "Tokens/s", "Static cache", "Eager"]
    head += ["First token, ms", "Static cache", "Peak memory, GiB", "Static cache"]
    return markdown_table(head, rows)


def _arm(ffn: str, target: float, pattern_rate: float | None = None) -> dict[str, Any]:
    """Keys of a sparse arm; without a rate, Muon trains the matrix that decides the pattern."""
    return {"ffn": ffn, "target_percent": target, "pattern_rate": pattern_rate}


_STOCK = {"ffn": "stock", "precision": "fp8", "pattern_rate": None}
_STOCK_BY_ADAMW = _STOCK | {"pattern_rate": 9e-4}
# Part of the GPU's name, as of `find`; name, and the keys of the case.
_ARENA: tuple[tuple[str, str, dict[str, Any]], ...] = tuple(
    (gpu, name, {"depth": depth} | case)
    for depth, gpu, name, case in (
        (20, "H100", "ReLU², target 2%, `c_fc` by AdamW, FP8", _arm("relu2", 2, 9e-4)),
        (20, "H100", "the same at 6e-4", _arm("relu2", 2, 6e-4)),
        (20, "H100", "ReLU², target 1%, `c_fc` by AdamW, FP8", _arm("relu2", 1, 9e-4)),
        (20, "H100", "nanochat's own (ReLU²), FP8, 372 steps", _STOCK | {"iterations": 372}),
        (20, "H200", "the same", _STOCK | {"iterations": 372}),
        (20, "H100", "nanochat's own, `c_fc` by AdamW, FP8, 372 steps",
         _STOCK_BY_ADAMW | {"iterations": 372}),
        (20, "H100", "nanochat's own, `c_fc` by AdamW, FP8", _STOCK_BY_ADAMW | {"iterations": 400}),
        (20, "H200", "nanochat's own, FP8", _STOCK | {"iterations": 400}),
        (20, "H200", "nanochat's own, bf16", _STOCK | {"precision": "bfloat16"}),
        *((20, "H200", f"ReLU², target {target}%, `c_fc` by Muon, FP8", _arm("relu2", target))
          for target in (10, 5, 2)),
        (20, "H200", "gated ReLU, target 3%, gates by Muon, FP8", _arm("gated-relu", 3)),
        *((12, "H100", f"ReLU², target {target}%, `c_fc` by AdamW", _arm("relu2", target, 9e-4))
          for target in (10, 5, 2)),
        (12, "H100", "nanochat's own, FP8", _STOCK | {"iterations": 400}),
        (12, "H100", "nanochat's own, `c_fc` by AdamW, FP8", _STOCK_BY_ADAMW | {"iterations": 400}),
        (12, "H200", "nanochat's own, bf16", _STOCK | {"precision": "bfloat16"}),
        (12, "H200", "ReLU², target 2%, `c_fc` by Muon", _arm("relu2", 2)),
        (12, "H200", "gated ReLU, dense", _arm("gated-relu", 100)),
        (12, "H200", "gated ReLU, target 3%, gates by Muon", _arm("gated-relu", 3)),
        *((12, gpu, "the same, gates by AdamW", _arm("gated-relu", 3, 5e-4))
          for gpu in ("H200", "H100")),
    )
)  # fmt: skip


def _arena(lines: Sequence[Line]) -> str:
    rows = []
    for gpu, name, case in _ARENA:
        of = [
            line
            for line in lines
            if line["bench"] == "arena" and gpu in line["hardware"] and matches(line["case"], case)
        ]
        ends = [line for line in of if line["case"].get("step") == line["case"]["iterations"]]
        assert ends, name
        unions = [line["value"] for line in of if line["metric"] == "union_percent"]
        rates = [line["value"] for line in of if line["metric"] == "tokens_per_second"]
        seconds = (line["case"]["train_seconds"] for line in ends)
        cells = _each(line["value"] for line in ends), _each(seconds, 0)
        rate = f"{fmean(rates):,.0f}" if rates else ""
        rows.append([str(case["depth"]), name, gpu, *cells, rate, _each(unions, 0)])
    head = ["Depth", "FFN", "GPU", "Bits per byte of each run", "Seconds of training"]
    return markdown_table([*head, "Tokens/s at the end", "Active set of 64 tokens, %"], rows)


# --- one FFN --------------------------------------------------------------------------------------

_TRACES = {"pattern": "trace", "layer": "mean"}
_FP8 = {"precision": "fp8"}
_SORTED = {"token_order": "auto"}
_PATTERNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("traces", _TRACES),
    ("traces, FP8 ²", _TRACES | _FP8),
    ("traces, sorted tokens", _TRACES | _SORTED),
    ("traces, sorted tokens, FP8 ²", _TRACES | _SORTED | _FP8),
    *((f"uniform, {nnz}", {"pattern": "uniform", "nnz": nnz}) for nnz in (15, 30, 60, 120, 300)),
    *((f"skewed, {nnz}", {"pattern": "skewed", "nnz": nnz}) for nnz in (15, 30, 60, 120, 300)),
)
_FORMATS = tuple(
    (name, case) for name, case in _PATTERNS if "FP8" not in name and case.get("nnz", 0) <= 60
)
# Benchmark and case of other shapes and numbers of tokens; up to 64 as a CUDA graph.
_SHAPES: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (f"{shape}{'' if gated else ', non-gated'}", {"M": tokens, "K": hidden, "N": width, "nnz": 30,
     "pattern": "uniform", "gated": gated})
    for shape, hidden, width, gated in (
        ("2048/5632", 2048, 5632, True),
        ("2048/8192", 2048, 8192, False),
        ("4096/14336", 4096, 14_336, True),
    )
    for tokens in (1, 8, 64, 2048, 65_536)
)  # fmt: skip


def _with_gain(line: Line | None) -> str:
    """Value, its spread where it was sustained, and gain."""
    if line is None:
        return ""
    spread = ""
    if (of := line.get("sustained")) is not None:
        spread = f" ±{(of['p90'] - of['p10']) / 2 / line['value']:.1%}"
    dense = ", dense" if line["case"].get("path") == "dense" else ""
    return f"{_digits(line['value'], 4)}{spread} ({line['ratio']:.2f}×{dense})"


def _ffn(lines: Sequence[Line]) -> str:
    metrics = (("ffn_forward", "ms"), ("ffn_train", "ms"), ("ffn_train", "memory_MiB"))
    rows = []
    for name, case in _PATTERNS:
        each = [measured(lines, bench, metric, SHAPE | case) for bench, metric in metrics]
        union = next(line["case"]["union_64"] for line in each if line)
        rows.append([name, f"{union:,.0f}", *map(_with_gain, each)])
    for kernel in PUBLISHED_KERNELS:
        sides = (kernel.forward, kernel.forward_backward, kernel.memory)
        cells = [f"{side.sparse:g} ({1 / side.ratio:.2f}×)" for side in sides]
        rows.append([f"{kernel.pattern}, {kernel.nnz}, published kernels ¹", "", *cells])
    head = ["Pattern, active", "Union of 64", "Forward, ms", "Forward + backward, ms"]
    return markdown_table([*head, "Stored for backward, MiB"], rows)


def _formats(lines: Sequence[Line]) -> str:
    rows = []
    for name, case in _FORMATS:
        cells = []
        for bench in ("ffn_forward", "ffn_train"):
            twell = measured(lines, bench, "ms", SHAPE | case | {"format": "twell"})
            # The union of the same run.
            of_run = [line for line in lines if twell and line["commit"] == twell["commit"]]
            union = measured(of_run, bench, "ms", SHAPE | case) if twell else None
            cells += [_with_gain(union), _with_gain(twell)]
        rows.append([name, *cells])
    head = ["Pattern, active", "Forward, ms: union", "TwELL"]
    return markdown_table([*head, "Forward + backward, ms: union", "TwELL"], rows)


def _shapes(lines: Sequence[Line]) -> str:
    rows = []
    for name, case in _SHAPES:
        decoding = case["M"] <= 64
        bench = "ffn_decode" if decoding else "ffn_forward"
        line = measured(lines, bench, "ms", case | ({"launch": "graph"} if decoding else {}))
        assert line is not None, (name, case)
        ms = [_digits(line[side], 3) for side in ("value", "baseline")]
        rows.append([name, f"{case['M']:,}", *ms, f"{line['ratio']:.2f}×", line["case"]["path"]])
    return markdown_table(["K/N", "Tokens", "ms", "Dense, ms", "Gain", "Kernels"], rows)


TABLES: dict[str, Callable[[Sequence[Line]], str]] = {
    "equal-tokens": lambda lines: markdown_table(equal.TOKENS_HEAD, equal.equal_tokens(lines)),
    "equal-time": lambda lines: markdown_table(equal.TIME_HEAD, equal.equal_time(lines)),
    "lead": lambda lines: markdown_table(lead.HEAD, lead.expected(lines)),
    "long": _long,
    "gates": lambda lines: markdown_table(*equal.gate_rates(lines)),
    "widths": _widths,
    "relufy": _relufy,
    "zeros": _zeros,
    "headline": _headline,
    "trainings": _trainings,
    "paper": _paper,
    "hours": _hours,
    "micro-batches": _micro_batches,
    "muon": _muon,
    "arena": _arena,
    "generation": _generation,
    "generation-h200": _generation_on_a_quiet_host,
    "ffn": _ffn,
    "formats": _formats,
    "shapes": _shapes,
}


def main() -> None:
    """Writes tables and figures; ends with an error if a claim in the text does not hold."""
    lines = results.read_records(results.RECORDS)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text, lines)) != text:
            page.write_text(filled, encoding="utf-8", newline="\n")
            print(page)
    for name, svg in figures.draw_all(lines).items():
        (figures.FOLDER / name).write_text(svg, encoding="utf-8", newline="\n")
    if wrong := claims.wrong(lines):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
