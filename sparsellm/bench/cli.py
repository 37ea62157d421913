"""``sparsellm bench …``: measures, prints, and with ``--record`` keeps the figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_bench_parser(commands: Any) -> None:
    """Adds ``bench`` and its benchmarks to the ``sparsellm`` command."""
    bench = commands.add_parser("bench", help="measure speed; results under benchmarks/")
    names = bench.add_subparsers(required=True, metavar="BENCHMARK")

    loader = names.add_parser("loader", help="tokens a second out of the data loader")
    loader.add_argument("--corpus", default="sample", help="name in data/, or a YAML file")
    loader.add_argument("--files", nargs="*", help="globs that replace the corpus's files")
    loader.add_argument("--tokenizer", default="bytes", choices=("gpt2", "bytes"))
    loader.add_argument("--num-workers", type=int, nargs="+", default=[0, 2])
    loader.add_argument("--num-ranks", type=int, default=1, help="training processes")
    loader.add_argument("--context-length", type=int, default=2048, help="tokens")
    loader.add_argument("--micro-batch-size", type=int, default=16, help="sequences")
    loader.add_argument("--seconds", type=float, default=5.0, help="of measuring, each")
    loader.set_defaults(run=_loader)

    loss = names.add_parser("loss", help="materialised against fused cross-entropy (GPU)")
    loss.add_argument("--tokens", type=int, default=32_768)
    loss.add_argument("--hidden-size", type=int, default=2048)
    loss.add_argument("--vocab-size", type=int, default=50_304)
    loss.set_defaults(run=_loss)

    ffn = names.add_parser(
        "ffn",
        help="one FFN forward: ours against dense, at real and synthetic patterns (GPU)",
        description="One FFN forward: dense eager, dense compiled and ours, in one run. Without "
        "options: 16,384 tokens at 2048/5632. Prints and records case by case.",
    )
    ffn.add_argument(
        "--traces", type=Path, metavar="FILE", help="real patterns, from `sparsellm analyze`"
    )
    ffn.add_argument("--M", type=int, nargs="+", metavar="TOKENS", help="default: 16384")
    ffn.add_argument("--shape", nargs="+", metavar="K/N[/non-gated]", help="default: 2048/5632")
    ffn.add_argument(
        "--pattern",
        nargs="+",
        choices=("trace", "uniform", "skewed"),
        default=["trace", "uniform", "skewed"],
    )
    ffn.add_argument(
        "--nnz",
        nargs="+",
        metavar="NNZ",
        help="of the synthetic patterns, a token: numbers or percentages "
        "(default: 15 30 60 120 300 50%%)",
    )
    ffn.add_argument("--all", action="store_true", help="every M and shape that is not given")
    ffn.add_argument(
        "--kernels",
        choices=("auto", "sparse", "dense"),
        default="auto",
        help="ours: by measured density (default), or always these",
    )
    ffn.add_argument("--seconds", type=float, default=1.0, help="of timing, a case (default: 1)")
    ffn.add_argument(
        "--energy",
        action="store_true",
        help="also mJ a token, of the trace and of nnz 30 and 60 at 16,384 tokens",
    )
    ffn.set_defaults(run=_ffn)

    run = names.add_parser("run", help="a finished training run's curve")
    run.add_argument("run_path", type=Path, metavar="RUN")
    run.add_argument("--name", default="train", help="name of the benchmark in the records")
    run.set_defaults(run=_run)

    for parser in (loader, loss, ffn, run):
        parser.add_argument(
            "--record", type=Path, metavar="FILE", help="append to it (benchmarks/results.jsonl)"
        )
    table = names.add_parser("table", help="benchmarks/RESULTS.md from results.jsonl")
    table.set_defaults(run=_table)


def _loader(options: argparse.Namespace) -> None:
    from sparsellm.bench import loader

    found = []
    for num_workers in options.num_workers:
        found += loader.run(
            corpus=options.corpus,
            files=options.files,
            tokenizer=options.tokenizer,
            num_workers=num_workers,
            num_ranks=options.num_ranks,
            context_length=options.context_length,
            micro_batch_size=options.micro_batch_size,
            seconds=options.seconds,
        )
    _report(found, options.record)


def _loss(options: argparse.Namespace) -> None:
    from sparsellm.bench import loss

    _report(loss.run(options.tokens, options.hidden_size, options.vocab_size), options.record)


def _ffn(options: argparse.Namespace) -> None:
    import torch

    from sparsellm.bench import ffn, ffn_cases, ffn_records, record

    every_shape = list(map(str, ffn_cases.SHAPES))
    shapes = options.shape or (every_shape if options.all else every_shape[:1])
    tokens = options.M or (ffn_cases.TOKENS if options.all else [ffn.ENERGY_TOKENS])
    cases = ffn_cases.grid(
        tokens,
        map(ffn_cases.parse_shape, shapes),
        options.pattern,
        options.nnz or ffn_cases.NNZ,
    )
    if not cases:
        raise ValueError(f"traces are of {ffn_cases.TRACED}: --shape and --pattern leave no case")
    if not torch.cuda.is_available():
        raise ValueError("bench ffn measures GPU kernels and needs a CUDA device")
    num_measured = 0
    for found in ffn.run(
        cases,
        torch.device("cuda", torch.cuda.current_device()),
        traces=options.traces,
        kernels=options.kernels,
        seconds=options.seconds,
        with_energy=options.energy,
    ):
        if isinstance(found, ffn.Skipped):
            print(f"skipped: {found.case}: {found.why}", flush=True)
            continue
        num_measured += found[0].bench != "ceilings"
        print("\n".join(ffn_records.rows(found)), flush=True)
        if options.record:
            record.append(found, options.record)
    if not num_measured:
        raise ValueError("no case was measured; the reasons are above")


def _run(options: argparse.Namespace) -> None:
    from sparsellm.bench import run_summary

    _report(run_summary.run(options.run_path, options.name), options.record)


def _table(options: argparse.Namespace) -> None:
    from sparsellm.bench import record

    record.TABLE.write_text(record.table(record.read()), encoding="utf-8")
    print(record.TABLE)


def _report(found: list[Any], path: Path | None) -> None:
    from sparsellm.bench import record

    for m in found:
        ratio = "" if m.ratio is None else f"  {m.ratio:.2f}× of {m.baseline:.4g}"
        case = " ".join(f"{key}={value}" for key, value in m.case.items())
        print(f"{m.bench} {m.metric} {m.value:,.6g} {m.unit}{ratio}  [{case}]")
    if path:
        record.append(found, path)
