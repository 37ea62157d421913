"""`sparsellm.train`: our loop, called from Python."""

import threading
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from sparsellm.processes import ranks
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import Recipe
from sparsellm.recipe.strict import yaml_line
from sparsellm.runs.huggingface.hf_files import with_tokenizer_at_hand
from sparsellm.runs.huggingface.recipe_of import recipe_to_train
from sparsellm.waiting import allow_any_text


def train(
    recipe: str | Path | Recipe,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: str | Path | None = None,
    fresh: bool = False,
    init_from: str | Path | None = None,
) -> Path:
    """Trains a recipe to its last step, as ``sparsellm train`` does; the same call resumes.

    ```python
    import sparsellm

    folder = sparsellm.train("debug", {"train.steps": 20})
    ```

    To use several GPUs, run ``accelerate launch script.py``, which trains one run. The call prints
    the same progress as the command, without its first lines, and generates no sample of text at
    the end. A signal to stop saves a checkpoint, and the call returns.

    Args:
        recipe: the name of a bundled recipe, a YAML file, or a `Recipe`.
        overrides: values by dotted key, such as ``{"ffn.kernels": "dense"}``, or by section; not
            allowed with a `Recipe`.
        resume: a checkpoint from which a new run continues.
        fresh: starts at step 0; an earlier run of the same name is moved aside.
        init_from: a run, a checkpoint or a Hugging Face folder with the weights of step 0.

    Returns:
        The run's folder, with ``metrics.jsonl`` and ``checkpoints/``; `sparsellm.load` takes it.

    Raises:
        ValueError, FileNotFoundError: a recipe, text or checkpoint cannot be used; arguments
            contradict one another; the call is not in the main thread, which receives the signals.
        FloatingPointError: the loss or a gradient became NaN or infinite.
        ChildProcessError: a data worker ended.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("sparsellm.train must be called in the main thread, which gets signals")
    if resume and (fresh or init_from):
        raise ValueError("fresh and init_from start at step 0, and resume does not; give one")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ValueError(f"overrides {overrides!r}: must be a dictionary such as {{'seed': 1}}")
    allow_any_text()
    resume, init_from = (None if path is None else Path(path) for path in (resume, init_from))
    recipe = _resolved(recipe, overrides or {}, init_from, fresh=fresh)
    from sparsellm.training.resume.start_checks import check_run

    if ranks.is_main():
        _, lines = check_run(recipe, resume, init_from, fresh=fresh)
        for line in lines:
            print(line, flush=True)
    with StopRequest() as stop:
        # It loads torch. What can be refused without torch has been refused by now.
        from sparsellm.training import loop

        loop.train(recipe, stop, resume, fresh, init_from)
    return recipe.run_path


def _resolved(
    recipe: str | Path | Recipe,
    overrides: Mapping[str, Any],
    init_from: Path | None,
    *,
    fresh: bool,
) -> Recipe:
    """The recipe itself, or that of this name or path with its overrides."""
    if isinstance(recipe, Recipe):
        if overrides or init_from:
            raise ValueError(
                "overrides and init_from change a recipe that is read by its name or path; a "
                "Recipe is trained as it is"
            )
        return recipe if fresh else with_tokenizer_at_hand(recipe)
    words = [f"{key}={_as_yaml(key, value)}" for key, value in overrides.items()]
    return recipe_to_train(str(recipe), words, init_from, fresh=fresh)


def _as_yaml(key: str, value: Any) -> str:
    """A value on one line."""
    try:
        return yaml_line(_plain(value))
    except yaml.YAMLError as error:
        raise ValueError(
            f"overrides: {key} is of type {type(value).__name__}; give numbers, text, None, lists "
            "or dictionaries"
        ) from error


def _plain(value: Any) -> Any:
    """A value with paths as text and NumPy's numbers as Python's, in lists and dictionaries too."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
