"""The benchmark suite: `eval/suite.yaml`, and lm-eval's own tasks behind `eval/tasks/<name>.yaml`.

A task file is lm-eval's YAML with two relative paths: ``include`` is relative to the installed
lm-eval, ``data_files`` to the user's ``--data-dir``. `task_config` makes them absolute. Without a
data directory it drops the keys that redirect the data, and rows come from the hub at the revision
that the suite names.
"""

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from jinja2 import UndefinedError
from pydantic import NonNegativeInt, RootModel

from sparsellm.paths import bundled, how_to_install
from sparsellm.recipe.strict import StrictModel, load_yaml, validate
from sparsellm.runs.files import read_json_lines

# The keys of a task file that say where its rows come from.
DATA_KEYS = (
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
)
_NO_NETWORK = "Without a network, give --data-dir DIR (to train: --set evaluation.data_dir=DIR)"


class TaskConfig(StrictModel):
    """How one task is run."""

    shots: NonNegativeInt
    metric: Literal["acc", "acc_norm"]
    in_mean: bool
    dataset: str  # its name on the hub, as in lm-eval's own task
    revision: str  # a commit of the dataset


class Suite(StrictModel):
    """`eval/suite.yaml`."""

    log_softmax: Literal["model", "float32"]
    tasks: dict[str, TaskConfig]

    def split(self, names: list[str] | None) -> tuple[list[str], list[str]]:
        """The suite's tasks among these names, and the other names. None: the whole suite."""
        if names is None:
            return list(self.tasks), []
        names = list(dict.fromkeys(names))
        in_suite = [name for name in names if name in self.tasks]
        return in_suite, [name for name in names if name not in self.tasks]


def suite_path() -> Path:
    """`eval/suite.yaml` in the checkout or in the wheel."""
    return bundled("eval") / "suite.yaml"


def load_suite() -> Suite:
    """Reads `eval/suite.yaml`.

    Raises:
        ValueError: unknown or mistyped key.
    """
    return validate(Suite, load_yaml(suite_path()), suite_path())


def task_file(name: str) -> Path:
    """`eval/tasks/<name>.yaml`.

    Raises:
        FileNotFoundError: the suite names a task that has no file.
    """
    path = bundled("eval") / "tasks" / f"{name}.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {suite_path()} names the task {name!r}")
    return path


def require_lm_eval() -> None:
    """Checks that lm-eval is installed, before anything slow happens.

    Raises:
        ValueError: it is not; the message says what to install.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"evaluation needs lm-eval, which is not installed: {how_to_install('eval')}"
        )


def task_config(suite: Suite, name: str, data_dir: Path | None) -> dict[str, Any]:
    """A task's file as lm-eval reads it.

    Raises:
        FileNotFoundError: the task file, what it includes, or a file of rows is missing.
        ValueError: the task file is not YAML, or does not say where local rows lie.
    """
    source = task_file(name)
    content = load_yaml(source) | {"task": name}
    if "include" in content:
        content["include"] = str(_stock_task(source, content["include"]))
    if data_dir is None:
        pinned = suite.tasks[name]
        content = {key: value for key, value in content.items() if key not in DATA_KEYS}
        return content | {
            "dataset_path": pinned.dataset,
            "dataset_kwargs": {"revision": pinned.revision},
        }
    files = (content.get("dataset_kwargs") or {}).get("data_files")
    if not isinstance(files, dict):
        raise ValueError(
            f"{source}: --data-dir needs key 'dataset_kwargs.data_files', such as "
            "{validation: task/validation.jsonl}"
        )
    for split, relative in files.items():
        files[split] = str(_rows(source, split, data_dir / relative))
    return content


def _stock_task(source: Path, include: str) -> Path:
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None, "require_lm_eval comes first"
    assert spec.origin is not None, "lm_eval is a package of files"
    path = Path(spec.origin).parent.parent / include
    if not path.is_file():
        raise FileNotFoundError(
            f"{source}: key 'include': the installed lm-eval has no {include}; install the version "
            "of constraints.txt, or correct the path"
        )
    return path


def _rows(source: Path, split: str, path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: key 'dataset_kwargs.data_files.{split}' of {source} asks for it. "
            "Put the split there, leave the task out (--tasks), or leave --data-dir (to train: "
            "evaluation.data_dir) out and read the hub"
        )
    remedy = "write one row per line (docs/experiments.md lists the fields)"
    if not read_json_lines(path, RootModel[dict[str, Any]], remedy):
        raise ValueError(f"{path} has no rows; copy the split there again, or leave the task out")
    return path.resolve()


def build_tasks(suite: Suite, names: list[str], data_dir: Path | None) -> dict[str, Any]:
    """lm-eval's task objects, with their rows and shots.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: lm-eval is not installed, or cannot load a task or build its first question.
    """
    require_lm_eval()
    configs = {name: task_config(suite, name, data_dir) for name in names}
    tasks = {}
    with quiet():
        for name, config in configs.items():
            try:
                tasks[name] = _build(config)
            except Exception as error:  # whatever lm-eval, datasets or the hub raise
                fields = f"; the rows in {data_dir} need the fields that docs/experiments.md lists"
                remedy = fields if data_dir else f". {_NO_NETWORK}"
                if isinstance(error, UndefinedError | KeyError):  # a field that the rows lack
                    rows = data_dir or suite.tasks[name].dataset
                    remedy = f": the rows ({rows}) have no such field; see docs/experiments.md"
                raise ValueError(
                    f"{task_file(name)}: lm-eval cannot build the task {name!r}: "
                    f"{type(error).__name__}: {error}{remedy}"
                ) from error
            _configure(tasks[name], name, suite.tasks[name])
    return tasks


def _build(config: dict[str, Any]) -> Any:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml as lm_eval_load_yaml

    if include := config.pop("include", None):
        config = lm_eval_load_yaml(include) | config
    (task,) = TaskManager(include_defaults=False).load([config])["tasks"].values()
    task.doc_to_choice(task.eval_docs[0])
    return task


def _configure(task: Any, name: str, config: TaskConfig) -> None:
    if config.metric not in task.aggregation():
        raise ValueError(
            f"{suite_path()}: key 'tasks.{name}.metric': the task has no {config.metric}; "
            f"it has {', '.join(task.aggregation())}"
        )
    if config.shots and not task.has_training_docs():
        raise ValueError(
            f"{suite_path()}: key 'tasks.{name}.shots': {config.shots} examples would come from "
            f"the rows that are scored; name a training_split and its file in {task_file(name)}"
        )
    task.set_config("num_fewshot", config.shots)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Only errors of lm-eval and datasets are shown, no note per file and no bar per split."""
    import datasets
    from lm_eval.api import task

    logger = logging.getLogger("lm_eval")
    level, bars, tqdm = logger.level, datasets.are_progress_bars_disabled(), task.tqdm
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    task.tqdm = functools.partial(tqdm, disable=True)  # lm-eval has no switch for it
    try:
        yield
    finally:
        logger.setLevel(level)
        task.tqdm = tqdm
        if not bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def templates_compiled_once() -> Iterator[None]:
    """lm-eval compiles a prompt's template once, instead of two to four times for every row.

    All of an evaluation of the suite except the model's part then takes 3.5 s, and 19.0 s without
    this (2 CPU cores, lm-eval 0.4.13).
    """
    from lm_eval import utils

    cached = functools.lru_cache(maxsize=256)(utils.env.from_string)
    utils.env.from_string = cached  # type: ignore[method-assign]
    try:
        yield
    finally:
        del utils.env.from_string
