"""``sparsellm bench …``: the benchmarks, their options, and the command that runs them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sparsellm.arguments import positive_int
from sparsellm.ffn.capacity import SHRUNK_STEPS


class Benchmark(NamedTuple):
    """One benchmark. Another one is an entry in `BENCHMARKS`, and its module.

    The module's ``measure(options)`` yields the records of one case after the other, most simply
    those of a `compare.Comparison`: two sides, their inputs, a check, and the case's keys. It is
    imported only when it runs, to keep ``sparsellm --help`` fast.
    """

    name: str
    help: str  # a line
    details: str  # sentences
    options: Callable[[argparse.ArgumentParser], None]
    module: str  # in sparsellm/bench/


def ffn_options(parser: argparse.ArgumentParser) -> None:
    """Options that select the cases of one FFN, `ffn_cases.selected`, and their variants."""
    many: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--M", type=int, metavar="TOKENS", default=[16_384], **many)
    parser.add_argument("--shape", metavar="K/N[/non-gated]", default=["2048/5632"], **many)
    patterns = ("trace", "uniform", "skewed")
    parser.add_argument("--pattern", choices=patterns, default=patterns, **many)
    nnz = ("15", "30", "60", "120", "300", "50%")
    text = "non-zeros per token of uniform and skewed patterns: numbers or percentages"
    parser.add_argument("--nnz", metavar="NNZ", default=nnz, help=text, **many)
    text = "patterns of a trained model, from `sparsellm analyze` (default: those of the checkout)"
    parser.add_argument("--traces", type=Path, metavar="FILE", help=text)
    text = "how the active neurons are stored (default: union)"
    formats = ("union", "twell")
    parser.add_argument("--format", choices=formats, default=["union"], help=text, **many)
    text = "of the product that decides what fires; dense is bf16 (default: bf16)"
    precisions = ("bf16", "fp8")
    parser.add_argument("--precision", choices=precisions, default=["bf16"], help=text, **many)
    _add_seconds(parser)


def _forward_ffn_options(parser: argparse.ArgumentParser) -> None:
    ffn_options(parser)
    kernels = ("auto", "sparse", "dense")
    text = "sparsellm's kernels: by measured density (auto, default), or always these"
    parser.add_argument("--kernels", choices=kernels, default="auto", help=text)


def _add_seconds(parser: argparse.ArgumentParser) -> None:
    text = "of timing per side, after half as many of warming up (default: 3)"
    parser.add_argument("--seconds", type=float, default=3.0, help=text)


def _forward_options(parser: argparse.ArgumentParser) -> None:
    text = "checkpoint, run or exported folder"
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help=text)
    text = "held-out text (default: the recipe's)"
    parser.add_argument("--data", nargs="+", metavar="GLOB", help=text)
    text = "sequences per forward (default: train.micro_batch_size, or 16,384 tokens for auto)"
    parser.add_argument("--sequences", type=positive_int, help=text)
    text = "also time every FFN on its own inputs"
    parser.add_argument("--layers", action="store_true", help=text)
    text = "token order of the accelerated model (default: none); several in one run"
    orders = ("none", "auto")
    parser.add_argument("--token-order", nargs="+", choices=orders, default=["none"], help=text)
    _add_seconds(parser)


def _train_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser, required=True)
    text = "what is compared with ffn.kernels=dense (default: ffn.kernels=auto); several in one run"
    sides = ["ffn.kernels=auto"]
    side = "KEY=VALUE[,KEY=VALUE]"
    parser.add_argument("--side", nargs="+", default=sides, metavar=side, help=text)
    text = "checkpoint with settled weights"
    parser.add_argument("--init-from", type=Path, metavar="CHECKPOINT", help=text)
    text = "GPUs of a run (default: 1)"
    parser.add_argument("--gpus", type=positive_int, nargs="+", default=[1], help=text)
    text = "files of launch/ for several GPUs (default: ddp8); one GPU has launch/single.yaml"
    parser.add_argument("--config", nargs="+", default=["ddp8"], help=text)
    text = "tokens per step and GPU: weak scaling (default: the recipe's global batch)"
    parser.add_argument("--tokens-per-gpu", type=positive_int, metavar="TOKENS", help=text)
    text = f"of each run (default: 40; {SHRUNK_STEPS} or fewer do not show sparse layers' memory)"
    parser.add_argument("--steps", type=positive_int, default=40, help=text)
    text = "keeps runs and figures; the same command continues (default: a temporary folder)"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=text)


def _add_recipe(parser: argparse.ArgumentParser, **options: Any) -> None:
    parser.add_argument("--recipe", help="bundled name or a YAML file", **options)
    text = "override a key of the recipe"
    name = "KEY=VALUE"
    parser.add_argument(
        "--set", action="append", default=[], metavar=name, dest="overrides", help=text
    )


def _loader_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser, default="0.5b")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--num-ranks", type=positive_int, default=1, help="training processes")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, each time")


BENCHMARKS = (
    Benchmark(
        "ffn",
        "one FFN forward: sparse against dense, real and synthetic patterns (GPU)",
        "Without options: 16,384 tokens at 2048/5632.",
        _forward_ffn_options,
        "ffn_forward",
    ),
    Benchmark(
        "ffn-train",
        "one FFN forward and backward in training: sparse against dense (GPU)",
        "Time and memory of the sparse path with statistics and L1, against the compiled dense "
        "formula. Without options: 16,384 tokens at 2048/5632.",
        ffn_options,
        "ffn_train",
    ),
    Benchmark(
        "forward",
        "whole forward of trained models, sparse against dense (GPU)",
        "Both are compiled and compute held-out text. Checkpoints without ReLU are skipped.",
        _forward_options,
        "model_forward",
    ),
    Benchmark(
        "train",
        "whole training runs through accelerate launch, on 1 to 8 GPUs of a node",
        "A run for each combination of --gpus, --config and --side: rate, memory, energy and "
        "scaling over the second half of the steps. Sparsity must have settled: train for some "
        "hundred steps before, and give --init-from. Checkpoints, validation and wandb are off "
        "unless --set turns them on.",
        _train_options,
        "train_runs",
    ),
    Benchmark(
        "loader",
        "rate of the data loader, from files on disk to micro-batches",
        "Tokens per second, and the seconds until the first micro-batch, fresh and resumed.",
        _loader_options,
        "loader_rate",
    ),
)


def add_bench_parser(commands: Any) -> None:
    """Adds ``bench`` and its benchmarks to the ``sparsellm`` command."""
    bench = commands.add_parser("bench", help="measure speed; results under benchmarks/")
    names = bench.add_subparsers(metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        parser = names.add_parser(
            benchmark.name,
            help=benchmark.help,
            description=f"{benchmark.help}. {benchmark.details}",
        )
        benchmark.options(parser)
        parser.add_argument(
            "--record", type=Path, metavar="FILE", help="append to FILE (benchmarks/results.jsonl)"
        )
        parser.set_defaults(run=_run, benchmark=benchmark.name, module=benchmark.module)


def _run(options: argparse.Namespace) -> None:
    """Prints what a benchmark measures, and records it in ``--record``'s file.

    Raises:
        ValueError: no case was measured.
    """
    from sparsellm.bench import record

    module = importlib.import_module(f"sparsellm.bench.{options.module}")
    num_measured = 0
    for found in module.measure(options):
        if isinstance(found, str):
            print(found, flush=True)
            continue
        num_measured += 1
        print(record.row(found), flush=True)
        if options.record:
            record.append(found, options.record)
    if not num_measured:
        raise ValueError("no case was measured; the reasons are above")
