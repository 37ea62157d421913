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

    run = names.add_parser("run", help="a finished training run's curve")
    run.add_argument("run_path", type=Path, metavar="RUN")
    run.add_argument("--name", default="train", help="name of the benchmark in the records")
    run.set_defaults(run=_run)

    for parser in (loader, loss, run):
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
