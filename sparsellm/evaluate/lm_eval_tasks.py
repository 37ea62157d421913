"""Tasks besides the suite: lm-eval's own, by name, group or tag, and YAML files of its kind.

They are used unchanged: rows come from where the task's YAML says (mostly the hub, not pinned), and
shots and metrics are the task's own.
"""

import difflib
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsellm.evaluate.suite import quiet

_MOST_SUGGESTIONS = 3
_NEEDS_HUB = "Its rows are read from the Hugging Face hub: a network or a filled cache is needed"


def build_other_tasks(
    names: Sequence[str], suite_names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loads tasks, groups and tags of lm-eval's, or of YAML files, with their rows.

    Returns lm-eval's objects by name: tasks, and groups. An error for an unknown name suggests
    ``suite_names``, too.

    Raises:
        ValueError: a name is unknown, or lm-eval cannot build a task (the message suggests names);
            the task of a file has the name of another one; or a task would show questions with
            their own answers.
    """
    tasks: dict[str, Any] = {}
    all_groups: dict[str, Any] = {}
    own_tasks: set[str] = set()
    if not names:
        return tasks, all_groups
    files = {n: Path(n).resolve() for n in names if n.endswith((".yaml", ".yml"))}
    for name, path in files.items():
        if not path.is_file():
            raise ValueError(f"--tasks: there is no file {name}")
    groups = {name: group for name, path in files.items() if (group := _group_in(path))}
    with quiet():
        # lm-eval loads a task by its file, and a group by name from a folder that it searches.
        folders = tuple(sorted({files[name].parent for name in groups}))
        manager = _task_manager(folders, include_defaults=bool(groups) or len(files) < len(names))
        for name in names:
            if name not in manager.task_index and name not in files:
                raise ValueError(_unknown(name, [*suite_names, *manager.all_tasks]))
        for name in names:
            try:
                built = manager.load([groups.get(name, str(files.get(name, name)))])
                for task in built["tasks"].values():
                    len(task.eval_docs)  # a missing split raises here
            except Exception as error:  # whatever lm-eval, datasets or the hub raise
                raise ValueError(
                    f"--tasks: lm-eval cannot build {name!r}: {type(error).__name__}: {error}"
                    + ("" if name in files else f". {_NEEDS_HUB}")
                ) from error
            for task in built["tasks"].values():
                _check_examples(name, task)
            is_own = name in files and name not in groups
            names_in_use = {*suite_names, *tasks} if is_own else own_tasks
            if clashes := names_in_use & built["tasks"].keys():
                raise ValueError(
                    f"--tasks {name}: another task is called {min(clashes)!r}, too, and scores are "
                    "named by tasks: give the one in your file another name (its key `task`)"
                )
            if is_own:
                own_tasks |= built["tasks"].keys()
            tasks |= built["tasks"]
            all_groups |= built.get("groups", {})
    return tasks, all_groups


def _check_examples(name: str, task: Any) -> None:
    """Raises ValueError if a question can be among its own examples, with its answer.

    lm-eval draws the examples of a task without other splits from the rows that are scored. It
    leaves out the question itself only if ``fewshot_split`` is also the ``test_split``
    (`fewshot_context` in its `api/task.py`, version 0.4.13).
    """
    config, split = task.config, task.fewshot_cfg.split
    if not config.num_fewshot or split == config.test_split:
        return
    if split is None and task.fewshot_cfg.samples is not None:
        return
    source = split or config.training_split or config.validation_split or config.test_split
    if source == (config.test_split or config.validation_split):
        raise ValueError(
            f"--tasks {name}: {config.task} draws its {config.num_fewshot} examples from "
            f"{source!r}, the rows that are scored, and some questions would be shown with their "
            f"answers; name another split as fewshot_split, or {source!r} as both test_split and "
            "fewshot_split"
        )


@functools.cache
def _task_manager(folders: tuple[Path, ...], include_defaults: bool) -> Any:
    """lm-eval's index of the tasks in these folders and, on request, of its own tasks.

    For its own it reads thousands of files, which takes ten seconds.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders) or None, include_defaults=include_defaults)


def _group_in(path: Path) -> str | None:
    """The group that a YAML file defines; None for a task's file."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        group = load_yaml(path, resolve_func=False).get("group")
    except Exception as error:  # of YAML, or of a file that it includes
        raise ValueError(f"--tasks: {path} cannot be read: {error}") from error
    return None if group is None else str(group)


def _unknown(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, list(dict.fromkeys(candidates)), n=_MOST_SUGGESTIONS)
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return (
        f"--tasks: {name!r} is neither a task of the suite nor one of lm-eval's tasks, groups and "
        f"tags (`python -m lm_eval ls tasks` lists them){meant}"
    )
