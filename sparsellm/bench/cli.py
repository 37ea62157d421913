"""``sparsellm bench …``: measures, prints, and with ``--record`` keeps the figures."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsellm.arguments import positive_int
from sparsellm.bench.train_cli import add_train_parser

if TYPE_CHECKING:  # imported where they run: `sparsellm --help` is quick
    import torch

    from sparsellm.bench.ffn_cases import Case
    from sparsellm.bench.ffn_sweep import Skipped
    from sparsellm.bench.record import Measurement

DEFAULT_TOKENS = 16_384  # M


def add_bench_parser(commands: Any) -> None:
    """Adds ``bench`` and its benchmarks to the ``sparsellm`` command."""
    bench = commands.add_parser("bench", help="measure speed; results under benchmarks/")
    names = bench.add_subparsers(required=True, metavar="BENCHMARK")

    loader, saving = _add_loader_parser(names), _add_checkpoint_parser(names)

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
    _add_grid_arguments(ffn)
    ffn.add_argument(
        "--kernels",
        choices=("auto", "sparse", "dense"),
        default="auto",
        help="ours: by measured density (default), or always these",
    )
    _add_format_argument(ffn)
    ffn.set_defaults(run=_ffn)

    ffn_train = names.add_parser(
        "ffn-train",
        help="one FFN forward and backward in training: ours against dense (GPU)",
        description="Forward and backward of one FFN in training, time and memory: the sparse path "
        "with statistics and L1, against the plain formula compiled. Without options: 16,384 "
        "tokens at 2048/5632. Prints and records case by case.",
    )
    _add_grid_arguments(ffn_train)
    _add_format_argument(ffn_train)
    ffn_train.set_defaults(run=_ffn_train)

    dispatch = names.add_parser(
        "dispatch",
        help="from which density on training is faster dense, measured and predicted (GPU)",
        description="Forward and backward of one FFN in training at rising density, dense and "
        "sparse, beside what `ffn.kernels: auto` expects and where it changes over.",
    )
    dispatch.add_argument("--recipe", help="shape and micro-batch of this name or YAML file")
    dispatch.add_argument("--M", type=int, metavar="TOKENS", help="default: 16384")
    dispatch.add_argument("--shape", metavar="K/N[/non-gated]", help="default: 2048/5632")
    dispatch.add_argument(
        "--pattern", nargs="+", choices=("uniform", "skewed"), default=["uniform", "skewed"]
    )
    dispatch.add_argument(
        "--nnz",
        nargs="+",
        metavar="NNZ",
        help="a token: numbers or percentages (default: 8 to 50%%)",
    )
    dispatch.add_argument(
        "--seconds", type=float, default=1.0, help="of timing, a point (default: 1)"
    )
    dispatch.set_defaults(run=_dispatch)

    token_order = _add_token_order_parser(names)

    train = add_train_parser(names)

    forward = _add_forward_parser(names)
    run = names.add_parser("run", help="a finished training run's curve")
    run.add_argument("run_path", type=Path, metavar="RUN")
    run.add_argument("--name", default="run", help="name of the benchmark in the records")
    run.set_defaults(run=_run)

    for parser in (
        loader,
        saving,
        loss,
        ffn,
        ffn_train,
        dispatch,
        token_order,
        train,
        forward,
        run,
    ):
        parser.add_argument(
            "--record", type=Path, metavar="FILE", help="append to it (benchmarks/results.jsonl)"
        )
    table = names.add_parser("table", help="benchmarks/RESULTS.md from results.jsonl")
    table.set_defaults(run=_table)


def _add_forward_parser(names: Any) -> argparse.ArgumentParser:
    parser = names.add_parser(
        "forward",
        help="trained models' whole forward, ours against dense (GPU)",
        description="Times a forward of each checkpoint on held-out text, under "
        "sparsellm.accelerate and dense, both compiled; records carry λ, non-zeros and run. "
        "Checkpoints without ReLU are skipped.",
    )
    parser.add_argument(
        "checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="or run, exported folder"
    )
    parser.add_argument("--data", nargs="+", metavar="GLOB", help="(default: the recipe's text)")
    parser.add_argument("--sequences", type=positive_int, help="(default: train.micro_batch_size)")
    parser.add_argument("--layers", action="store_true", help="also every FFN on its own inputs")
    parser.add_argument("--energy", action="store_true", help="also mJ a token")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing (default: 2)")
    parser.set_defaults(run=_forward)
    return parser


def _add_format_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        nargs="+",
        choices=("union", "twell"),
        default=["union"],
        help="ours: how the active neurons are kept (default: union); several in one run",
    )


def _add_loader_parser(names: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        "loader", help="tokens a second out of the data loader"
    )
    parser.add_argument("--corpus", default="sample", help="name in data/, or a YAML file")
    parser.add_argument("--files", nargs="*", help="globs that replace the corpus's files")
    parser.add_argument(
        "--recipe", default="0.5b", help="what --tokenizer, … are by default (default: 0.5b)"
    )
    parser.add_argument("--tokenizer", help="gpt2, bytes or hf:ID_OR_PATH")
    parser.add_argument("--num-workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--num-ranks", type=positive_int, default=1, help="training processes")
    parser.add_argument("--context-length", type=positive_int, help="tokens")
    parser.add_argument("--micro-batch-size", type=positive_int, help="sequences")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, each")
    parser.add_argument(
        "--resume-after", type=int, default=0, metavar="TOKENS", help="to resume after (all ranks)"
    )
    parser.add_argument(
        "--format",
        nargs="+",
        choices=("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "tokens"),
        default=[None],
        help="write the text so before, and read that (default: as it is)",
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keeps what --format writes, for further calls"
    )
    parser.add_argument("--shards", type=positive_int, default=16, help="files of --format")
    parser.add_argument("--copies", type=positive_int, default=1, help="of the text in --format")
    parser.set_defaults(run=_loader)
    return parser


def _add_checkpoint_parser(names: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        "checkpoint",
        help="saving and loading checkpoints while training, under accelerate launch or alone",
        description="Trains a few steps of a recipe, saves twice while it goes on, verifies and "
        "loads. Under `accelerate launch … -m sparsellm bench checkpoint` each rank writes its "
        "part. The run's folder must be a new one; it is deleted again.",
    )
    parser.add_argument("--recipe", required=True, help="bundled name or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.set_defaults(run=_checkpoint)
    return parser


def _add_token_order_parser(names: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        "token-order",
        help="unions of 64 tokens by the key that sorts them, on recorded traces (no GPU)",
        description="Sorts the tokens of a trace by several keys and counts the neurons that 64 in "
        "a row fire between them, layer by layer, then the mean.",
    )
    parser.add_argument(
        "--traces", type=Path, required=True, metavar="FILE", help="from `sparsellm analyze`"
    )
    parser.add_argument(
        "--ids", type=Path, metavar="FILE", help="their token ids (.npy), should they hold none"
    )
    parser.add_argument(
        "--neurons", type=positive_int, default=5632, help="of a layer (default: 5632)"
    )
    parser.add_argument(
        "--context-length", type=positive_int, default=2048, help="of ids that are stored flat"
    )
    parser.set_defaults(run=_token_order)
    return parser


def _add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cases of `ffn_cases.grid`, and what of each."""
    parser.add_argument(
        "--traces", type=Path, metavar="FILE", help="real patterns, from `sparsellm analyze`"
    )
    parser.add_argument(
        "--ids",
        type=Path,
        metavar="FILE",
        help="the token ids of the traces (.npy), should those not hold them: also in token order",
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
        help="of the synthetic patterns, a token: numbers or percentages "
        "(default: 15 30 60 120 300 50%%)",
    )
    parser.add_argument("--all", action="store_true", help="every M and shape that is not given")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing, a case (default: 1)")
    parser.add_argument(
        "--energy",
        action="store_true",
        help="also mJ a token, of the trace and of nnz 30 and 60 at 16,384 tokens",
    )
    parser.add_argument(
        "--arch",
        choices=("hopper", "portable"),
        help="whose kernels ours are (default: the best that the GPU runs)",
    )


def _loader(options: argparse.Namespace) -> None:
    from sparsellm.bench import loader_rate
    from sparsellm.recipe import load_recipe

    recipe = load_recipe(options.recipe)
    for kind, num_workers in itertools.product(options.format, options.num_workers):
        found = loader_rate.run(
            corpus=options.corpus,
            files=options.files,
            tokenizer=options.tokenizer or recipe.data.tokenizer,
            num_workers=num_workers,
            num_ranks=options.num_ranks,
            context_length=options.context_length or recipe.model.context_length,
            micro_batch_size=options.micro_batch_size or recipe.train.micro_batch_size,
            seconds=options.seconds,
            resume_after=options.resume_after,
            kind=kind,
            folder=options.work,
            num_shards=options.shards,
            copies=options.copies,
        )
        _report(found, options.record)


def _checkpoint(options: argparse.Namespace) -> None:
    from sparsellm.bench import checkpoint_speed
    from sparsellm.recipe import load_recipe

    found = checkpoint_speed.run(load_recipe(options.recipe, options.overrides))
    if int(os.environ.get("RANK", "0")) == 0:
        _report(found, options.record)


def _loss(options: argparse.Namespace) -> None:
    from sparsellm.bench import loss

    _report(loss.run(options.tokens, options.hidden_size, options.vocab_size), options.record)


def _force(architecture: str | None) -> None:
    from sparsellm.ffn.kernels.gpu_architecture import FORCED

    if architecture is not None:
        os.environ[FORCED] = architecture


def _ffn(options: argparse.Namespace) -> None:
    from sparsellm.bench import ffn_cases, ffn_forward, ffn_records

    _force(options.arch)
    found = ffn_forward.run(
        _cases(options, ffn_cases.TOKENS),
        _gpu("ffn"),
        traces=options.traces,
        ids=options.ids,
        kernels=options.kernels,
        formats=list(dict.fromkeys(options.format)),
        seconds=options.seconds,
        with_energy=options.energy,
    )
    _follow(found, ffn_records.rows, options.record)


def _ffn_train(options: argparse.Namespace) -> None:
    from sparsellm.bench import ffn_records, ffn_train

    _force(options.arch)
    found = ffn_train.run(
        _cases(options, ffn_train.TRAIN_TOKENS),
        _gpu("ffn-train"),
        traces=options.traces,
        ids=options.ids,
        seconds=options.seconds,
        with_energy=options.energy,
        formats=list(dict.fromkeys(options.format)),
    )
    _follow(found, ffn_records.rows, options.record)


def _dispatch(options: argparse.Namespace) -> None:
    from sparsellm.bench import dispatch_sweep, ffn_cases
    from sparsellm.recipe import load_recipe

    shape = ffn_cases.parse_shape(options.shape) if options.shape else ffn_cases.SHAPES[0]
    tokens = options.M or DEFAULT_TOKENS
    if options.recipe:
        if options.shape or options.M:
            raise ValueError("--recipe gives the shape and M: leave out --shape and --M")
        recipe = load_recipe(options.recipe)
        if not recipe.activation.exact_zeros:
            raise ValueError(f"--recipe {options.recipe}: ffn.activation must be relu")
        tokens, sizes = recipe.micro_batch_tokens, recipe.model
        shape = ffn_cases.Shape(sizes.hidden_size, sizes.intermediate_size, recipe.ffn.gated)
    found = dispatch_sweep.run(
        shape,
        tokens,
        _gpu("dispatch"),
        patterns=options.pattern,
        nnz=options.nnz or dispatch_sweep.sweep(shape.intermediate_size),
        seconds=options.seconds,
    )
    _follow(found, dispatch_sweep.rows, options.record)


def _token_order(options: argparse.Namespace) -> None:
    from sparsellm.analyze.trace import load_ids, load_traces
    from sparsellm.bench import order_study, record

    traces = load_traces(options.traces, options.neurons)
    ids_BT = load_ids(options.ids or options.traces, options.context_length)
    if ids_BT is None:
        raise ValueError(f"{options.traces} has no token ids; give --ids FILE")
    for found in order_study.run(traces, ids_BT, options.traces.stem):
        print("\n".join(order_study.rows(found)), flush=True)
        if options.record:
            record.append(found, options.record)


def _forward(options: argparse.Namespace) -> None:
    from sparsellm.bench import model_forward, record
    from sparsellm.runs.pretrained import find_checkpoint, load_recipe_of

    device = _gpu("forward")
    for path in options.checkpoints:
        found = find_checkpoint(path)
        recipe = load_recipe_of(found)
        if not recipe.activation.exact_zeros:
            print(f"skipped: {found}: {recipe.ffn.activation} has no zeros", flush=True)
            continue
        changes: dict[str, Any] = {}
        if options.data:
            own = {"corpus": "local", "files": options.data, "validation_files": options.data}
            changes["data"] = recipe.data.model_copy(update=own)
        if options.sequences:
            size = {"micro_batch_size": options.sequences}
            changes["train"] = recipe.train.model_copy(update=size)
        measured = model_forward.run(
            found,
            recipe.model_copy(update=changes),
            device,
            options.energy,
            seconds=options.seconds,
            layers=options.layers,
        )
        for m in measured:
            print(_line(m), flush=True)
        if options.record:
            record.append(measured, options.record)


def _cases(options: argparse.Namespace, every_tokens: Sequence[int]) -> list[Case]:
    """What `_add_grid_arguments` asks for; ``every_tokens`` is M under ``--all``."""
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
        raise ValueError(f"traces are of {ffn_cases.TRACED}: --shape and --pattern leave no case")
    return cases


def _gpu(bench: str) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"bench {bench} measures GPU kernels and needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def _follow(
    measured: Iterable[list[Measurement] | Skipped],
    rows: Callable[[list[Measurement]], list[str]],
    path: Path | None,
) -> None:
    """Prints, and records in a file that is given, case by case.

    Raises:
        ValueError: no case was measured.
    """
    from sparsellm.bench import record

    num_measured = 0
    for found in measured:
        if not isinstance(found, list):
            print(f"skipped: {found.case}: {found.why}", flush=True)
            continue
        num_measured += any(m.metric == "ms" for m in found)
        print("\n".join(rows(found)), flush=True)
        if path:
            record.append(found, path)
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
        print(_line(m))
    if path:
        record.append(found, path)


def _line(m: Measurement) -> str:
    ratio = "" if m.ratio is None else f"  {m.ratio:.2f}× of {m.baseline:.4g}"
    case = " ".join(f"{key}={value}" for key, value in m.case.items())
    value = f"{m.value:,.0f}" if abs(m.value) >= 1e5 else f"{m.value:,.6g}"  # not 1.2e+06
    return f"{m.bench} {m.metric} {value} {m.unit}{ratio}  [{case}]"
