"""``sparsellm bench …``: the benchmarks, their options, and the command that runs them."""

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sparsellm.arguments import add_model, add_overrides, check_out, positive_int
from sparsellm.ffn.training_path.capacity import SHRUNK_STEPS
from sparsellm.paths import may_have_gpu
from sparsellm.waiting import waiting


class Benchmark(NamedTuple):
    """One benchmark. Another one is an entry in `BENCHMARKS`, and its module.

    The module's ``measure(options)`` yields the records of one case after the other, most simply
    those of `compare.compare`: two configurations, their results, and the case's keys. It prints
    why it skips a case. The module is imported only when it runs, to keep ``sparsellm --help``
    fast.
    """

    name: str
    help: str  # a line
    details: str  # sentences
    options: Callable[[argparse.ArgumentParser], None]
    module: str  # in sparsellm/bench/
    needs_gpu: bool = True


def ffn_options(parser: argparse.ArgumentParser) -> None:
    """Options that select the cases of one FFN, `ffn_cases.selected`, and their variants."""
    one_or_more: dict[str, Any] = {"nargs": "+"}
    text = "numbers of tokens that the FFN processes at once (default: 16,384)"
    parser.add_argument(
        "--M", type=positive_int, metavar="TOKENS", default=[16_384], help=text, **one_or_more
    )
    text = "shapes of the FFN: hidden size / number of neurons (default: 2048/5632)"
    shape = "K/N[/non-gated]"
    parser.add_argument("--shape", metavar=shape, default=["2048/5632"], help=text, **one_or_more)
    text = "patterns of active neurons: recorded (trace) or synthetic (default: all three)"
    patterns = ("trace", "uniform", "skewed")
    parser.add_argument("--pattern", choices=patterns, default=patterns, help=text, **one_or_more)
    nnz = ("15", "30", "60", "120", "300", "50%")
    text = "non-zeros per token in synthetic patterns, as numbers or percentages of the neurons"
    parser.add_argument("--nnz", metavar="NNZ", default=nnz, help=text, **one_or_more)
    text = "traces of a trained model from `sparsellm analyze` (default: those in the checkout)"
    parser.add_argument("--traces", type=Path, metavar="FILE", help=text)
    text = "formats in which the active neurons are stored (default: union)"
    formats = ("union", "twell")
    parser.add_argument("--format", choices=formats, default=["union"], help=text, **one_or_more)
    text = "precisions of the gate's product on the sparse path; dense is bf16 (default: bf16)"
    precisions = ("bf16", "fp8")
    parser.add_argument(
        "--precision", choices=precisions, default=["bf16"], help=text, **one_or_more
    )
    _add_seconds(parser)


def _forward_ffn_options(parser: argparse.ArgumentParser) -> None:
    ffn_options(parser)
    kernels = ("auto", "sparse", "dense")
    text = "kernels to use: chosen by measured density (auto, the default), or always these"
    parser.add_argument("--kernels", choices=kernels, default="auto", help=text)


def _training_ffn_options(parser: argparse.ArgumentParser) -> None:
    ffn_options(parser)
    text = "time both as CUDA graphs: only the kernels, without the host that queues them"
    parser.add_argument("--graph", action="store_true", help=text)


def _add_seconds(parser: argparse.ArgumentParser) -> None:
    text = "seconds to time each of the two; the warm-up is half as long (default: 3)"
    parser.add_argument("--seconds", type=float, default=3.0, help=text)


def _forward_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "checkpoints", nargs="+")
    text = "text files to process (default: the held-out text of the recipe)"
    parser.add_argument("--data", nargs="+", metavar="GLOB", help=text)
    text = "sequences per forward pass (default: train.micro_batch_size; 16,384 tokens if auto)"
    parser.add_argument("--sequences", type=positive_int, help=text)
    text = "precision of the accelerated model; dense is bf16 (default: model, its own dtype)"
    parser.add_argument("--precision", choices=("model", "fp8"), default="model", help=text)
    text = "also time each FFN alone, on the inputs that it has in the model"
    parser.add_argument("--layers", action="store_true", help=text)
    _add_seconds(parser)


def _generation_options(parser: argparse.ArgumentParser) -> None:
    one_or_more: dict[str, Any] = {"nargs": "+"}
    text = "recipes of the models to measure (default: 2b and 0.5b)"
    parser.add_argument("--recipe", default=["2b", "0.5b"], help=text, **one_or_more)
    text = "mean number of active neurons per token in every layer (default: 30)"
    parser.add_argument("--nnz", type=float, default=30.0, help=text)
    text = "precisions of sparsellm's model; the others are bf16 (default: model and fp8)"
    choices = ("model", "fp8")
    parser.add_argument("--precision", choices=choices, default=choices, help=text, **one_or_more)
    text = "batch sizes, in sequences (default: 1 and 8)"
    parser.add_argument("--batch", type=positive_int, default=[1, 8], help=text, **one_or_more)
    text = "prompt lengths, in tokens (default: 128 and 2,048)"
    parser.add_argument(
        "--prompt", type=positive_int, default=[128, 2048], help=text, **one_or_more
    )
    text = "number of tokens after the first, over which throughput is measured (default: 128)"
    parser.add_argument("--new-tokens", type=positive_int, default=128, help=text)
    text = "timed calls per configuration; the median is reported (default: 5)"
    parser.add_argument("--repeats", type=positive_int, default=5, help=text)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, help="a bundled recipe or a YAML file")
    add_overrides(parser)
    text = "settings to compare with ffn.kernels=dense, each in a run (default: ffn.kernels=auto)"
    sides = ["ffn.kernels=auto"]
    side = "KEY=VALUE[,KEY=VALUE]"
    parser.add_argument("--side", nargs="+", default=sides, metavar=side, help=text)
    text = "checkpoint whose sparsity is in its steady state; every run starts from its weights"
    parser.add_argument("--init-from", type=Path, metavar="CHECKPOINT", help=text)
    text = "numbers of GPUs to train on, each in a separate run (default: 1)"
    parser.add_argument("--gpus", type=positive_int, nargs="+", default=[1], help=text)
    text = "files of launch/ for several GPUs (default: ddp8); one GPU uses launch/single.yaml"
    parser.add_argument("--config", nargs="+", default=["ddp8"], help=text)
    text = "tokens per step on each GPU, for weak scaling (default: the recipe's global batch)"
    parser.add_argument("--tokens-per-gpu", type=positive_int, metavar="TOKENS", help=text)
    text = f"steps of each run (default: 40); above {SHRUNK_STEPS} they show sparse layers' memory"
    parser.add_argument("--steps", type=positive_int, default=40, help=text)
    text = "folder for runs and measurements; the same command then continues (default: none)"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=text)


BENCHMARKS = (
    Benchmark(
        "ffn",
        "time the forward pass of one FFN, sparse and dense (GPU)",
        "Measures recorded and synthetic patterns of active neurons; by default for 16,384 "
        "tokens at 2048/5632.",
        _forward_ffn_options,
        "ffn_forward",
    ),
    Benchmark(
        "ffn-train",
        "time the forward and backward pass of one FFN, sparse and dense (GPU)",
        "Compares time and memory of the sparse path, with statistics and L1, with those of the "
        "compiled dense formula; by default for 16,384 tokens at 2048/5632.",
        _training_ffn_options,
        "ffn_train",
    ),
    Benchmark(
        "forward",
        "time the forward pass of trained models, sparse and dense (GPU)",
        "Both models are compiled and process held-out text. A checkpoint is skipped if no "
        "kernels support its activation.",
        _forward_options,
        "model_forward",
    ),
    Benchmark(
        "generation",
        "measure generated tokens per second, sparsellm and stock transformers (GPU)",
        "Runs the same weights three times: in transformers as it is, in transformers with its "
        "compiled static cache, and in sparsellm. Weights are random, with gates fitted to --nnz.",
        _generation_options,
        "generation",
    ),
    Benchmark(
        "train",
        "time whole training runs through accelerate launch, on the GPUs of a node",
        "Trains one run for each combination of --gpus, --config and --side, and measures "
        "throughput, memory, energy and scaling over the second half of its steps. Sparsity must "
        "be in its steady state: train for a few hundred steps first, and pass that run with "
        "--init-from. Checkpoints, validation and wandb are off unless --set turns them on.",
        _train_options,
        "train_runs",
        needs_gpu=False,
    ),
)


def add_bench_parser(commands: Any) -> None:
    """Adds ``bench`` and its benchmarks to the ``sparsellm`` command."""
    bench = commands.add_parser("bench", help="measure speed on this machine")
    names = bench.add_subparsers(metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        parser = names.add_parser(
            benchmark.name,
            help=benchmark.help,
            description=f"{benchmark.help[0].upper()}{benchmark.help[1:]}. {benchmark.details}",
        )
        benchmark.options(parser)
        text = "append the measurements to FILE (JSON Lines)"
        parser.add_argument("--record", type=Path, metavar="FILE", help=text)
        parser.set_defaults(run=partial(_run, benchmark), benchmark=benchmark.name)


def _run(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Prints what a benchmark measures, and records it in ``--record``'s file.

    Raises:
        ValueError: there is no GPU for it, or no case was measured.
    """
    if benchmark.needs_gpu and not may_have_gpu():
        raise ValueError(f"bench {benchmark.name} measures GPU kernels and needs a CUDA device")
    if options.record:
        check_out(options.record, option="--record")
    with waiting("loading PyTorch"):
        from sparsellm.bench import record

        module = importlib.import_module(f"sparsellm.bench.{benchmark.module}")
    measurements = None
    for measurements in module.measure(options):
        print(record.row(measurements), flush=True)
        if options.record:
            record.append(measurements, options.record)
    if measurements is None:
        raise ValueError("no case was measured; the reasons are above")
