"""Options of ``sparsellm bench forward`` and ``sweep``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparsellm.arguments import positive_int
from sparsellm.bench import output


def add_model_parsers(names: Any) -> list[argparse.ArgumentParser]:
    """Adds the benchmarks of a model; the caller adds ``--record``."""
    sweep = names.add_parser(
        "sweep",
        help="final figures of a sweep's runs: loss, non-zeros, speed, scores, target",
        description="Reads the records of a sweep's runs, which may have been trained elsewhere.",
    )
    sweep.add_argument("folder", type=Path, metavar="SWEEP", help="folder such as runs/quality")
    sweep.set_defaults(run=_sweep)
    return [_add_forward_parser(names), sweep]


def _add_forward_parser(names: Any) -> argparse.ArgumentParser:
    parser = names.add_parser(
        "forward",
        help="whole forward of trained models, sparse against dense (GPU)",
        description="Times a forward of each checkpoint on held-out text, under "
        "sparsellm.accelerate and dense, both compiled; records carry λ, non-zeros and run. "
        "Checkpoints without ReLU are skipped.",
    )
    parser.add_argument(
        "checkpoints",
        type=Path,
        nargs="+",
        metavar="CHECKPOINT",
        help="checkpoint, run or exported folder",
    )
    parser.add_argument(
        "--data", nargs="+", metavar="GLOB", help="held-out text (default: the recipe's)"
    )
    parser.add_argument(
        "--sequences",
        type=positive_int,
        help="sequences per forward (default: train.micro_batch_size, or 16,384 tokens for auto)",
    )
    parser.add_argument(
        "--layers", action="store_true", help="also time every FFN on its own inputs"
    )
    parser.add_argument(
        "--token-order",
        nargs="+",
        choices=("none", "auto"),
        default=["none"],
        help="token order of the accelerated model (default: none); several in one run",
    )
    parser.add_argument("--energy", action="store_true", help="also measure mJ per token")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of timing (default: 2)")
    parser.set_defaults(run=_forward)
    return parser


def _forward(options: argparse.Namespace) -> None:
    from sparsellm.bench import model_forward
    from sparsellm.runs.pretrained import find_checkpoint, load_recipe_of

    device = output.gpu("forward")
    for path in options.checkpoints:
        found = find_checkpoint(path)
        recipe = load_recipe_of(found)
        if not recipe.activation.kernels:
            print(f"skipped: {found}: no kernels compute {recipe.ffn.activation}", flush=True)
            continue
        changes: dict[str, Any] = {}
        if options.data:
            own = {"corpus": "local", "files": options.data, "validation_files": options.data}
            changes["data"] = recipe.data.model_copy(update=own)
        if options.sequences:
            size = {"micro_batch_size": options.sequences}
            changes["train"] = recipe.train.model_copy(update=size)
        for order in dict.fromkeys(options.token_order):
            first = order == options.token_order[0]
            for measured in model_forward.run(
                found,
                recipe.model_copy(update=changes),
                device,
                options.energy,
                seconds=options.seconds,
                layers=options.layers and first,
                token_order=order,
            ):
                output.report(measured, options.record)


def _sweep(options: argparse.Namespace) -> None:
    from sparsellm.bench import sweep_summary

    for found, taken in sweep_summary.run(options.folder):
        output.report(found, options.record, taken)
