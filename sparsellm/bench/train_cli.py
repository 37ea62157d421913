"""``sparsellm bench train …``: its options."""

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
        "--gpus", type=positive_int, nargs="+", default=[1], help="of a run (default: 1)"
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
        help="of the sparse kernels (default: union); a run for each",
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
        "--seconds", type=float, help="start no run later than this; see --folder to go on"
    )
    parser.add_argument(
        "--steps",
        type=positive_int,
        default=40,
        help=f"of each run (default: 40; up to {SHRUNK_STEPS} the memory of sparse layers is not "
        "recorded)",
    )
    parser.add_argument(
        "--tokens-per-gpu",
        type=positive_int,
        metavar="TOKENS",
        help="of a step: weak scaling (default: the recipe's global batch for any number of GPUs)",
    )
    parser.add_argument("--init-from", type=Path, metavar="CHECKPOINT", help="settled weights")
    parser.add_argument(
        "--settle-steps",
        type=int,
        default=0,
        metavar="STEPS",
        help="train so many steps first, dense and on most GPUs unless told otherwise; all runs "
        "begin with what they leave",
    )
    parser.add_argument("--settle-gpus", type=positive_int, metavar="N", help="of the settling run")
    parser.add_argument(
        "--settle-config", default="ddp8", help="file of launch/ for --settle-gpus (default: ddp8)"
    )
    parser.add_argument("--set", **_override("override a key of every run"))
    parser.add_argument("--settle-set", **_override("… of the settling run alone"))
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="of the runs and what they print, to keep; settled weights and figures in it are "
        "used again (default: a temporary one)",
    )
    parser.add_argument("--energy", action="store_true", help="also mJ a token")
    parser.add_argument(
        "--kill", action="store_true", help="kill the last combination once more, and resume it"
    )
    parser.add_argument(
        "--forward", action="store_true", help="also the settled model's forward on one GPU"
    )
    parser.add_argument(
        "--loader", action="store_true", help="also the data loader's rate beside training's"
    )
    parser.set_defaults(run=_train)
    return parser


def _override(text: str) -> dict[str, Any]:
    return {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": text}


def _train(options: argparse.Namespace) -> None:
    # As Ctrl-C does, `timeout` then ends the launched processes too, and the GPUs are free.
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
        kill=options.kill,
        forward=options.forward,
        loader=options.loader,
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
