"""Options of the benchmarks of a model: ``block``, ``loss``, ``forward`` and others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparsellm import ranks
from sparsellm.arguments import positive_int
from sparsellm.bench import output


def add_model_parsers(names: Any) -> list[argparse.ArgumentParser]:
    """Adds the benchmarks of a model; the caller adds ``--record``."""
    loss = names.add_parser("loss", help="materialised against fused cross-entropy (GPU)")
    loss.add_argument("--tokens", type=int, default=32_768)
    loss.add_argument("--hidden-size", type=int, default=2048)
    loss.add_argument("--vocab-size", type=int, default=50_304)
    loss.set_defaults(run=_loss)

    run = names.add_parser("run", help="a finished training run's curve")
    run.add_argument("run_path", type=Path, metavar="RUN")
    run.add_argument("--name", default="run", help="name of the benchmark in the records")
    run.set_defaults(run=_run)

    sweep = names.add_parser(
        "sweep",
        help="final figures of a sweep's runs: loss, non-zeros, speed, scores, target",
        description="Reads the records of a sweep's runs, which may have been trained elsewhere.",
    )
    sweep.add_argument("folder", type=Path, metavar="SWEEP", help="folder such as runs/quality")
    sweep.set_defaults(run=_sweep)
    block = _add_block_parser(names)
    trained = [_add_checkpoint_parser(names), _add_idle_parser(names), _add_forward_parser(names)]
    return [block, loss, *trained, run, sweep]


def _add_block_parser(names: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        "block",
        help="norms, RoPE and linear layers: compiled, and by fused kernels (GPU)",
        description="Times forward and backward of a block's norms, with and without token order, "
        "of RoPE, and of linear layers, whose weights' gradients are added up. The defaults are "
        "the widths of the recipes 0.5b to 2b.",
    )
    parser.add_argument(
        "--sequences",
        type=positive_int,
        nargs="+",
        default=[4, 8, 16],
        help="of a micro-batch (default: 4 8 16)",
    )
    parser.add_argument("--context-length", type=positive_int, default=2048)
    parser.add_argument("--hidden-size", type=positive_int, default=2048)
    parser.add_argument("--intermediate-size", type=positive_int, default=5632)
    parser.add_argument("--heads", type=positive_int, default=32)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of timing per operation (default: 1)"
    )
    parser.set_defaults(run=_block)
    return parser


def _add_checkpoint_parser(names: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        "checkpoint",
        help="saving and loading checkpoints while training, with or without accelerate launch",
        description="Trains a few steps of a recipe, saves while it trains on, verifies and "
        "loads. Under `accelerate launch … -m sparsellm bench checkpoint` each rank writes its "
        "part. The run's folder must be new; it is deleted afterwards.",
    )
    _add_recipe_arguments(parser)
    parser.set_defaults(run=_checkpoint)
    return parser


def _add_idle_parser(names: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = names.add_parser(
        "idle",
        help="share of a training step in which the GPU is idle, and time by kernel (GPU)",
        description="Trains a recipe for some steps, profiles a few more, and prints which kernels "
        "take how long, and between which kernels the GPU waits. Checkpoints, validation and wandb "
        "are off unless --set turns them on.",
    )
    _add_recipe_arguments(parser)
    parser.add_argument(
        "--init-from",
        type=Path,
        metavar="CHECKPOINT",
        help="checkpoint with settled weights, which a tiny learning rate then keeps",
    )
    parser.add_argument("--warm-up", type=positive_int, default=8, help="steps before (default: 8)")
    parser.add_argument("--steps", type=positive_int, default=10, help="measured (default: 10)")
    parser.add_argument(
        "--kernel-times",
        type=positive_int,
        default=25,
        metavar="N",
        help="kernels and waits printed (default: 25)",
    )
    parser.set_defaults(run=_idle)
    return parser


def _add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", required=True, help="bundled name or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")


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


def _block(options: argparse.Namespace) -> None:
    from sparsellm.bench import block

    for found in block.run(
        options.sequences,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_heads=options.heads,
        context_length=options.context_length,
        device=output.gpu("block"),
        seconds=options.seconds,
    ):
        output.report(found, options.record)


def _loss(options: argparse.Namespace) -> None:
    from sparsellm.bench import loss

    shape = (options.tokens, options.hidden_size, options.vocab_size)
    output.report(loss.run(*shape, output.gpu("loss")), options.record)


def _checkpoint(options: argparse.Namespace) -> None:
    ranks.watch_launcher()
    from sparsellm.bench import checkpoint_speed
    from sparsellm.recipe import load_recipe

    found = checkpoint_speed.run(load_recipe(options.recipe, options.overrides))
    if ranks.is_main():
        output.report(found, options.record)


def _idle(options: argparse.Namespace) -> None:
    ranks.watch_launcher()
    from sparsellm.bench import gpu_idle
    from sparsellm.bench.train_plan import HOLD, QUIET
    from sparsellm.recipe import load_recipe

    hold = HOLD if options.init_from else []
    recipe = load_recipe(options.recipe, [*QUIET, *hold, *options.overrides])
    found, timeline = gpu_idle.run(recipe, options.init_from, options.warm_up, options.steps)
    if ranks.is_main():  # the figures of its own GPU
        for kernel in timeline.kernels[: options.kernel_times]:
            print(f"{kernel.ms:9.2f} ms {kernel.launches:9,.0f} launches per step  {kernel.name}")
        print(f"gaps under the profiler: {timeline.launch_gaps_ms:.2f} ms per step between kernels")
        print("that were queued in time, and waits for the host:")
        for wait in timeline.waits[: options.kernel_times]:
            between = f"{wait.before} → {wait.after}"
            print(f"{wait.ms:9.2f} ms {wait.times:9,.1f} waits per step  {between}")
        output.report(found, options.record)


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


def _run(options: argparse.Namespace) -> None:
    from sparsellm.bench import run_summary

    found, taken = run_summary.run(options.run_path, options.name)
    output.report(found, options.record, taken)


def _sweep(options: argparse.Namespace) -> None:
    from sparsellm.bench import sweep_summary

    for found, taken in sweep_summary.run(options.folder):
        output.report(found, options.record, taken)
