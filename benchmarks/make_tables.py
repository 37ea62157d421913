"""Makes RESULTS.md from results.jsonl: at most seven tables of at most eight columns, with figures.

Every table states what was measured, on which hardware and at which commit. With ``--all`` it lists
the benchmarks that have records, and with ``--all BENCH`` it prints every case of one.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import claims
import model_tables
import results
import train_results
from listing import cell, listing, markdown_table
from model_tables import Made, change
from published import PUBLISHED_KERNELS
from results import FFNSetting, Line
from train_results import TrainPair

PAGE = results.FOLDER / "RESULTS.md"
INTRODUCTION = """# Results

Made from results.jsonl by `make results`; do not edit. Each table shows the newest record of a
case. Everything else that was measured (decoding, dispatch, checkpoints, the data loader, token
orders, accuracy against lm-eval and more) is printed by `benchmarks/make_tables.py --all BENCH`;
without BENCH it lists the benchmarks.
"""


def results_page(lines: Sequence[Line]) -> str:
    """The page; a table without records is omitted together with its figure."""
    parts = [INTRODUCTION]
    for title, figures, legend, table in TABLES:
        made = table(lines)
        if made is None:
            continue
        text, shown = made
        drawn = (f for f in figures if (results.FOLDER / "figures" / f"{f}.svg").is_file())
        image = "".join(f"![{title}](figures/{figure}.svg)\n\n" for figure in drawn)
        taken = results.taken_on(shown).replace(" · ", ". ").replace("commit", "Commit", 1)
        parts.append(f"## {title}\n\n{image}{text}\n{legend.strip()}\n\nHardware: {taken}.\n")
    return "\n".join(parts)


def with_ratio(line: Line | None) -> str:
    """Value with its spread and gain; marked if `auto` computed it dense or a CUDA graph ran it."""
    if line is None:
        return ""
    case = line["case"]
    dense = ", dense" if case.get("path") == "dense" else ""
    as_graph = line["bench"] == "ffn_train" and "launch" in case
    note = " ²" if as_graph else ""
    about = ""
    if under := line.get("sustained"):
        about = f" ±{(under['p90'] - under['p10']) / 2 / line['value']:.1%}"
    return f"{cell(line['value'])}{about} ({line['ratio']:.2f}×{dense}){note}"


# --- one FFN --------------------------------------------------------------------------------------


def _ffn_table(lines: Sequence[Line]) -> Made | None:
    forward, train = (results.ffn(lines, bench) for bench in ("ffn_forward", "ffn_train"))
    shown: list[Line] = []
    rows = []
    # A training that was timed as a CUDA graph stands in the row of its forward pass.
    settings = {setting._replace(launch=None) for setting in forward.keys() | train.keys()}
    for setting in sorted(filter(_in_ffn_table, settings), key=_order):
        as_graph = train.get(setting._replace(launch="graph"), {})
        of_forward, of_train = forward.get(setting, {}), train.get(setting, as_graph)
        picked = [
            of_forward.get("ms"),
            of_forward.get("mJ_per_token"),
            of_train.get("ms"),
            of_train.get("memory_MiB"),
        ]
        found = [line for line in picked if line is not None]
        shown += found
        union = found[0]["case"]["union_64"]
        rows.append([setting.name, setting.nnz, round(union), *map(with_ratio, picked)])
    if not rows:
        return None
    for kernel in PUBLISHED_KERNELS:
        sides = (kernel.forward, None, kernel.both, kernel.memory)
        cells = [f"{s.sparse:g} ({1 / s.ratio:.2f}×)" if s else "" for s in sides]
        rows.append([f"{kernel.pattern}, published kernels ¹", kernel.nnz, "", *cells])
    head = ["Pattern", "Non-zeros", "Union of 64", "Forward, ms", "Forward, mJ per token"]
    head += ["Forward + backward, ms", "Kept for backward, MiB"]
    return markdown_table(head, rows), shown


def _in_ffn_table(setting: FFNSetting) -> bool:
    union = setting.format == "union" and results.shown_shape(setting)
    return union and setting.layer in (None, "mean")


def _order(setting: FFNSetting) -> tuple[Any, ...]:
    patterns = ("trace", "uniform", "skewed")
    place = patterns.index(setting.pattern) if setting.pattern in patterns else len(patterns)
    layer = -1 if setting.layer in (None, "mean") else int(setting.layer)
    shape = (setting.hidden_size, setting.intermediate_size, setting.tokens)
    variant = (setting.in_token_order, setting.precision)
    return (*shape, place, layer, *variant, setting.nnz)


FFN_LEGEND = """
One FFN of 2048/5632 on 16,384 tokens: `sparsellm.accelerate` (forward) and the training path with
statistics, L1 and all gradients. Dense is bf16; so is ours, unless a row says FP8. In brackets:
dense under `torch.compile` over ours, of the same run; above 1 is better. Times with ± (half of
what lies between the 10th and the 90th percentile) were sustained for seconds; those without were
bursts, which are faster. Union of 64: neurons that fire for any of 64 neighbouring tokens, which is
what the kernels' time depends on. Traces: a six-layer pilot model on real text. Commands:
`sparsellm bench ffn`, `sparsellm bench ffn-train`.

¹ The kernels that the paper's authors published, run once beside dense on an H200 and typed in,
without a record, on inputs for which their results are right; over 31 non-zeros in a tile of 256
they are not. `benchmarks/published_kernels.py` repeats it for those who have them.

² Both sides as CUDA graphs: the kernels alone, without the host that queues them.
"""

# --- both formats ---------------------------------------------------------------------------------


def _format_table(lines: Sequence[Line]) -> Made | None:
    forward, train = (results.format_pairs(lines, b) for b in ("ffn_forward", "ffn_train"))
    settings = [s for s in forward.keys() | train.keys() if results.shown_shape(s)]
    rows, shown = [], []
    for setting in sorted(settings, key=_order):
        cells: list[Any] = [setting.name, setting.nnz]
        for pairs, metric in ((forward, "ms"), (train, "ms"), (train, "memory_MiB")):
            pair = pairs.get(setting)
            both = [side.get(metric) for side in (pair.union, pair.twell)] if pair else [None] * 2
            shown += [line for line in both if line is not None]
            cells += map(with_ratio, both)
        rows.append(cells)
    whole = [p for p in train_results.every_pair(lines) if p.gpus == 1]
    sentences = []
    for twell in (p for p in whole if p.format == "twell"):
        sentence, used = _whole_model(twell, whole)
        sentences.append(sentence)
        shown += used
    if not shown:
        return None
    head = ["Pattern", "Non-zeros", "Forward, ms: union", "TwELL"]
    head += ["Forward + backward, ms: union", "TwELL", "Kept for backward, MiB: union", "TwELL"]
    text = markdown_table(head, rows) if rows else ""
    return "\n".join([text, *sentences, ""]) if sentences else text, shown


def _whole_model(twell: TrainPair, pairs: Iterable[TrainPair]) -> tuple[str, list[Line]]:
    run = twell.dense["tokens_per_ms"]
    unions = [p for p in pairs if p.format == "union" and p.dense["tokens_per_ms"] == run]
    rates, memory, used = [], [], []
    for name, pair in [*((_union_name(union), union) for union in unions), ("TwELL", twell)]:
        rates.append(f"{name} {change(*pair.values('tokens_per_ms'))}")
        memory.append(f"{name} {change(*pair.values('memory_GiB'), less=True)}")
        used += pair.lines
    sentence = (
        f"Training the whole {train_results.size_name(twell.recipe)} on one GPU at "
        f"{twell.values('nnz')[1] or 0:.0f} non-zeros, dense → sparse, in one run: "
        f"{', '.join(rates)} tokens/ms; peak {', '.join(memory)} GiB."
    )
    return sentence, used


def _union_name(pair: TrainPair) -> str:
    return "union in token order" if pair.in_token_order else "union"


FORMAT_LEGEND = """
Our union format and the paper's TwELL (training: with the hybrid format), both by this project's
kernels, and dense, measured in one run on the same inputs: 16,384 tokens at 2048/5632, bf16. In
brackets: dense under `torch.compile` over the format; above 1 is better. Commands: `sparsellm bench
ffn --format union twell`, `sparsellm bench ffn-train --format union twell`.
"""

# --- other shapes ---------------------------------------------------------------------------------


def _shapes_table(lines: Sequence[Line]) -> Made | None:
    rows, shown = [], []
    for bench in ("ffn_forward", "ffn_decode"):
        cases = results.ffn(lines, bench)
        for setting in sorted(filter(_among_shapes, cases), key=_order):
            line = cases[setting].get("ms")
            if line is None:
                continue
            shown.append(line)
            rows.append(
                [
                    f"{setting.hidden_size}/{setting.intermediate_size}"
                    + ("" if line["case"]["gated"] else ", non-gated"),
                    setting.tokens,
                    setting.name,
                    setting.nnz,
                    cell(line["value"]),
                    cell(line["baseline"]),
                    f"{line['ratio']:.2f}×",
                    line["case"]["path"],
                ]
            )
    if not rows:
        return None
    head = ["K/N", "Tokens", "Pattern", "Non-zeros", "ms", "Dense, ms", "Gain", "Kernels"]
    return markdown_table(head, rows), shown


def _among_shapes(setting: FFNSetting) -> bool:
    if setting.format != "union" or setting.in_token_order or results.shown_shape(setting):
        return False
    if setting.launch not in (None, "graph"):
        return False
    return (setting.pattern, setting.nnz) == ("uniform", 30) or setting.layer == "mean"


SHAPES_LEGEND = """
Forward of one FFN at other shapes and numbers of tokens; up to 64 tokens as a CUDA graph whose
weights no cache holds (decoding). `auto` chose the kernels. Command: `sparsellm bench ffn`.
"""

# Title, figures, legend, and the function that makes the table.
TABLES: tuple[tuple[str, tuple[str, ...], str, Callable[[Sequence[Line]], Made | None]], ...] = (
    (
        "Loss against GPU time",
        ("frontier-same-time", "frontier"),
        model_tables.FRONTIER_LEGEND,
        model_tables.frontier_table,
    ),
    ("One FFN", ("ffn_speed",), FFN_LEGEND, _ffn_table),
    ("Union against TwELL", (), FORMAT_LEGEND, _format_table),
    (
        "Each model size, beside the paper",
        ("model_sizes",),
        model_tables.SIZE_LEGEND,
        model_tables.size_table,
    ),
    ("Over several GPUs", ("scaling",), model_tables.SCALING_LEGEND, model_tables.scaling_table),
    (
        "Quality against non-zeros",
        ("quality_and_speed", "score_and_forward"),
        model_tables.QUALITY_LEGEND,
        model_tables.quality_table,
    ),
    ("Other shapes, and decoding", (), SHAPES_LEGEND, _shapes_table),
)


def main(words: list[str] | None = None) -> None:
    """Writes the page, or with ``--all`` prints records."""
    parser = argparse.ArgumentParser(description="RESULTS.md from results.jsonl.")
    parser.add_argument(
        "--all",
        nargs="?",
        const="",
        metavar="BENCH",
        help="print all cases of this benchmark instead; without a name, list the benchmarks",
    )
    wanted = parser.parse_args(words).all
    records = results.read_records(results.RECORDS)
    count = Counter(line["bench"] for line in records)
    if wanted is None:
        PAGE.write_text(results_page(records), encoding="utf-8", newline="\n")
        print(PAGE)
        claims.fill_pages(records)
    elif not wanted:
        print("\n".join(f"{name:24} {number:6,} records" for name, number in sorted(count.items())))
    elif wanted in count:
        print(listing([line for line in records if line["bench"] == wanted]), end="")
    else:
        close = difflib.get_close_matches(wanted, count, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        sys.exit(f"error: --all {wanted}: {results.RECORDS} has no such benchmark{meant}")


if __name__ == "__main__":
    main()
