"""What the benchmarks that run during training need; without PyTorch, so that it is known early."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsellm.evaluate.suite import load_suite, require_lm_eval, task_config
from sparsellm.recipe import Recipe
from sparsellm.recipe.sections import EvaluationConfig


def check_evaluation(recipe: Recipe) -> None:
    """Checks, before anything slow happens, that everything the recipe's benchmarks need is
    present.

    Data sets of the hub are looked up later, but also before the first step.

    Raises:
        ValueError: lm-eval, a task's file or its rows are missing; the message has the remedy.
    """
    config = recipe.evaluation
    if not config.every_steps:
        return
    with with_remedy(config):
        require_lm_eval()
        suite = load_suite()
        for name in suite.tasks:
            task_config(suite, name, data_dir(config))


def data_dir(config: EvaluationConfig) -> Path | None:
    """The folder of the tasks' rows; None: they are read from the hub."""
    return Path(config.data_dir) if config.data_dir else None


@contextmanager
def with_remedy(config: EvaluationConfig) -> Iterator[None]:
    """Errors inside also say why benchmarks run, and how to train without them."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{error}. The recipe runs benchmarks during training (evaluation.every_steps "
            f"{config.every_steps}); --set evaluation.every_steps=0 trains without them"
        ) from error
