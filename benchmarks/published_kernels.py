"""Times somebody else's kernels of one FFN beside dense, as `sparsellm bench ffn` times ours.

    python benchmarks/published_kernels.py THEIRS.py --nnz 15 30 60

THEIRS.py calls them, such as those that the paper's authors published, and has one or both of:

    def load(w_gate_NK, w_up_NK, w_down_KN):           # bf16, on the GPU; what it does is not timed
        return lambda x_MK: ...                        # y_MK of relu(x W_g) * (x W_u), times W_d

    def load_training(w_gate_NK, w_up_NK, w_down_KN):  # parameters
        return lambda x_MK: ...                        # the same; autograd gives all four gradients

Both configurations get the same inputs, run for seconds in one process, and must agree: wrong
results are not timed. Shapes: M tokens, K hidden size, N neurons.
"""

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparsellm.bench.ffn_cases import Layer
from sparsellm.bench.ffn_run import FFNBench, dense, dense_weights, new_ffn
from sparsellm.bench.ffn_train import Step, random_gradient
from sparsellm.bench.record import Measurement, append, row
from sparsellm.bench.timing import Configuration

FORWARD, TRAINING = "load", "load_training"
Load = Callable[..., Callable[[Tensor], Tensor]]


def theirs_in(path: Path) -> ModuleType:
    """The module in a file.

    Raises:
        ValueError: it has neither function.
    """
    spec = importlib.util.spec_from_file_location("theirs", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, FORWARD) and not hasattr(module, TRAINING):
        raise ValueError(f"{path}: it defines neither {FORWARD} nor {TRAINING}")
    return module


def measure(
    theirs: ModuleType, options: argparse.Namespace, device: torch.device | None = None
) -> Iterator[list[Measurement]]:
    """Measures what the module has, case by case; each list is final."""
    bench = FFNBench(options, device)
    for name, compare_layer in ((FORWARD, _forward), (TRAINING, _training)):
        if load := getattr(theirs, name, None):
            yield from bench.run(partial(compare_layer, bench, load))


def _forward(bench: FFNBench, load: Load, layer: Layer, key: dict[str, Any]) -> list[Measurement]:
    weights = dense_weights(new_ffn(layer).requires_grad_(False))
    call = partial(load(*weights), layer.x_MK)
    return bench.compare(
        "published_forward",
        key,
        Configuration({"forward": partial(bench.compiled, layer.x_MK, *weights)}),
        Configuration({"forward": call}),
        tokens=len(layer.x_MK),
        results=lambda: [("y", call(), dense(layer.x_MK, *weights))],
        most_off=layer.most_off,
    )


def _training(bench: FFNBench, load: Load, layer: Layer, key: dict[str, Any]) -> list[Measurement]:
    weights = dense_weights(new_ffn(layer))
    x_MK = layer.x_MK.detach().requires_grad_()
    gradients = (random_gradient(x_MK),)
    inputs, call = [x_MK, *(w for w in weights if w is not None)], load(*weights)

    def step(forward: Callable[..., Tensor]) -> Step:
        return Step(lambda: (forward(x_MK, *weights),), inputs, gradients)

    ours = step(lambda x_MK, *_: call(x_MK))
    names = ["y", *(f"the gradient of {name}" for name in ("x", "W_g", "W_u", "W_d"))]
    return bench.compare(
        "published_train",
        key,
        step(bench.compiled).configuration(),
        ours.configuration(),
        tokens=len(x_MK),
        results=lambda: zip(names, ours.results(), step(dense).results(), strict=True),
        most_off=layer.most_off,
        mode=torch.enable_grad,
    )


def parser() -> argparse.ArgumentParser:
    """Of the command line; what `FFNBench` reads beyond it is set."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument(
        "theirs", type=Path, metavar="THEIRS.py", help="calls the kernels, see above"
    )
    arguments.add_argument("--M", type=int, nargs="+", default=[16_384], help="tokens")
    arguments.add_argument("--shape", nargs="+", default=["2048/5632"], help="K/N of gated FFNs")
    patterns = ["uniform", "skewed"]
    arguments.add_argument("--pattern", nargs="+", choices=patterns, default=patterns)
    arguments.add_argument(
        "--nnz", nargs="+", default=["15", "30", "60"], help="non-zeros per token"
    )
    arguments.add_argument(
        "--seconds", type=float, default=3.0, help="for which each configuration is timed"
    )
    arguments.add_argument("--record", type=Path, help="such as benchmarks/results.jsonl")
    arguments.set_defaults(traces=None, format=["union"], precision=["bf16"], benchmark="published")
    return arguments


def main(words: list[str] | None = None, device: torch.device | None = None) -> None:
    """Prints each case, and records it if asked to."""
    options = parser().parse_args(words)
    arguments = sys.argv[1:] if words is None else words
    command = {"command": shlex.join(["python", "benchmarks/published_kernels.py", *arguments])}
    try:
        for measurements in measure(theirs_in(options.theirs), options, device):
            print(row(measurements), flush=True)
            if options.record:
                append([replace(m, context=command) for m in measurements], options.record)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
