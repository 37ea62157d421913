"""The ``sparsellm`` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparsellm import __version__
from sparsellm.analyze.cli import add_analyze_parser
from sparsellm.arguments import model_path
from sparsellm.bench.cli import add_bench_parser
from sparsellm.cli.parser import Parser
from sparsellm.cli.recipe_cli import add_recipe_arguments, add_recipe_parser
from sparsellm.data.cli import add_data_parser
from sparsellm.evaluate.cli import add_eval_parser
from sparsellm.export.cli import add_export_parsers
from sparsellm.generate import add_generate_parser
from sparsellm.processes import ranks
from sparsellm.processes.signals import StopRequest
from sparsellm.report.cli import add_report_parser
from sparsellm.runs.cli import add_stop_parser
from sparsellm.sweep.cli import add_sweep_parser
from sparsellm.waiting import allow_any_text, on_terminal, waiting

if TYPE_CHECKING:
    from sparsellm.recipe import Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses and runs; a user's mistake becomes one ``error:`` message and exit code 1."""
    # torch, which is imported later, reads it. Otherwise its idle CPU threads spin: beside other
    # processes on two cores, the debug recipe trains at a quarter of the throughput.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    allow_any_text()
    # Without a network it would print two lines for each of some twenty retries; an error follows.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    with _ends_with_its_reader():
        return _parse_and_run(arguments)


@contextmanager
def _ends_with_its_reader() -> Iterator[None]:
    """Ends the process by SIGPIPE, as Unix tools do, once its output (to `head`) has no reader.

    Python ignores that signal and raises `BrokenPipeError` instead, from sockets and from pipes
    between its own processes too.
    """
    try:
        try:
            yield
        finally:
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the start
                stream.flush()  # at exit Python would complain by itself
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def _reader_has_left() -> bool:
    """Whether standard output or error is a pipe that nobody can read any more."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parse_and_run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    except ranks.EndedByAnother:
        ranks.follow()
    except (ValueError, OSError, FloatingPointError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            raise
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


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command with its options; imports neither torch nor transformers."""
    parser = Parser(
        prog="sparsellm",
        description=__import__("sparsellm").__doc__,
        epilog="SPARSELLM_TRACEBACK=1 shows Python's traceback instead of a short error message.",
    )
    parser.add_argument("--version", action="version", version=f"sparsellm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a recipe; the same command resumes an interrupted run",
        description="Trains a recipe. The same command resumes from the run's last checkpoint.",
    )
    add_recipe_arguments(train)
    train.add_argument(
        "--resume",
        type=model_path,
        metavar="CHECKPOINT",
        help="start a new run (--set name=NEW) from this checkpoint, or from the last one of this "
        "run; the same command then resumes from the new run's own last checkpoint",
    )
    train.add_argument(
        "--fresh",
        action="store_true",
        help="start at step 0; an earlier run of this name is moved to <run>.1, <run>.2, …",
    )
    train.add_argument(
        "--init-from",
        type=Path,
        metavar="MODEL",
        help="start a new run at step 0 with the weights, shape and tokenizer of MODEL: a "
        "checkpoint, a run, an exported or Hugging Face folder, or a model on the Hub (owner/name)",
    )
    train.set_defaults(run=_train)

    add_recipe_parser(commands)
    add_stop_parser(commands)
    add_analyze_parser(commands)
    add_bench_parser(commands)
    add_data_parser(commands)
    add_eval_parser(commands)
    add_export_parsers(commands)
    add_generate_parser(commands)
    add_report_parser(commands)
    add_sweep_parser(commands)
    version = commands.add_parser("version", help="print the version of sparsellm")
    version.set_defaults(run=lambda options: print(f"sparsellm {__version__}"))
    completion = commands.add_parser(
        "completion",
        help="print a script that lets a shell complete commands, options, recipes and keys",
        description="Prints a script for a shell. With bash, run "
        'eval "$(sparsellm completion bash)", or put this line into ~/.bashrc. With zsh, do the '
        "same with zsh and ~/.zshrc. With fish, run sparsellm completion fish | source.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_completion)
    return parser


def _train(options: argparse.Namespace) -> None:
    ranks.watch_launcher()
    with StopRequest() as stop:  # before torch is imported, which takes seconds
        _train_until(options, stop)


def _train_until(options: argparse.Namespace, stop: StopRequest) -> None:
    if options.fresh and options.resume:
        raise ValueError("--fresh starts at step 0 and --resume does not; use only one of them")
    if options.init_from and options.resume:
        raise ValueError("--init-from starts at step 0 and --resume does not; use only one of them")
    from sparsellm.runs.huggingface.recipe_of import recipe_to_train

    recipe = recipe_to_train(
        options.recipe, options.overrides, options.init_from, fresh=options.fresh
    )
    start = None
    notes: list[str] = []
    if ranks.is_main():
        from sparsellm.training.resume.start_checks import check_run

        start, notes = check_run(recipe, options.resume, options.init_from, fresh=options.fresh)
    say = _say_what_is_trained(recipe, options, start)
    for line in notes:
        say(line)
    in_place = ranks.is_main() and on_terminal()
    with waiting("loading PyTorch", None if in_place else say):  # after all checks without it
        from sparsellm.training.loop import train

    train(recipe, stop, options.resume, options.fresh, options.init_from)
    if not ranks.several() and stop.received is None:
        _write_sample(recipe.run_path, recipe.train.steps)


def _write_sample(run_path: Path, steps: int) -> None:
    """Prints text that the model of a finished run of ``steps`` writes, and saves it in the run.

    The model is read from the last checkpoint, so that the training's own is not touched. Does
    nothing without a checkpoint of the last step, or if that has been sampled already.
    """
    from sparsellm.report.collect import Sample
    from sparsellm.runs.checkpoint import latest, step_name
    from sparsellm.runs.files import SAMPLE_FILE, write_atomically

    newest, file = latest(run_path / "checkpoints"), run_path / SAMPLE_FILE
    if newest is None or newest.name != step_name(steps):
        return
    if file.is_file() and file.stat().st_mtime >= newest.stat().st_mtime:
        return
    try:
        with waiting("reading the checkpoint for a sample of text"):
            from sparsellm.device import default_dtype, pick_device
            from sparsellm.generate import generate
            from sparsellm.runs.huggingface.pretrained import load_pretrained

            device = pick_device(None)
            pretrained = load_pretrained(newest, device, default_dtype(device))
        pieces: list[str] = []
        with waiting("writing a sample of text"):
            report = generate(pretrained, "", pieces.append)
        sample = Sample(step=steps, text="".join(pieces))
        print(f"what the model writes by itself:\n{sample}")
        print(report.line(pretrained.recipe.model.intermediate_size), flush=True)
        write_atomically(file, sample.model_dump_json() + "\n")
    except (ValueError, OSError, RuntimeError) as error:  # such as a GPU without memory for it
        print(f"no sample of text: {error}", file=sys.stderr, flush=True)


def _completion(options: argparse.Namespace) -> None:
    import argcomplete

    print(argcomplete.shellcode(["sparsellm"], shell=options.shell))


def _say_what_is_trained(
    recipe: Recipe, options: argparse.Namespace, start: Path | None
) -> Callable[[str], object]:
    """Prints the banner on rank 0; returns a function that prints further lines, only there.

    ``start``: see `start_of`.
    """
    from sparsellm.processes.banner import Launch, Machine, banner, beginning_of

    if not ranks.is_main():
        return lambda line: None
    say = partial(print, flush=True)
    beginning = beginning_of(recipe, start, options.fresh, options.init_from)
    say(banner(recipe, options.recipe, beginning, Machine.present(), Launch.present()))
    return say
