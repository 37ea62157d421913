"""Options of ``sparsellm bench ffn`` and ``ffn-train``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsellm.bench import output

if TYPE_CHECKING:  # imported only where needed, to keep `sparsellm --help` fast
    from sparsellm.bench.ffn_cases import Case

DEFAULT_TOKENS = 16_384  # M


def add_ffn_parsers(names: Any) -> list[argparse.ArgumentParser]:
    """Adds the benchmarks of one FFN; the caller adds ``--record``."""
    ffn = names.add_parser(
        "ffn",
        help="one FFN forward: sparse against dense, real and synthetic patterns (GPU)",
        description="Times one FFN forward: dense eager, dense compiled and sparsellm, in one run. "
        "Without options: 16,384 tokens at 2048/5632. Prints and records case by case.",
    )
    _add_grid_arguments(ffn)
    ffn.add_argument(
        "--kernels",
        choices=("auto", "sparse", "dense"),
        default="auto",
        help="sparsellm's kernels: by measured density (auto, default), or always these",
    )
    _add_format_argument(ffn)
    ffn.set_defaults(run=_ffn)

    ffn_train = names.add_parser(
        "ffn-train",
        help="one FFN forward and backward in training: sparse against dense (GPU)",
        description="Measures time and memory of one FFN's forward and backward in training: the "
        "sparse path with statistics and L1, against the compiled dense formula. Without options: "
        "16,384 tokens at 2048/5632. Prints and records case by case.",
    )
    _add_grid_arguments(ffn_train)
    _add_format_argument(ffn_train)
    ffn_train.set_defaults(run=_ffn_train)

    return [ffn, ffn_train]


def _add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that select the cases of `ffn_cases.grid` and what is measured of each."""
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FILE",
        help="real patterns from `sparsellm analyze` (default: "
        "benchmarks/traces/sample/traces.npz; where it is missing, an error names the commands "
        "that make it)",
    )
    parser.add_argument(
        "--ids",
        type=Path,
        metavar="FILE",
        help="token ids of the traces (.npy), if those have none; adds cases in token order",
    )
    parser.add_argument("--M", type=int, nargs="+", metavar="TOKENS", help="default: 16384")
    parser.add_argument("--shape", nargs="+", metavar="K/N[/non-gated]", help="default: 2048/5632")
    parser.add_argument(
        "--pattern",
        nargs="+",
        choices=("trace", "uniform", "skewed"),
        default=["trace", "uniform", "skewed"],
    )
    parser.add_argument(
        "--nnz",
        nargs="+",
        metavar="NNZ",
        help="non-zeros per token of the synthetic patterns: numbers or percentages "
        "(default: 15 30 60 120 300 50%%)",
    )
    parser.add_argument("--all", action="store_true", help="every M and shape, unless given")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of timing per case (default: 1)"
    )
    parser.add_argument(
        "--energy",
        action="store_true",
        help="also measure mJ per token, for the trace and nnz 30 and 60 at 16,384 tokens",
    )
    parser.add_argument(
        "--arch",
        choices=("hopper", "portable"),
        help="architecture of the sparse kernels (default: the best that the GPU runs)",
    )


def _add_format_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        nargs="+",
        choices=("union", "twell"),
        default=["union"],
        help="how the active neurons are stored (default: union); several are timed in one run",
    )


def _how_measured(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `ffn_forward.run` and `ffn_train.run` alike."""
    return {
        "traces": options.traces,
        "ids": options.ids,
        "seconds": options.seconds,
        "with_energy": options.energy,
        "formats": list(dict.fromkeys(options.format)),
    }


def _ffn(options: argparse.Namespace) -> None:
    from sparsellm.bench import ffn_cases, ffn_forward, ffn_records

    _force(options.arch)
    found = ffn_forward.run(
        _cases(options, ffn_cases.TOKENS),
        output.gpu("ffn"),
        kernels=options.kernels,
        **_how_measured(options),
    )
    output.follow(found, ffn_records.rows, options.record)


def _ffn_train(options: argparse.Namespace) -> None:
    from sparsellm.bench import ffn_records, ffn_train

    _force(options.arch)
    found = ffn_train.run(
        _cases(options, ffn_train.TRAIN_TOKENS),
        output.gpu("ffn-train"),
        **_how_measured(options),
    )
    output.follow(found, ffn_records.rows, options.record)


def _cases(options: argparse.Namespace, every_tokens: Sequence[int]) -> list[Case]:
    """The cases that the options select; ``every_tokens`` are the values of M under ``--all``."""
    from sparsellm.bench import ffn_cases

    every_shape = list(map(str, ffn_cases.SHAPES))
    shapes = options.shape or (every_shape if options.all else every_shape[:1])
    tokens = options.M or (every_tokens if options.all else [DEFAULT_TOKENS])
    cases = ffn_cases.grid(
        tokens,
        map(ffn_cases.parse_shape, shapes),
        options.pattern,
        options.nnz or ffn_cases.NNZ,
    )
    if not cases:
        raise ValueError(f"traces are of {ffn_cases.TRACED}: --shape and --pattern select no case")
    return cases


def _force(architecture: str | None) -> None:
    from sparsellm.ffn.kernels.gpu_architecture import FORCED

    if architecture is not None:
        os.environ[FORCED] = architecture
