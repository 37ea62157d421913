"""Options of ``sparsellm bench train``."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from sparsellm.arguments import positive_int
from sparsellm.ffn.capacity import SHRUNK_STEPS


def add_train_parser(names: Any) -> argparse.ArgumentParser:
    """Adds ``train`` to the benchmarks; the caller adds ``--record``."""
    parser: argparse.ArgumentParser = names.add_parser(
        "train",
        help="whole training runs through accelerate launch, on 1 to 8 GPUs of a node",
        description="Trains a recipe once for each combination of --gpus, --config and --kernels, "
        "from weights whose sparsity has settled, and measures rate, memory, energy and scaling "
        "over the second half of the steps. Checkpoints, validation and wandb are off unless "
        "--set turns them on. Prints and records run by run.",
    )
    parser.add_argument("--recipe", required=True, help="bundled name or a YAML file")
    parser.add_argument(
        "--gpus", type=positive_int, nargs="+", default=[1], help="GPUs of a run (default: 1)"
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=["ddp8"],
        help="files of launch/ for several GPUs (default: ddp8); one GPU has launch/single.yaml",
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=("dense", "auto", "sparse"), default=["dense", "auto"]
    )
    parser.add_argument(
        "--format",
        nargs="+",
        choices=("union", "twell"),
        default=["union"],
        help="format of the sparse kernels (default: union); one run for each",
    )
    parser.add_argument(
        "--token-order",
        nargs="+",
        choices=("none", "auto"),
        default=[None],
        help="of the sparse kernels (default: the recipe's); a run for each",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=positive_int,
        nargs="+",
        default=[None],
        metavar="SEQUENCES",
        help="(default: the recipe's); a run for each",
    )
    parser.add_argument(
        "--parallel",
        action="store_true",
        help="runs on one GPU at once, one on each GPU of this machine",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no run after this many seconds; to continue, give --folder and repeat the "
        "command",
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=40,
        help=f"of each run (default: 40; with {SHRUNK_STEPS} or fewer, the memory of sparse "
        "layers is not recorded)",
    )
    parser.add_argument(
        "--tokens-per-gpu",
        type=positive_int,
        metavar="TOKENS",
        help="tokens per step and GPU: weak scaling (default: the recipe's global batch)",
    )
    parser.add_argument(
        "--init-from", type=Path, metavar="CHECKPOINT", help="checkpoint with settled weights"
    )
    parser.add_argument(
        "--settle-steps",
        type=int,
        default=0,
        metavar="STEPS",
        help="train so many steps first, by default dense and on the most GPUs; all runs "
        "start from the resulting weights",
    )
    parser.add_argument(
        "--settle-gpus", type=positive_int, metavar="N", help="GPUs of the settling run"
    )
    parser.add_argument(
        "--settle-config", default="ddp8", help="file of launch/ for --settle-gpus (default: ddp8)"
    )
    parser.add_argument("--set", **_override("override a key of every run"))
    parser.add_argument("--settle-set", **_override("override a key of the settling run only"))
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="keep the runs and their output here; settled weights and figures in it are "
        "reused (default: a temporary folder)",
    )
    parser.add_argument("--energy", action="store_true", help="also measure mJ per token")
    parser.set_defaults(run=_train)
    return parser


def _override(text: str) -> dict[str, Any]:
    return {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": text}


def _train(options: argparse.Namespace) -> None:
    # SIGTERM, as from `timeout`, acts like Ctrl-C: it ends the launched processes, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.folder:
        _measure(options, options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="sparsellm-bench-") as folder:
        _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> None:
    from sparsellm.bench import record, train_plan, training_run
    from sparsellm.bench.train_figures import row

    plan = train_plan.Plan(
        recipe=options.recipe,
        overrides=options.set,
        sides=train_plan.combinations(
            options.gpus,
            options.config,
            options.kernels,
            options.format,
            token_orders=options.token_order,
            micro_batch_sizes=options.micro_batch_size,
        ),
        steps=options.steps,
        folder=folder.resolve(),
        init_from=options.init_from,
        settle_steps=options.settle_steps,
        settle_overrides=tuple(options.settle_set),
        settle_gpus=options.settle_gpus,
        settle_config=options.settle_config,
        tokens_per_gpu=options.tokens_per_gpu,
        energy=options.energy,
        parallel=options.parallel,
        seconds=options.seconds,
    )
    for found in training_run.run(plan):
        if isinstance(found, str):
            print(found, flush=True)
        else:
            print(row(found), flush=True)
            if options.record:
                record.append(found, options.record)
