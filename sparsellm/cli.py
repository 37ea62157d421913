"""The ``sparsellm`` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsellm import __version__, ranks
from sparsellm.arguments import positive_int

if TYPE_CHECKING:
    from sparsellm.training.signals import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses and runs; a user's mistake becomes one ``error:`` message and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # λ and → where the terminal has no such letters
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    from sparsellm.runs.checkpoint import CheckpointError

    try:
        options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except ranks.EndedByAnother:
        ranks.follow()
    except (ValueError, OSError, CheckpointError, FloatingPointError) as error:
        if os.environ.get("SPARSELLM_TRACEBACK"):
            raise
        rank = int(os.environ.get("RANK", "0"))
        where = f" (rank {rank})" if rank else ""
        if ranks.first_to_speak():
            ranks.tell(f"error{where}: {error}")
        if ranks.several():
            ranks.leave(1)
        return 1
    except Exception as error:
        if not ranks.several():
            raise
        if ranks.first_to_speak():
            traceback.print_exc()
            ranks.tell(f"error (rank {os.environ['RANK']}): {type(error).__name__}: {error}")
        ranks.leave(1)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparsellm",
        description=__import__("sparsellm").__doc__,
        epilog="SPARSELLM_TRACEBACK=1 shows Python's traceback instead of a one-line error.",
    )
    parser.add_argument("--version", action="version", version=f"sparsellm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a recipe; the same command resumes an interrupted run",
        description="Trains a recipe. The same command resumes from the run's last checkpoint.",
    )
    _add_recipe_arguments(train)
    train.add_argument(
        "--resume", type=Path, metavar="CHECKPOINT", help="resume from this one (or a run's last)"
    )
    train.add_argument(
        "--fresh",
        action="store_true",
        help="start at step 0; an earlier run of this name is moved to <run>.1, .2, …",
    )
    train.add_argument(
        "--init-from",
        type=Path,
        metavar="CHECKPOINT",
        help="a new run begins with these weights (checkpoint, run or exported folder) at step 0",
    )
    train.set_defaults(run=_train)

    recipe = commands.add_parser("recipe", help="list recipes, or show a resolved one")
    actions = recipe.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="names of the bundled recipes").set_defaults(run=_recipe_list)
    show = actions.add_parser("show", help="resolved recipe, parameters, FLOPs, memory")
    _add_recipe_arguments(show)
    show.add_argument(
        "--gpus", type=positive_int, help="number of GPUs (default: 8, if they divide)"
    )
    show.set_defaults(run=_recipe_show)

    plot = commands.add_parser("plot", help="PNG plots of a run")
    plot.add_argument("run_path", type=Path, metavar="RUN", help="folder such as runs/debug")
    plot.set_defaults(run=_plot)

    from sparsellm.analyze.cli import add_analyze_parser

    add_analyze_parser(commands)
    from sparsellm.bench.cli import add_bench_parser

    add_bench_parser(commands)
    from sparsellm.evaluate.cli import add_eval_parser

    add_eval_parser(commands)
    from sparsellm.export.cli import add_export_parsers

    add_export_parsers(commands)
    from sparsellm.generate import add_generate_parser

    add_generate_parser(commands)
    from sparsellm.report.cli import add_report_parser

    add_report_parser(commands)
    from sparsellm.sweep.cli import add_sweep_parser

    add_sweep_parser(commands)
    return parser


def _add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", required=True, help="bundled name (`sparsellm recipe list`) or a YAML file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override a key, such as train.steps=100; may be repeated",
    )


def _train(options: argparse.Namespace) -> None:
    from sparsellm.training.signals import StopRequest

    with StopRequest() as stop:  # before torch is imported, which takes seconds
        _train_until(options, stop)


def _train_until(options: argparse.Namespace, stop: StopRequest) -> None:
    from sparsellm.recipe import load_recipe
    from sparsellm.training.loop import train

    recipe = load_recipe(options.recipe, options.overrides)
    if options.fresh and options.resume:
        raise ValueError("--fresh starts at step 0 and --resume does not; give one of them")
    if options.init_from and options.resume:
        raise ValueError("--init-from starts at step 0 and --resume does not; give one of them")
    run_path = recipe.run_path.resolve()
    if options.fresh and options.init_from and options.init_from.resolve().is_relative_to(run_path):
        raise ValueError(f"--fresh would move --init-from {options.init_from}; add --set name=NEW")
    train(recipe, stop, options.resume, options.fresh, options.init_from)


def _recipe_list(options: argparse.Namespace) -> None:
    from sparsellm.recipe import bundled_recipes, load_recipe

    for name in bundled_recipes():
        print(f"{name:24} {load_recipe(name).description}")


def _recipe_show(options: argparse.Namespace) -> None:
    from sparsellm.estimate import most_gpus, summary
    from sparsellm.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    print(recipe.to_yaml())
    print(summary(recipe, options.gpus or most_gpus(recipe)))


def _plot(options: argparse.Namespace) -> None:
    from sparsellm.report.plots import plot_run

    for path in plot_run(options.run_path):
        print(path)
